//! Sums that outlive their holder. A worker leaves a copy of what it has summed so far with another holder of its
//! stage, its *keeper*, every so often; if it is gone before the reduction, the ledger makes the keeper the holder of
//! those lots, and only what came since is computed again.
//!
//! A deposit is whole or nothing: a merged sum cannot be taken apart. It is a copy as long as its owner lives, and
//! counts for nothing; it becomes the keeper's when the coordinator says so, or when a plan counts just its lots.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::*;
use crate::lots::TreeNode;
use crate::message::*;
use crate::reduce::stamp;
use crate::refusal::Refusal;
use crate::small::SmallMap;
use crate::spec::Reduce;
use crate::time::{Span, Time};
use crate::worker::io::{Deposit, Inherited};
use crate::worker::{Command, Worker};

/// Workers whose sums of a step one keeps, at the most: one's, or two's while keepers change.
const MOST: usize = 2;

/// What a worker has left with another, and what others have left with it.
#[derive(Clone, Debug, Default)]
pub(super) struct Deposits {
    /// Who keeps copies of our sums.
    pub keeper: Option<PeerId>,
    /// The stamp of the lots of each step of which the keeper has a copy.
    safe: SmallMap<Step, u64>,
    /// What is on its way to the keeper, and since when.
    sent: Option<(Step, u64, Time)>,
    /// How often what was sent was taken for lost, one after the other.
    tries: u32,
    /// When to look again whether there is something new.
    next: Time,
    /// What others have left here.
    kept: BTreeMap<(Step, PeerId), Kept>,
}

/// What another has left here.
#[derive(Clone, Debug)]
struct Kept {
    lots: Vec<Lot>,
    nodes: Vec<TreeNode>,
    payload: Payload,
    /// The ledger counts on just this one: another that was still on its way does not take its place.
    counted: bool,
}

impl Deposits {
    /// When a deposit may be due.
    pub(super) fn due(&self) -> Option<Time> {
        self.keeper.map(|_| self.next)
    }

    /// What belongs to the steps before this one is of no use any more.
    pub(super) fn drop_before(&mut self, step: Step, out: &mut Vec<Command>) {
        self.safe.retain(|of, _| of >= step);
        self.sent = self.sent.filter(|(of, ..)| *of >= step);
        let gone = self.kept.extract_if(.., |(of, _), _| *of < step);
        out.extend(gone.map(|(_, kept)| Command::Release(kept.payload)));
    }

    /// The next deposit is due now.
    pub(super) fn hurry(&mut self, now: Time) {
        self.next = now;
    }

    /// Room for a copy of `of`'s sums of a step: the one before it, or that of somebody who has another keeper by now, goes,
    /// unless the ledger counts on it. Whether there is room.
    fn make_room(&mut self, step: Step, of: PeerId, out: &mut Vec<Command>) -> bool {
        let of_step = (step, PeerId(0))..=(step, PeerId(u32::MAX));
        let count = self.kept.range(of_step.clone()).count();
        let goes = match self.kept.get(&(step, of)) {
            Some(before) => (!before.counted).then_some((step, of)),
            None if count < MOST => return true,
            None => self.kept.range(of_step).find(|(_, kept)| !kept.counted).map(|(key, _)| *key),
        };
        let gone = goes.and_then(|key| self.kept.remove(&key));
        out.extend(gone.map(|kept| Command::Release(kept.payload)));
        goes.is_some()
    }

    fn change_keeper(&mut self, keeper: Option<PeerId>, now: Time) {
        if self.keeper != keeper {
            (self.keeper, self.sent, self.next) = (keeper, None, now);
            self.safe.clear();
        }
    }
}

impl Worker {
    /// The coordinator names our keeper.
    pub(super) fn on_keeper(&mut self, keeper: Option<PeerId>, now: Time) {
        match keeper == Some(self.me) {
            true => self.refusals.count(Refusal::Nonsense),
            false => self.deposits.change_keeper(keeper, now),
        }
    }

    /// If it is time, leaves a copy of the sums of the oldest step of which the keeper lacks something.
    pub(super) fn deposit(&mut self, now: Time, out: &mut Vec<Command>) {
        let tuning = self.spec.tuning;
        let Some(keeper) = self.deposits.keeper.filter(|_| now >= self.deposits.next) else { return };
        // Who will be gone soon does not wait.
        self.deposits.next = now + if self.leaving { tuning.slack } else { tuning.deposit };
        let patience = tuning.unknown.times(4 << self.deposits.tries.min(6));
        if self.deposits.sent.take_if(|(_, _, since)| now.since(*since) > patience).is_some() {
            self.deposits.tries += 1;
        }
        let Some(stage) = self.stage.filter(|_| self.active && self.applying.is_none()) else { return };
        if self.deposits.sent.is_some() {
            return; // What is on its way is to get there first.
        }
        // Sums of a step that is reduced are on their way anyway.
        let reduced = self.reduction.as_ref().map(|_| self.version);
        for (step, book) in self.books.iter().filter(|(step, _)| Some(*step) != reduced) {
            let accepted = book.accepted();
            let lots: Vec<Lot> = accepted.iter().copied().collect();
            let stamp = stamp(&lots);
            if lots.is_empty() || self.deposits.safe.get(step) == Some(&stamp) {
                continue;
            }
            self.deposits.sent = Some((step, stamp, now));
            let nodes = self.nodes_of(&accepted);
            let fence = Fence { step, ..self.fence(Attempt(0)) };
            return out.push(Command::Deposit(Deposit {
                from: self.me,
                to: keeper,
                fence,
                stage,
                lots,
                nodes,
            }));
        }
    }

    /// Another leaves a copy of its sums here.
    pub(super) fn on_deposit(&mut self, envelope: Envelope, out: &mut Vec<Command>) {
        let step = envelope.fence.step;
        let (theirs, ours) = ((envelope.fence.epoch, step), (self.epoch, self.version));
        if theirs < ours || (theirs == ours && self.applying.is_some()) {
            // It was behind everything else on the wire, and its step is closed.
            self.refusals.count(Refusal::OldStep);
            return out.extend(envelope.payload().map(Command::Release));
        }
        if !self.is_now(&envelope) {
            return;
        }
        let (Body::Deposit { stage, lots, nodes, payload }, Address::Worker(of)) =
            (envelope.body, envelope.from)
        else {
            return;
        };
        let set: BTreeSet<Lot> = lots.iter().copied().collect();
        let sound = lots.is_sorted_by(|a, b| a < b)
            && lots.last().is_some_and(|lot| lot.0 < self.spec.lots.lots)
            && nodes == self.nodes_of(&set)
            && of != self.me;
        if self.stage != Some(stage) || !sound || !self.deposits.make_room(step, of, out) {
            self.refusals.count(if sound { Refusal::Busy } else { Refusal::Nonsense });
            return out.push(Command::Release(payload));
        }
        let kept = Kept { lots: lots.clone(), nodes, payload, counted: false };
        self.deposits.kept.insert((step, of), kept);
        let fence = Fence { step, ..self.fence(Attempt(0)) };
        for to in [Address::Coordinator, Address::Worker(of)] {
            self.send(to, fence, Body::Deposited { stage, of, lots: lots.clone() }, out);
        }
    }

    /// Tells a coordinator that has just begun what is kept here.
    pub(super) fn tell_deposits(&mut self, out: &mut Vec<Command>) {
        let Some(stage) = self.stage else { return };
        for (&(step, of), kept) in &self.deposits.kept {
            let fence = Fence { step, ..self.fence(Attempt(0)) };
            let body = Body::Deposited { stage, of, lots: kept.lots.clone() };
            self.send(Address::Coordinator, fence, body, out);
        }
    }

    /// Our keeper has what we sent.
    pub(super) fn on_deposited(&mut self, from: Address, fence: Fence, body: Body, now: Time) {
        let Body::Deposited { of, lots, .. } = body else { return };
        let is_keeper = self.deposits.keeper.is_some_and(|keeper| from == Address::Worker(keeper));
        let told = (fence.step, stamp(&lots));
        let awaited = self.deposits.sent.is_some_and(|(step, stamp, _)| (step, stamp) == told);
        if !is_keeper || of != self.me || fence.epoch != self.epoch || !awaited {
            return self.refusals.count(Refusal::Unasked);
        }
        (self.deposits.sent, self.deposits.tries) = (None, 0);
        self.deposits.safe.insert(told.0, told.1);
        if self.leaving {
            self.deposits.next = now; // There may be more.
        }
    }

    /// Whoever left these here is gone: they are ours.
    pub(super) fn on_inherit(&mut self, fence: Fence, body: Body, out: &mut Vec<Command>) {
        let Body::Inherit { number, stage, of, lots } = body else { return };
        if self.last_verdict >= (fence.term, number) {
            return self.refusals.count(Refusal::OldAttempt);
        }
        self.last_verdict = (fence.term, number);
        let step = fence.step;
        let here = fence.epoch == self.epoch && self.stage == Some(stage) && self.active;
        if !here || !self.spec.sync.is_open(self.version, step) || self.applying.is_some() {
            return self.refusals.count(Refusal::OldStep);
        }
        let kept = self.deposits.kept.get_mut(&(step, of)).filter(|kept| kept.lots == lots);
        let is_kept = kept.map(|kept| kept.counted = true).is_some();
        if is_kept && step == self.version && self.reduction.is_some() {
            return; // The plan under way does not count them, and is void; the next one does.
        }
        if !is_kept || !self.inherit(step, of, out) {
            let lost = lots.into_iter().filter(|lot| lot.0 < self.spec.lots.lots);
            let book = self.books.get(step);
            let lost = lost.filter(|&lot| book.is_none_or(|book| !book.is_accepted(lot)));
            self.tell_lost(lost.map(|lot| LotOf { step, lot }).collect(), out);
        }
    }

    /// A plan counts lots that we have not summed: those of a deposit, if all of it is counted.
    pub(super) fn inherit_what_counts(&mut self, counted: &BTreeSet<Lot>, out: &mut Vec<Command>) {
        let step = self.version;
        let of_step = self.deposits.kept.range((step, PeerId(0))..=(step, PeerId(u32::MAX)));
        let counts = |kept: &Kept| kept.lots.iter().all(|lot| counted.contains(lot));
        let owners: Vec<PeerId> = of_step.filter(|(_, kept)| counts(kept)).map(|((_, of), _)| *of).collect();
        for of in owners {
            self.inherit(step, of, out);
        }
    }

    /// Takes a deposit as our own sum, if nothing of it is in our sums already; whether we did.
    fn inherit(&mut self, step: Step, of: PeerId, out: &mut Vec<Command>) -> bool {
        let Some(kept) = self.deposits.kept.remove(&(step, of)) else { return false };
        let book = self.book(step);
        if kept.lots.iter().any(|&lot| book.is_accepted(lot)) {
            out.push(Command::Release(kept.payload));
            return false;
        }
        for &lot in &kept.lots {
            // What we have begun of it ourselves is of no use.
            let (gone, withheld) = book.drop_lot(lot);
            out.extend(withheld.map(Command::Discard));
            if !gone.is_empty() {
                out.push(Command::DropLots(vec![LotOf { step, lot }]));
            }
            book.inherit(lot);
        }
        let Kept { lots, nodes, payload, .. } = kept;
        let stage = self.stage.unwrap_or_default();
        out.push(Command::Inherit(Inherited { stage, step, of, lots, nodes, payload }));
        true
    }

    /// What was left here was not what it was said to be: its lots are to be done again.
    pub(super) fn on_not_inherited(&mut self, step: Step, lots: &[Lot], out: &mut Vec<Command>) {
        let Some(book) = self.books.get_mut(step) else { return };
        let gone: Vec<LotOf> =
            lots.iter().filter(|lot| book.disinherit(**lot)).map(|&lot| LotOf { step, lot }).collect();
        if step == self.version && !gone.is_empty() {
            self.reduction = None; // It counted on them.
        }
        self.tell_lost(gone, out);
    }

    /// Where in the tree the sums of a set of lots stand.
    fn nodes_of(&self, lots: &BTreeSet<Lot>) -> Vec<TreeNode> {
        match self.spec.reduce {
            Reduce::Exact => self.spec.lots.nodes(lots),
            Reduce::Fast => vec![TreeNode::ALL],
        }
    }

    /// When to look whether a deposit is due.
    pub(super) fn next_deposit(&self) -> Option<Time> {
        self.deposits.due().filter(|_| self.spec.tuning.deposit > Span(0))
    }
}
