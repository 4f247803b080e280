//! Peers that are all alike, of whom nobody fails, are at work nearly all the time: in one site and in several, with lots of
//! one microbatch and of many.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use starling_sim::network::Link;
use starling_sim::scenario::Scenario;
use starling_sim::world::World;
use starling_swarm::ids::Step;
use starling_swarm::lots::Lots;
use starling_swarm::spec::{Reduce, Tuning};

/// The share of the time in which peers were at work, from the end of the second step to the end of the last.
fn at_work(sites: u16, (stages, replicas): (u16, usize), lots: Lots, reduce: Reduce) -> f64 {
    let mut scenario = Scenario::alike(sites, stages, replicas, lots, reduce);
    scenario.spec.steps = Step(5);
    let commits = World::new(&scenario).run().unwrap().commits_us;
    let took_s = (commits[commits.len() - 1] - commits[1]) as f64 / 1e6;
    f64::from(lots.microbatches) * (commits.len() - 2) as f64 / (10.0 * replicas as f64) / took_s
}

#[test]
fn lots_of_many_microbatches_stay_in_their_site() {
    for reduce in [Reduce::Fast, Reduce::Exact] {
        let share = at_work(3, (8, 6), Lots { microbatches: 1008, lots: 36 }, reduce);
        assert!(share > 0.93, "{reduce:?}: {share}");
    }
}

#[test]
fn lots_of_one_microbatch_and_of_several_keep_a_site_at_work() {
    for (lots, least) in [(256, 0.9), (32, 0.9)] {
        for reduce in [Reduce::Fast, Reduce::Exact] {
            let share = at_work(1, (4, 4), Lots { microbatches: 256, lots }, reduce);
            assert!(share > least, "{reduce:?}, {lots} lots: {share}");
        }
    }
}

/// Eight sites of eight peers with 200 Mb/s each, none of which holds the whole pipeline; an activation is on such a link
/// for half a second. Before, what waited in queues was taken for late and sent again, until the links carried little else.
#[test]
fn a_swarm_whose_links_are_busy_sends_hardly_anything_twice() {
    let (activation, gradient) = (12_600_000, 100_000_000);
    let lots = Lots { microbatches: 256, lots: 64 };
    let mut scenario = Scenario::alike(8, 8, 8, lots, Reduce::Fast);
    scenario.spec.costs = vec![1.9, 1.4, 0.5, 0.5, 0.5, 0.5, 0.5, 2.2];
    scenario.spec.steps = Step(3);
    scenario.spec.tuning = Tuning { quorum: scenario.peers.len(), ..Tuning::default() };
    scenario.peers.iter_mut().for_each(|peer| peer.speed = 2.4);
    scenario.between = Link { latency_us: 50_000, jitter_us: 2_500, loss: 0.0, ..Link::INTERCONTINENTAL };
    (scenario.sizes.activation, scenario.sizes.gradient) = (activation, gradient);
    let outcome = World::new(&scenario).run().unwrap();
    // Every microbatch once over every hop, there and back; and of sums less than two for each peer, out and back.
    let work = u64::from(lots.microbatches) * 2 * 7 * activation;
    let sums = scenario.peers.len() as u64 * 2 * gradient;
    let twice = outcome.bytes as f64 / (3 * (work + sums)) as f64;
    let step_s = outcome.done_us as f64 / 3e6;
    assert!(twice < 1.15, "{twice:.2} times what must be sent, {step_s:.0} s a step");
    // The devices could do a step in 11 s; the links, as stages are placed, in about 35.
    assert!(step_s < 90.0, "{step_s:.0} s a step, {twice:.2} times what must be sent");
}
