//! Real processes over real connections: whatever happens to them, the weights after every step are those of one
//! process, bit for bit.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod chaos;
mod flock;
mod hostile;
#[path = "../process/mod.rs"]
mod process;

use std::time::Duration;

use flock::Flock;
use starling_model::random::uniform;
use starling_node::events::Event;

/// One of so many, by a number.
fn draw(seed: u64, number: u64, count: usize) -> usize {
    (uniform(seed, number) * count as f64) as usize
}

#[test]
fn six_workers_in_two_sites_train_what_one_process_trains() {
    let mut flock = Flock::with_workers("", "aaabbb");
    flock.go_on_for(40);
    assert!(flock.finish_as_one_process() > 40);
}

#[test]
fn twenty_kills_of_workers_and_drivers_change_no_weight() {
    let mut flock = Flock::with_workers("", "aaabbb");
    flock.go_on_for(5);
    let mut drivers = 0;
    for kill in 0..20 {
        let peer = draw(1, kill, flock.peers().len());
        drivers += u32::from(flock.is_driver(peer));
        flock.kill(peer);
        std::thread::sleep(Duration::from_secs_f64(0.5 * uniform(2, kill)));
        flock.replace(peer);
        flock.go_on_for(1 + draw(3, kill, 4) as u64);
    }
    assert!(drivers > 0, "drivers were killed too");
    flock.finish_as_one_process();
}

#[test]
fn what_killed_workers_had_left_with_others_is_not_lost_and_changes_no_weight() {
    // Steps that are long against the time between two copies.
    let settings = "--set swarm.deposit_every_s=0.05 --set train.batch=560 --set train.lots=70";
    let mut flock = Flock::with_workers(settings, "aaabbb");
    flock.go_on_for(1);
    let workers: Vec<usize> = flock.peers().filter(|&peer| !flock.is_driver(peer)).collect();
    for kill in 0..12 {
        flock.go_on_for(1);
        // Who is first is luck: those who may be are others each time.
        let some = draw(4, kill, workers.len());
        let some: Vec<usize> = (0..4).map(|next| workers[(some + next) % workers.len()]).collect();
        let peer = flock.wait_for_copies(&some);
        flock.kill(peer);
        flock.replace(peer);
    }
    // A preemption warning: others have its sums at once, and it does not wait for the end of the step.
    flock.signal(workers[0], "TERM");
    assert_eq!(flock.ended(workers[0]), Some(0));
    flock.go_on_for(2);
    flock.finish_as_one_process();
    let inherited = flock.events_of_peers().filter(|event| matches!(event, Event::Inherited { .. })).count();
    println!("{inherited} inheritances");
    assert!(inherited > 0, "nothing was inherited");
}

#[test]
fn several_at_once_and_a_whole_stage_at_once_change_no_weight() {
    let mut flock = Flock::with_workers("", "aaabbb");
    flock.go_on_for(25);
    let workers: Vec<usize> = flock.peers().filter(|&peer| !flock.is_driver(peer)).collect();
    // Five of six: whatever the placement is, a stage loses all its holders.
    workers[..5].iter().for_each(|&peer| flock.kill(peer));
    workers[..5].iter().for_each(|&peer| flock.replace(peer));
    flock.go_on_for(10);
    assert!(flock.events().iter().any(|event| matches!(event, Event::WentBack { .. })), "it went back");
    flock.finish_as_one_process();
}

#[test]
fn a_coordinator_that_is_killed_and_takes_over_elsewhere_changes_no_weight() {
    let mut flock = Flock::with_workers("", "aaab");
    for _ in 0..4 {
        flock.go_on_for(4);
        flock.restart_coordinator();
    }
    flock.go_on_for(4);
    let went_back = flock.events().iter().filter(|event| matches!(event, Event::WentBack { .. })).count();
    assert_eq!(went_back, 0, "nothing was lost with it");
    flock.finish_as_one_process();
}

#[test]
fn processes_that_stop_longer_than_every_deadline_and_wake_change_no_weight() {
    let mut flock = Flock::with_workers("", "aaab");
    flock.go_on_for(5);
    let workers: Vec<usize> = flock.peers().filter(|&peer| !flock.is_driver(peer)).collect();
    flock.signal(workers[0], "STOP");
    flock.go_on_for(5);
    flock.signal(workers[0], "CONT");
    flock.go_on_for(5);
    flock.stop_coordinator_for(Duration::from_secs(8));
    flock.go_on_for(5);
    flock.finish_as_one_process();
}

#[test]
fn two_sites_that_are_cut_off_from_each_other_for_twenty_seconds_change_no_weight() {
    let mut flock = Flock::with_workers("", "aaabbb");
    flock.go_on_for(5);
    flock.links("a-b=cut");
    std::thread::sleep(Duration::from_secs(20));
    flock.links("");
    flock.go_on_for(5);
    flock.finish_as_one_process();
}

#[test]
fn a_peer_whose_packets_are_dropped_is_replaced_and_may_come_back() {
    let mut flock = Flock::with_workers("", "aaac");
    flock.go_on_for(5);
    flock.links("a-c=cut");
    flock.go_on_for(5);
    flock.links("");
    flock.go_on_for(5);
    flock.finish_as_one_process();
}

#[test]
fn joiners_and_leavers_in_the_middle_change_no_weight() {
    let mut flock = Flock::with_workers("", "aab");
    flock.go_on_for(5);
    let joiners: Vec<usize> = ["a", "b", "b"].map(|site| flock.start_worker(site)).into();
    flock.go_on_for(10);
    // A preemption warning: what it holds is handed over, and it ends by itself.
    flock.signal(joiners[0], "TERM");
    assert_eq!(flock.ended(joiners[0]), Some(0));
    flock.go_on_for(5);
    flock.finish_as_one_process();
}

/// Megabytes over a slow link: from all who have them, and through a cut.
#[test]
fn joiners_take_their_states_from_several_workers_and_through_a_cut_and_count() {
    let mut flock = Flock::with_workers("--set model.width=128 --set train.stages=1", "bb");
    // Early, so that all have read it when it matters.
    flock.links("b-c=16mbit,10ms;b-d=2mbit,10ms;c-d=2mbit,10ms");
    flock.go_on_for(3);
    // At rest both have the same state for as long as it takes.
    flock.pause();
    let took = |events: &[Event]| {
        events.iter().find_map(|event| match event {
            Event::Took { onto: None, chunks, .. } => Some(chunks.clone()),
            _ => None,
        })
    };
    flock.start_worker("c");
    let chunks = flock.wait_for("it has a state", took);
    assert!(chunks.len() > 1, "from more than one: {chunks:?}");
    flock.start_worker("d");
    flock.wait_for("it is told what to hold", |events| {
        events.iter().any(|event| matches!(event, Event::Voided)).then_some(())
    });
    flock.links("b-d=cut;c-d=cut");
    std::thread::sleep(Duration::from_secs(7));
    assert_eq!(flock.wait_for("a log", |events| Some(took(events))), None, "the cut met it on its way");
    flock.links("");
    flock.wait_for("it has a state", took);
    flock.place.good("run resume run");
    flock.wait_for("it takes part in an update", |events| {
        events.iter().any(|event| matches!(event, Event::Holds { loaded: false, .. })).then_some(())
    });
    flock.finish_as_one_process();
}

#[test]
fn held_out_text_is_tried_across_the_pipeline_with_the_losses_of_one_process_through_kills() {
    let mut flock = Flock::with_workers("--set evaluate.every=4 --set data.held_out=0.2", "aaabbb");
    for kill in 0..6 {
        flock.go_on_for(7);
        let peer = draw(5, kill, flock.peers().len());
        flock.kill(peer);
        flock.replace(peer);
    }
    flock.go_on_for(7);
    flock.finish();
    let (swarm, steps) = (flock.held_out("run"), flock.step());
    let one = flock.held_out(&flock.train_in_one_process(steps));
    let expected: Vec<u64> = (1..steps).filter(|step| step % 4 == 0).chain([steps]).collect();
    assert_eq!(one.keys().copied().collect::<Vec<_>>(), expected);
    // When peers die too fast, a version is not looked at, and that is said.
    let missed = one.keys().filter(|step| !swarm.contains_key(step)).count();
    let says = |event: &&Event| matches!(event, Event::News { text } if text.contains("held-out"));
    let said = flock.events().iter().filter(says).count();
    assert!(missed == said && missed < 3, "{missed} {said}");
    for (step, loss) in &swarm {
        assert_eq!(Some(loss), one.get(step), "step {step}");
    }
}

#[test]
fn a_run_goes_on_with_other_numbers_of_stages_sites_and_peers() {
    let mut flock = Flock::with_workers("", "aaabbb");
    flock.go_on_for(7);
    flock.begin_again("--set train.stages=2", 2);
    flock.start_driver("c");
    flock.start_worker("c");
    flock.start_worker("c");
    flock.go_on_for(7);
    flock.begin_again("--set train.stages=4", 4);
    flock.start_driver("a");
    for site in ["a", "b", "b", "c"] {
        flock.start_worker(site);
    }
    flock.go_on_for(7);
    let weights = flock.finish();
    assert_eq!(flock.first_difference(&weights), None);
    flock.place.good("checkpoint verify run");
    // Another training is not put on top of it.
    let told = flock.place.bad("run new flock.toml --out run --resume --set optimiser.lr=0.5");
    assert!(told.contains("another training"), "{told}");
}

#[test]
fn a_run_goes_on_from_the_copy_in_another_site_when_every_machine_is_lost() {
    let mut flock = Flock::with_workers("", "aab");
    let step = flock.lose_all_but_a_copy(3);
    flock.start_driver("c");
    for site in ["a", "c", "c"] {
        flock.start_worker(site);
    }
    flock.go_on_for(1); // The log of the new run begins.
    flock.go_on_for(7);
    let weights = flock.finish();
    assert_eq!(flock.first_difference_from(step, &weights), None);
    assert!(weights.len() >= 7 && weights.keys().all(|&of| of >= step), "{:?}", weights.keys());
    flock.place.good("checkpoint verify run");
    let told = flock.place.bad("run new flock.toml --out other --from run/checkpoints --peers 1");
    assert!(told.contains("manifest") && !flock.place.path("other").exists(), "{told}");
}

/// Promise (b): with the shortest way of adding up, only the last bits depend on who computed what.
#[test]
fn a_fast_reduction_follows_the_curve_of_one_process_through_kills() {
    let mut flock = Flock::with_workers("--set swarm.reduce=\"fast\"", "aaabbb");
    for kill in 0..6 {
        flock.go_on_for(15);
        let peer = draw(4, kill, flock.peers().len());
        flock.kill(peer);
        flock.replace(peer);
    }
    flock.go_on_for(15);
    flock.finish();
    let (swarm, one) = (flock.place.losses("run"), flock.place.losses(&flock.train_in_one_process(100)));
    for (step, loss) in one {
        let difference = (swarm[&step] - loss).abs();
        assert!(difference <= 2e-6, "the loss of step {step} differs by {difference:e}");
    }
    let (proof, _) = flock.place.good("run audit run");
    assert!(proof.contains("every sample was counted once"), "{proof}");
}

/// Promise (c): a suite that cannot find these would prove nothing.
#[test]
fn a_double_a_drop_and_a_stale_fold_are_found() {
    for sabotage in ["double", "drop", "stale"] {
        let mut flock = Flock::new("", 4);
        flock.start_driver("a");
        for _ in 0..3 {
            flock.start_worker("a");
        }
        flock.start_saboteur("a", sabotage);
        flock.go_on_for(20);
        let weights = flock.finish();
        let found = flock.first_difference(&weights);
        assert!(found >= Some(starling_node::sabotage::FROM_STEP), "{sabotage}: {found:?}");
    }
}
