//! Negative controls: a rule is broken on purpose, and an invariant must say so. A checker that cannot fail
//! proves nothing.

use starling_sim::scenario::{Sabotage, Scenario};
use starling_sim::world::World;

fn caught_by(sabotage: Sabotage) -> String {
    let mut scenario = Scenario::small(11, 3, 2);
    assert!(World::new(&scenario).run().is_ok(), "the scenario is sound without the sabotage");
    scenario.sabotage = Some(sabotage);
    match World::new(&scenario).run() {
        Ok(_) => panic!("{sabotage:?} was not caught"),
        Err(violation) => violation.invariant,
    }
}

#[test]
fn a_gradient_that_is_folded_twice_is_caught() {
    assert!(caught_by(Sabotage::Double).contains("exactly once"));
}

#[test]
fn a_gradient_that_is_dropped_is_caught() {
    assert!(caught_by(Sabotage::Drop).contains("exactly once"));
}

#[test]
fn a_forward_pass_with_stale_weights_is_caught() {
    assert!(caught_by(Sabotage::StaleFold).contains("one-process result"));
}

#[test]
fn an_update_before_its_commit_is_caught() {
    // The weights are the right ones, so that nothing else can notice.
    assert!(caught_by(Sabotage::ApplyBeforeCommit).contains("before its commit"));
}

#[test]
fn a_commit_that_the_journal_lost_is_caught() {
    assert!(caught_by(Sabotage::LostCommit).contains("journal"));
}
