//! The worker's microbatches: forward, backward, fold, seal.

use crate::ids::*;
use crate::message::*;
use crate::refusal::Refusal;
use crate::time::{Span, Time};
use crate::worker::book::{Fold, Granted, JobId};
use crate::worker::jobs::{Job, State};
use crate::worker::{Command, Worker};

impl Worker {
    /// A microbatch comes in forward.
    pub(super) fn on_work(&mut self, envelope: Envelope, now: Time, out: &mut Vec<Command>) {
        if !self.is_now(&envelope) {
            return;
        }
        let fence = envelope.fence;
        let (Body::Begin(work, input) | Body::Activation(work, input)) = envelope.body else { return };
        let Some(hop) = self.our_hop(&work) else {
            self.refusals.count(Refusal::OtherStage);
            return self.decline(&work, fence, Decline::NotHere, out);
        };
        if !self.replaces_what_is_here(&work, fence, out) {
            return;
        }
        let grant = hop.grant.map(|attempt| Grant { lease: work.lease, attempt });
        if let Some(grant) = grant
            && !self.take_grant(work.lot, grant, out)
        {
            return;
        }
        if !self.make_room(work.lease, out) {
            self.refusals.count(Refusal::Busy);
            return self.decline(&work, fence, Decline::Busy, out);
        }
        self.jobs.add(work, fence, grant, input);
        self.compute(now, out);
    }

    /// The gradient of a microbatch's output comes back.
    pub(super) fn on_gradient(&mut self, envelope: Envelope, now: Time, out: &mut Vec<Command>) {
        if !self.is_now(&envelope) {
            return;
        }
        let Body::Gradient(work, gradient) = envelope.body else { return };
        match self.jobs.get(work.lot, work.microbatch) {
            Some(job) if same_try(job, &work, envelope.fence) => {
                if !matches!(job.state, State::Away(_)) {
                    return self.refusals.count(Refusal::Repeated);
                }
                self.jobs.ready_backward(work.lot, work.microbatch, Some(gradient));
                self.compute(now, out);
            }
            Some(_) => self.refusals.count(Refusal::OldAttempt),
            None => self.refusals.count(Refusal::Unasked),
        }
    }

    pub(super) fn on_forward_done(&mut self, id: JobId, output: Payload, now: Time, out: &mut Vec<Command>) {
        if let Some((job, computed)) = self.jobs.done(id, now) {
            self.progress(&job, Pass::Forward, computed, out);
            let (lot, microbatch) = (job.work.lot, job.work.microbatch);
            if self.is_last() {
                self.jobs.ready_backward(lot, microbatch, None);
            } else {
                self.jobs.away(lot, microbatch, output);
                self.send_activation(&job, output, out);
            }
        }
        self.compute(now, out);
    }

    pub(super) fn on_backward_done(
        &mut self,
        id: JobId,
        gradient: Payload,
        now: Time,
        out: &mut Vec<Command>,
    ) {
        match self.jobs.done(id, now) {
            None => out.push(Command::Discard(id)), // Its step or attempt is over.
            Some((job, computed)) => {
                self.jobs.remove(job.work.lot, job.work.microbatch);
                self.progress(&job, Pass::Backward, computed, out);
                let before = self.stage.and_then(|stage| stage.0.checked_sub(1));
                if let Some(before) = before.and_then(|stage| job.work.route.get(stage as usize)) {
                    let body = Body::Gradient(job.work.clone(), gradient);
                    self.send(Address::Worker(before.peer), job.fence, body, out);
                }
                self.fold(&job, out);
            }
        }
        self.compute(now, out);
    }

    /// The driver took a lot away from us.
    pub(super) fn on_revoke(&mut self, fence: Fence, lot: Lot, grant: Grant, out: &mut Vec<Command>) {
        if (fence.epoch, fence.step) == (self.epoch, self.version) && self.book.revoke(lot, grant) {
            out.extend(self.jobs.remove_lot(lot, grant).into_iter().map(Command::Forget));
            out.push(Command::DropLots(vec![lot]));
        }
    }

    /// The ledger has counted our seals, or another's.
    pub(super) fn on_verdict(&mut self, envelope: Envelope, out: &mut Vec<Command>) {
        let fence = envelope.fence;
        let Body::Verdict { number, accepted, refused } = envelope.body else { return };
        if self.last_verdict >= (fence.term, number) {
            return self.refusals.count(Refusal::OldAttempt); // Overtaken: the beat asks again for what it said.
        }
        self.last_verdict = (fence.term, number);
        self.unreported = false;
        if (fence.epoch, fence.step) != (self.epoch, self.version) {
            return self.refusals.count(Refusal::OldStep);
        }
        for lot in accepted {
            if let Some(job) = self.book.accept(lot) {
                out.push(Command::Fold(job, lot));
            }
        }
        // A plan of the same term that counts a lot as ours is the ledger's later word.
        let plan = self.reduction.as_ref().filter(|reduction| reduction.term == fence.term);
        let counted = plan.map(|reduction| reduction.plan.lots_of(self.me)).unwrap_or_default();
        let mut lost = Vec::new();
        for lot in refused.into_iter().filter(|lot| !counted.contains(lot)) {
            let (gone, withheld) = self.book.drop_lot(lot);
            out.extend(withheld.map(Command::Discard));
            lost.extend(gone.iter().copied().filter(|other| *other != lot));
            if !gone.is_empty() {
                out.push(Command::DropLots(gone));
            }
        }
        if !lost.is_empty() {
            self.reduction = None; // It counted on what is lost.
        }
        self.tell_lost(lost, out);
    }

    pub(super) fn tell_lost(&mut self, lots: Vec<Lot>, out: &mut Vec<Command>) {
        if let Some(stage) = self.stage
            && !lots.is_empty()
        {
            self.tell_coordinator(Attempt(0), Body::Lost { stage, lots }, out);
        }
    }

    pub(super) fn send_seals(&mut self, waiting_only: bool, out: &mut Vec<Command>) {
        let lots = self.book.seals(waiting_only);
        if let Some(stage) = self.stage
            && !lots.is_empty()
        {
            self.tell_coordinator(Attempt(0), Body::Seals { stage, lots }, out);
        }
    }

    /// Gives the device its next job.
    fn compute(&mut self, now: Time, out: &mut Vec<Command>) {
        if self.applying.is_some() || !self.whole {
            return;
        }
        if let Some((job, pass, input)) = self.jobs.start(now) {
            out.push(match pass {
                Pass::Backward => Command::Backward(job.id, input),
                Pass::Forward => Command::Forward {
                    job: job.id,
                    step: job.fence.step,
                    microbatch: job.work.microbatch,
                    input: input.unwrap_or_default(),
                },
            });
        }
    }

    fn fold(&mut self, job: &Job, out: &mut Vec<Command>) {
        let (lot, microbatch) = (job.work.lot, job.work.microbatch);
        let fold = job.grant.map_or(Fold::Discard, |grant| self.book.fold(lot, microbatch, grant, job.id));
        match fold {
            Fold::Add => out.push(Command::Fold(job.id, lot)),
            Fold::Discard => out.push(Command::Discard(job.id)),
            Fold::Withhold => self.send_seals(true, out),
        }
    }

    /// Our place in the route, if it is where we stand, and the work makes sense.
    fn our_hop(&self, work: &Work) -> Option<Hop> {
        let stage = self.stage?;
        let sound = work.route.len() == self.spec.stages as usize
            && self.spec.lots.contains(work.lot, work.microbatch);
        work.route.get(stage.0 as usize).copied().filter(|hop| sound && hop.peer == self.me)
    }

    /// Makes way for a later try of a microbatch; answers a repeated delivery again; refuses an older one.
    fn replaces_what_is_here(&mut self, work: &Work, fence: Fence, out: &mut Vec<Command>) -> bool {
        let Some(job) = self.jobs.get(work.lot, work.microbatch) else { return true };
        match (work.lease, fence.attempt).cmp(&(job.work.lease, job.fence.attempt)) {
            std::cmp::Ordering::Less => self.refusals.count(Refusal::OldAttempt),
            std::cmp::Ordering::Equal => {
                if let State::Away(output) = job.state {
                    let job = job.clone();
                    self.send_activation(&job, output, out);
                }
                self.refusals.count(Refusal::Repeated);
            }
            std::cmp::Ordering::Greater => {
                let old = self.jobs.remove(work.lot, work.microbatch);
                out.extend(old.map(|job| Command::Forget(job.id)));
                return true;
            }
        }
        false
    }

    fn take_grant(&mut self, lot: Lot, grant: Grant, out: &mut Vec<Command>) -> bool {
        match self.book.grant(lot, grant) {
            Granted::Yes => {}
            Granted::Instead => out.push(Command::DropLots(vec![lot])),
            Granted::Sealed => self.send_seals(false, out),
            Granted::Old => {
                self.refusals.count(Refusal::OldAttempt);
                return false;
            }
        }
        true
    }

    fn make_room(&mut self, lease: LeaseNo, out: &mut Vec<Command>) -> bool {
        match self.jobs.room(lease) {
            Ok(()) => true,
            Err(None) => false,
            Err(Some((lot, microbatch))) => {
                out.extend(self.jobs.remove(lot, microbatch).map(|job| Command::Forget(job.id)));
                true
            }
        }
    }

    fn is_last(&self) -> bool {
        self.stage.is_some_and(|stage| stage.0 + 1 == self.spec.stages)
    }

    fn send_activation(&self, job: &Job, output: Payload, out: &mut Vec<Command>) {
        let next = self.stage.and_then(|stage| job.work.route.get(stage.0 as usize + 1));
        if let Some(next) = next {
            let body = Body::Activation(job.work.clone(), output);
            self.send(Address::Worker(next.peer), job.fence, body, out);
        }
    }

    fn progress(&self, job: &Job, pass: Pass, computed: Span, out: &mut Vec<Command>) {
        let Work { lot, microbatch, lease, driver, .. } = job.work;
        let stage = self.stage.unwrap_or_default();
        let body = Body::Progress(Progress { lot, microbatch, lease, stage, pass, computed });
        self.send(Address::Driver(driver), job.fence, body, out);
    }

    fn decline(&self, work: &Work, fence: Fence, reason: Decline, out: &mut Vec<Command>) {
        let Work { lot, microbatch, lease, .. } = *work;
        let at = work.route.iter().position(|hop| hop.peer == self.me).unwrap_or(0);
        let body = Body::Declined { lot, microbatch, lease, stage: StageId(at as u16), reason };
        self.send(Address::Driver(work.driver), fence, body, out);
    }
}

fn same_try(job: &Job, work: &Work, fence: Fence) -> bool {
    (work.lease, fence.attempt) == (job.work.lease, job.fence.attempt)
}
