//! The worker's microbatches: forward, backward, fold, seal.

use crate::ids::*;
use crate::message::*;
use crate::refusal::Refusal;
use crate::time::{Span, Time};
use crate::worker::book::{Fold, Granted, JobId};
use crate::worker::jobs::{Job, Key, State, key};
use crate::worker::{Command, Worker};

impl Worker {
    /// A microbatch comes in forward.
    pub(super) fn on_work(&mut self, envelope: Envelope, now: Time, out: &mut Vec<Command>) {
        if !self.is_now(&envelope) {
            return;
        }
        let fence = envelope.fence;
        let (Body::Begin(work, input) | Body::Activation(work, input)) = envelope.body else { return };
        let Some(hop) = self.our_hop(&work).filter(|_| fence.step >= self.since) else {
            self.refusals.count(Refusal::OtherStage);
            return self.decline(&work, fence, Decline::NotHere, out);
        };
        let here = self.jobs.get(key(&work, fence)).map(Job::attempt);
        if here.is_some_and(|here| (work.lease, fence.attempt) < here) {
            return self.refusals.count(Refusal::OldAttempt);
        }
        let grant = hop.grant.map(|attempt| Grant { lease: work.lease, attempt });
        if let Some(grant) = grant
            && !self.take_grant(LotOf { step: fence.step, lot: work.lot }, grant, out)
        {
            return;
        }
        if self.answer_from_what_is_here(&work, fence, grant, out) {
            return;
        }
        if !self.jobs.has_room() {
            self.compute(now, out); // It may be that what is before this is of a driver that is gone.
        }
        if !self.jobs.has_room() {
            self.refusals.count(Refusal::Busy);
            return self.decline(&work, fence, Decline::Busy, out);
        }
        self.jobs.add(work, fence, grant, input);
        self.compute(now, out);
    }

    /// Where a microbatch that we have computed goes from here.
    pub(super) fn on_onward(&mut self, fence: Fence, work: Work, out: &mut Vec<Command>) {
        if fence.epoch != self.epoch || fence.step < self.version || self.our_hop(&work).is_none() {
            return self.refusals.count(Refusal::Unasked);
        }
        match self.jobs.go_onward(work, fence).map(|job| job.id) {
            Some(id) => self.send_activation(id, out),
            None => self.refusals.count(Refusal::OldAttempt),
        }
    }

    /// The gradient of a microbatch's output comes back.
    pub(super) fn on_gradient(&mut self, envelope: Envelope, now: Time, out: &mut Vec<Command>) {
        if !self.is_now(&envelope) {
            return;
        }
        let Body::Gradient(work, gradient) = envelope.body else { return };
        let key = key(&work, envelope.fence);
        match self.jobs.get(key) {
            Some(job) if job.attempt() != (work.lease, envelope.fence.attempt) => {
                self.refusals.count(Refusal::OldAttempt)
            }
            Some(job) => match job.state {
                State::Away(since) => {
                    let id = job.id;
                    self.away_time.observe(now.since(since));
                    self.jobs.ready_backward(id, Some(gradient));
                    self.compute(now, out);
                }
                State::Kept(kept) => {
                    self.progress(job.id, Pass::Backward, None, out);
                    self.send_gradient(job.id, kept, out);
                }
                State::Ready(..) | State::Running(_) => {
                    let id = job.id;
                    if !self.jobs.came_back(id) {
                        self.refusals.count(Refusal::Repeated);
                    }
                }
            },
            None => self.refusals.count(Refusal::Unasked),
        }
    }

    pub(super) fn on_forward_done(&mut self, id: JobId, output: Payload, now: Time, out: &mut Vec<Command>) {
        if let Some(computed) = self.jobs.done(id, now).map(|(_, computed)| computed) {
            self.jobs.away(id, output, now);
            self.progress(id, Pass::Forward, Some(computed), out);
            if self.is_last() {
                self.jobs.ready_backward(id, None);
            } else {
                self.send_activation(id, out);
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
        let is_last = self.is_last();
        // A later try may have taken it over meanwhile. Its own gradient is still on the way then, and may be
        // the first that some stage after us folds: what we have now is not the answer to that.
        let answers = |job: &Job| is_last || job.came_back == Some(job.attempt());
        match self.jobs.done(id, now).map(|(job, computed)| (job.key(), job.grant, answers(job), computed)) {
            None => out.push(Command::Discard(id)), // Its step or attempt is over.
            Some((key, grant, answers, computed)) => {
                if answers {
                    self.progress(id, Pass::Backward, Some(computed), out);
                    self.send_gradient(id, gradient, out);
                }
                let kept = self.jobs.keep(id, gradient);
                self.fold(id, key, grant, out);
                if !kept {
                    self.jobs.remove(key);
                    out.push(Command::Forget(id));
                }
            }
        }
        self.compute(now, out);
    }

    /// The host could not compute it: the driver is to have it done elsewhere.
    pub(super) fn on_failed(&mut self, id: JobId, now: Time, out: &mut Vec<Command>) {
        let key = self.jobs.done(id, now).map(|(job, _)| job.key());
        if let Some(job) = key.and_then(|key| self.jobs.remove(key)) {
            out.push(Command::Forget(id));
            self.decline(&job.work, job.fence, Decline::NotHere, out);
        }
        self.compute(now, out);
    }

    /// What was computed is not finite. Whether that is the data's fault or ours, another's result will tell.
    pub(super) fn on_not_finite(&mut self, id: JobId, now: Time, out: &mut Vec<Command>) {
        let key = self.jobs.done(id, now).map(|(job, _)| job.key());
        if let Some(job) = key.and_then(|key| self.jobs.remove(key)) {
            out.push(Command::Forget(id));
            let Key { at, microbatch } = job.key();
            let new = NotFinite { at, microbatch, times: 0, granted: false };
            let claim = self.not_finite.entry(job.key()).or_insert(new);
            claim.times = claim.times.saturating_add(1);
            claim.granted |= job.grant.is_some();
            let claim = *claim;
            self.tell_not_finite(vec![claim], out);
            self.decline(&job.work, job.fence, Decline::NotFinite, out);
        }
        out.push(Command::Discard(id));
        self.compute(now, out);
    }

    /// Tells the coordinator of all that was not finite, until its step is closed.
    pub(super) fn send_not_finite(&mut self, out: &mut Vec<Command>) {
        self.tell_not_finite(self.not_finite.values().copied().collect(), out);
    }

    fn tell_not_finite(&mut self, of: Vec<NotFinite>, out: &mut Vec<Command>) {
        if let Some(stage) = self.stage.filter(|_| !of.is_empty()) {
            self.tell_coordinator(Attempt(0), Body::NotFinite { stage, of }, out);
        }
    }

    /// The driver took a lot away from us.
    pub(super) fn on_revoke(
        &mut self,
        fence: Fence,
        lot: Lot,
        grant: Grant,
        now: Time,
        out: &mut Vec<Command>,
    ) {
        if fence.epoch != self.epoch || !self.books.contains(fence.step) {
            return;
        }
        let at = LotOf { step: fence.step, lot };
        if self.book(fence.step).revoke(lot, grant) {
            out.extend(self.jobs.remove_lot(at, grant).into_iter().map(Command::Forget));
            out.push(Command::DropLots(vec![at]));
            self.compute(now, out); // There may be room for what waits.
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
        if std::mem::take(&mut self.unreported) {
            self.tell_deposits(out);
        }
        if fence.epoch != self.epoch {
            return self.refusals.count(Refusal::OldEpoch);
        }
        for at in accepted {
            if self.is_reducing_without(fence.term, at) {
                continue; // It stays withheld; if the reduction comes to nothing, the next beat tells of it again.
            }
            let job = self.books.get_mut(at.step).and_then(|book| book.accept(at.lot));
            out.extend(job.map(|job| Command::Fold(job, at)));
        }
        let mut lost = Vec::new();
        for at in refused {
            if self.counts(fence.term, at) {
                continue;
            }
            let Some(book) = self.books.get_mut(at.step) else { continue };
            let (gone, withheld) = book.drop_lot(at.lot);
            out.extend(withheld.map(Command::Discard));
            let gone: Vec<LotOf> = gone.into_iter().map(|lot| LotOf { lot, ..at }).collect();
            lost.extend(gone.iter().copied().filter(|other| *other != at));
            if !gone.is_empty() {
                out.push(Command::DropLots(gone));
            }
        }
        if lost.iter().any(|at| at.step == self.version) {
            self.reduction = None; // It counted on what is lost.
        }
        self.tell_lost(lost, out);
    }

    /// Whether its step is being reduced by a plan in which a lot is not ours.
    fn is_reducing_without(&self, term: Term, at: LotOf) -> bool {
        let plan = self.reduction.as_ref().filter(|reduction| reduction.term == term);
        at.step == self.version && plan.is_some_and(|reduction| !reduction.counts(at.lot))
    }

    /// Whether a plan of the same term counts a lot as ours: the ledger's later word.
    fn counts(&self, term: Term, at: LotOf) -> bool {
        let plan = self.reduction.as_ref().filter(|reduction| reduction.term == term);
        at.step == self.version && plan.is_some_and(|reduction| reduction.counts(at.lot))
    }

    pub(super) fn tell_lost(&mut self, lots: Vec<LotOf>, out: &mut Vec<Command>) {
        if let Some(stage) = self.stage
            && !lots.is_empty()
        {
            self.tell_coordinator(Attempt(0), Body::Lost { stage, lots }, out);
        }
    }

    pub(super) fn send_seals(&mut self, lots: Vec<SealedLot>, out: &mut Vec<Command>) {
        if let Some(stage) = self.stage
            && !lots.is_empty()
        {
            self.tell_coordinator(Attempt(0), Body::Seals { stage, lots }, out);
        }
    }

    /// Gives the device its next jobs.
    pub(super) fn compute(&mut self, now: Time, out: &mut Vec<Command>) {
        if self.applying.is_some() || !self.whole {
            return;
        }
        let sync = self.spec.sync;
        self.give_up_overdue(now, out);
        while let Some((job, pass, input)) = self.jobs.start(now) {
            out.push(match pass {
                Pass::Backward => Command::Backward(job.id, input),
                Pass::Forward => Command::Forward {
                    job: job.id,
                    step: job.fence.step,
                    weights: sync.weights_of(job.fence.step),
                    microbatch: job.work.microbatch,
                    input: input.unwrap_or_default(),
                },
            });
        }
    }

    fn fold(&mut self, id: JobId, key: Key, grant: Option<Grant>, out: &mut Vec<Command>) {
        let Key { at, microbatch } = key;
        let fold = match grant {
            Some(grant) => self.book(at.step).fold(at.lot, microbatch, grant, id),
            None => Fold::Discard,
        };
        match fold {
            Fold::Add => out.push(Command::Fold(id, at)),
            Fold::Discard => out.push(Command::Discard(id)),
            Fold::Withhold => {
                self.not_finite.retain(|key, _| key.at != at);
                let seal = self.book(at.step).seal(at.step, at.lot);
                self.send_seals(seal.into_iter().collect(), out);
            }
        }
    }

    /// Our place in the route, if it is where we stand, and the work makes sense.
    fn our_hop(&self, work: &Work) -> Option<Hop> {
        let stage = self.stage?;
        let sound = work.route.len() <= self.spec.stages as usize
            && self.spec.lots.contains(work.lot, work.microbatch);
        work.route.get(stage.0 as usize).copied().filter(|hop| sound && hop.peer == self.me)
    }

    /// What was computed for an earlier try of a microbatch, or for the same one, serves this one too.
    fn answer_from_what_is_here(
        &mut self,
        work: &Work,
        fence: Fence,
        grant: Option<Grant>,
        out: &mut Vec<Command>,
    ) -> bool {
        let key = key(work, fence);
        let Some(job) = self.jobs.get(key) else { return false };
        let repeated = job.attempt() == (work.lease, fence.attempt);
        let done = matches!(job.state, State::Kept(_));
        if done && grant.is_some() && !self.book(fence.step).has(key.at.lot, key.microbatch) {
            // It was passed through before, and its gradient thrown away.
            out.extend(self.jobs.remove(key).map(|job| Command::Forget(job.id)));
            return false;
        }
        if repeated {
            self.refusals.count(Refusal::Repeated);
        }
        let renewed = self.jobs.renew(work.clone(), fence, grant).map(|job| (job.id, job.state));
        let Some((id, state)) = renewed else { return false };
        match state {
            State::Ready(Pass::Forward, _) | State::Running(Pass::Forward) => {}
            State::Kept(gradient) if self.is_last() => {
                self.progress(id, Pass::Backward, None, out);
                self.send_gradient(id, gradient, out);
            }
            State::Ready(..) | State::Running(_) if self.is_last() => {}
            State::Ready(..) | State::Running(_) | State::Away(_) | State::Kept(_) => {
                self.progress(id, Pass::Forward, None, out);
                self.send_activation(id, out);
            }
        }
        true
    }

    fn take_grant(&mut self, at: LotOf, grant: Grant, out: &mut Vec<Command>) -> bool {
        match self.book(at.step).grant(at.lot, grant) {
            Granted::Yes => {}
            Granted::Instead => {
                out.extend(self.jobs.remove_kept(at).into_iter().map(Command::Forget));
                out.push(Command::DropLots(vec![at]));
            }
            Granted::Sealed => {
                let seal = self.book(at.step).seal(at.step, at.lot);
                self.send_seals(seal.into_iter().collect(), out);
            }
            Granted::Old => {
                self.refusals.count(Refusal::OldAttempt);
                return false;
            }
        }
        true
    }

    /// If the device has nothing to do because gradients do not come, whoever waits longest for one is given up.
    fn give_up_overdue(&mut self, now: Time, out: &mut Vec<Command>) {
        let tuning = self.spec.tuning;
        let longest = self.away_time.deadline(tuning.slack, tuning.unknown, 1);
        let overdue = self.jobs.overdue(Time(now.0.saturating_sub(longest.0)));
        let job = overdue.and_then(|key| self.jobs.remove(key));
        out.extend(job.map(|job| Command::Forget(job.id)));
    }

    fn is_last(&self) -> bool {
        self.stage.is_some_and(|stage| stage.0 + 1 == self.spec.stages)
    }

    fn send_activation(&self, id: JobId, out: &mut Vec<Command>) {
        let Some(job) = self.jobs.job(id) else { return };
        let next = self.stage.and_then(|stage| job.work.route.get(stage.0 as usize + 1));
        if let (Some(next), Some(output)) = (next, job.output) {
            let body = Body::Activation(job.work.clone(), output);
            self.send(Address::Worker(next.peer), job.fence, body, out);
        }
    }

    fn send_gradient(&self, id: JobId, gradient: Payload, out: &mut Vec<Command>) {
        let Some(job) = self.jobs.job(id) else { return };
        let before = self.stage.and_then(|stage| stage.0.checked_sub(1));
        if let Some(before) = before.and_then(|stage| job.work.route.get(stage as usize)) {
            let body = Body::Gradient(job.work.clone(), gradient);
            self.send(Address::Worker(before.peer), job.fence, body, out);
        }
    }

    fn progress(&self, id: JobId, pass: Pass, computed: Option<Span>, out: &mut Vec<Command>) {
        let Some(job) = self.jobs.job(id) else { return };
        let Work { lot, microbatch, lease, driver, .. } = job.work;
        let stage = self.stage.unwrap_or_default();
        let body = Body::Progress(Progress { lot, microbatch, lease, stage, pass, computed });
        self.send(Address::Driver(driver), job.fence, body, out);
    }

    fn decline(&self, work: &Work, fence: Fence, reason: Decline, out: &mut Vec<Command>) {
        let Work { lot, microbatch, lease, .. } = *work;
        let at = work.route.iter().position(|hop| hop.peer == self.me).unwrap_or(0);
        let stage = StageId(at as u16);
        let body = Body::Declined(Declined { lot, microbatch, lease, stage, reason });
        self.send(Address::Driver(work.driver), fence, body, out);
    }
}
