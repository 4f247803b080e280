//! What ten thousand peers cost the coordinator: each beats and seals one lot a second.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use starling_swarm::coordinator::{Command, Coordinator, Input};
use starling_swarm::ids::*;
use starling_swarm::journal::JournalState;
use starling_swarm::lots::Lots;
use starling_swarm::message::*;
use starling_swarm::spec::{Reduce, Spec, Sync, Tuning};
use starling_swarm::time::{Span, Time};

use crate::figure;

const PEERS: u32 = 10_000;
const STAGES: u16 = 8;
const SECONDS: u64 = 20;

pub fn measure() {
    let mut load = Load::new();
    load.join_all();
    load.spent = Duration::ZERO;
    (0..SECONDS).for_each(|_| load.one_second());
    let sealed = load.sealed_by_all();
    assert_eq!(sealed, SECONDS * u64::from(PEERS), "every seal was counted");
    let share = load.spent.as_secs_f64() / SECONDS as f64;
    figure("coordinator, 10,000 peers that beat and seal once a second", share, "of one core");
}

/// A coordinator and hand-made members.
struct Load {
    coordinator: Coordinator,
    now: Time,
    spent: Duration,
    members: BTreeMap<PeerId, (MemberNo, Option<StageId>)>,
    driver: Option<MemberNo>,
    leases: BTreeMap<LotOf, LeaseNo>,
    beats: u64,
    accepted: u64,
    /// The next lot of each stage.
    next_lot: Vec<u32>,
}

impl Load {
    fn new() -> Load {
        let tuning = Tuning { quorum: PEERS as usize, leases: 1 << 16, ..Tuning::default() };
        let spec = Spec {
            run: RunId(1),
            stages: STAGES,
            costs: Vec::new(),
            lots: Lots { microbatches: 1 << 16, lots: 1 << 16 },
            sync: Sync::Delayed,
            reduce: Reduce::Fast,
            steps: Step(1 << 40),
            checkpoint_every: 0,
            elements: vec![1 << 16],
            shared: Vec::new(),
            state_bytes: 1,
            memory_bytes: 1,
            tuning,
        };
        let mut out = Vec::new();
        let coordinator = Coordinator::new(spec, JournalState::default(), 0, Time(0), &mut out);
        let mut load = Load {
            coordinator,
            now: Time(0),
            spent: Duration::ZERO,
            members: BTreeMap::new(),
            driver: None,
            leases: BTreeMap::new(),
            beats: 0,
            accepted: 0,
            next_lot: vec![0; STAGES as usize],
        };
        load.obey(out);
        load
    }

    /// Hands an input in, and does what comes out, journal included.
    fn give(&mut self, input: Input) {
        let mut out = Vec::new();
        let began = Instant::now();
        self.coordinator.handle(input, self.now, &mut out);
        self.spent += began.elapsed();
        self.obey(out);
    }

    fn obey(&mut self, commands: Vec<Command>) {
        for command in commands {
            match command {
                Command::Append(number, _) => self.give(Input::Journaled(number)),
                Command::Send(envelope) => self.receive(envelope),
                Command::Conclude(..) | Command::Tell(_) => {}
            }
        }
    }

    fn receive(&mut self, envelope: Envelope) {
        match (envelope.to, envelope.body) {
            (Address::Worker(peer), Body::Welcome { member, .. }) => {
                self.members.entry(peer).or_insert((member, None));
            }
            (Address::Worker(peer), Body::Assign(assign)) => {
                self.members.insert(peer, (assign.member, Some(assign.stage)));
            }
            (Address::Driver(_), Body::Welcome { member, .. }) => self.driver = Some(member),
            (Address::Driver(_), Body::Lease(lease)) => {
                self.leases.insert(lease.at, lease.number);
            }
            (_, Body::Verdict { accepted, .. }) => self.accepted += accepted.len() as u64,
            _ => {}
        }
    }

    fn say(&mut self, from: Address, body: Body) {
        let fence =
            Fence { run: RunId(1), term: Term(1), epoch: Epoch(1), step: Step(0), attempt: Attempt(0) };
        let envelope = Envelope { protocol: PROTOCOL, from, to: Address::Coordinator, fence, body };
        self.give(Input::Message(envelope));
    }

    fn join_all(&mut self) {
        for peer in (0..PEERS).map(PeerId) {
            let capability = Capability {
                site: SiteId(0),
                speed: 1.0,
                memory_bytes: 1 << 30,
                link_bytes_per_s: 25e6,
                class: "a".into(),
            };
            self.say(Address::Worker(peer), Body::Hello(Hello::Worker { incarnation: 1, capability }));
        }
        self.beat_all(false);
        self.beat_all(true);
        let hello = Hello::Driver { incarnation: 1, site: SiteId(0) };
        self.say(Address::Driver(DriverId(0)), Body::Hello(hello));
        assert!(!self.leases.is_empty(), "lots are handed out: {}", self.coordinator.why_waiting());
    }

    fn beat_all(&mut self, active: bool) {
        self.beats += 1;
        for peer in (0..PEERS).map(PeerId) {
            let (member, stage) = self.members[&peer];
            let status = WorkerStatus {
                number: self.beats,
                member: Some(member),
                stage,
                whole: stage.is_some(),
                active,
                ..Default::default()
            };
            self.say(Address::Worker(peer), Body::WorkerBeat(status));
        }
    }

    fn one_second(&mut self) {
        self.now = self.now + Span::s(1);
        self.beat_all(true);
        for peer in (0..PEERS).map(PeerId) {
            let Some(stage) = self.members[&peer].1 else { continue };
            let next = &mut self.next_lot[stage.0 as usize];
            let at = LotOf { step: Step(0), lot: Lot(*next) };
            *next += 1;
            let Some(&lease) = self.leases.get(&at) else { continue };
            let grant = Grant { lease, attempt: Attempt(0) };
            let seal = SealedLot { at, grant, accepted: false };
            self.say(Address::Worker(peer), Body::Seals { stage, lots: vec![seal] });
        }
        let status = DriverStatus {
            member: self.driver,
            leases: self.leases.values().copied().collect(),
            ..Default::default()
        };
        self.say(Address::Driver(DriverId(0)), Body::DriverBeat(status));
        self.give(Input::Wake);
    }

    fn sealed_by_all(&self) -> u64 {
        self.accepted
    }
}
