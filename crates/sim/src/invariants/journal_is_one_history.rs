//! The journal is one history, whatever happened to the coordinator: terms grow, every commit follows the one
//! before it, and a rollback goes to a version that was saved whole in the history that it leaves.

use std::collections::BTreeSet;

use starling_swarm::ids::{Epoch, Step, Term};
use starling_swarm::journal::Record;

use crate::invariants::{Fact, Invariant};

/// See the module's head.
#[derive(Default)]
pub struct JournalIsOneHistory {
    term: Term,
    epoch: Epoch,
    step: Step,
    saved: BTreeSet<Step>,
}

impl Invariant for JournalIsOneHistory {
    fn name(&self) -> &'static str {
        "a coordinator's restart changes nothing that was committed"
    }

    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String> {
        let Fact::Journaled(record) = fact else { return Ok(()) };
        match record {
            Record::Term(term) if *term <= self.term => return Err(format!("{term} after {}", self.term)),
            Record::Term(term) => self.term = *term,
            Record::Commit(commit) if (commit.epoch, commit.step) != (self.epoch, self.step) => {
                let (epoch, step) = (self.epoch, self.step);
                return Err(format!("{}, {} where {epoch}, {step} was open", commit.epoch, commit.step));
            }
            Record::Commit(_) => self.step = self.step.next(),
            Record::Checkpoint(version) if *version > self.step => {
                return Err(format!("a checkpoint of version {}, which no commit made", version.0));
            }
            Record::Checkpoint(version) => drop(self.saved.insert(*version)),
            Record::Rollback(epoch, version) | Record::LeftOut(epoch, version, _) => {
                if *epoch <= self.epoch || (version.0 > 0 && !self.saved.contains(version)) {
                    return Err(format!("a rollback to {epoch}, version {}: never saved", version.0));
                }
                (self.epoch, self.step) = (*epoch, *version);
            }
            _ => {}
        }
        Ok(())
    }
}
