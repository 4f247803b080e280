//! What the swarm survives, told one by one. Every run is checked against all invariants while it runs: each
//! microbatch exactly once, every replica equal to the one-process result, nothing applied before its commit.

use starling_sim::fault::Fault;
use starling_sim::network::Link;
use starling_sim::scenario::Scenario;
use starling_sim::world::{Outcome, World};
use starling_swarm::coordinator::Order;
use starling_swarm::ids::*;
use starling_swarm::lots::Lots;
use starling_swarm::spec::Sync;

const SECOND: u64 = 1_000_000;

fn run(scenario: &Scenario) -> (Outcome, Vec<String>) {
    let (result, told) = World::new(scenario).run_with_log();
    let told: Vec<String> = told.into_iter().map(|(at, what)| format!("{at} {what}")).collect();
    (result.unwrap_or_else(|violation| panic!("{violation}\n{}", told.join("\n"))), told)
}

fn with(fault: Fault, at_us: u64) -> Scenario {
    let mut scenario = Scenario::small(7, 3, 2);
    scenario.faults.push((at_us, fault));
    scenario
}

fn says(told: &[String], words: &str) -> bool {
    told.iter().any(|line| line.contains(words))
}

#[test]
fn a_handful_of_peers_trains_to_the_end_when_nothing_fails() {
    let (outcome, told) = run(&Scenario::small(1, 3, 2));
    assert_eq!((outcome.rollbacks, outcome.terms), (0, 1));
    assert!(!says(&told, "removed"), "{told:?}");
}

#[test]
fn a_killed_worker_is_replaced_and_comes_back() {
    let (outcome, told) = run(&with(Fault::Kill { peer: PeerId(1), back_after_us: SECOND }, 800_000));
    assert_eq!(outcome.rollbacks, 0, "the other replica of the stage was there");
    assert!(says(&told, "peer 1 is removed") && says(&told, "peer 1 joins"), "{told:?}");
}

#[test]
fn a_killed_worker_costs_nothing_but_time_at_any_moment_of_the_step() {
    for at in (200..1_400).step_by(20) {
        let fault = Fault::Kill { peer: PeerId(4), back_after_us: 3 * SECOND };
        let (outcome, told) = run(&with(fault, at * 1_000));
        assert_eq!(outcome.rollbacks, 0, "killed at {at} ms: {told:#?}");
    }
}

#[test]
fn a_stage_that_loses_all_holders_rolls_everybody_back_to_the_checkpoint() {
    let mut scenario = Scenario::small(3, 2, 2);
    scenario.spec.steps = Step(12);
    let fault = Fault::KillStage { stage: StageId(1), back_after_us: SECOND };
    scenario.faults.push((2 * SECOND, fault));
    let (outcome, told) = run(&scenario);
    assert_eq!(outcome.rollbacks, 1);
    let from_a_checkpoint =
        |line: &&String| line.contains("all go back to the checkpoint") && !line.contains("step 0");
    assert_eq!(told.iter().filter(from_a_checkpoint).count(), 1, "{told:?}");
}

#[test]
fn a_coordinator_that_dies_at_any_moment_goes_on_from_its_journal() {
    for at in (200..1_400).step_by(20) {
        for torn_record_survives in [false, true] {
            let fault = Fault::KillCoordinator { back_after_us: 300_000, torn_record_survives };
            let (outcome, _) = run(&with(fault, at * 1_000));
            assert_eq!((outcome.terms, outcome.rollbacks), (2, 0), "killed at {at} ms");
        }
    }
}

#[test]
fn a_worker_that_sleeps_longer_than_every_deadline_wakes_as_a_stranger() {
    let (outcome, told) = run(&with(Fault::Stop { peer: PeerId(2), for_us: 8 * SECOND }, 700_000));
    assert_eq!(outcome.rollbacks, 0);
    assert!(says(&told, "peer 2 is removed"), "{told:?}");
}

#[test]
fn a_coordinator_that_sleeps_does_not_blame_the_others() {
    let (_, told) = run(&with(Fault::StopCoordinator { for_us: 8 * SECOND }, 700_000));
    assert!(!says(&told, "removed"), "{told:?}");
}

#[test]
fn a_coordinator_whose_clock_jumps_does_not_blame_the_others() {
    let (_, told) = run(&with(Fault::CoordinatorClockJump { by_us: 3600 * SECOND }, 700_000));
    assert!(!says(&told, "removed"), "{told:?}");
}

#[test]
fn two_sites_that_lose_each_other_train_on_when_they_meet_again() {
    let mut scenario = Scenario::small(5, 2, 2);
    scenario.between = Link::INTERCONTINENTAL;
    for (index, peer) in scenario.peers.iter_mut().enumerate() {
        peer.site = SiteId(index as u16 % 2);
    }
    let (a, b) = (SiteId(0), SiteId(1));
    scenario.faults.push((2 * SECOND, Fault::Partition { a, b, one_way: false, for_us: 5 * SECOND }));
    scenario.faults.push((12 * SECOND, Fault::Partition { a: b, b: a, one_way: true, for_us: 2 * SECOND }));
    run(&scenario);
}

#[test]
fn two_replicas_that_cannot_talk_sum_through_a_third() {
    // All six hold the only stage; the edge between two of them is cut while they sum.
    let mut scenario = Scenario::small(6, 1, 6);
    scenario.faults.push((300_000, Fault::CutEdge { a: PeerId(0), b: PeerId(5), for_us: 30 * SECOND }));
    scenario.spec.steps = Step(3);
    let (outcome, told) = run(&scenario);
    assert!(outcome.done_us < 20 * SECOND, "done while the edge is still cut");
    assert!(says(&told, "tried again another way") && !says(&told, "sits out"), "{told:?}");
}

#[test]
fn of_two_replicas_that_cannot_talk_one_sits_out_until_they_can() {
    let mut scenario = Scenario::small(6, 1, 2);
    scenario.faults.push((300_000, Fault::CutEdge { a: PeerId(0), b: PeerId(1), for_us: 10 * SECOND }));
    let (_, told) = run(&scenario);
    assert!(says(&told, "no third member"), "{told:?}");
}

#[test]
fn a_straggler_does_not_hold_up_the_step() {
    let mut scenario = Scenario::small(8, 2, 3);
    scenario.spec.steps = Step(20);
    let (calm, _) = run(&scenario);
    let fault = Fault::Straggle { peer: PeerId(0), factor: 100, for_us: 3600 * SECOND };
    scenario.faults.push((SECOND, fault));
    let (slow, _) = run(&scenario);
    // A hundred times slower, it would need five seconds a microbatch.
    assert!(slow.done_us < 6 * calm.done_us, "{} against {}", slow.done_us, calm.done_us);
}

#[test]
fn a_preempted_peer_hands_over_within_its_notice() {
    let mut scenario = with(Fault::Preempt { peer: PeerId(3), notice_us: 3 * SECOND }, 700_000);
    scenario.spec.steps = Step(20);
    let (outcome, told) = run(&scenario);
    assert_eq!(outcome.rollbacks, 0);
    assert!(says(&told, "peer 3 is removed: it asked to leave"), "{told:?}");
}

#[test]
fn a_newcomer_in_the_middle_joins_the_bottleneck_and_works() {
    let mut scenario = Scenario::small(9, 2, 2);
    scenario.spec.steps = Step(30);
    scenario.peers[3].joins_us = 2 * SECOND;
    scenario.spec.tuning.quorum = 3;
    let (_, told) = run(&scenario);
    assert!(says(&told, "peer 3 joins stage"), "{told:?}");
    assert!(says(&told, "bottleneck"), "{told:?}");
}

#[test]
fn a_peer_moves_from_the_stage_that_has_most_to_the_one_that_lost_most() {
    let mut scenario = Scenario::small(12, 2, 4);
    scenario.spec.steps = Step(30);
    for peer in [0, 2, 4] {
        scenario.faults.push((SECOND, Fault::Preempt { peer: PeerId(peer), notice_us: SECOND }));
    }
    let (outcome, told) = run(&scenario);
    assert_eq!(outcome.rollbacks, 0);
    assert!(says(&told, "moves to stage") && says(&told, "was the bottleneck"), "{told:#?}");
}

#[test]
fn a_slow_disk_makes_the_journal_slow_and_nothing_else() {
    let (outcome, told) = run(&with(Fault::SlowDisk { sync_us: 700_000, for_us: 4 * SECOND }, 500_000));
    assert_eq!(outcome.rollbacks, 0);
    assert!(!says(&told, "removed"), "{told:?}");
}

#[test]
fn a_driver_that_dies_loses_no_lot() {
    run(&with(Fault::KillDriver { driver: 0, back_after_us: 2 * SECOND }, 600_000));
}

#[test]
fn only_reductions_cross_between_two_sites_that_could_each_hold_all_stages() {
    let mut scenario = Scenario::small(10, 2, 2);
    scenario.spec.tuning.far = starling_swarm::time::Span::s(3600);
    scenario.spec.steps = Step(4);
    scenario.drivers = vec![SiteId(0), SiteId(1)];
    for (index, peer) in scenario.peers.iter_mut().enumerate() {
        peer.site = SiteId(index as u16 / 2);
    }
    let (outcome, _) = run(&scenario);
    // Each of two members sends half a gradient, and gets half of one back, in each of two stages; the rest is control.
    let reductions = 4 * 2 * 2 * scenario.sizes.gradient;
    assert!(outcome.wan_bytes < reductions + reductions / 4, "{} of {reductions}", outcome.wan_bytes);
}

#[test]
fn a_paused_run_closes_its_step_and_waits_until_it_is_resumed() {
    let mut scenario = with(Fault::Operator(Order::Pause), 900_000);
    scenario.faults.push((20 * SECOND, Fault::Operator(Order::Resume)));
    let (outcome, _) = run(&scenario);
    let waiting = |at: &&u64| (900_000..20 * SECOND).contains(*at);
    assert_eq!(outcome.commits_us.iter().filter(waiting).count(), 1, "{:?}", outcome.commits_us);
    assert_eq!(outcome.step, 5);
}

#[test]
fn the_operator_may_end_a_run_sooner_but_not_before_what_is_done() {
    let mut scenario = with(Fault::Operator(Order::LastStep(Step(3))), 900_000);
    scenario.faults.push((2 * SECOND, Fault::Operator(Order::LastStep(Step(1)))));
    let (outcome, told) = run(&scenario);
    assert_eq!(outcome.step, 3);
    assert!(says(&told, "closed already"), "{told:#?}");
}

#[test]
fn amended_settings_are_used_from_one_step_on_by_everybody_whoever_restarts_and_rolls_back() {
    let mut scenario = with(Fault::Operator(Order::Amend(vec![7])), SECOND);
    scenario.spec.steps = Step(12);
    let coordinator = Fault::KillCoordinator { back_after_us: SECOND, torn_record_survives: false };
    scenario.faults.push((2 * SECOND, coordinator));
    scenario.faults.push((5 * SECOND, Fault::KillStage { stage: StageId(1), back_after_us: SECOND }));
    let (outcome, told) = run(&scenario);
    assert!(says(&told, "amended: from step"), "{told:#?}");
    assert_eq!((outcome.rollbacks, outcome.terms, outcome.step), (1, 2, 12));
}

#[test]
fn a_stage_that_costs_more_gets_more_peers() {
    let mut scenario = Scenario::small(5, 2, 4);
    scenario.spec.costs = vec![1.5, 0.5];
    scenario.spec.lots = Lots { microbatches: 64, lots: 64 };
    let mut holders = Vec::new();
    let (result, _) = World::new(&scenario).run_observed(SECOND, &mut |sample| {
        holders.push(sample.holders);
        true
    });
    result.expect("every invariant holds");
    assert!(holders.contains(&vec![6, 2]), "{holders:?}");
}

#[test]
fn the_operators_last_word_counts_also_after_a_rollback() {
    let mut scenario = with(Fault::Operator(Order::Amend(vec![1])), 3 * SECOND);
    scenario.spec.checkpoint_every = 0;
    scenario.spec.steps = Step(30);
    scenario.faults.push((4 * SECOND, Fault::KillStage { stage: StageId(1), back_after_us: SECOND }));
    scenario.faults.push((6_500_000, Fault::Operator(Order::Amend(vec![2]))));
    let (outcome, told) = run(&scenario);
    assert_eq!((outcome.rollbacks, outcome.step), (1, 30), "{told:#?}");
    let from =
        |line: &String| line.split_once("amended: from step ")?.1.split(' ').next()?.parse::<u64>().ok();
    let amended: Vec<u64> = told.iter().filter_map(from).collect();
    assert!(amended.len() == 2 && amended[1] < amended[0], "{amended:?}");
}

#[test]
fn a_journal_keeps_the_last_amendment_of_every_step() {
    use starling_swarm::journal::{JournalState, Record};
    let amended = |from, settings: u8| Record::Amended(Step(from), vec![settings]);
    let state = JournalState::replay(&[amended(3, 0), amended(11, 1), amended(6, 2)]);
    let of = |step| state.amendment(Step(step)).map(|settings| settings[0]);
    assert_eq!([of(2), of(3), of(6), of(20)], [None, Some(0), Some(2), Some(2)]);
}

#[test]
fn a_sample_whose_loss_is_not_finite_makes_every_stage_skip_that_update_and_no_other() {
    for (replicas, sync) in [(2, Sync::Step), (2, Sync::Delayed), (1, Sync::Step), (1, Sync::Delayed)] {
        let mut scenario = Scenario::small(9, 3, replicas);
        scenario.spec.sync = sync;
        scenario.poison = Some((Step(2), Microbatch(5)));
        let (outcome, told) = run(&scenario);
        assert_eq!((outcome.step, outcome.rollbacks), (5, 0));
        let skipped = told.iter().filter(|line| line.contains("the update is skipped")).count();
        assert_eq!(skipped, 1, "{told:?}");
        assert!(!says(&told, "quarantined"), "{told:?}");
    }
}

#[test]
fn a_spike_takes_all_back_and_its_updates_are_left_out() {
    for sync in [Sync::Step, Sync::Delayed] {
        let mut scenario = with(Fault::Spike, 700_000);
        scenario.spec.sync = sync;
        scenario.spec.steps = Step(12);
        let (outcome, told) = run(&scenario);
        assert_eq!((outcome.step, outcome.rollbacks), (12, 1), "{told:?}");
        assert!(says(&told, "the loss is a spike: all go back"), "{told:?}");
        let left_out = told.iter().filter(|line| line.contains("the update is left out")).count();
        assert!((1..=2).contains(&left_out), "{told:?}");
    }
}

#[test]
fn a_coordinator_that_dies_while_a_run_goes_back_goes_back_whole_or_not_at_all() {
    let mut scenario = with(Fault::Spike, 700_000);
    scenario.spec.steps = Step(12);
    let (_, told) = run(&scenario);
    let line = told.iter().find(|line| line.contains("is a spike")).expect("there is a spike");
    let at = line.split_once(' ').and_then(|(at, _)| at.parse::<u64>().ok()).expect("told with its time");
    for torn_record_survives in [false, true] {
        let mut scenario = scenario.clone();
        let fault = Fault::KillCoordinator { back_after_us: 300_000, torn_record_survives };
        scenario.faults.push((at + 100, fault));
        let (outcome, told) = run(&scenario);
        let rollbacks = u64::from(torn_record_survives);
        assert_eq!((outcome.step, outcome.rollbacks), (12, rollbacks), "{told:?}");
    }
}

#[test]
fn a_peer_whose_results_are_not_finite_where_anothers_are_is_quarantined_by_name() {
    for sync in [Sync::Step, Sync::Delayed] {
        let mut scenario = with(Fault::Spoil { peer: PeerId(4), results: 1000 }, 700_000);
        scenario.spec.sync = sync;
        // It comes back under its name, and is not let in, not even by the coordinator's next life.
        scenario.faults.push((1_500_000, Fault::Kill { peer: PeerId(4), back_after_us: 100_000 }));
        let fault = Fault::KillCoordinator { back_after_us: 300_000, torn_record_survives: false };
        scenario.faults.push((1_800_000, fault));
        scenario.spec.steps = Step(12);
        let (outcome, told) = run(&scenario);
        assert_eq!((outcome.step, outcome.rollbacks), (12, 0));
        assert!(says(&told, "peer 4 is quarantined"), "{told:?}");
        assert!(!says(&told, "skipped"), "{told:?}");
        let quarantined = told.iter().position(|line| line.contains("peer 4 is quarantined"));
        let after = &told[quarantined.unwrap_or(0)..];
        assert!(!says(after, "peer 4 joins"), "{after:?}");
    }
}

/// Nobody else holds its stage, so a peer of another stage goes there to look, and not a single update is skipped.
#[test]
fn the_only_holder_of_a_stage_is_not_believed_if_another_stage_can_spare_a_witness() {
    for sync in [Sync::Step, Sync::Delayed] {
        let mut scenario = Scenario::small(9, 2, 2);
        scenario.spec.sync = sync;
        scenario.spec.steps = Step(12);
        // Of four peers, two in each stage, one goes for good, and the other of its stage computes wrongly.
        scenario.faults.push((500_000, Fault::Kill { peer: PeerId(3), back_after_us: 500 * SECOND }));
        scenario.faults.push((800_000, Fault::Spoil { peer: PeerId(1), results: 100_000 }));
        let (outcome, told) = run(&scenario);
        assert_eq!((outcome.step, outcome.rollbacks), (12, 0), "{told:#?}");
        assert!(says(&told, "and another is to look"), "{told:#?}");
        assert!(says(&told, "peer 1 is quarantined") && !says(&told, "skipped"), "{told:#?}");
    }
}

#[test]
fn a_peer_that_was_quarantined_is_let_in_again_when_the_operator_says_so() {
    let mut scenario = with(Fault::Spoil { peer: PeerId(4), results: 1 }, 700_000);
    scenario.spec.steps = Step(40);
    scenario.faults.push((3 * SECOND, Fault::Operator(Order::Forgive(PeerId(4)))));
    let (_, told) = run(&scenario);
    let quarantined = told.iter().position(|line| line.contains("peer 4 is quarantined"));
    let after = &told[quarantined.expect("it was quarantined")..];
    assert!(says(after, "peer 4 joins"), "{after:?}");
}

#[test]
fn a_coordinator_that_dies_while_it_quarantines_a_peer_does_not_take_it_back() {
    let mut scenario = with(Fault::Spoil { peer: PeerId(4), results: 100_000 }, 700_000);
    scenario.spec.steps = Step(12);
    let quarantined = |told: &[String]| {
        let line =
            told.iter().find(|line| line.contains("peer 4 is quarantined")).expect("it is quarantined");
        line.split_once(' ').and_then(|(at, _)| at.parse::<u64>().ok()).expect("told with its time")
    };
    let at = quarantined(&run(&scenario).1);
    for torn_record_survives in [false, true] {
        let mut scenario = scenario.clone();
        let fault = Fault::KillCoordinator { back_after_us: 300_000, torn_record_survives };
        scenario.faults.push((at + 1_000, fault));
        let (outcome, told) = run(&scenario);
        assert_eq!((outcome.step, outcome.rollbacks), (12, 0), "{told:?}");
        // If the record is lost with it, the peer is found out once more; otherwise it is no member any more.
        let found_out = told.iter().filter(|line| line.contains("peer 4 is quarantined")).count();
        assert_eq!(found_out, if torn_record_survives { 1 } else { 2 }, "{told:?}");
    }
}

#[test]
fn what_is_not_finite_is_believed_of_one_peer_if_no_other_can_be_reached() {
    let mut scenario = Scenario::small(9, 2, 2);
    scenario.poison = Some((Step(2), Microbatch(5)));
    for first in [0, 2] {
        scenario.faults.push((0, Fault::CutEdge { a: PeerId(first), b: PeerId(1), for_us: 200 * SECOND }));
    }
    let (outcome, told) = run(&scenario);
    assert!(outcome.done_us < 60 * SECOND, "{} s: {told:?}", outcome.done_us / SECOND);
}

#[test]
fn a_peer_that_reaches_nobody_in_the_next_stage_is_passed_by() {
    let mut scenario = Scenario::small(9, 2, 2);
    for next in [1, 3] {
        scenario.faults.push((0, Fault::CutEdge { a: PeerId(0), b: PeerId(next), for_us: 200 * SECOND }));
    }
    let (outcome, told) = run(&scenario);
    assert!(outcome.done_us < 60 * SECOND, "{} s: {told:?}", outcome.done_us / SECOND);
}

#[test]
fn a_stage_that_lost_half_of_its_peers_is_filled_up_before_the_step_is_over() {
    let mut scenario = Scenario::small(5, 2, 6);
    let spec = &mut scenario.spec;
    (spec.sync, spec.steps, spec.checkpoint_every) = (Sync::Delayed, Step(2), 0);
    spec.lots = Lots { microbatches: 2000, lots: 2000 };
    // Peers with even numbers hold one stage.
    for peer in [0, 2, 4] {
        scenario.faults.push((10 * SECOND, Fault::Preempt { peer: PeerId(peer), notice_us: 0 }));
    }
    let (result, told) = World::new(&scenario).run_with_log();
    let outcome = result.unwrap_or_else(|violation| panic!("{violation}"));
    let moved = told.iter().filter(|(_, what)| what.contains("moves to stage")).map(|(at, _)| *at);
    let moved: Vec<u64> = moved.collect();
    let step_us = outcome.commits_us[0];
    assert!(step_us > 20 * SECOND, "the first step is long: {step_us}");
    assert!(moved.iter().any(|at| (10 * SECOND..step_us).contains(at)), "{moved:?} {told:#?}");
    assert_eq!(outcome.rollbacks, 0);
}
