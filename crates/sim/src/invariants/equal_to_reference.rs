//! All replicas of a stage are equal after a commit, and equal to the one-process result.

use crate::invariants::{Fact, Invariant};
use crate::toy::{Reference, Toy};

/// See the module's head.
pub struct EqualToReference {
    reference: Reference,
}

impl EqualToReference {
    /// For this run.
    pub fn new(toy: Toy) -> EqualToReference {
        EqualToReference { reference: Reference::new(toy) }
    }
}

impl Invariant for EqualToReference {
    fn name(&self) -> &'static str {
        "every replica equals the one-process result"
    }

    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String> {
        if let Fact::Journaled(record) = fact {
            self.reference.amend(record);
        }
        let Fact::State { peer, stage, version, weights, .. } = fact else { return Ok(()) };
        let expected = self.reference.weights(stage, version);
        if weights == expected {
            return Ok(());
        }
        Err(format!("{peer}, {stage}, version {}: {weights:016x} instead of {expected:016x}", version.0))
    }
}
