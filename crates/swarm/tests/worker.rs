//! What a worker does with more work than it has room for.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use starling_swarm::ids::*;
use starling_swarm::lots::Lots;
use starling_swarm::message::*;
use starling_swarm::spec::{Reduce, Spec, Sync, Tuning};
use starling_swarm::time::{Span, Time};
use starling_swarm::worker::{Command, Input, Worker};

const GONE: Address = Address::Driver(DriverId(0));
const OTHER: Address = Address::Driver(DriverId(1));

/// A worker of the first of two stages, with room for two microbatches between forward and backward.
struct World {
    worker: Worker,
    now: Time,
}

impl World {
    fn new() -> World {
        let spec = Spec {
            run: RunId(1),
            stages: 2,
            costs: Vec::new(),
            lots: Lots { microbatches: 40, lots: 40 },
            sync: Sync::Step,
            reduce: Reduce::Exact,
            steps: Step(4),
            checkpoint_every: 0,
            elements: vec![4],
            shared: Vec::new(),
            state_bytes: 10,
            memory_bytes: 0,
            tuning: Tuning { jobs: 2, ..Tuning::default() },
        };
        let capability = Capability {
            site: SiteId(0),
            speed: 1.0,
            memory_bytes: 1,
            link_bytes_per_s: 1.0,
            class: "any".into(),
        };
        let mut world = World { worker: Worker::new(PeerId(0), 7, capability, spec, Time(0)), now: Time(0) };
        let member = MemberNo(1);
        world.input(Input::Wake);
        world.hear(Address::Coordinator, Body::Welcome { member, incarnation: 7 });
        let assign = Assign { member, stage: StageId(0), source: Source::Seed, catch_up: false };
        let commands = world.hear(Address::Coordinator, Body::Assign(assign));
        let loads = |command: &Command| if let Command::Load { of, .. } = command { Some(*of) } else { None };
        let of = commands.iter().find_map(loads).unwrap();
        world.input(Input::Loaded(of));
        world.hear(Address::Coordinator, Body::Activate);
        world
    }

    fn input(&mut self, input: Input) -> Vec<Command> {
        let mut out = Vec::new();
        self.worker.handle(input, self.now, &mut out);
        out
    }

    fn hear(&mut self, from: Address, body: Body) -> Vec<Command> {
        let fence = Fence { run: RunId(1), term: Term(1), epoch: Epoch(1), ..Fence::default() };
        let to = Address::Worker(PeerId(0));
        self.input(Input::Message(Envelope { protocol: PROTOCOL, from, to, fence, body }))
    }

    /// A lot of one microbatch comes; what begins is done with forward at once. How many began, and how many were refused.
    fn begin(&mut self, from: Address, lot: u32) -> (usize, usize) {
        let Address::Driver(driver) = from else { return (0, 0) };
        let route = vec![Hop { peer: PeerId(0), grant: Some(Attempt(0)) }].into();
        let work = Work { lot: Lot(lot), microbatch: Microbatch(lot), lease: lease(lot), driver, route };
        let commands = self.hear(from, Body::Begin(work, Payload::default()));
        self.go_forward(commands)
    }

    fn go_forward(&mut self, commands: Vec<Command>) -> (usize, usize) {
        let is_refused = |command: &Command| matches!(command, Command::Send(envelope) if matches!(envelope.body, Body::Declined(_)));
        let refused = commands.iter().filter(|command| is_refused(command)).count();
        let mut begun = 0;
        for command in commands {
            if let Command::Forward { job, .. } = command {
                begun += 1;
                let more = self.input(Input::ForwardDone(job, Payload::default()));
                begun += self.go_forward(more).0;
            }
        }
        (begun, refused)
    }
}

fn lease(lot: u32) -> LeaseNo {
    LeaseNo { term: Term(1), number: u64::from(lot) + 1 }
}

/// Two of a driver's are away, two of another's wait, and there is no room for a fifth.
fn full() -> World {
    let mut world = World::new();
    assert_eq!([world.begin(GONE, 0), world.begin(GONE, 1)], [(1, 0); 2]);
    assert_eq!([world.begin(OTHER, 2), world.begin(OTHER, 3)], [(0, 0); 2], "they wait");
    assert_eq!(world.begin(OTHER, 4), (0, 1));
    world
}

#[test]
fn what_waits_is_begun_when_a_lot_that_is_away_is_revoked() {
    let mut world = full();
    for lot in [0, 1] {
        let grant = Grant { lease: lease(lot), attempt: Attempt(0) };
        let commands = world.hear(GONE, Body::Revoke { lot: Lot(lot), grant });
        assert_eq!(world.go_forward(commands), (1, 0));
    }
    let queues = world.worker.queues();
    assert_eq!((queues.begun, queues.jobs), (2, 2));
}

#[test]
fn what_is_away_for_a_driver_that_is_gone_makes_room_in_time() {
    let mut world = full();
    world.now = world.now + Span::s(60);
    let commands = world.input(Input::Wake);
    let (begun, _) = world.go_forward(commands);
    assert!(begun > 0, "the longest overdue is given up for what waits");
    assert!(world.begin(OTHER, 4).1 == 0, "and another one may wait");
}
