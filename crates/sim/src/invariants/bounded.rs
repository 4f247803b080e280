//! Every queue stays within its bound.

use starling_swarm::spec::{Spec, Tuning};
use starling_swarm::worker::{Queues, WAITING};

use crate::invariants::{Fact, Invariant};

/// See the module's head.
pub struct Bounded {
    tuning: Tuning,
    lots: usize,
}

impl Bounded {
    /// For these bounds.
    pub fn new(spec: &Spec) -> Bounded {
        Bounded { tuning: spec.tuning, lots: spec.lots.lots as usize * (1 + spec.sync.lag() as usize) }
    }
}

impl Invariant for Bounded {
    fn name(&self) -> &'static str {
        "queues stay within their bounds"
    }

    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String> {
        let Tuning { keep_bytes, in_flight, leases, .. } = self.tuning;
        match fact {
            Fact::WorkerQueues(peer, Queues { jobs, begun, lots, ahead, kept_bytes })
                if begun > self.tuning.jobs
                    || jobs > (1 + WAITING) * self.tuning.jobs
                    || lots > self.lots
                    || ahead > self.tuning.ahead
                    || kept_bytes > keep_bytes =>
            {
                Err(format!(
                    "{peer} has {jobs} jobs, {begun} of them begun, {lots} lots, {ahead} messages ahead, keeps {kept_bytes} B"
                ))
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
