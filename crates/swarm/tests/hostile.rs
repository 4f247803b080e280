//! Whatever is said to the machines, in whatever order, by whomever: refused or contained, never a panic, and
//! never an update that no coordinator has committed.

use proptest::prelude::*;
use starling_swarm::coordinator::{self, Coordinator};
use starling_swarm::driver::{self, Driver};
use starling_swarm::ids::*;
use starling_swarm::journal::{Commit, JournalState};
use starling_swarm::lots::{Lots, TreeNode};
use starling_swarm::message::*;
use starling_swarm::reduce::{Part, ReducePlan, Relay};
use starling_swarm::spec::{Reduce, Spec, Sync, Tuning};
use starling_swarm::time::{Span, Time};
use starling_swarm::worker::{self, Worker};

const LOTS: Lots = Lots { microbatches: 3, lots: 2 };

fn spec(sync: Sync) -> Spec {
    Spec {
        run: RunId(1),
        stages: 2,
        costs: Vec::new(),
        lots: LOTS,
        sync,
        reduce: if sync == Sync::Step { Reduce::Exact } else { Reduce::Fast },
        steps: Step(4),
        checkpoint_every: 1,
        elements: vec![4],
        shared: if sync == Sync::Step { vec![vec![StageId(0), StageId(1)]] } else { Vec::new() },
        state_bytes: 10,
        memory_bytes: 0,
        tuning: Tuning {
            jobs: 3,
            ahead: 4,
            leases: 2,
            in_flight: 3,
            deposit: Span::ms(500),
            ..Tuning::default()
        },
    }
}

fn capability(speed: f64) -> Capability {
    Capability { site: SiteId(0), speed, memory_bytes: 1, link_bytes_per_s: 1.0, class: "x".into() }
}

fn at(number: u32) -> LotOf {
    LotOf { step: Step(u64::from(number) / 3), lot: Lot(number % 3) }
}

fn sync() -> impl Strategy<Value = Sync> {
    prop_oneof![Just(Sync::Step), Just(Sync::Delayed)]
}

fn address() -> impl Strategy<Value = Address> {
    prop_oneof![
        Just(Address::Coordinator),
        (0u32..3).prop_map(|n| Address::Worker(PeerId(n))),
        (0u32..2).prop_map(|n| Address::Driver(DriverId(n))),
    ]
}

fn fence() -> impl Strategy<Value = Fence> {
    (0u64..2, 0u64..3, 0u64..3, 0u64..3, 0u32..3).prop_map(|(run, term, epoch, step, attempt)| Fence {
        run: RunId(run),
        term: Term(term),
        epoch: Epoch(epoch),
        step: Step(step),
        attempt: Attempt(attempt),
    })
}

fn work() -> impl Strategy<Value = Work> {
    let hop = (0u32..3, prop::option::of(0u32..3))
        .prop_map(|(peer, grant)| Hop { peer: PeerId(peer), grant: grant.map(Attempt) });
    (0u32..4, 0u32..5, 0u64..3, prop::collection::vec(hop, 0..4)).prop_map(
        |(lot, microbatch, number, route)| Work {
            lot: Lot(lot),
            microbatch: Microbatch(microbatch),
            lease: LeaseNo { term: Term(number), number },
            driver: DriverId(0),
            route: route.into(),
        },
    )
}

fn plan() -> impl Strategy<Value = ReducePlan> {
    let peers = || prop::collection::vec((0u32..3).prop_map(PeerId), 0..4);
    let part = (0u64..5, 0u64..6, peers(), 0u16..3).prop_map(|(start, end, owners, root)| Part {
        start,
        end,
        owners,
        root,
        since: Attempt(1),
    });
    let groups = prop::collection::vec(peers(), 0..3);
    (0u16..3, groups, peers(), prop::collection::vec(part, 0..3)).prop_map(
        |(stage, groups, holders, parts)| {
            let holders = holders.into_iter().map(|peer| (peer, 0)).collect();
            let relays = vec![Relay { a: PeerId(0), b: PeerId(1), via: PeerId(2) }];
            let joined = groups.concat().into_iter().map(|peer| (peer, Attempt(2))).collect();
            ReducePlan {
                stage: StageId(stage),
                groups,
                joined,
                holders,
                parts,
                relays,
                reason: String::new(),
            }
        },
    )
}

/// One that makes sense to a worker of its own stage.
fn sound_plan() -> impl Strategy<Value = ReducePlan> {
    (0u16..2).prop_map(|stage| ReducePlan {
        stage: StageId(stage),
        groups: vec![vec![PeerId(0), PeerId(1)], vec![PeerId(2)]],
        joined: vec![(PeerId(1), Attempt(2))],
        holders: vec![(PeerId(0), 0), (PeerId(2), 0)],
        parts: vec![Part {
            start: 0,
            end: 4,
            owners: vec![PeerId(0), PeerId(2)],
            root: stage,
            since: Attempt(1),
        }],
        relays: Vec::new(),
        reason: String::new(),
    })
}

fn body() -> impl Strategy<Value = Body> {
    let speeds = prop_oneof![Just(f64::NAN), Just(0.0), Just(-1.0), Just(f64::INFINITY), Just(2.0)];
    let stage = || (0u16..4).prop_map(StageId);
    let member = || prop::option::of((0u64..3).prop_map(|n| MemberNo(1 << 32 | n)));
    let status = (member(), prop::option::of(stage()), any::<bool>(), any::<bool>()).prop_map(
        |(m, s, whole, active)| WorkerStatus {
            member: m,
            stage: s,
            whole,
            active,
            report: Some(Vec::new()),
            ..WorkerStatus::default()
        },
    );
    let commit = (0u64..3, 0u64..3, any::<bool>()).prop_map(|(epoch, step, skipped)| Commit {
        term: Term(0),
        epoch: Epoch(epoch),
        step: Step(step),
        constants: Vec::new(),
        digests: vec![[0; 32]; 2],
        savers: vec![PeerId(0)],
        skipped,
    });
    let grant = Grant { lease: LeaseNo { term: Term(1), number: 1 }, attempt: Attempt(0) };
    let source = prop_oneof![Just(Source::Seed), Just(Source::Checkpoint), Just(Source::Donor(PeerId(1)))];
    let node = TreeNode { level: 200, index: u32::MAX };
    prop_oneof![
        speeds.prop_map(|s| Body::Hello(Hello::Worker { incarnation: 1, capability: capability(s) })),
        Just(Body::Hello(Hello::Driver { incarnation: 1, site: SiteId(0) })),
        member().prop_map(|m| Body::Welcome { member: m.unwrap_or_default(), incarnation: 7 }),
        member().prop_map(|member| Body::Stranger { member }),
        Just(Body::Unfit { why: "x".repeat(2000) }),
        status.prop_map(Body::WorkerBeat),
        member().prop_map(|m| Body::DriverBeat(DriverStatus { member: m, ..DriverStatus::default() })),
        (stage(), source).prop_map(|(stage, source)| Body::Assign(Assign {
            member: MemberNo(1 << 32),
            stage,
            source,
            catch_up: stage.0 == 1,
        })),
        Just(Body::Activate),
        Just(Body::Save),
        stage().prop_map(|stage| Body::Share { sources: vec![(stage, vec![PeerId(0), PeerId(1)])] }),
        stage().prop_map(|stage| Body::UsesRequest { stage }),
        stage().prop_map(|stage| Body::Uses { stage, payload: Payload::default() }),
        stage().prop_map(|stage| Body::Settled { stage, digest: [0; 32], summary: Vec::new() }),
        stage().prop_map(|stage| Body::StateRequest { stage, have: Some(Step(9)) }),
        stage().prop_map(|stage| Body::State { stage, payload: Payload::default(), onto: None }),
        Just(Body::View(View { number: 1, stages: vec![Vec::new(), Vec::new()], drivers: vec![SiteId(0)] })),
        stage().prop_map(move |stage| Body::Lease(Lease {
            number: grant.lease,
            at: LotOf { step: Step(0), lot: Lot(1) },
            held: vec![None, Some(PeerId(stage.0.into()))]
        })),
        Just(Body::LeaseEnd { leases: vec![grant.lease] }),
        work().prop_map(|work| Body::Begin(work, Payload::default())),
        work().prop_map(Body::Onward),
        work().prop_map(|work| Body::Activation(work, Payload::default())),
        work().prop_map(|work| Body::Gradient(work, Payload::default())),
        (0u32..9).prop_map(move |lot| Body::Revoke { lot: Lot(lot), grant }),
        (stage(), 0u32..9).prop_map(move |(stage, lot)| Body::Seals {
            stage,
            lots: vec![SealedLot { at: at(lot), grant, accepted: true }]
        }),
        (stage(), 0u32..9).prop_map(|(stage, lot)| Body::Lost { stage, lots: vec![at(lot)] }),
        (0u32..9).prop_map(|lot| Body::Verdict {
            number: u64::from(lot),
            accepted: vec![at(lot)],
            refused: vec![at(lot)]
        }),
        (prop_oneof![plan(), sound_plan()], prop::collection::vec((0u32..3).prop_map(Lot), 0..3))
            .prop_map(|(plan, lots)| Body::Reduce { plan: plan.into(), lots }),
        (stage(), 0u32..9).prop_map(move |(stage, part)| Body::Contribution {
            stage,
            part,
            holder: PeerId(1),
            stamp: 0,
            nodes: vec![node],
            payload: Payload::default()
        }),
        prop::option::of(0u32..4).prop_map(|peer| Body::Keeper { keeper: peer.map(PeerId) }),
        (stage(), prop::collection::vec(0u32..9, 0..4), any::<bool>()).prop_map(|(stage, lots, all)| {
            let set = lots.iter().filter(|lot| **lot < LOTS.lots).map(|&lot| Lot(lot)).collect();
            let nodes = if all { vec![TreeNode::ALL] } else { LOTS.nodes(&set) };
            let lots = lots.into_iter().map(Lot).collect();
            Body::Deposit { stage, lots, nodes, payload: Payload::default() }
        }),
        (stage(), 0u32..4, prop::collection::vec(0u32..9, 0..4)).prop_map(|(stage, of, lots)| {
            Body::Deposited { stage, of: PeerId(of), lots: lots.into_iter().map(Lot).collect() }
        }),
        (stage(), 0u32..4, prop::collection::vec(0u32..9, 0..4)).prop_map(|(stage, of, lots)| {
            Body::Inherit { number: 9, stage, of: PeerId(of), lots: lots.into_iter().map(Lot).collect() }
        }),
        (stage(), 0u32..9).prop_map(|(stage, part)| Body::Reduced {
            stage,
            part,
            member: PeerId(0),
            payload: Payload::default()
        }),
        (stage(), 0u64..3, any::<u32>(), any::<u32>()).prop_map(|(stage, step, lot, microbatch)| {
            let at = LotOf { step: Step(step), lot: Lot(lot % 5) };
            let of = vec![NotFinite {
                at,
                microbatch: Microbatch(microbatch % 9),
                times: lot % 3,
                granted: lot % 2 == 0,
            }];
            Body::NotFinite { stage, of }
        }),
        stage().prop_map(|stage| Body::Stuck { stage, on: PeerId(1), certain: true }),
        stage().prop_map(|stage| Body::Prepared { stage, digest: [0; 32], summary: Vec::new() }),
        commit.prop_map(|commit| Body::Commit(commit.into())),
        stage().prop_map(|stage| Body::Saved { stage, version: Step(1) }),
    ]
}

fn envelope() -> impl Strategy<Value = Envelope> {
    let protocol = prop_oneof![9 => Just(PROTOCOL), 1 => any::<u16>()];
    (protocol, address(), address(), fence(), body()).prop_map(|(protocol, from, to, fence, body)| Envelope {
        protocol,
        from,
        to,
        fence,
        body,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_worker_bears_any_sequence_of_messages(
        sync in sync(),
        messages in prop::collection::vec(envelope(), 0..120),
    ) {
        let mut worker = Worker::new(PeerId(0), 7, capability(1.0), spec(sync), Time(0));
        let (mut out, mut prepared, mut settled) = (Vec::new(), false, false);
        for (at, mut message) in messages.into_iter().enumerate() {
            message.to = Address::Worker(PeerId(0));
            let now = Time(at as u64 * 300_000);
            worker.handle(worker::Input::Message(message), now, &mut out);
            worker.handle(worker::Input::Wake, now, &mut out);
            for command in std::mem::take(&mut out) {
                match command {
                    worker::Command::Forward { job, .. } => {
                        worker.handle(worker::Input::ForwardDone(job, Payload::default()), now, &mut out)
                    }
                    worker::Command::Load { of, .. } => {
                        worker.handle(worker::Input::Loaded(of), now, &mut out)
                    }
                    worker::Command::Prepare(number) => {
                        prepared = true;
                        worker.handle(worker::Input::Prepared(number, [0; 32], vec![]), now, &mut out)
                    }
                    worker::Command::Settle(number, round, _) => {
                        settled = true;
                        worker.handle(worker::Input::Settled(number, round, [0; 32], vec![]), now, &mut out)
                    }
                    worker::Command::Inherit(inherited) if at % 2 == 0 => {
                        let lost = worker::Input::NotInherited(inherited.step, inherited.lots);
                        worker.handle(lost, now, &mut out)
                    }
                    worker::Command::Apply(..) => {
                        prop_assert!(prepared, "an update without a reduced gradient");
                        prop_assert!(settled || sync != Sync::Step, "an update without what is shared");
                        (prepared, settled) = (false, false);
                    }
                    _ => {}
                }
            }
            let queues = worker.queues();
            let lots = 2 * (1 + sync.lag() as usize);
            prop_assert!(queues.begun <= 3 && queues.jobs <= 6, "{queues:?}");
            prop_assert!(queues.lots <= lots && queues.ahead <= 4, "{queues:?}");
        }
    }

    #[test]
    fn a_driver_bears_any_sequence_of_messages(
        sync in sync(),
        messages in prop::collection::vec(envelope(), 0..120),
    ) {
        let mut driver = Driver::new(DriverId(0), 7, SiteId(0), spec(sync), Time(0));
        let mut out = Vec::new();
        for (at, mut message) in messages.into_iter().enumerate() {
            message.to = Address::Driver(DriverId(0));
            let now = Time(at as u64 * 300_000);
            driver.handle(driver::Input::Message(message), now, &mut out);
            driver.handle(driver::Input::Wake, now, &mut out);
            prop_assert!(driver.queue_lengths().1 <= 3);
        }
    }

    #[test]
    fn a_coordinator_bears_any_sequence_of_messages_and_commits_nothing(
        sync in sync(),
        messages in prop::collection::vec(envelope(), 0..120),
    ) {
        let mut out = Vec::new();
        let mut coordinator = Coordinator::new(spec(sync), JournalState::default(), 0, Time(0), &mut out);
        for (at, mut message) in messages.into_iter().enumerate() {
            message.to = Address::Coordinator;
            let now = Time(at as u64 * 300_000);
            for command in std::mem::take(&mut out) {
                if let coordinator::Command::Append(number, _) = command {
                    coordinator.handle(coordinator::Input::Journaled(number), now, &mut out);
                }
            }
            coordinator.handle(coordinator::Input::Message(message), now, &mut out);
            coordinator.handle(coordinator::Input::Wake, now, &mut out);
            prop_assert!(!coordinator.why_waiting().is_empty());
        }
        // Nobody here can have sealed all lots, told the same hash, and been asked to.
        prop_assert!(coordinator.journal().step <= Step(1));
    }

    #[test]
    fn a_message_survives_being_written_and_read(message in envelope()) {
        let text = serde_json::to_string(&message).unwrap();
        if let Ok(read) = serde_json::from_str::<Envelope>(&text) {
            prop_assert_eq!(serde_json::to_string(&read).unwrap(), text);
        }
    }
}
