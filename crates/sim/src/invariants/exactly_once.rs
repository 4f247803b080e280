//! Every microbatch is counted exactly once in every stage of every step.

use starling_swarm::lots::Lots;

use crate::host::Counted;
use crate::invariants::{Fact, Invariant};

/// See the module's head.
pub struct ExactlyOnce {
    all: Counted,
}

impl ExactlyOnce {
    /// For steps of so many microbatches.
    pub fn new(lots: Lots) -> ExactlyOnce {
        ExactlyOnce { all: Counted::all(lots) }
    }
}

impl Invariant for ExactlyOnce {
    fn name(&self) -> &'static str {
        "every microbatch is counted exactly once per stage and step"
    }

    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String> {
        let Fact::Reduced { stage, step, counted } = fact else { return Ok(()) };
        if counted == self.all {
            return Ok(());
        }
        let (got, all) = (counted.microbatches, self.all.microbatches);
        Err(format!(
            "{step}, {stage}: the sum is over {got} microbatches, of {all} that should each be in it once"
        ))
    }
}
