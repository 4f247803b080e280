//! The worker's end of a step: reduce, prepare, and on the commit, and only then, apply.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::ids::*;
use crate::journal::Commit;
use crate::message::*;
use crate::reduce::Part;
use crate::refusal::Refusal;
use crate::time::Time;
use crate::worker::io::{Contribute, ReduceNo, StateOf};
use crate::worker::reduction::Reduction;
use crate::worker::{Command, Worker};

impl Worker {
    /// The coordinator starts an attempt to reduce.
    pub(super) fn on_reduce(&mut self, envelope: Envelope, now: Time, out: &mut Vec<Command>) {
        if !self.is_now(&envelope) {
            return;
        }
        if envelope.fence.step != self.version {
            return self.keep_for_later(envelope); // Reduced in order: the commit before it has not come yet.
        }
        let (number, step) = ((envelope.fence.term, envelope.fence.attempt), self.version);
        let Body::Reduce { plan, lots } = envelope.body else { return };
        let counted: BTreeSet<Lot> = lots.into_iter().collect();
        let sound = counted.last().is_none_or(|lot| lot.0 < self.spec.lots.lots)
            && counted.is_empty() != plan.has_holder(self.me)
            && plan.is_sound(self.spec.elements(plan.stage));
        if self.stage != Some(plan.stage) || !sound {
            return self.refusals.count(Refusal::Nonsense);
        }
        if self.reduction.as_ref().is_some_and(|now| (now.term, now.attempt) >= number) {
            self.send_prepared(out);
            return self.refusals.count(Refusal::Repeated);
        }
        // The plan is the ledger's word: a verdict that was lost on the way is made up for here.
        for &lot in &counted {
            let at = LotOf { step, lot };
            out.extend(self.book(step).accept(lot).map(|job| Command::Fold(job, at)));
        }
        self.inherit_what_counts(&counted, out);
        let mut lost = self.drop_uncounted(&counted, out);
        let accepted = self.book(step).accepted();
        let short = counted.difference(&accepted).map(|&lot| LotOf { step, lot });
        let is_short = counted.iter().any(|lot| !accepted.contains(lot));
        lost.extend(short);
        self.tell_lost(lost, out);
        if is_short {
            return;
        }
        let tuning = self.spec.tuning;
        let patience = now + self.reduce_time.deadline(tuning.slack, tuning.unknown, number.1.0.min(3));
        let Some(mut reduction) = Reduction::new(self.me, number, plan, counted, now, patience) else {
            return self.refusals.count(Refusal::Nonsense);
        };
        let before = self.reduction.take();
        if !before.is_some_and(|before| reduction.take_over(*before)) {
            out.push(Command::BeginReduce(step));
        }
        self.reduction = Some(Box::new(reduction));
        self.contribute(out);
        self.sum_complete_parts(out);
        self.serve_newcomers(out);
        self.prepare_if_whole(out);
        self.look_again(now, out);
    }

    /// A holder's sums of a part of ours, or to be passed on.
    pub(super) fn on_contribution(&mut self, envelope: Envelope, out: &mut Vec<Command>) {
        let me = self.me;
        let Some(reduction) = self.current_reduction(&envelope) else { return };
        let Body::Contribution { part, holder, stamp, ref nodes, payload, .. } = envelope.body else {
            return;
        };
        let counts = reduction.plan.stamp_of(holder).is_none_or(|counted| counted == stamp);
        if !counts || !reduction.is_current(part, envelope.fence.attempt) {
            return self.refusals.count(Refusal::OldAttempt);
        }
        let part_of = reduction.plan.parts.get(part as usize);
        let gatherer = part_of.and_then(|part| reduction.plan.gatherer(part, holder));
        if gatherer.is_some_and(|gatherer| gatherer != me) {
            return self.pass_on(gatherer, envelope, out);
        }
        if !reduction.contribute(part, holder, (nodes.clone(), payload)) {
            return self.refusals.count(Refusal::Repeated);
        }
        self.sum_complete_parts(out);
    }

    /// A reduced part, for us or to be passed on.
    pub(super) fn on_reduced(&mut self, envelope: Envelope, out: &mut Vec<Command>) {
        let me = self.me;
        let Some(reduction) = self.current_reduction(&envelope) else { return };
        let Body::Reduced { part, member, payload, .. } = envelope.body else { return };
        if !reduction.is_current(part, envelope.fence.attempt) {
            return self.refusals.count(Refusal::OldAttempt);
        }
        if !reduction.plan.has_member(member) {
            return self.refusals.count(Refusal::Nonsense);
        }
        if member != me {
            return self.pass_on(Some(member), envelope, out);
        }
        self.take_result(part, payload, out);
    }

    /// A part of ours was added up: the root needs what our group's sums come to, and everybody the result.
    pub(super) fn on_summed(
        &mut self,
        number: ReduceNo,
        part: u32,
        payload: Payload,
        out: &mut Vec<Command>,
    ) {
        let ReduceNo { term, attempt, .. } = number;
        let Some(reduction) = self.reduction.as_ref() else { return };
        let ours = ReduceNo { attempt, ..self.number_of(reduction) };
        if ours != number || !reduction.is_current(part, attempt) {
            return;
        }
        let plan = reduction.plan.clone();
        let root = plan.parts.get(part as usize).and_then(|part| part.root_owner());
        let (Some(root), Some(nodes)) = (root, reduction.asked(part)) else { return };
        if root == self.me {
            return self.take_result(part, payload, out);
        }
        let to = Address::Worker(plan.next_hop(self.me, root));
        let fence = Fence { term, ..self.fence(attempt) };
        let (stage, nodes) = (plan.stage, nodes.to_vec());
        let stamp = plan.stamp_of(self.me).unwrap_or_default();
        let body = Body::Contribution { stage, part, holder: self.me, stamp, nodes, payload };
        self.send(to, fence, body, out);
    }

    /// The reduced gradient was looked at: the coordinator may commit.
    pub(super) fn on_prepared(
        &mut self,
        number: ReduceNo,
        digest: Digest,
        summary: Vec<u8>,
        now: Time,
        out: &mut Vec<Command>,
    ) {
        let awaited = self.reduction.as_ref().is_some_and(|reduction| self.number_of(reduction) == number);
        if let Some(reduction) = self.reduction.as_mut().filter(|_| awaited) {
            reduction.prepared = Some((digest, summary));
            self.reduce_time.observe(now.since(reduction.began));
            self.send_prepared(out);
        }
    }

    /// Which attempt we are in.
    pub(super) fn number_of(&self, reduction: &Reduction) -> ReduceNo {
        let Reduction { term, attempt, .. } = *reduction;
        ReduceNo { stage: reduction.plan.stage, epoch: self.epoch, step: self.version, term, attempt }
    }

    pub(super) fn send_prepared(&mut self, out: &mut Vec<Command>) {
        let Some(reduction) = self.reduction.as_ref().filter(|reduction| reduction.term == self.term) else {
            return;
        };
        if let (Some((digest, summary)), Some(stage)) = (reduction.prepared.clone(), self.stage) {
            self.tell_coordinator(reduction.attempt, Body::Prepared { stage, digest, summary }, out);
        }
    }

    /// The step is closed. The only place where an update begins.
    pub(super) fn on_commit(&mut self, commit: Arc<Commit>, out: &mut Vec<Command>) {
        let theirs = (commit.epoch, commit.step);
        if theirs < (self.epoch, self.version) || self.applying.is_some() || self.is_loading() {
            return self.refusals.count(Refusal::Repeated);
        }
        if theirs > (self.epoch, self.version) || !self.active {
            return self.refusals.count(Refusal::TooFarAhead); // Our next beat shows it, and we are sent the state.
        }
        let stage = self.stage.unwrap_or_default();
        if !commit.skipped && self.update_digest().as_ref() != commit.digests.get(stage.0 as usize) {
            // We were left out of the reduction that counted: what came after our version must be fetched.
            self.active = false;
            self.refusals.count(Refusal::Unasked);
            return self.send_beat(out);
        }
        self.drop_before(commit.step.next(), out);
        self.applying = Some(commit.clone());
        let (epoch, version) = (commit.epoch, commit.step.next());
        out.push(Command::Apply(StateOf { stage, epoch, version }, commit));
    }

    /// The update is done.
    pub(super) fn on_applied(&mut self, of: StateOf, now: Time, out: &mut Vec<Command>) {
        let StateOf { stage, epoch, version } = of;
        if self.stage != Some(stage) {
            return;
        }
        let Some(commit) =
            self.applying.take_if(|commit| (commit.epoch, commit.step.next()) == (epoch, version))
        else {
            return;
        };
        self.version = version;
        self.fetch = None;
        if commit.savers.contains(&self.me) {
            out.push(Command::Save(of));
        }
        self.last_commit = Some(commit);
        self.send_beat(out);
        self.look_again(now, out);
        self.compute(now, out);
    }

    pub(super) fn on_save(&mut self, fence: Fence, out: &mut Vec<Command>) {
        let Some(stage) = self.stage.filter(|_| self.whole && fence.step == self.version) else {
            return self.refusals.count(Refusal::Nonsense);
        };
        out.push(Command::Save(StateOf { stage, epoch: self.epoch, version: self.version }));
    }

    pub(super) fn on_saved(&mut self, of: StateOf, out: &mut Vec<Command>) {
        let StateOf { stage, epoch, version } = of;
        if epoch == self.epoch {
            self.tell_coordinator(Attempt(0), Body::Saved { stage, version }, out);
        }
    }

    /// Drops all work of the steps before this one: they are closed.
    pub(super) fn drop_before(&mut self, step: Step, out: &mut Vec<Command>) {
        out.extend(self.jobs.clear_before(step).into_iter().map(Command::Forget));
        self.books.retain(|open, _| open >= step);
        self.not_finite.retain(|key, _| key.at.step >= step);
        self.deposits.drop_before(step, out);
        out.push(Command::DropBefore(step));
        self.reduction = None;
    }

    /// Drops all work: it is void.
    pub(super) fn drop_all(&mut self, out: &mut Vec<Command>) {
        out.extend(self.jobs.clear().into_iter().map(Command::Forget));
        self.books.clear();
        self.not_finite.clear();
        self.deposits.drop_before(Step(u64::MAX), out);
        out.push(Command::DropBefore(Step(u64::MAX)));
        self.reduction = None;
    }

    /// Complains if the reduction hangs on somebody.
    pub(super) fn check_patience(&mut self, now: Time, out: &mut Vec<Command>) {
        let tuning = self.spec.tuning;
        let Some(reduction) = self.reduction.as_mut().filter(|r| r.prepared.is_none() && now >= r.patience)
        else {
            return;
        };
        let waits = reduction.waits_for();
        if waits.is_some_and(|(_, certain)| !certain) && !reduction.doubted {
            // The owner may itself be waiting for another, which it will then name sooner than we would name it.
            reduction.doubted = true;
            reduction.patience = now + tuning.unknown;
            return;
        }
        reduction.patience = now + tuning.unknown;
        let (stage, attempt) = (reduction.plan.stage, reduction.attempt);
        if let Some((on, certain)) = waits {
            self.tell_coordinator(attempt, Body::Stuck { stage, on, certain }, out);
        }
    }

    /// The reduction that a message is about, if we are in it; kept if we have not heard of it.
    fn current_reduction(&mut self, envelope: &Envelope) -> Option<&mut Reduction> {
        if !self.is_now(envelope) {
            return None;
        }
        // Attempts are numbered stage by stage, and we may have held another before.
        let (Body::Contribution { stage, .. } | Body::Reduced { stage, .. }) = envelope.body else {
            return None;
        };
        if self.stage != Some(stage) {
            self.refusals.count(Refusal::OtherStage);
            return None;
        }
        if envelope.fence.step != self.version {
            self.keep_for_later(envelope.clone());
            return None;
        }
        let theirs = (envelope.fence.term, envelope.fence.attempt);
        let ours = self.reduction.as_ref().map(|reduction| (reduction.term, reduction.attempt));
        if ours.is_none_or(|ours| theirs > ours) {
            self.keep_for_later(envelope.clone());
            return None;
        }
        if ours.is_some_and(|ours| ours.0 != theirs.0) {
            self.refusals.count(Refusal::OldAttempt);
            return None;
        }
        self.reduction.as_deref_mut()
    }

    /// Lots that the plan gives to others: ours do not count, and are dropped. One that an earlier coordinator
    /// had accepted takes those along that it was merged with; they are returned.
    fn drop_uncounted(&mut self, counted: &BTreeSet<Lot>, out: &mut Vec<Command>) -> Vec<LotOf> {
        let step = self.version;
        let mut lost = Vec::new();
        for lot in self.book(step).lots() {
            if !counted.contains(&lot) {
                let was_accepted = self.book(step).accepted().contains(&lot);
                let (gone, withheld) = self.book(step).drop_lot(lot);
                let gone: Vec<LotOf> = gone.into_iter().map(|lot| LotOf { step, lot }).collect();
                out.extend(withheld.map(Command::Discard));
                lost.extend(gone.iter().copied().filter(|_| was_accepted));
                out.push(Command::DropLots(gone));
            }
        }
        lost
    }

    fn contribute(&mut self, out: &mut Vec<Command>) {
        let (lots, reduce) = (self.spec.lots, self.spec.reduce);
        let Some(reduction) = self.reduction.as_mut() else { return };
        let nodes = reduction.own_nodes(lots, reduce);
        let Some(stamp) = reduction.plan.stamp_of(self.me).filter(|_| !nodes.is_empty()) else { return };
        let (to_send, plan, attempt) = (reduction.to_send(), reduction.plan.clone(), reduction.attempt);
        let fence = Fence { term: reduction.term, ..self.fence(attempt) };
        for (index, part, owner) in to_send {
            out.push(Command::Contribute(Contribute {
                from: self.me,
                to: plan.next_hop(self.me, owner),
                fence,
                stage: plan.stage,
                part: index,
                start: part.start,
                end: part.end,
                stamp,
                nodes: nodes.clone(),
            }));
        }
    }

    /// Those who joined after a part was done get it too.
    fn serve_newcomers(&mut self, out: &mut Vec<Command>) {
        let Some(reduction) = self.reduction.as_ref() else { return };
        let stage = reduction.plan.stage;
        let fence = Fence { term: reduction.term, ..self.fence(reduction.attempt) };
        for (part, member, payload) in reduction.for_newcomers() {
            let to = Address::Worker(reduction.plan.next_hop(self.me, member));
            self.send(to, fence, Body::Reduced { stage, part, member, payload }, out);
        }
    }

    fn prepare_if_whole(&mut self, out: &mut Vec<Command>) {
        if let Some(reduction) = self.reduction.as_ref().filter(|reduction| reduction.is_whole()) {
            out.push(Command::Prepare(self.number_of(reduction)));
        }
    }

    fn sum_complete_parts(&mut self, out: &mut Vec<Command>) {
        let (lots, reduce) = (self.spec.lots, self.spec.reduce);
        let Some(number) = self.reduction.as_ref().map(|reduction| self.number_of(reduction)) else { return };
        let due = self.reduction.as_mut().map(|reduction| reduction.due(lots, reduce));
        out.extend(due.into_iter().flatten().map(|due| Command::Sum(number, due)));
    }

    /// A part of the reduced gradient is here: we keep it, and pass it on to those who get it from us.
    fn take_result(&mut self, part: u32, payload: Payload, out: &mut Vec<Command>) {
        let step = self.version;
        let Some(reduction) = self.reduction.as_mut() else { return };
        if !reduction.write(part, payload) {
            return self.refusals.count(Refusal::Repeated);
        }
        let Part { start, end, .. } = reduction.plan.parts[part as usize];
        let (plan, recipients) = (reduction.plan.clone(), reduction.recipients(part));
        let keep = reduction.is_ours(part);
        out.push(Command::WriteReduced { step, start, end, payload, keep });
        let (term, attempt) = (reduction.term, reduction.attempt);
        let fence = Fence { term, ..self.fence(attempt) };
        for member in recipients {
            let to = Address::Worker(plan.next_hop(self.me, member));
            let body = Body::Reduced { stage: plan.stage, part, member, payload };
            self.send(to, fence, body, out);
        }
        self.prepare_if_whole(out);
    }

    /// A relay's part: the message goes on under our name, the holder or member in it stays.
    fn pass_on(&mut self, to: Option<PeerId>, envelope: Envelope, out: &mut Vec<Command>) {
        match to {
            Some(to) if Address::Worker(to) != envelope.from => {
                self.send(Address::Worker(to), envelope.fence, envelope.body, out);
            }
            _ => self.refusals.count(Refusal::Nonsense),
        }
    }
}
