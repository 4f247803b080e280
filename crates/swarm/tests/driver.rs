//! What a driver does with news that it did not expect.

use starling_swarm::driver::{Command, Driver, Input};
use starling_swarm::ids::*;
use starling_swarm::lots::Lots;
use starling_swarm::message::*;
use starling_swarm::spec::{Reduce, Spec, Sync, Tuning};
use starling_swarm::time::{Span, Time};

fn spec(lots: Lots, sync: Sync) -> Spec {
    Spec {
        run: RunId(1),
        stages: 3,
        costs: Vec::new(),
        lots,
        sync,
        reduce: Reduce::Exact,
        steps: Step(4),
        checkpoint_every: 1,
        elements: vec![4],
        shared: Vec::new(),
        state_bytes: 10,
        memory_bytes: 0,
        tuning: Tuning::default(),
    }
}

/// A driver that knows three stages, each with a peer in every site.
struct World {
    driver: Driver,
    now: Time,
}

impl World {
    fn new(lots: Lots, sites: u16, drivers: Vec<SiteId>) -> World {
        World::with_sync(Sync::Step, lots, sites, drivers)
    }

    fn with_sync(sync: Sync, lots: Lots, sites: u16, drivers: Vec<SiteId>) -> World {
        let now = Time(0);
        let mut world = World { driver: Driver::new(DriverId(0), 1, SiteId(0), spec(lots, sync), now), now };
        let holder = |stage, site| {
            let (peer, site) = (PeerId(stage + 3 * u32::from(site)), SiteId(site));
            let (draining, since, until) = (false, Step(0), None);
            Holder { peer, site, speed: 1.0, draining, since, until }
        };
        let stages = (0..3).map(|stage| (0..sites).map(|site| holder(stage, site)).collect()).collect();
        world.input(Input::Wake);
        world.hear(Address::Coordinator, Body::Welcome { member: MemberNo(1), incarnation: 1 });
        world.hear(Address::Coordinator, Body::View(View { number: 1, stages, drivers }));
        world
    }

    fn hear(&mut self, from: Address, body: Body) -> Vec<Body> {
        let fence = Fence { run: RunId(1), term: Term(1), epoch: Epoch(1), ..Fence::default() };
        let to = Address::Driver(DriverId(0));
        self.input(Input::Message(Envelope { protocol: PROTOCOL, from, to, fence, body }))
    }

    fn input(&mut self, input: Input) -> Vec<Body> {
        let mut out = Vec::new();
        self.driver.handle(input, self.now, &mut out);
        out.into_iter().map(|Command::Send(envelope)| envelope.body).collect()
    }
}

#[test]
fn a_lot_whose_end_is_told_before_its_route_is_made_begins_again() {
    let mut world = World::new(Lots { microbatches: 1, lots: 1 }, 1, vec![SiteId(0)]);
    let at = LotOf { step: Step(0), lot: Lot(0) };
    let number = LeaseNo { term: Term(1), number: 1 };
    // The first stage has sealed it already, and only passes it on.
    let held = vec![Some(PeerId(0)), None, None];
    let sent = world.hear(Address::Coordinator, Body::Lease(Lease { number, at, held }));
    assert!(matches!(sent[..], [Body::Begin(..)]), "{sent:?}");
    let (microbatch, stage, pass) = (Microbatch(0), StageId(0), Pass::Backward);
    let news = Progress { lot: at.lot, microbatch, lease: number, stage, pass, computed: None };
    world.hear(Address::Worker(PeerId(0)), Body::Progress(news));
    let mut begun_again = false;
    for _ in 0..200 {
        assert!(world.driver.next_wake() > world.now, "it wants to be woken at once, again and again");
        world.now = world.now.max(world.driver.next_wake()) + Span(1);
        begun_again |= world.input(Input::Wake).iter().any(|body| matches!(body, Body::Begin(..)));
    }
    assert!(begun_again, "the lot is forgotten");
}

#[test]
fn drivers_share_what_may_be_in_flight() {
    let lots = Lots { microbatches: 100, lots: 1 };
    let lease = Lease {
        number: LeaseNo { term: Term(1), number: 1 },
        at: LotOf { step: Step(0), lot: Lot(0) },
        held: vec![None; 3],
    };
    let begun = |drivers: &[u16]| {
        let mut world = World::new(lots, 2, drivers.iter().map(|&site| SiteId(site)).collect());
        let sent = world.hear(Address::Coordinator, Body::Lease(lease.clone()));
        sent.into_iter().filter(|body| matches!(body, Body::Begin(..))).count()
    };
    let all = Tuning::default().depth * 6;
    assert_eq!((begun(&[0]), begun(&[0, 1])), (all, all / 2));
}

/// The lots in the order in which they were begun: eight new ones, then one that was lost in the first stage.
fn begun_in(sync: Sync) -> Vec<u32> {
    let lots = Lots { microbatches: 9, lots: 9 };
    let mut world = World::with_sync(sync, lots, 1, vec![SiteId(0)]);
    let lease = |lot: u32, held| {
        let number = LeaseNo { term: Term(1), number: u64::from(lot) + 1 };
        Body::Lease(Lease { number, at: LotOf { step: Step(0), lot: Lot(lot) }, held })
    };
    let mut sent = Vec::new();
    for lot in 0..8 {
        sent.extend(world.hear(Address::Coordinator, lease(lot, vec![None; 3])));
    }
    let held = vec![None, Some(PeerId(1)), Some(PeerId(2))];
    sent.extend(world.hear(Address::Coordinator, lease(8, held)));
    let mut begun = Vec::new();
    let mut done = 0;
    loop {
        for body in sent.drain(..) {
            if let Body::Begin(work, _) = body {
                begun.push(work);
            }
        }
        let Some(work) = begun.get(done).cloned() else { break };
        let Work { lot, microbatch, lease, .. } = work;
        let (stage, pass) = (StageId(0), Pass::Backward);
        let news = Progress { lot, microbatch, lease, stage, pass, computed: None };
        sent = world.hear(Address::Worker(PeerId(0)), Body::Progress(news));
        done += 1;
    }
    begun.into_iter().map(|work| work.lot.0).collect()
}

#[test]
fn what_was_lost_goes_first_in_steps_and_in_delayed_sync_after_the_rest_of_the_step() {
    let delayed = begun_in(Sync::Delayed);
    assert_eq!(delayed, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    let in_steps = begun_in(Sync::Step);
    let place = in_steps.iter().position(|lot| *lot == 8).unwrap_or(9);
    assert!(in_steps.len() == 9 && place < 5, "{in_steps:?}");
}

#[test]
fn a_driver_that_feeds_nobody_any_more_sees_through_what_it_has() {
    let lots = Lots { microbatches: 64, lots: 16 };
    let mut world = World::new(lots, 2, vec![SiteId(0)]);
    let holder = |site: u16, peer: u32| Holder {
        peer: PeerId(peer),
        site: SiteId(site),
        speed: 1.0,
        draining: false,
        since: Step(0),
        until: None,
    };
    // The first stage stands in the other site, where nobody drives as yet.
    let view = |number, first: u32, drivers: Vec<SiteId>| {
        let stages =
            vec![vec![holder(1, first)], vec![holder(0, 1), holder(1, 4)], vec![holder(0, 2), holder(1, 5)]];
        Body::View(View { number, stages, drivers })
    };
    world.hear(Address::Coordinator, view(2, 3, vec![SiteId(0)]));
    for lot in 0..16 {
        let number = LeaseNo { term: Term(1), number: u64::from(lot) + 1 };
        let at = LotOf { step: Step(0), lot: Lot(lot) };
        world.hear(Address::Coordinator, Body::Lease(Lease { number, at, held: vec![None; 3] }));
    }
    // A driver joins there, and all that was under way has to be sent anew.
    world.hear(Address::Coordinator, view(3, 3, vec![SiteId(0), SiteId(1)]));
    let sent = world.hear(Address::Coordinator, view(4, 9, vec![SiteId(0), SiteId(1)]));
    let begun = sent.iter().filter(|body| matches!(body, Body::Begin(..))).count();
    assert_eq!(begun, 8, "as many as a peer may have before it, and not one by one");
}
