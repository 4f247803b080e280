//! A state of the whole swarm, and what may happen in it.

use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::rc::Rc;
use std::sync::Arc;

use starling_sim::host::{Host, Piece};
use starling_sim::rng::mix2;
use starling_sim::toy::{Reference, Toy};
use starling_swarm::coordinator::{self, Coordinator};
use starling_swarm::driver::{self, Driver};
use starling_swarm::ids::*;
use starling_swarm::journal::{Commit, JournalState, Record};
use starling_swarm::lots::Lots;
use starling_swarm::message::{Body, Capability, Envelope};
use starling_swarm::rebalance::Policy;
use starling_swarm::spec::{Reduce, Spec, Tuning};
use starling_swarm::time::{Span, Time};
use starling_swarm::worker::{self, Worker};

use crate::*;

/// Everything that what happens next depends on.
#[derive(Clone)]
pub(crate) struct State {
    pub(crate) about: Rc<About>,
    pub(crate) now: u64,
    pub(crate) coordinator: Printed<Coordinator>,
    pub(crate) driver: Printed<Driver>,
    pub(crate) peers: Vec<Peer>,
    pub(crate) wires: BTreeMap<(Address, Address), VecDeque<Letter>>,
    /// Messages that are in no order any more.
    pub(crate) strays: Vec<Letter>,
    /// Messages that come when it is this time.
    pub(crate) stale: Vec<(u64, Letter)>,
    pub(crate) unsynced: VecDeque<(u64, Record)>,
    pub(crate) concluded: VecDeque<(u64, Vec<u8>)>,
    pub(crate) journal: Printed<Journal>,
    pub(crate) checkpoints: Printed<BTreeMap<(StageId, Step), BTreeMap<Step, u64>>>,
    pub(crate) faults: u32,
}

/// What is the same in all states.
pub(crate) struct About {
    pub(crate) bounds: Bounds,
    pub(crate) spec: Spec,
    pub(crate) toy: Toy,
    pub(crate) reference: RefCell<Reference>,
    /// Sums by the hash of what they are: who has the handle has the sum.
    pub(crate) pieces: RefCell<HashMap<u64, Piece>>,
}

#[derive(Clone)]
pub(crate) struct Peer {
    /// `None` while it is dead.
    pub(crate) node: Option<Printed<(Worker, Host)>>,
    pub(crate) life: u64,
    pub(crate) back_at: Option<u64>,
    /// What its host has done and not yet told it.
    pub(crate) pending: Vec<Printed<worker::Input>>,
    /// The latest (epoch, version) of this life.
    pub(crate) last: (Epoch, Step),
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Journal {
    pub(crate) book: JournalState,
    pub(crate) commits: Vec<Arc<Commit>>,
}

pub(crate) type Letter = Printed<Envelope>;

impl State {
    pub(crate) fn new(bounds: Bounds) -> State {
        let (spec, toy) = spec(bounds);
        let reference = RefCell::new(Reference::new(toy));
        let about = About { bounds, spec: spec.clone(), toy, reference, pieces: RefCell::default() };
        let mut out = Vec::new();
        let machine = Coordinator::new(spec.clone(), JournalState::default(), 0, Time(0), &mut out);
        let driver = Driver::new(DriverId(0), 1, SiteId(0), spec, Time(0));
        let peer = Peer { node: None, life: 0, back_at: None, pending: Vec::new(), last: Default::default() };
        let mut state = State {
            about: Rc::new(about),
            now: 0,
            coordinator: Printed::new(machine),
            driver: Printed::new(driver),
            peers: vec![peer; PEERS],
            wires: BTreeMap::new(),
            strays: Vec::new(),
            stale: Vec::new(),
            unsynced: VecDeque::new(),
            concluded: VecDeque::new(),
            journal: Printed::default(),
            checkpoints: Printed::default(),
            faults: 0,
        };
        state.coordinator_commands(out);
        state.begin().expect("nothing goes wrong yet");
        state
    }

    /// Every start of a process, and if wanted all that comes before there is a driver, in one order.
    pub(crate) fn begin(&mut self) -> Result<(), String> {
        self.take(Choice::Synced)?;
        for index in 0..PEERS {
            self.start(index)?;
        }
        let start = self.about.bounds.start;
        while start != Start::Cold
            && let Some(&next) = self.events().first()
        {
            self.take(next)?;
        }
        self.driver_input(driver::Input::Wake);
        while start == Start::Sealed
            && !self.is_sealed()
            && let Some(&next) = self.events().first()
        {
            self.take(next)?;
        }
        Ok(())
    }

    /// Whether some peer has an order to reduce before it.
    pub(crate) fn is_sealed(&self) -> bool {
        let reduces = |letter: &Letter| matches!(letter.body, Body::Reduce { .. });
        (0..PEERS).any(|index| {
            let wire = self.wires.get(&(Address::Coordinator, address(index)));
            wire.is_some_and(|wire| wire.iter().any(reduces))
        })
    }

    /// All that may happen next; nothing if all is done.
    pub(crate) fn choices(&self) -> Vec<Choice> {
        let mut choices = self.events();
        if choices.is_empty() && self.is_settled() {
            return choices;
        }
        match self.order() {
            Order::Any => choices.extend((0..self.strays.len()).map(Choice::Stray)),
            Order::FastHosts => choices.truncate(1),
            Order::SlowHosts | Order::NewestFirst => choices = choices.pop().into_iter().collect(),
            Order::Ranked(seed) => {
                let first = choices.iter().copied().min_by_key(|&choice| mix2(seed, bit(choice)));
                choices = first.into_iter().collect();
            }
        }
        if choices.is_empty() && !self.strays.is_empty() {
            choices.push(Choice::Stray(0));
        }
        let quiet = choices.is_empty();
        if self.faults < self.about.bounds.faults {
            self.add_faults(&mut choices);
        }
        if quiet {
            choices.push(Choice::Time);
        }
        choices
    }

    /// After the first fault, one order stands for all.
    pub(crate) fn order(&self) -> Order {
        match self.about.bounds.order {
            Order::Any if self.faults > 0 => Order::FastHosts,
            order => order,
        }
    }

    /// Takes what is the only choice, as long as there is one; returns the choices then, and how many it took
    /// until there.
    pub(crate) fn run_on(&mut self) -> Result<(Vec<Choice>, usize), String> {
        for forced in 0..MOST_FORCED {
            match self.forced() {
                Some(choice) => self.take(choice)?,
                None => return Ok((self.choices(), forced)),
            }
        }
        Err("no progress: messages go round in circles".into())
    }

    /// The only choice, unless it is that time goes on. Where there were many orders, also not what reaches
    /// the coordinator: states are to be compared where those orders meet again.
    pub(crate) fn forced(&self) -> Option<Choice> {
        let many = self.about.bounds.order == Order::Any;
        match self.choices()[..] {
            [Choice::Time] => None,
            [Choice::Deliver(_, Address::Coordinator)] if many => None,
            [choice] => Some(choice),
            _ => None,
        }
    }

    /// What is enabled, without faults and time.
    pub(crate) fn events(&self) -> Vec<Choice> {
        let mut events = Vec::new();
        let most = if matches!(self.order(), Order::Any | Order::NewestFirst) { usize::MAX } else { 1 };
        for (index, peer) in self.peers.iter().enumerate() {
            // The device computes one job after another.
            let is_job = |nth: &usize| {
                use worker::Input::{BackwardDone, ForwardDone};
                matches!(*peer.pending[*nth], ForwardDone(..) | BackwardDone(..))
            };
            let first = (0..peer.pending.len()).find(is_job);
            let may_come = |nth: &usize| !is_job(nth) || Some(*nth) == first;
            let choices = (0..peer.pending.len().min(most)).filter(may_come);
            events.extend(choices.map(|nth| Choice::Host(index, nth)));
        }
        events.extend((!self.unsynced.is_empty()).then_some(Choice::Synced));
        events.extend((!self.concluded.is_empty()).then_some(Choice::Concluded));
        events.extend(self.wires.keys().map(|&(from, to)| Choice::Deliver(from, to)));
        events
    }

    pub(crate) fn add_faults(&self, choices: &mut Vec<Choice>) {
        let heads: Vec<(Address, Address)> = choices
            .iter()
            .filter_map(|choice| match choice {
                Choice::Deliver(from, to) => Some((*from, *to)),
                _ => None,
            })
            .collect();
        for &kind in self.about.bounds.kinds {
            if matches!(kind, Kind::Bounce | Kind::Die) {
                let alive = (0..PEERS).filter(|&index| self.peers[index].node.is_some()).map(address);
                choices.extend(alive.map(|peer| Choice::Fault(kind, peer, peer)));
            } else {
                choices.extend(heads.iter().map(|&(from, to)| Choice::Fault(kind, from, to)));
            }
        }
    }

    /// Whether all steps are done, and every peer has the last version.
    pub(crate) fn is_settled(&self) -> bool {
        let last = self.about.spec.steps;
        let has = |peer: &Peer| {
            let version = peer.node.as_ref().and_then(|node| node.0.version());
            version.is_some_and(|(_, version)| version == last)
        };
        self.strays.is_empty()
            && self.stale.is_empty()
            && self.coordinator.is_done()
            && self.peers.iter().all(has)
    }

    /// One transition.
    pub(crate) fn take(&mut self, choice: Choice) -> Result<(), String> {
        match choice {
            Choice::Deliver(from, to) => self.pull(from, to).map_or(Ok(()), |letter| self.deliver(&letter)),
            Choice::Stray(index) => {
                let letter = self.strays.remove(index);
                self.deliver(&letter)
            }
            Choice::Host(index, nth) => {
                let input = self.peers[index].pending.remove(nth);
                self.worker_input(index, (*input).clone())
            }
            Choice::Synced => self.synced(),
            Choice::Concluded => {
                if let Some((number, constants)) = self.concluded.pop_front() {
                    self.coordinator_input(coordinator::Input::Concluded(number, Some(constants)));
                }
                Ok(())
            }
            Choice::Time => self.wake(),
            Choice::Fault(kind, from, to) => {
                self.faults += 1;
                self.fault(kind, from, to)
            }
        }
    }

    pub(crate) fn fault(&mut self, kind: Kind, from: Address, to: Address) -> Result<(), String> {
        match kind {
            Kind::Bounce => return self.kill(to, true),
            Kind::Die => return self.kill(to, false),
            _ => {}
        }
        let Some(letter) = self.pull(from, to) else { return Ok(()) };
        if matches!(kind, Kind::Twice | Kind::Again) {
            self.deliver(&letter)?;
        }
        match kind {
            Kind::Twice => self.deliver(&letter),
            Kind::Again | Kind::Late => {
                self.strays.push(letter);
                Ok(())
            }
            Kind::Stale => {
                self.stale.push((self.now + STALE_US, letter));
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn kill(&mut self, who: Address, at_once: bool) -> Result<(), String> {
        let Address::Worker(PeerId(index)) = who else { return Ok(()) };
        let peer = &mut self.peers[index as usize];
        (peer.node, peer.pending, peer.last) = (None, Vec::new(), Default::default());
        if at_once {
            return self.start(index as usize);
        }
        peer.back_at = Some(self.now + AWAY_US);
        self.wires.retain(|(_, to), _| *to != who);
        self.strays.retain(|letter| letter.to != who);
        Ok(())
    }

    pub(crate) fn start(&mut self, index: usize) -> Result<(), String> {
        let capability = Capability {
            site: SiteId(0),
            speed: 1.0,
            memory_bytes: 1,
            link_bytes_per_s: 1e6,
            class: "toy".into(),
        };
        let (id, spec, now) = (PeerId(index as u32), self.about.spec.clone(), Time(self.now));
        let peer = &mut self.peers[index];
        (peer.life, peer.back_at) = (peer.life + 1, None);
        let worker = Worker::new(id, peer.life << 8, capability, spec, now);
        peer.node = Some(Printed::new((worker, Host::new(self.about.toy))));
        self.worker_input(index, worker::Input::Wake)
    }

    /// Nothing is on its way: time goes on to the next timer, and all that are due then fire.
    pub(crate) fn wake(&mut self) -> Result<(), String> {
        let workers = self.peers.iter().filter_map(|peer| peer.node.as_ref()).map(|node| node.0.next_wake());
        let machines = workers.chain([self.coordinator.next_wake(), self.driver.next_wake()]).map(|at| at.0);
        let backs = self.peers.iter().filter_map(|peer| peer.back_at);
        let earliest = machines.chain(backs).chain(self.stale.iter().map(|(at, _)| *at)).min();
        self.now = earliest.unwrap_or(0).max(self.now + 1);
        if self.now > PATIENCE_US {
            return Err(format!("no progress: {}", self.coordinator.why_waiting()));
        }
        let now = Time(self.now);
        let (due, later) = std::mem::take(&mut self.stale).into_iter().partition(|(at, _)| *at <= self.now);
        let due: Vec<(u64, Letter)> = due;
        (self.stale, self.strays) = (later, due.into_iter().map(|(_, letter)| letter).collect());
        if self.coordinator.next_wake() <= now {
            self.coordinator_input(coordinator::Input::Wake);
        }
        if self.driver.next_wake() <= now {
            self.driver_input(driver::Input::Wake);
        }
        for index in 0..PEERS {
            let peer = &self.peers[index];
            if peer.back_at.is_some_and(|at| at <= self.now) {
                self.start(index)?;
            } else if peer.node.as_ref().is_some_and(|node| node.0.next_wake() <= now) {
                self.worker_input(index, worker::Input::Wake)?;
            }
        }
        Ok(())
    }

    // ------------------------------------------------------------------------------------------ messages

    pub(crate) fn post(&mut self, envelope: Envelope) {
        let (from, to) = (envelope.from, envelope.to);
        if let Address::Worker(PeerId(index)) = to
            && self.peers[index as usize].node.is_none()
        {
            return;
        }
        self.wires.entry((from, to)).or_default().push_back(Printed::new(envelope));
    }

    pub(crate) fn pull(&mut self, from: Address, to: Address) -> Option<Letter> {
        let wire = self.wires.get_mut(&(from, to))?;
        let letter = wire.pop_front();
        if wire.is_empty() {
            self.wires.remove(&(from, to));
        }
        letter
    }

    pub(crate) fn deliver(&mut self, letter: &Letter) -> Result<(), String> {
        let envelope = (**letter).clone();
        match envelope.to {
            Address::Coordinator => self.coordinator_input(coordinator::Input::Message(envelope)),
            Address::Driver(_) => self.driver_input(driver::Input::Message(envelope)),
            Address::Worker(PeerId(index)) => {
                return self.worker_input(index as usize, worker::Input::Message(envelope));
            }
        }
        Ok(())
    }

    // ------------------------------------------------------------------------------------- the coordinator

    /// What tells this state from every other.
    pub(crate) fn print(&self) -> u128 {
        let mut print = Print::default();
        print.number(self.now.into());
        print.number(self.faults.into());
        print.number(self.coordinator.print());
        print.number(self.driver.print());
        print.number(self.journal.print());
        print.number(self.checkpoints.print());
        for peer in &self.peers {
            print.number(peer.node.as_ref().map_or(0, Printed::print));
            print.number(peer.back_at.unwrap_or(0).into());
            print.number((u128::from(peer.last.0.0) << 64) | u128::from(peer.last.1.0));
            peer.pending.iter().for_each(|input| print.number(input.print()));
            print.number(1);
        }
        for (&(from, to), letters) in &self.wires {
            print.number(u128::from(code(from)) << 64 | u128::from(code(to)));
            letters.iter().for_each(|letter| print.number(letter.print()));
        }
        print.number(2);
        self.strays.iter().for_each(|letter| print.number(letter.print()));
        print.number(3);
        for (at, letter) in &self.stale {
            print.number((*at).into());
            print.number(letter.print());
        }
        print.number(4);
        print.number(print_of(&(&self.unsynced, &self.concluded)));
        print.value()
    }

    pub(crate) fn describe(&self, choice: Choice) -> String {
        let head = |from, to| {
            let letter = self.wires.get(&(from, to)).and_then(|wire| wire.front());
            letter.map_or(String::new(), |letter| format!("{:?} {:?}", letter.body, letter.fence))
        };
        match choice {
            Choice::Deliver(from, to) => format!("{from} -> {to}: {}", head(from, to)),
            Choice::Stray(index) => format!("late: {:?}", *self.strays[index]),
            Choice::Host(index, nth) => {
                format!("host of peer {index}: {:?}", *self.peers[index].pending[nth])
            }
            Choice::Fault(kind, from, to) if from != to => {
                format!("FAULT {kind:?} {from} -> {to}: {}", head(from, to))
            }
            Choice::Fault(kind, from, _) => format!("FAULT {kind:?} {from}"),
            Choice::Synced => format!("journal: {:?}", self.unsynced.front()),
            choice => format!("{choice:?}"),
        }
    }
}

pub(crate) fn spec(bounds: Bounds) -> (Spec, Toy) {
    let lots = Lots { microbatches: MICROBATCHES, lots: bounds.lots };
    let tuning = Tuning {
        beat: Span::s(1),
        silence: Span::ms(1_500),
        slack: Span::ms(300),
        unknown: Span::ms(800),
        pause: Span::s(1),
        rebalance: Policy::Never,
        quorum: PEERS,
        ..Tuning::default()
    };
    let spec = Spec {
        run: RunId(1),
        stages: STAGES,
        costs: Vec::new(),
        lots,
        sync: bounds.sync,
        reduce: Reduce::Exact,
        steps: Step(bounds.steps),
        checkpoint_every: 1,
        elements: vec![2],
        shared: if bounds.shares { vec![vec![StageId(0), StageId(STAGES - 1)]] } else { Vec::new() },
        state_bytes: 1,
        memory_bytes: 1,
        tuning,
    };
    let Spec { stages, sync, reduce, .. } = spec;
    let elements = spec.elements(StageId(0));
    (spec, Toy { seed: 1, stages, lots, sync, reduce, elements, shares: bounds.shares, poison: None })
}

pub(crate) fn address(index: usize) -> Address {
    Address::Worker(PeerId(index as u32))
}

pub(crate) fn code(address: Address) -> u64 {
    match address {
        Address::Coordinator => 1,
        Address::Driver(DriverId(driver)) => 2 | u64::from(driver) << 8,
        Address::Worker(PeerId(peer)) => 3 | u64::from(peer) << 8,
    }
}
