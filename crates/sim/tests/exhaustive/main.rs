//! Every run of a very small swarm: the real machines, model-checked.
//!
//! The simulator draws schedules at random; this walks through all of them within bounds, depth first, over
//! distinct states. Coordinator, driver and three workers are those of `starling-swarm`; hosts compute with
//! the simulator's toy arithmetic. Two stages, two microbatches a step, one or two lots, one or two steps.
//!
//! **A state** is all machines and hosts, the messages on every wire, what hosts and the journal's disk have
//! not yet reported, the journal, the checkpoints, the time, and the number of faults. **A transition**
//! delivers the first message of a wire (a wire is an ordered pair of processes; first in, first out unless a
//! fault reorders it), completes one host operation or one journal sync, injects a fault, or, *only if
//! nothing else is enabled*, lets time go on to the next timer and fires all that are due. So no deadline
//! passes while anything is on its way, and a peer that is slow but not dead is seen only as a message that
//! is [`Kind::Stale`]. Timers would otherwise multiply the states by every moment at which they can fire.
//!
//! **What is looked at**, each to its end; a test fails if that is not reached, and prints the numbers:
//!
//! | test | begins when | lots, steps | orders | faults |
//! |---|---|---|---|---|
//! | `every_order_without_faults` | the driver joins | 1, 1 | every | 0 |
//! | `every_order_up_to_a_fault_…` | a stage is sealed | 2, 1 | every, then one | 1 of 4 kinds |
//! | `two_faults_anywhere` | the driver joins | 1, 1 | one | 2 of 5 kinds |
//! | `one_fault_in_several_orders` | the driver joins | 2, 2 | 6, with either `Sync` | 1 of 7 kinds |
//! | `one_fault_while_stages_share_…` | the driver joins | 2, 2 | 6, stages share parameters | 1 of 7 kinds |
//! | `two_faults_while_stages_share_…` | the driver joins | 1, 1 | one, stages share parameters | 2 of 5 kinds |
//! | `one_fault_at_the_start` | processes start | 1, 1 | 6 | 1 of 7 kinds |
//! | `two_faults_anywhere_in_two_steps` | the driver joins | 2, 2 | one | 2 of 4 kinds |
//! | `two_faults_with_hosts_that_…` | the driver joins | 2, 2 | one, hosts report the newest first | 2 of 4 kinds |
//!
//! A fault may strike in every state on the way; a message is lost, doubled or late when it would be
//! delivered, which is the same as at any moment before. 'One order' is a fixed priority among hosts and
//! wires. A host reports what it did in the order in which it was told to, except with [`Order::Any`] and
//! [`Order::NewestFirst`]. *Not* looked at: every order together with two faults or with the recovery from
//! one, faults of the coordinator or the driver, partitions, moves of peers between stages, more peers.
//!
//! **States are told apart** by 128 bits over what `Debug` writes of them. That is exact, up to the chance of
//! a collision (well below 1e-20 for these numbers), since nothing that decides is left out: only `spec`,
//! which never changes, and `refusals`, which are counted and never read. Times and counters are not
//! normalised: that would merge more, and would have to be argued. States in which there is nothing to choose
//! are passed through and not kept. Events at different machines commute, so one of their orders is enough to
//! see every state ([`Asleep`]; without it the same states are found by more transitions).
//!
//! **What must hold**: every sum that is written is over each microbatch once; weights, whenever they change,
//! are those of one process, so replicas are equal; (epoch, version) of a living peer never goes back;
//! nothing is applied before its commit is journaled; commits follow one another; and every run ends with all
//! steps done and the last version at every peer. The last tests break a rule on purpose, and the explorer
//! must say so.

mod bounds;
mod explorer;
mod hosting;
mod print;
mod state;

use std::time::Instant;

use starling_swarm::spec::Sync;

use bounds::*;
use explorer::*;
use print::*;
use state::*;

const PLAIN: Bounds = Bounds {
    lots: 1,
    steps: 1,
    sync: Sync::Step,
    faults: 0,
    kinds: ALL_KINDS,
    order: Order::FastHosts,
    start: Start::Staffed,
    shares: false,
    sabotage: None,
    most_states: 1_000_000,
};

const SOME_ORDERS: [Order; 6] = [
    Order::FastHosts,
    Order::SlowHosts,
    Order::NewestFirst,
    Order::Ranked(1),
    Order::Ranked(2),
    Order::Ranked(3),
];

/// Explores, prints what was seen, and fails with the whole story if anything is wrong or was left out.
fn all_is_well(name: &str, bounds: Bounds) -> Explored {
    let began = Instant::now();
    match explore(bounds) {
        Ok(explored) => {
            println!("{name}, {:?}: {explored:?}, {:.1} s", bounds.order, began.elapsed().as_secs_f64());
            assert!(explored.complete, "{name}: there are more than {} states", bounds.most_states);
            assert!(explored.ends > 0, "{name}: no run ends");
            explored
        }
        Err(broken) => panic!("{name}: {}\n{}", broken.what, tell(bounds, &broken.trace)),
    }
}

#[test]
fn every_order_without_faults() {
    all_is_well("every order", Bounds { order: Order::Any, ..PLAIN });
}

#[test]
fn every_order_up_to_a_fault_at_the_end_of_a_step() {
    let (start, kinds) = (Start::Sealed, &ALL_KINDS[..4]);
    let bounds = Bounds { lots: 2, faults: 1, kinds, order: Order::Any, start, ..PLAIN };
    assert!(all_is_well("every order up to a fault", bounds).rolled_back > 0);
}

#[test]
fn two_faults_anywhere() {
    let bounds = Bounds { faults: 2, kinds: &ALL_KINDS[..5], ..PLAIN };
    assert!(all_is_well("two faults", bounds).rolled_back > 0);
}

#[test]
fn one_fault_in_several_orders() {
    for sync in [Sync::Step, Sync::Delayed] {
        for order in SOME_ORDERS {
            let bounds = Bounds { lots: 2, steps: 2, sync, faults: 1, order, ..PLAIN };
            all_is_well("one fault in two steps", bounds);
        }
    }
}

#[test]
fn one_fault_while_stages_share_parameters() {
    for order in SOME_ORDERS {
        let bounds = Bounds { shares: true, lots: 2, steps: 2, faults: 1, order, ..PLAIN };
        all_is_well("one fault in two steps, with shared parameters", bounds);
    }
}

#[test]
fn two_faults_while_stages_share_parameters() {
    let bounds = Bounds { shares: true, faults: 2, kinds: &ALL_KINDS[..5], ..PLAIN };
    assert!(all_is_well("two faults, with shared parameters", bounds).rolled_back > 0);
}

#[test]
fn one_fault_at_the_start() {
    for order in SOME_ORDERS {
        all_is_well("one fault at the start", Bounds { faults: 1, order, start: Start::Cold, ..PLAIN });
    }
}

#[test]
fn two_faults_anywhere_in_two_steps() {
    let (kinds, order) = (&ALL_KINDS[..4], Order::FastHosts);
    all_is_well("two faults in two steps", Bounds { lots: 2, steps: 2, faults: 2, kinds, order, ..PLAIN });
}

#[test]
fn two_faults_with_hosts_that_report_the_newest_first() {
    let (kinds, order) = (&ALL_KINDS[..4], Order::NewestFirst);
    all_is_well("two faults, newest first", Bounds { lots: 2, steps: 2, faults: 2, kinds, order, ..PLAIN });
}

/// What the explorer says when a rule is broken on purpose.
fn caught(sabotage: Sabotage, faults: u32) -> String {
    match explore(Bounds { sabotage: Some(sabotage), faults, ..PLAIN }) {
        Ok(explored) => panic!("{sabotage:?} was not caught: {explored:?}"),
        Err(broken) => broken.what,
    }
}

#[test]
fn a_gradient_that_is_folded_twice_is_caught() {
    assert!(caught(Sabotage::Double, 0).contains("exactly once"));
}

#[test]
fn an_update_at_prepare_is_caught() {
    assert!(caught(Sabotage::ApplyAtPrepare, 0).contains("before its commit"));
}

#[test]
fn a_commit_that_the_journal_lost_is_caught() {
    assert!(caught(Sabotage::LostCommit, 0).contains("before its commit"));
}

#[test]
fn a_run_that_hangs_is_caught() {
    assert!(caught(Sabotage::NeverPrepared, 0).contains("no progress"));
}

#[test]
fn a_lot_that_is_not_dropped_is_caught_by_a_fault_and_only_then() {
    let without = Bounds { sabotage: Some(Sabotage::KeepsDropped), ..PLAIN };
    assert!(explore(without).is_ok(), "it does no harm as long as nothing goes wrong");
    assert!(caught(Sabotage::KeepsDropped, 1).contains("exactly once"));
}
