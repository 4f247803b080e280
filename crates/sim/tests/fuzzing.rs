//! Thousands of random scenarios, each from one seed.

use starling_sim::fault::Fault;
use starling_sim::fuzz;
use starling_sim::scenario::{Sabotage, Scenario};
use starling_sim::world::World;
use starling_swarm::ids::{PeerId, Step};

/// Seeds that once failed, with what they found.
const ONCE_FAILED: [u64; 28] = [
    1_008_480, // A peer that came back within a step was asked to share a sum that it did not have.
    2,         // A verdict was lost, and the reduction that named the lot was refused for ever.
    25,        // A joiner was told to make version 1 from the seed.
    317,       // Nobody complained of a member that could not be reached.
    365,       // A donor that had not applied the last commit took a joiner back.
    499,       // A member that was left out of a reduction was taken in again at once.
    4324,      // After a restart, a ledger that was rebuilt from half the seals.
    9469,      // A joiner went on asking a donor that was gone.
    11289,     // A peer that came back in another stage was taken for a member of its old one.
    22800,     // Answers to an earlier life of a driver made it say hello for ever.
    1_000_598, // A refusal that was overtaken by a later verdict dropped a lot that counted.
    811_490,   // A lot whose patience had grown longer than the run's.
    812_839,   // A beat that was overtaken by a later one made a holder a joiner.
    227175,    // An admission whose record the journal lost: the peer and the coordinator never agreed again.
    421681,    // A driver took the view of an earlier term for that of the new one.
    484412,    // A peer that had not heard of a new term was not told, since its attempt had the same number.
    1_000_748, // Nobody was left with the older weights that the open step is computed with.
    1_017_863, // A lot that an earlier coordinator had accepted, and the next one counted elsewhere.
    1_049_303, // A lot that was begun while its step was being reduced was in the sum.
    50111813,  // A checkpoint that was complete while a rollback was on its way to the journal.
    60069695,  // The patience with a lot after a straggler and a cut was longer than the run's.
    80206791, // A hop that only passed on was replaced when all had come back, and nobody looked at the lot again.
    28539,    // A reduced part of another stage, under the same attempt.
    100126374, // A donor that was itself catching up gave a newer state than it said.
    110127122, // The doubt whether an owner waits itself lasted as long as a clock had jumped.
    90000477, // A result that is not finite waited to be confirmed by a peer that lacked the step's weights.
    90002522, // A run that had lost a stage before its first commit waited for its whole quorum again.
    90033383, // A step was skipped before all had applied the one before it.
];

#[test]
fn seeds_that_once_failed_stay_mended() {
    for seed in ONCE_FAILED {
        fuzz::hunt(seed..seed + 1).unwrap_or_else(|failure| panic!("{failure}"));
        // Most of them failed when nothing could be shared.
        let mut scenario = fuzz::scenario(seed);
        scenario.spec.shared.clear();
        World::new(&scenario)
            .run()
            .unwrap_or_else(|violation| panic!("seed {seed}, nothing shared: {violation}"));
    }
}

#[test]
fn no_random_schedule_of_faults_breaks_an_invariant_or_stops_the_run() {
    fuzz::hunt(1_000_000..1_010_000).unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn the_same_seed_gives_the_same_history_byte_for_byte() {
    for seed in 0..100 {
        let (first, second) = (fuzz::replay(seed), fuzz::replay(seed));
        assert_eq!(first, second, "seed {seed}");
    }
    let histories: std::collections::BTreeSet<u64> =
        (0..100).map(|seed| fuzz::replay(seed).unwrap().history).collect();
    assert_eq!(histories.len(), 100, "and another seed another one");
}

#[test]
fn a_failing_scenario_is_made_small() {
    let mut scenario = Scenario::small(17, 2, 2);
    scenario.sabotage = Some(Sabotage::Double);
    scenario.faults.push((400_000, Fault::Kill { peer: PeerId(1), back_after_us: 1_000 }));
    scenario.faults.push((500_000, Fault::ClockJump { peer: PeerId(0), by_us: 1_000 }));
    let smallest = fuzz::shrink(scenario);
    assert!(smallest.faults.is_empty(), "the double alone is enough to fail");
    assert_eq!(smallest.spec.steps, Step(1));
}
