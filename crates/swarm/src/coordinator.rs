//! The coordinator: membership, placement, leases, the ledger, and the commit of a step.
//!
//! It owns the truth of who is a member, who holds what, and which steps are closed. What must survive it goes
//! through [`Command::Append`] and counts only after [`Input::Journaled`]; everything else is rebuilt from what
//! members say. It is level-triggered: a member's beat says how it stands, and is answered with whatever it
//! lacks, so that a lost message costs one beat and never a run.
//!
//! It touches no tensor and no clock, and never waits for one particular message: [`Coordinator::why_waiting`]
//! always has an answer.

mod deposits;
mod doubting;
mod ending;
mod leasing;
mod members;
mod moving;
pub mod overview;
mod placing;
mod sharing;
mod why;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::*;
use crate::journal::{Commit, JournalState, Record};
use crate::message::*;
use crate::refusal::{Refusal, Refusals};
use crate::spec::Spec;
use crate::time::{Span, Time};
use ending::Life;
use leasing::OpenStep;
use members::{DriverMember, Member};
use moving::Joiners;
use sharing::Sharing;

/// What goes into a coordinator.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// A message came.
    Message(Envelope),
    /// The time of [`Coordinator::next_wake`] has come, and the inbox is empty.
    Wake,
    /// The connection with this member has ended: if it is not heard of in a moment, it is gone.
    HungUp(Address),
    /// There is a connection with this member again.
    CalledAgain(Address),
    /// What this worker said cannot be what a worker of this version says, and why.
    Nonsense(PeerId, String),
    /// The record of this number is safe, and all before it.
    Journaled(u64),
    /// The constants of a commit that was asked for; none if the reduced gradient is not finite.
    Concluded(u64, Option<Vec<u8>>),
    /// The loss of the step whose commit was asked for is a spike: all are to go back to the checkpoint, and the updates
    /// from this step to it are to be left out.
    Spiked(u64, Step),
    /// The operator wants something.
    Operator(Order),
}

/// What an operator may want.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Close the open step, then wait.
    Pause,
    /// Go on.
    Resume,
    /// Let this be the last step.
    LastStep(Step),
    /// From the next step on, make commits' constants with these settings (a learning rate…), opaque here.
    Amend(Vec<u8>),
    /// Let a peer in again that was quarantined.
    Forgive(PeerId),
}

/// What a coordinator wants done.
#[derive(Clone, Debug, PartialEq)]
pub enum Command {
    /// Send this.
    Send(Envelope),
    /// Write this down, synced, in order, under this number.
    Append(u64, Record),
    /// Make the constants of the commit of this step from the stages' summaries and the journal's amendment of the
    /// step, and give them back under this number.
    Conclude(u64, Step, Vec<Vec<u8>>),
    /// Tell the operator.
    Tell(String),
}

/// A coordinator's state; see the module's head.
#[derive(Clone, Debug)]
pub struct Coordinator {
    spec: Spec,
    term: Term,
    /// What the journal says; changes only when a record is safe.
    book: JournalState,
    appended: BTreeMap<u64, Record>,
    next_record: u64,
    members: BTreeMap<PeerId, Member>,
    drivers: BTreeMap<DriverId, DriverMember>,
    crashes: BTreeMap<PeerId, (u32, Time)>,
    /// Whose connection has ended, and when.
    hung_up: BTreeMap<Address, Time>,
    next_member: u64,
    /// The steps that are open, the oldest first: that is the journal's.
    steps: VecDeque<OpenStep>,
    /// How far each stage is with the oldest.
    lives: Vec<Life>,
    closing: Closing,
    /// The last round of adding up what stages share.
    sharing: Sharing,
    conclusions: u64,
    next_lease: u64,
    verdicts: u64,
    view: u64,
    saved: BTreeMap<Step, BTreeSet<StageId>>,
    /// Who was asked to save this version of a stage, and when.
    asked_to_save: BTreeMap<StageId, (PeerId, Time)>,
    /// After a restart: until when the reports of the journal's members are awaited.
    collecting: Option<Time>,
    unheard: BTreeSet<PeerId>,
    halted: Option<String>,
    last_move: Time,
    joiners: Joiners,
    /// Somebody has gone from a stage since stages were last looked at.
    uneven: bool,
    /// When all stages were last given their state anew.
    filled_at: Time,
    /// Whether lots may be handed out: every stage is held, and nobody is still loading what is safe.
    is_staffed: bool,
    last_tick: Time,
    now: Time,
    refusals: Refusals,
}

/// How far the end of the step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closing {
    /// Stages are at work.
    No,
    /// All stages are prepared; those that share parameters add those up.
    Sharing,
    /// The host makes the constants.
    Concluding,
    /// A record that ends the step, or the epoch, is on its way to the journal.
    Journaling,
}

impl Coordinator {
    /// A coordinator that takes over what the journal says, under the next term. `records`: how many there are.
    pub fn new(
        spec: Spec,
        book: JournalState,
        records: u64,
        now: Time,
        out: &mut Vec<Command>,
    ) -> Coordinator {
        let term = Term(book.term.0 + 1);
        let stages = spec.stages as usize;
        let mut coordinator = Coordinator {
            term,
            steps: OpenStep::all(&spec),
            lives: vec![Life::default(); stages],
            closing: Closing::Journaling,
            sharing: Sharing::default(),
            conclusions: 0,
            appended: BTreeMap::new(),
            next_record: records,
            members: BTreeMap::new(),
            drivers: BTreeMap::new(),
            crashes: BTreeMap::new(),
            hung_up: BTreeMap::new(),
            next_member: 0,
            next_lease: 0,
            verdicts: 0,
            // A view of this term is never taken for one of an earlier.
            view: term.0 << 32,
            saved: BTreeMap::new(),
            asked_to_save: BTreeMap::new(),
            collecting: None,
            unheard: BTreeSet::new(),
            halted: None,
            last_move: now,
            joiners: Joiners::default(),
            uneven: false,
            filled_at: now,
            is_staffed: false,
            last_tick: now,
            now,
            refusals: Refusals::default(),
            spec,
            book,
        };
        coordinator.append(Record::Term(term), out);
        coordinator
    }

    /// Takes what happened, and says what is to be done.
    pub fn handle(&mut self, input: Input, now: Time, out: &mut Vec<Command>) {
        self.now = now;
        match input {
            Input::Message(envelope) => self.on_message(envelope, out),
            Input::Wake => self.on_wake(out),
            Input::HungUp(who) => drop(self.hung_up.insert(who, now)),
            Input::CalledAgain(who) => drop(self.hung_up.remove(&who)),
            Input::Nonsense(peer, why) => self.on_nonsense(peer, &why, out),
            Input::Journaled(number) => self.on_journaled(number, out),
            Input::Concluded(number, constants) => self.on_concluded(number, constants, out),
            Input::Spiked(number, first) => self.on_spiked(number, first, out),
            Input::Operator(order) => self.on_order(order, out),
        }
    }

    /// When it wants to be woken.
    pub fn next_wake(&self) -> Time {
        let hung_up = self.hung_up.values().map(|&at| at + self.spec.tuning.slack);
        hung_up.fold(self.last_tick + self.tick(), Time::min)
    }

    /// What the journal says.
    pub fn journal(&self) -> &JournalState {
        &self.book
    }

    /// What was refused, by reason.
    pub fn refusals(&self) -> &Refusals {
        &self.refusals
    }

    /// Whether all steps are done.
    pub fn is_done(&self) -> bool {
        self.book.step >= self.last_step()
    }

    /// Whether all steps are done, and what they made is safe.
    pub fn is_finished(&self) -> bool {
        self.is_done() && self.is_safe()
    }

    /// Whether nothing would be lost if everybody went now: the last version is saved, and no step is begun.
    pub fn is_safe(&self) -> bool {
        self.rests() && self.book.checkpoint >= self.book.step
    }

    /// Whether the version stays what it is, because all is done or the run is paused.
    fn rests(&self) -> bool {
        let paused = self.book.paused && self.steps.iter().all(OpenStep::is_fresh);
        self.closing == Closing::No && (self.is_done() || paused)
    }

    fn on_message(&mut self, envelope: Envelope, out: &mut Vec<Command>) {
        if let Err(refusal) = self.admit(&envelope) {
            return self.refusals.count(refusal);
        }
        self.hung_up.remove(&envelope.from);
        match (envelope.from, envelope.fence) {
            (Address::Worker(peer), fence) => self.on_worker(peer, fence, envelope.body, out),
            (Address::Driver(driver), _) => self.on_driver(driver, envelope.body, out),
            (Address::Coordinator, _) => self.refusals.count(Refusal::Malformed),
        }
    }

    fn admit(&self, envelope: &Envelope) -> Result<(), Refusal> {
        envelope.check().map_err(|_| Refusal::Malformed)?;
        if envelope.to != Address::Coordinator {
            return Err(Refusal::Malformed);
        }
        if envelope.fence.run != self.spec.run {
            return Err(Refusal::OtherRun);
        }
        // Who has not heard of this term yet is told by the answer; who claims a later one is lying or lost.
        if envelope.fence.term > self.term { Err(Refusal::Nonsense) } else { Ok(()) }
    }

    fn on_worker(&mut self, peer: PeerId, fence: Fence, body: Body, out: &mut Vec<Command>) {
        if let Body::Hello(Hello::Worker { incarnation, capability }) = body {
            return self.on_worker_hello(peer, incarnation, capability, out);
        }
        if self.closing == Closing::Journaling && self.book.term < self.term {
            return; // Not yet in office: nothing may be promised. Whoever asks will ask again.
        }
        let Some(member) = self.members.get_mut(&peer) else {
            self.refusals.count(Refusal::Stranger);
            let Body::WorkerBeat(WorkerStatus { member, .. }) = body else { return };
            return self.send(Address::Worker(peer), Attempt(0), Body::Stranger { member }, out);
        };
        member.heard(self.now);
        match body {
            Body::WorkerBeat(status) => self.on_worker_beat(peer, fence, status, out),
            Body::Leaving { member } => self.on_leaving(peer, member, out),
            Body::Seals { stage, lots } => self.on_seals(peer, fence, stage, &lots, out),
            Body::Deposited { .. } => self.on_deposited(peer, fence, body, out),
            Body::Lost { stage, lots } => self.on_lost(peer, fence, stage, &lots, out),
            Body::NotFinite { stage, of } => self.on_not_finite(peer, fence, stage, &of, out),
            Body::Stuck { stage, on, certain } => self.on_stuck(peer, fence, stage, on, certain, out),
            Body::Prepared { stage, digest, summary } => {
                self.on_prepared(peer, fence, stage, digest, summary, out)
            }
            Body::Settled { stage, digest, summary } => {
                self.on_settled(peer, fence, stage, digest, summary, out)
            }
            Body::Saved { stage, version } => self.on_saved(fence, stage, version, out),
            _ => self.refusals.count(Refusal::Malformed),
        }
    }

    fn on_wake(&mut self, out: &mut Vec<Command>) {
        let asleep = self.now.since(self.last_tick);
        self.last_tick = self.now;
        if asleep > self.tick().times(4) {
            // We were stopped, or the clock jumped: the silence was ours, and nobody is judged by it.
            self.members.values_mut().for_each(|member| member.forgive(self.now));
            self.drivers.values_mut().for_each(|driver| driver.forgive(self.now));
            self.hung_up.clear();
        }
        self.remove_hung_up(out);
        self.remove_silent(out);
        self.end_collecting_if_late();
        self.advance(out);
    }

    /// Everything that may be due after something has changed.
    fn advance(&mut self, out: &mut Vec<Command>) {
        if self.halted.is_some() || self.closing == Closing::Journaling || self.collecting.is_some() {
            return;
        }
        if self.skip_if_not_finite(out) {
            return;
        }
        self.place_members(out);
        if self.closing == Closing::Journaling {
            return; // Everybody goes back.
        }
        self.rebalance_if_uneven(out);
        self.start_reductions(out);
        self.conclude(out);
        self.is_staffed = self.every_stage_is_held() && !self.is_filling();
        self.lease(out);
    }

    fn on_order(&mut self, order: Order, out: &mut Vec<Command>) {
        match order {
            Order::Pause => self.append(Record::Paused(true), out),
            Order::Resume => self.append(Record::Paused(false), out),
            Order::LastStep(step) if step < self.book.step => {
                out.push(Command::Tell(format!("{step} is closed already; the last step stays as it was")));
            }
            Order::LastStep(step) => self.append(Record::LastStep(step), out),
            Order::Amend(settings) if settings.len() > MAX_SUMMARY_BYTES => {
                let most = MAX_SUMMARY_BYTES;
                out.push(Command::Tell(format!("settings of {} bytes are more than {most}", settings.len())));
            }
            Order::Amend(settings) => self.append(Record::Amended(self.book.step.next(), settings), out),
            Order::Forgive(peer) if !self.is_quarantined(peer) => {
                out.push(Command::Tell(format!("{peer} is not quarantined")));
            }
            Order::Forgive(peer) => self.append(Record::Quarantined(peer, false), out),
        }
    }

    fn append(&mut self, record: Record, out: &mut Vec<Command>) {
        self.appended.insert(self.next_record, record.clone());
        out.push(Command::Append(self.next_record, record));
        self.next_record += 1;
    }

    fn on_journaled(&mut self, number: u64, out: &mut Vec<Command>) {
        while let Some(entry) = self.appended.first_entry().filter(|entry| *entry.key() <= number) {
            let record = entry.remove();
            self.book.enter(&record);
            match record {
                Record::Term(_) => self.take_office(out),
                Record::Commit(commit) => self.on_committed(commit, out),
                Record::Rollback(..) | Record::LeftOut(..) => self.on_rolled_back(out),
                Record::Amended(from, _) => {
                    out.push(Command::Tell(format!("amended: from {from} on other settings are used")));
                }
                _ => {}
            }
        }
        self.advance(out);
    }

    /// The term is safe: those whom the journal names are asked how they stand.
    fn take_office(&mut self, out: &mut Vec<Command>) {
        self.closing = Closing::No;
        for (&peer, place) in &self.book.members {
            self.members.insert(peer, Member::from_journal(place, self.now));
            self.unheard.insert(peer);
        }
        for (&peer, member) in &self.members {
            self.send(Address::Worker(peer), Attempt(0), member.welcome(), out);
        }
        if !self.unheard.is_empty() {
            self.collecting = Some(self.now + self.spec.tuning.silence.times(2));
        }
    }

    fn end_collecting_if_late(&mut self) {
        if self.collecting.is_some_and(|until| self.now >= until) {
            self.collecting = None;
            self.unheard.clear();
        }
    }

    fn heard_after_restart(&mut self, peer: PeerId, out: &mut Vec<Command>) {
        if self.unheard.remove(&peer) && self.unheard.is_empty() {
            self.collecting = None;
            self.advance(out);
        }
    }

    fn last_step(&self) -> Step {
        self.book.last_step.unwrap_or(self.spec.steps)
    }

    fn tick(&self) -> Span {
        Span(self.spec.tuning.beat.0 / 2)
    }

    fn fence(&self, attempt: Attempt) -> Fence {
        Fence { run: self.spec.run, term: self.term, epoch: self.book.epoch, step: self.book.step, attempt }
    }

    fn send(&self, to: Address, attempt: Attempt, body: Body, out: &mut Vec<Command>) {
        let fence = self.fence(attempt);
        out.push(Command::Send(Envelope { protocol: PROTOCOL, from: Address::Coordinator, to, fence, body }));
    }

    fn halt(&mut self, why: String, out: &mut Vec<Command>) {
        out.push(Command::Tell(why.clone()));
        self.halted = Some(why);
    }

    fn last_commit(&self) -> Option<&Arc<Commit>> {
        self.book.last_commit.as_ref()
    }
}
