//! Every microbatch is counted exactly once in every stage of every step.

use starling_swarm::ids::Microbatch;

use crate::invariants::{Fact, Invariant};

/// See the module's head.
pub struct ExactlyOnce {
    microbatches: u32,
}

impl ExactlyOnce {
    /// For steps of so many microbatches.
    pub fn new(microbatches: u32) -> ExactlyOnce {
        ExactlyOnce { microbatches }
    }
}

impl Invariant for ExactlyOnce {
    fn name(&self) -> &'static str {
        "every microbatch is counted exactly once per stage and step"
    }

    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String> {
        let Fact::Summed { stage, step, microbatches } = fact else { return Ok(()) };
        if microbatches.iter().copied().eq((0..self.microbatches).map(Microbatch)) {
            return Ok(());
        }
        let numbers: Vec<u32> = microbatches.iter().map(|microbatch| microbatch.0).collect();
        Err(format!("{step}, {stage}: the sum is over {numbers:?} of 0..{}", self.microbatches))
    }
}
