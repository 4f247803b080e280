//! The worker: holds a stage. Computes, folds, seals, reduces, applies, hands its state to joiners.
//!
//! It owns the life of its own stage's state and lots. It decides nothing about who computes what (the driver
//! does), nor whose lots count (the coordinator does), and it changes its weights in one place only: when a
//! commit comes whose digest is that of the reduced gradient it has (`update.rs`).
//!
//! Messages that are older than what it knows are refused and counted. Messages that are ahead of it (the next
//! step's, a reduction that it has not heard of) are kept, up to a bound, and looked at again when it gets there.

pub mod book;
mod compute;
mod deposits;
pub mod io;
mod jobs;
mod joining;
pub mod reduction;
mod sharing;
mod update;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::deadline::Estimate;
use crate::ids::*;
use crate::journal::Commit;
use crate::message::*;
use crate::refusal::{Refusal, Refusals};
use crate::small::SmallMap;
use crate::spec::Spec;
use crate::time::Time;
use book::Book;
use deposits::Deposits;
pub use io::{Command, Input};
pub use jobs::WAITING;
use jobs::{Jobs, Key};
use joining::Fetch;
use reduction::Reduction;

/// A worker's state; see the module's head.
#[derive(Clone, Debug)]
pub struct Worker {
    me: PeerId,
    incarnation: u64,
    capability: Capability,
    /// Where a thousand workers are simulated, all have the same.
    spec: Arc<Spec>,
    term: Term,
    member: Option<MemberNo>,
    stage: Option<StageId>,
    epoch: Epoch,
    version: Step,
    /// The first step for which it has the weights.
    since: Step,
    whole: bool,
    active: bool,
    fetch: Option<Fetch>,
    applying: Option<Arc<Commit>>,
    jobs: Jobs,
    /// A book for each open step of which anything was granted.
    books: SmallMap<Step, Book>,
    /// What we computed and is not finite.
    not_finite: BTreeMap<Key, NotFinite>,
    reduction: Option<Box<Reduction>>,
    deposits: Deposits,
    reduce_time: Estimate,
    share_time: Estimate,
    away_time: Estimate,
    last_commit: Option<Arc<Commit>>,
    ahead: VecDeque<Envelope>,
    leaving: bool,
    unfit: Option<String>,
    /// Whether the coordinator of this term has not yet answered our report.
    unreported: bool,
    last_verdict: (Term, u64),
    beats: u64,
    next_beat: Time,
    refusals: Refusals,
}

/// What is in a worker's queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Queues {
    /// Microbatches at work.
    pub jobs: usize,
    /// Those of them that are between forward and backward.
    pub begun: usize,
    /// Lots with anything in them.
    pub lots: usize,
    /// Messages that are ahead of it.
    pub ahead: usize,
    /// Bytes that are kept for those who do a lot again.
    pub kept_bytes: u64,
}

impl Queues {
    /// Of each queue the longer one.
    pub fn longest(self, other: Queues) -> Queues {
        Queues {
            jobs: self.jobs.max(other.jobs),
            begun: self.begun.max(other.begun),
            lots: self.lots.max(other.lots),
            ahead: self.ahead.max(other.ahead),
            kept_bytes: self.kept_bytes.max(other.kept_bytes),
        }
    }
}

impl Worker {
    /// A worker that nobody knows yet. `incarnation` must differ from that of every earlier life of this peer.
    pub fn new(
        me: PeerId,
        incarnation: u64,
        capability: Capability,
        spec: impl Into<Arc<Spec>>,
        now: Time,
    ) -> Worker {
        let spec = spec.into();
        let jobs = Jobs::new(spec.tuning.jobs, spec.tuning.keep_bytes);
        Worker {
            me,
            incarnation,
            capability,
            spec,
            term: Term(0),
            member: None,
            stage: None,
            epoch: Epoch(0),
            version: Step(0),
            since: Step(0),
            whole: false,
            active: false,
            fetch: None,
            applying: None,
            jobs,
            books: SmallMap::default(),
            not_finite: BTreeMap::new(),
            reduction: None,
            deposits: Deposits::default(),
            reduce_time: Estimate::default(),
            share_time: Estimate::default(),
            away_time: Estimate::default(),
            last_commit: None,
            ahead: VecDeque::new(),
            leaving: false,
            unfit: None,
            unreported: false,
            last_verdict: (Term(0), 0),
            beats: 0,
            next_beat: now,
            refusals: Refusals::default(),
        }
    }

    /// Takes what happened, and says what is to be done.
    pub fn handle(&mut self, input: Input, now: Time, out: &mut Vec<Command>) {
        match input {
            Input::Message(envelope) => self.on_message(envelope, now, out),
            Input::Wake => self.on_wake(now, out),
            Input::ForwardDone(job, output) => self.on_forward_done(job, output, now, out),
            Input::BackwardDone(job, gradient) => self.on_backward_done(job, gradient, now, out),
            Input::NotFinite(job) => self.on_not_finite(job, now, out),
            Input::Failed(job) => self.on_failed(job, now, out),
            Input::NotInherited(step, lots) => self.on_not_inherited(step, &lots, out),
            Input::Summed(number, part, payload) => self.on_summed(number, part, payload, out),
            Input::Prepared(number, digest, summary) => self.on_prepared(number, digest, summary, now, out),
            Input::Settled(number, round, digest, summary) => {
                self.on_settled(number, round, digest, summary, now, out);
            }
            Input::SettleFailed(number, round) => self.on_settle_failed(number, round, now, out),
            Input::Applied(of) => self.on_applied(of, now, out),
            Input::Loaded(of) => self.on_loaded(of, now, out),
            Input::LoadFailed(of) => self.on_load_failed(of),
            Input::StateGone(donor) => self.on_state_gone(donor, now),
            Input::Saved(of) => self.on_saved(of, out),
            Input::Notice => {
                self.leaving = true;
                self.tell_leaving(out);
                self.deposits.hurry(now);
                self.deposit(now, out);
            }
        }
    }

    /// When it wants to be woken.
    pub fn next_wake(&self) -> Time {
        let patience = self.reduction.as_ref().filter(|reduction| reduction.prepared.is_none());
        let fetch = self.fetch.as_ref().and_then(|fetch| fetch.retry_at());
        [patience.map(|reduction| reduction.patience), fetch, self.next_sharing(), self.next_deposit()]
            .into_iter()
            .flatten()
            .fold(self.next_beat, Time::min)
    }

    /// Its (epoch, version), if its state is whole.
    pub fn version(&self) -> Option<(Epoch, Step)> {
        self.whole.then_some((self.epoch, self.version))
    }

    /// The stage that it holds or fetches.
    pub fn stage(&self) -> Option<StageId> {
        self.stage
    }

    /// Whether it counts as a holder of its stage.
    pub fn is_active(&self) -> bool {
        self.active
    }

    /// What was refused, by reason.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// What is in its queues.
    pub fn queues(&self) -> Queues {
        Queues {
            jobs: self.jobs.len(),
            begun: self.jobs.begun(),
            lots: self.books.values().map(Book::len).sum(),
            ahead: self.ahead.len(),
            kept_bytes: self.jobs.kept_bytes(),
        }
    }

    /// Whether it was told that it will be taken away, and nobody counts on it any more.
    pub fn has_left(&self) -> bool {
        self.leaving && self.member.is_none()
    }

    /// Why it cannot take part in the run, if the coordinator said so.
    pub fn unfit(&self) -> Option<&str> {
        self.unfit.as_deref()
    }

    fn on_message(&mut self, envelope: Envelope, now: Time, out: &mut Vec<Command>) {
        if let Err(refusal) = self.admit(&envelope) {
            return self.refusals.count(refusal);
        }
        if envelope.from == Address::Coordinator && envelope.fence.term > self.term {
            self.adopt_term(envelope.fence.term, out);
        }
        let fence = envelope.fence;
        match envelope.body {
            Body::Welcome { member, incarnation } => self.on_welcome(member, incarnation, out),
            Body::Stranger { member } => self.on_stranger(member, now, out),
            Body::Unfit { why } if self.member.is_none() => self.unfit = Some(why),
            Body::Assign(assign) => self.on_assign(fence, assign, now, out),
            Body::Activate => self.on_activate(fence, now, out),
            Body::Save => self.on_save(fence, out),
            Body::StateRequest { .. } | Body::State { .. } => self.on_state_message(envelope, out),
            Body::Begin(..) | Body::Activation(..) => self.on_work(envelope, now, out),
            Body::Onward(work) => self.on_onward(fence, work, out),
            Body::Gradient(..) => self.on_gradient(envelope, now, out),
            Body::Revoke { lot, grant } => self.on_revoke(fence, lot, grant, now, out),
            Body::Verdict { .. } => self.on_verdict(envelope, out),
            Body::Keeper { keeper } => self.on_keeper(keeper, now),
            Body::Deposit { .. } => self.on_deposit(envelope, out),
            Body::Deposited { .. } => self.on_deposited(envelope.from, fence, envelope.body, now),
            Body::Inherit { .. } => self.on_inherit(fence, envelope.body, out),
            Body::Reduce { .. } => self.on_reduce(envelope, now, out),
            Body::Contribution { .. } => self.on_contribution(envelope, out),
            Body::Reduced { .. } => self.on_reduced(envelope, out),
            Body::Share { .. } => self.on_share(envelope, now, out),
            Body::UsesRequest { .. } | Body::Uses { .. } => self.on_uses_message(envelope, out),
            Body::Commit(commit) => self.on_commit(commit, out),
            _ => self.refusals.count(Refusal::Malformed),
        }
    }

    fn admit(&self, envelope: &Envelope) -> Result<(), Refusal> {
        envelope.check().map_err(|_| Refusal::Malformed)?;
        if envelope.to != Address::Worker(self.me) {
            return Err(Refusal::Malformed);
        }
        if envelope.fence.run != self.spec.run {
            return Err(Refusal::OtherRun);
        }
        // A joiner may ask a donor whose term it has not heard of: state is fenced by epoch and version.
        let state = matches!(envelope.body, Body::StateRequest { .. } | Body::State { .. });
        if envelope.fence.term < self.term && !state { Err(Refusal::OldTerm) } else { Ok(()) }
    }

    /// Where a message's (epoch, step) stands to ours: now, ahead of us (kept), or refused.
    fn is_now(&mut self, envelope: &Envelope) -> bool {
        let theirs = (envelope.fence.epoch, envelope.fence.step);
        let ours = (self.epoch, self.version);
        if theirs < ours {
            let old = if theirs.0 < ours.0 { Refusal::OldEpoch } else { Refusal::OldStep };
            self.refusals.count(old);
            return false;
        }
        if theirs == ours && self.applying.is_some() {
            self.refusals.count(Refusal::OldStep);
            return false;
        }
        let open = theirs.0 == ours.0 && self.spec.sync.is_open(ours.1, theirs.1);
        if open && self.active {
            return true;
        }
        self.keep_for_later(envelope.clone());
        false
    }

    fn keep_for_later(&mut self, envelope: Envelope) {
        if self.ahead.len() >= self.spec.tuning.ahead {
            // The oldest goes: it is the likeliest to have been given up by its sender.
            self.ahead.pop_front();
            self.refusals.count(Refusal::TooFarAhead);
        }
        self.ahead.push_back(envelope);
    }

    /// Looks again at what was kept because it was ahead.
    fn look_again(&mut self, now: Time, out: &mut Vec<Command>) {
        for envelope in std::mem::take(&mut self.ahead) {
            self.on_message(envelope, now, out);
        }
    }

    fn adopt_term(&mut self, term: Term, out: &mut Vec<Command>) {
        self.term = term;
        self.unreported = true;
        self.send_beat(out);
    }

    fn on_wake(&mut self, now: Time, out: &mut Vec<Command>) {
        if now >= self.next_beat {
            self.next_beat = now + self.spec.tuning.beat;
            self.beat(out);
        }
        self.compute(now, out); // What waits for gradients that do not come is given up in time.
        self.check_patience(now, out);
        self.retry_fetch(now, out);
        self.retry_sharing(now, out);
        self.deposit(now, out);
    }

    /// The beat says how we stand, and repeats what has not been answered.
    fn beat(&mut self, out: &mut Vec<Command>) {
        if self.has_left() {
            return;
        }
        if self.member.is_none() {
            let hello = Hello::Worker { incarnation: self.incarnation, capability: self.capability.clone() };
            return self.tell_coordinator(Attempt(0), Body::Hello(hello), out);
        }
        self.send_beat(out);
        self.send_seals(self.books.iter().flat_map(|(step, book)| book.waiting(step)).collect(), out);
        self.send_not_finite(out);
        self.send_prepared(out);
        self.send_settled(out);
        if self.leaving {
            self.tell_leaving(out);
        }
    }

    fn send_beat(&mut self, out: &mut Vec<Command>) {
        self.beats += 1;
        let status = WorkerStatus {
            number: self.beats,
            member: self.member,
            stage: self.stage,
            whole: self.whole,
            since: self.since,
            active: self.active,
            fetching: self.fetch.is_some(),
            reducing: self.reduction.as_ref().filter(|r| r.term == self.term).map(|r| r.attempt),
            sharing: self.round(),
            keeper: self.deposits.keeper,
            last_commit: self.last_commit.clone(),
            report: self.unreported.then(|| self.seals()),
            queued: self.jobs.len() as u32,
        };
        self.tell_coordinator(Attempt(0), Body::WorkerBeat(status), out);
    }

    fn tell_leaving(&mut self, out: &mut Vec<Command>) {
        if let Some(member) = self.member {
            self.tell_coordinator(Attempt(0), Body::Leaving { member }, out);
        }
    }

    fn book(&mut self, step: Step) -> &mut Book {
        let (lots, reduce) = (self.spec.lots, self.spec.reduce);
        self.books.get_or_insert_with(step, || Book::new(lots, reduce))
    }

    fn seals(&self) -> Vec<SealedLot> {
        self.books.iter().flat_map(|(step, book)| book.seals(step)).collect()
    }

    fn fence(&self, attempt: Attempt) -> Fence {
        Fence { run: self.spec.run, term: self.term, epoch: self.epoch, step: self.version, attempt }
    }

    fn tell_coordinator(&mut self, attempt: Attempt, body: Body, out: &mut Vec<Command>) {
        self.send(Address::Coordinator, self.fence(attempt), body, out);
    }

    fn send(&self, to: Address, fence: Fence, body: Body, out: &mut Vec<Command>) {
        let from = Address::Worker(self.me);
        out.push(Command::Send(Envelope { protocol: PROTOCOL, from, to, fence, body }));
    }
}
