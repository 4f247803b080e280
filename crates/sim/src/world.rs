//! The simulated world: the swarm's machines on virtual time, their hosts, the links between them, and faults.
//!
//! It uses `swarm` exactly as `node` does: inputs in, commands out, carry them out. Everything is a function of
//! the scenario; there is no other source of time, order or randomness.

mod actors;
mod faults;
mod workers;

use std::collections::BTreeMap;
use std::sync::Arc;

use starling_swarm::coordinator::{self, Coordinator};
use starling_swarm::driver::{self, Driver};
use starling_swarm::ids::*;
use starling_swarm::journal::{JournalState, Record};
use starling_swarm::message::Envelope;
use starling_swarm::sequence::Sequence;
use starling_swarm::spec::Spec;
use starling_swarm::time::Time;
use starling_swarm::worker::{self, Worker};

use crate::heap::Heap;
use crate::history::History;
use crate::host::{Host, Piece, Terms};
use crate::invariants::{self, Fact, Invariant};
use crate::network::Network;
use crate::rng::{Rng, mix2};
use crate::scenario::Scenario;
use crate::toy::Toy;
use actors::Actor;

/// Bytes that a message has besides its tensors.
const HEADER: u64 = 256;
/// For how many steps pieces of sums are kept: a process that was stopped may ask for old ones.
const KEPT_STEPS: u64 = 20;
/// Most lines of what machines told the operator that are kept.
const MOST_TOLD: usize = 2000;

/// The simulated world; see the module's head.
pub struct World {
    scenario: Scenario,
    /// The scenario's, for all workers.
    spec: Arc<Spec>,
    toy: Arc<Toy>,
    now: u64,
    heap: Heap<Event>,
    rng: Rng,
    network: Network,
    coordinator: Actor<Coordinator>,
    drivers: BTreeMap<DriverId, Actor<Driver>>,
    /// By the peer's number.
    workers: Vec<Actor<(Worker, Host)>>,
    /// By the peer's number: how many times slower it is than it was.
    slowness: Vec<u32>,
    /// By the peer's number: how many of its next results are not finite.
    spoiled: Vec<u32>,
    /// How many of the next losses are spikes.
    spikes: u32,
    journal: Vec<Record>,
    unsynced: BTreeMap<u64, Record>,
    sync_us: u64,
    disk_free: u64,
    checkpoints: BTreeMap<(StageId, Step), BTreeMap<Step, u64>>,
    /// By their handles.
    pieces: Sequence<(Step, Arc<Piece>)>,
    /// Copies of sums that workers left with others, by their handles.
    deposits: Sequence<(Step, Vec<(LotOf, Terms)>)>,
    /// What a worker's machine has just said; kept for its room.
    worker_commands: Vec<worker::Command>,
    /// The same of a driver's.
    driver_commands: Vec<driver::Command>,
    /// The same of the coordinator's.
    coordinator_commands: Vec<coordinator::Command>,
    /// The longest queues so far, of workers and of drivers: bounds are looked at when one is longer still.
    longest: (worker::Queues, (usize, usize)),
    sabotages: u32,
    invariants: Vec<Box<dyn Invariant>>,
    violation: Option<Violation>,
    history: History,
    told: Vec<(u64, String)>,
    events: u64,
    commits_us: Vec<u64>,
    busy_us: Vec<u64>,
    /// The same by stage.
    stage_busy_us: Vec<u64>,
    /// For each peer, in which life its device will have done all that it has got, and when.
    free_at: Vec<(u64, u64)>,
    died_lots: u64,
}

/// How the world stands at a moment.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    /// When.
    pub at_us: u64,
    /// The step that is open.
    pub step: u64,
    /// Microbatches a second of all peers that are alive, of one stage.
    pub alive: f64,
    /// By stage: peers that hold it.
    pub holders: Vec<usize>,
    /// By stage: how long devices were at work so far.
    pub busy_us: Vec<u64>,
    /// Bytes between sites so far.
    pub wan_bytes: u64,
    /// What the coordinator waits for.
    pub why: String,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant, reason = "nearly all events are of the large kind, and are moved twice")]
enum Event {
    Deliver(Envelope),
    Wake(Address, u64),
    Worker(PeerId, u64, worker::Input),
    Coordinator(u64, coordinator::Input),
    Synced(u64, u64),
    Strike(usize),
    Heal(usize),
    Start(Address),
}

/// Something that must not be.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("after {at_us} µs: {invariant} — {what}")]
pub struct Violation {
    /// When.
    pub at_us: u64,
    /// Which invariant.
    pub invariant: String,
    /// What was seen.
    pub what: String,
}

/// What came of a run.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    /// When steps were closed.
    pub commits_us: Vec<u64>,
    /// How long each peer's device was at work, useful or not.
    pub busy_us: Vec<u64>,
    /// When the last step was closed.
    pub done_us: u64,
    /// Events that were handled.
    pub events: u64,
    /// The hash of all of them.
    pub history: u64,
    /// Bytes between sites.
    pub wan_bytes: u64,
    /// All bytes.
    pub bytes: u64,
    /// The step that is open.
    pub step: u64,
    /// Rollbacks in the journal.
    pub rollbacks: u64,
    /// Lots that died with the peers that held them, before their commit.
    pub died_lots: u64,
    /// The last coordinator's term.
    pub terms: u64,
}

impl World {
    /// The world at its start.
    pub fn new(scenario: &Scenario) -> World {
        let toy = scenario.toy();
        let mut world = World {
            spec: Arc::new(scenario.spec.clone()),
            toy: Arc::new(toy),
            now: 0,
            heap: Heap::default(),
            rng: Rng::new(scenario.seed),
            network: Network::new(scenario.inside, scenario.between),
            coordinator: Actor::absent(),
            drivers: BTreeMap::new(),
            workers: scenario.peers.iter().map(|_| Actor::absent()).collect(),
            slowness: vec![1; scenario.peers.len()],
            spoiled: vec![0; scenario.peers.len()],
            spikes: 0,
            journal: Vec::new(),
            unsynced: BTreeMap::new(),
            sync_us: scenario.sync_us,
            disk_free: 0,
            checkpoints: BTreeMap::new(),
            pieces: Sequence::default(),
            deposits: Sequence::default(),
            worker_commands: Vec::new(),
            driver_commands: Vec::new(),
            coordinator_commands: Vec::new(),
            longest: Default::default(),
            sabotages: 0,
            invariants: invariants::all(toy, &scenario.spec),
            violation: None,
            history: History::default(),
            told: Vec::new(),
            events: 0,
            commits_us: Vec::new(),
            busy_us: vec![0; scenario.peers.len()],
            stage_busy_us: vec![0; scenario.spec.stages as usize],
            free_at: vec![(0, 0); scenario.peers.len()],
            died_lots: 0,
            scenario: scenario.clone(),
        };
        world.network.place(Address::Coordinator, SiteId(0));
        world.heap.push(0, Event::Start(Address::Coordinator));
        for (index, &site) in scenario.drivers.iter().enumerate() {
            let driver = Address::Driver(DriverId(index as u32));
            world.network.place(driver, site);
            world.heap.push(0, Event::Start(driver));
        }
        for (index, peer) in scenario.peers.iter().enumerate() {
            let address = Address::Worker(PeerId(index as u32));
            world.network.place(address, peer.site);
            world.heap.push(peer.joins_us, Event::Start(address));
        }
        for (index, (at, _)) in scenario.faults.iter().enumerate() {
            world.heap.push(*at, Event::Strike(index));
        }
        world
    }

    /// The same world with nobody looking, to see what looking costs.
    pub fn without_invariants(mut self) -> World {
        self.invariants.clear();
        self
    }

    /// Runs until all steps are done, an invariant is broken, or the patience after the last fault is over.
    pub fn run(mut self) -> Result<Outcome, Violation> {
        self.run_to_end(u64::MAX, &mut |_| true)
    }

    /// The same, with what machines told the operator, which a failed run has too.
    pub fn run_with_log(self) -> (Result<Outcome, Violation>, Vec<(u64, String)>) {
        self.run_observed(u64::MAX, &mut |_| true)
    }

    /// The same, looked at every so often; it ends early when `goes_on` says no.
    pub fn run_observed(
        mut self,
        every_us: u64,
        goes_on: &mut dyn FnMut(Sample) -> bool,
    ) -> (Result<Outcome, Violation>, Vec<(u64, String)>) {
        let result = self.run_to_end(every_us, goes_on);
        (result, self.told)
    }

    fn run_to_end(
        &mut self,
        every_us: u64,
        goes_on: &mut dyn FnMut(Sample) -> bool,
    ) -> Result<Outcome, Violation> {
        let limit = self.scenario.healed_us().saturating_add(self.scenario.patience_us);
        let mut done_us = None;
        let mut next_sample = every_us;
        while let Some((at, event)) = self.heap.pop() {
            while at >= next_sample {
                self.now = next_sample;
                next_sample += every_us;
                if !goes_on(self.sample()) {
                    return self.outcome(Some(self.now));
                }
            }
            self.now = at;
            self.events += 1;
            self.handle(event);
            if let Some(violation) = self.violation.take() {
                return Err(violation);
            }
            if done_us.is_none() && self.is_done() {
                done_us = Some(at);
            }
            // A little longer, so that every replica applies the last commit.
            if done_us.is_some_and(|done| at > done + 2_000_000) {
                break;
            }
            if self.scenario.until_us.is_some_and(|until| at > until) {
                done_us = Some(at);
                break;
            }
            if done_us.is_none() && at > limit && self.scenario.until_us.is_none() {
                return Err(self.no_progress());
            }
        }
        self.outcome(done_us)
    }

    fn sample(&self) -> Sample {
        let mut holders = vec![0; self.scenario.spec.stages as usize];
        let mut alive = 0.0;
        for (actor, peer) in self.workers.iter().zip(&self.scenario.peers) {
            let Some((worker, _)) = &actor.machine else { continue };
            alive += peer.speed;
            if let Some(stage) = worker.stage().filter(|_| worker.is_active()) {
                holders[stage.0 as usize] += 1;
            }
        }
        let coordinator = self.coordinator.machine.as_ref();
        Sample {
            at_us: self.now,
            step: coordinator.map_or(0, |coordinator| coordinator.journal().step.0),
            alive,
            holders,
            busy_us: self.stage_busy_us.clone(),
            wan_bytes: self.network.wan_bytes,
            why: coordinator.map_or("a coordinator".into(), Coordinator::why_waiting),
        }
    }

    fn is_done(&self) -> bool {
        self.coordinator.machine.as_ref().is_some_and(|coordinator| coordinator.is_done())
    }

    fn outcome(&self, done_us: Option<u64>) -> Result<Outcome, Violation> {
        let Some(done_us) = done_us else { return Err(self.no_progress()) };
        let count = |of: fn(&Record) -> bool| self.journal.iter().filter(|record| of(record)).count() as u64;
        Ok(Outcome {
            commits_us: self.commits_us.clone(),
            busy_us: self.busy_us.clone(),
            done_us,
            events: self.events,
            history: self.history.value(),
            wan_bytes: self.network.wan_bytes,
            bytes: self.network.bytes,
            step: JournalState::replay(&self.journal).step.0,
            // The first filling of the stages is a rollback to version 0.
            rollbacks: count(|record| matches!(record, Record::Rollback(..) | Record::LeftOut(..)))
                .saturating_sub(1),
            died_lots: self.died_lots,
            terms: count(|record| matches!(record, Record::Term(_))),
        })
    }

    fn no_progress(&self) -> Violation {
        let why = self.coordinator.machine.as_ref().map(|coordinator| coordinator.why_waiting());
        let step = JournalState::replay(&self.journal).step;
        Violation {
            at_us: self.now,
            invariant: "progress after all faults are healed".into(),
            what: format!("at {step}, waiting for {}", why.unwrap_or("a coordinator".into())),
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Deliver(envelope) => self.deliver(envelope),
            Event::Wake(address, life) => self.wake(address, life),
            Event::Worker(peer, life, input) => self.worker_input(peer, life, input),
            Event::Coordinator(life, input) => self.coordinator_input(life, input),
            Event::Synced(life, number) => self.synced(life, number),
            Event::Strike(index) => self.strike(index),
            Event::Heal(index) => self.heal(index),
            Event::Start(address) => self.start(address),
        }
    }

    fn deliver(&mut self, envelope: Envelope) {
        let to = envelope.to;
        if self.network.is_cut(envelope.from, to) {
            return;
        }
        self.history.message(self.now, &envelope);
        match to {
            Address::Coordinator => {
                self.coordinator_input(self.coordinator.life, coordinator::Input::Message(envelope))
            }
            Address::Worker(peer) => {
                let life = self.workers.get(peer.0 as usize).map_or(0, |actor| actor.life);
                self.worker_input(peer, life, worker::Input::Message(envelope));
            }
            Address::Driver(driver) => self.driver_input(driver, driver::Input::Message(envelope)),
        }
    }

    fn wake(&mut self, address: Address, life: u64) {
        self.history.event(self.now, address, 1);
        match address {
            Address::Coordinator if self.coordinator.wakes(life, self.now) => {
                self.coordinator_input(life, coordinator::Input::Wake)
            }
            Address::Worker(peer)
                if self.workers.get_mut(peer.0 as usize).is_some_and(|a| a.wakes(life, self.now)) =>
            {
                self.worker_input(peer, life, worker::Input::Wake)
            }
            Address::Driver(driver)
                if self.drivers.get_mut(&driver).is_some_and(|a| a.wakes(life, self.now)) =>
            {
                self.driver_input(driver, driver::Input::Wake)
            }
            _ => {}
        }
    }

    fn coordinator_input(&mut self, life: u64, input: coordinator::Input) {
        if self.coordinator.life != life {
            return;
        }
        if let Some(stopped) = &mut self.coordinator.stopped {
            return stopped.push(Event::Coordinator(life, input));
        }
        let mut out = std::mem::take(&mut self.coordinator_commands);
        let now = self.coordinator.time(self.now);
        let Some(machine) = self.coordinator.machine.as_mut() else { return };
        machine.handle(input, now, &mut out);
        let wake = machine.next_wake();
        self.carry_out(&mut out);
        self.coordinator_commands = out;
        self.schedule_wake(Address::Coordinator, wake);
    }

    /// Carries out what the coordinator wants done.
    fn carry_out(&mut self, commands: &mut Vec<coordinator::Command>) {
        let life = self.coordinator.life;
        for command in commands.drain(..) {
            match command {
                coordinator::Command::Send(envelope) => self.send(envelope),
                coordinator::Command::Append(number, record) => {
                    self.disk_free = self.disk_free.max(self.now) + self.sync_us;
                    self.unsynced.insert(number, record);
                    self.heap.push(self.disk_free, Event::Synced(life, number));
                }
                coordinator::Command::Conclude(number, step, summaries) => {
                    let digest = |s: Vec<u8>| s.as_slice().try_into().map_or(0, u64::from_le_bytes);
                    let constants = self.toy.constants(step, summaries.into_iter().map(digest));
                    let book = self.coordinator.machine.as_ref().map(Coordinator::journal);
                    let settings = book.and_then(|book| book.amendment(step));
                    let constants = self.toy.amended(constants, settings);
                    let input = if book.is_some_and(|book| book.left_out.contains(&step)) {
                        coordinator::Input::Concluded(number, None)
                    } else if self.spikes > 0 {
                        self.spikes -= 1;
                        coordinator::Input::Spiked(number, Step(step.0.saturating_sub(1)))
                    } else {
                        coordinator::Input::Concluded(number, Some(constants.to_le_bytes().to_vec()))
                    };
                    self.heap.push(self.now + 100, Event::Coordinator(life, input));
                }
                coordinator::Command::Tell(what) => self.tell(what),
            }
        }
    }

    fn synced(&mut self, life: u64, number: u64) {
        if self.coordinator.life != life {
            return;
        }
        if let Some(record) = self.unsynced.remove(&number) {
            self.journal_record(record);
        }
        self.coordinator_input(life, coordinator::Input::Journaled(number));
    }

    fn journal_record(&mut self, record: Record) {
        if matches!(record, Record::Commit(_)) && self.sabotaged(crate::scenario::Sabotage::LostCommit, 2) {
            return;
        }
        if let Record::Commit(commit) = &record {
            self.commits_us.push(self.now);
            self.pieces.retain(|(step, _)| step.0 + KEPT_STEPS > commit.step.0);
            self.deposits.retain(|(step, _)| step.0 + KEPT_STEPS > commit.step.0);
        }
        self.observe(Fact::Journaled(&record));
        self.journal.push(record);
    }

    fn driver_input(&mut self, driver: DriverId, input: driver::Input) {
        let Some(actor) = self.drivers.get_mut(&driver) else { return };
        let now = actor.time(self.now);
        let Some(machine) = actor.machine.as_mut() else { return };
        let mut out = std::mem::take(&mut self.driver_commands);
        machine.handle(input, now, &mut out);
        let (wake, queues) = (machine.next_wake(), machine.queue_lengths());
        for driver::Command::Send(envelope) in out.drain(..) {
            self.send(envelope);
        }
        self.driver_commands = out;
        self.schedule_wake(Address::Driver(driver), wake);
        let longest = &mut self.longest.1;
        if queues.0 > longest.0 || queues.1 > longest.1 {
            *longest = (queues.0.max(longest.0), queues.1.max(longest.1));
            self.observe(Fact::DriverQueues(driver, queues));
        }
    }

    fn send(&mut self, envelope: Envelope) {
        let bytes = HEADER + envelope.payload_bytes();
        let (from, to) = (envelope.from, envelope.to);
        if let Some(at) = self.network.send(from, to, bytes, envelope.urgency(), self.now, &mut self.rng) {
            self.heap.push(at, Event::Deliver(envelope));
        }
    }

    fn schedule_wake(&mut self, address: Address, at: Time) {
        let now = self.now;
        let Some((life, at)) = (match address {
            Address::Coordinator => self.coordinator.plan_wake(at, now),
            Address::Worker(peer) => {
                self.workers.get_mut(peer.0 as usize).and_then(|actor| actor.plan_wake(at, now))
            }
            Address::Driver(driver) => {
                self.drivers.get_mut(&driver).and_then(|actor| actor.plan_wake(at, now))
            }
        }) else {
            return;
        };
        self.heap.push(at, Event::Wake(address, life));
    }

    fn observe(&mut self, fact: Fact<'_>) {
        for invariant in &mut self.invariants {
            if let Err(what) = invariant.observe(fact) {
                let violation = Violation { at_us: self.now, invariant: invariant.name().into(), what };
                self.violation.get_or_insert(violation);
            }
        }
    }

    fn tell(&mut self, what: String) {
        if self.told.len() < MOST_TOLD {
            self.told.push((self.now, what));
        }
    }

    fn start(&mut self, address: Address) {
        let spec = self.scenario.spec.clone();
        match address {
            Address::Coordinator if self.coordinator.machine.is_none() => {
                self.coordinator.start(self.now);
                let book = JournalState::replay(&self.journal);
                let (records, now) = (self.journal.len() as u64, self.coordinator.time(self.now));
                let mut out = Vec::new();
                let machine = Coordinator::new(spec, book, records, now, &mut out);
                let wake = machine.next_wake();
                self.coordinator.machine = Some(machine);
                self.carry_out(&mut out);
                self.schedule_wake(address, wake);
            }
            Address::Driver(driver) => {
                let actor = self.drivers.entry(driver).or_insert_with(Actor::absent);
                if actor.machine.is_none() {
                    actor.start(self.now);
                    let incarnation = mix2(actor.life, driver.0.into()) >> 1;
                    let site = self.scenario.drivers[driver.0 as usize];
                    actor.machine = Some(Driver::new(driver, incarnation, site, spec, actor.time(self.now)));
                    self.driver_input(driver, driver::Input::Wake);
                }
            }
            Address::Worker(peer) => self.start_worker(peer),
            Address::Coordinator => {}
        }
    }

    /// Whether the negative control strikes: at its `nth` chance, once.
    fn sabotaged(&mut self, kind: crate::scenario::Sabotage, nth: u32) -> bool {
        if self.scenario.sabotage != Some(kind) {
            return false;
        }
        self.sabotages += 1;
        self.sabotages == nth
    }
}
