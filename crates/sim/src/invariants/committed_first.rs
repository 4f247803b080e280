//! Nothing is applied before its commit is journaled.

use std::collections::BTreeSet;

use starling_swarm::ids::{Epoch, Step};
use starling_swarm::journal::Record;

use crate::invariants::{Fact, Invariant};

/// See the module's head.
#[derive(Default)]
pub struct CommittedFirst {
    committed: BTreeSet<(Epoch, Step)>,
}

impl Invariant for CommittedFirst {
    fn name(&self) -> &'static str {
        "nothing is applied before its commit is journaled"
    }

    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String> {
        match fact {
            Fact::Journaled(Record::Commit(commit)) => {
                self.committed.insert((commit.epoch, commit.step.next()));
                Ok(())
            }
            Fact::State { peer, epoch, version, applied: true, .. }
                if !self.committed.contains(&(epoch, version)) =>
            {
                Err(format!("{peer} applied version {} of {epoch}, which no journal knows", version.0))
            }
            _ => Ok(()),
        }
    }
}
