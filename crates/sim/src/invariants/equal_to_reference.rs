//! All replicas of a stage are equal after a commit, and equal to the one-process result.

use std::collections::BTreeMap;

use starling_swarm::ids::Epoch;
use starling_swarm::journal::Record;

use crate::invariants::{Fact, Invariant};
use crate::toy::{Reference, Toy};

/// See the module's head.
pub struct EqualToReference {
    /// By the first epoch of a history: updates that are left out in one were not in those before it, and who is late
    /// may still be there.
    histories: BTreeMap<Epoch, Reference>,
}

impl EqualToReference {
    /// For this run.
    pub fn new(toy: Toy) -> EqualToReference {
        EqualToReference { histories: BTreeMap::from([(Epoch(0), Reference::new(toy))]) }
    }
}

impl Invariant for EqualToReference {
    fn name(&self) -> &'static str {
        "every replica equals the one-process result"
    }

    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String> {
        if let Fact::Journaled(record) = fact {
            let newest = self.histories.last_entry();
            if let (Record::LeftOut(epoch, ..), Some(newest)) = (record, &newest) {
                let mut history = newest.get().clone();
                history.amend(record);
                self.histories.insert(*epoch, history);
            } else if let Some(mut newest) = newest {
                newest.get_mut().amend(record);
            }
        }
        let Fact::State { peer, stage, epoch, version, weights, .. } = fact else { return Ok(()) };
        let history = self.histories.range_mut(..=epoch).next_back();
        let Some(expected) = history.map(|(_, history)| history.weights(stage, version)) else {
            return Ok(());
        };
        if weights == expected {
            return Ok(());
        }
        Err(format!("{peer}, {stage}, version {}: {weights:016x} instead of {expected:016x}", version.0))
    }
}
