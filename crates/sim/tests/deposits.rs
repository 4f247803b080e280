//! Sums that outlive their holders: what workers have left with others is not computed again, and counts once.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use starling_sim::fault::Fault;
use starling_sim::rng::Rng;
use starling_sim::scenario::Scenario;
use starling_sim::world::{Outcome, World};
use starling_swarm::ids::{PeerId, SiteId, Step};
use starling_swarm::lots::Lots;
use starling_swarm::spec::{Reduce, Sync};
use starling_swarm::time::Span;

/// Two stages of five peers in two sites; a step takes about eight seconds.
fn scenario(sync: Sync, reduce: Reduce, deposit: Span) -> Scenario {
    let mut scenario = Scenario::alike(1, 2, 5, Lots { microbatches: 400, lots: 200 }, reduce);
    scenario.peers.iter_mut().enumerate().for_each(|(n, peer)| peer.site = SiteId((n % 4 == 3).into()));
    scenario.spec.sync = sync;
    scenario.spec.steps = Step(4);
    scenario.spec.tuning.deposit = deposit;
    scenario
}

fn run(scenario: &Scenario) -> (Outcome, usize) {
    let (outcome, told) = World::new(scenario).run_with_log();
    (outcome.unwrap(), told.iter().filter(|(_, line)| line.contains("has the sums that")).count())
}

#[test]
fn what_was_left_with_another_is_not_lost_with_its_owner() {
    for (sync, reduce) in [
        (Sync::Step, Reduce::Fast),
        (Sync::Step, Reduce::Exact),
        (Sync::Delayed, Reduce::Fast),
        (Sync::Delayed, Reduce::Exact),
    ] {
        let (mut with, mut without, mut handed_over) = (0, 0, 0);
        for seed in 0..6 {
            for deposit in [Span(0), Span::ms(500)] {
                let mut scenario = scenario(sync, reduce, deposit);
                let mut rng = Rng::new(seed);
                for kill in 1..8 {
                    let peer = PeerId(rng.below(10) as u32);
                    let at = 3_000_000 * kill + rng.below(2_000_000);
                    scenario.faults.push((at, Fault::Kill { peer, back_after_us: 2_000_000 }));
                }
                // Every invariant is checked all the while: each microbatch once, all replicas as one process.
                let (outcome, times) = run(&scenario);
                *(if deposit == Span(0) { &mut without } else { &mut with }) += outcome.died_lots;
                handed_over += times;
            }
        }
        assert!(handed_over >= 12, "{sync:?}, {reduce:?}: {handed_over}");
        assert!(
            3 * with < 2 * without,
            "{sync:?}, {reduce:?}: {with} lots died, and {without} without copies"
        );
    }
}

#[test]
fn who_is_warned_leaves_its_sums_behind_and_does_not_wait_for_the_end_of_the_step() {
    for (reduce, peer, every) in [(Reduce::Fast, 1, 500), (Reduce::Exact, 4, 500), (Reduce::Fast, 3, 60_000)]
    {
        let mut scenario = scenario(Sync::Step, reduce, Span::ms(every));
        let warning = Fault::Preempt { peer: PeerId(peer), notice_us: 2_500_000 };
        scenario.faults.push((4_000_000, warning));
        let (outcome, times) = run(&scenario);
        assert_eq!((outcome.died_lots, times), (0, 1), "{reduce:?}");
        assert!(outcome.commits_us[0] > 6_500_000, "it was gone before the step was over");
    }
}

#[test]
fn the_only_holder_of_its_site_has_a_keeper_elsewhere_and_no_keeper_is_flooded() {
    let mut scenario = Scenario::alike(4, 1, 4, Lots { microbatches: 400, lots: 200 }, Reduce::Fast);
    scenario.spec.steps = Step(3);
    scenario.spec.tuning.deposit = Span::ms(500);
    for (peer, at) in [(1, 4_000_000), (2, 7_000_000), (3, 14_000_000)] {
        let kill = Fault::Kill { peer: PeerId(peer), back_after_us: 1_500_000 };
        scenario.faults.push((at, kill));
    }
    let (outcome, times) = run(&scenario);
    assert!(times >= 3, "{times} were handed over");
    assert!(outcome.died_lots < 40, "{} lots died", outcome.died_lots);
}

#[test]
fn a_coordinator_that_takes_over_is_told_what_is_kept() {
    let mut scenario = scenario(Sync::Step, Reduce::Fast, Span::ms(500));
    let kill = Fault::KillCoordinator { back_after_us: 200_000, torn_record_survives: true };
    scenario.faults.push((4_000_000, kill));
    // Sooner than the next copy of most.
    scenario.spec.tuning.deposit = Span::s(3);
    let kill = Fault::Kill { peer: PeerId(2), back_after_us: 2_000_000 };
    scenario.faults.push((5_400_000, kill));
    let (outcome, times) = run(&scenario);
    assert!(times == 1 && outcome.terms == 2, "{times} were handed over");
}
