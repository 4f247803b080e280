//! Every queue stays within its bound.

use starling_swarm::spec::Tuning;

use crate::invariants::{Fact, Invariant};

/// See the module's head.
pub struct Bounded {
    tuning: Tuning,
    lots: usize,
}

impl Bounded {
    /// For these bounds.
    pub fn new(tuning: Tuning, lots: u32) -> Bounded {
        Bounded { tuning, lots: lots as usize }
    }
}

impl Invariant for Bounded {
    fn name(&self) -> &'static str {
        "queues stay within their bounds"
    }

    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String> {
        let Tuning { jobs, ahead, in_flight, leases, .. } = self.tuning;
        match fact {
            Fact::WorkerQueues(peer, (has_jobs, has_lots, has_ahead))
                if has_jobs > jobs || has_lots > self.lots || has_ahead > ahead =>
            {
                Err(format!("{peer} has {has_jobs} jobs, {has_lots} lots, {has_ahead} messages ahead"))
            }
            Fact::DriverQueues(driver, (has_leases, flying))
                if has_leases > 4 * leases || flying > in_flight =>
            {
                Err(format!("{driver} has {has_leases} leases and {flying} microbatches in flight"))
            }
            _ => Ok(()),
        }
    }
}
