//! Peers that are all alike, of whom nobody fails, are at work nearly all the time: in one site and in several, with lots of
//! one microbatch and of many.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use starling_sim::scenario::Scenario;
use starling_sim::world::World;
use starling_swarm::ids::Step;
use starling_swarm::lots::Lots;
use starling_swarm::spec::Reduce;

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
