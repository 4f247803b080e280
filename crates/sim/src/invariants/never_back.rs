//! (epoch, version) never goes back: neither in a peer's life nor in the journal.

use std::collections::BTreeMap;

use starling_swarm::ids::{Epoch, PeerId, Step};
use starling_swarm::journal::Record;

use crate::invariants::{Fact, Invariant};

/// See the module's head.
#[derive(Default)]
pub struct NeverBack {
    peers: BTreeMap<(PeerId, u64), (Epoch, Step)>,
    journal: (Epoch, Step),
}

impl Invariant for NeverBack {
    fn name(&self) -> &'static str {
        "(epoch, version) never goes back"
    }

    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String> {
        match fact {
            Fact::State { peer, life, epoch, version, .. } => {
                let last = self.peers.entry((peer, life)).or_default();
                forward(&peer.to_string(), last, (epoch, version))
            }
            Fact::Journaled(Record::Commit(commit)) => {
                forward("the journal", &mut self.journal, (commit.epoch, commit.step.next()))
            }
            Fact::Journaled(Record::Rollback(epoch, version) | Record::LeftOut(epoch, version, _)) => {
                forward("the journal", &mut self.journal, (*epoch, *version))
            }
            _ => Ok(()),
        }
    }
}

fn forward(who: &str, last: &mut (Epoch, Step), next: (Epoch, Step)) -> Result<(), String> {
    if next < *last {
        return Err(format!("{who} was at {last:?} and is at {next:?}"));
    }
    *last = next;
    Ok(())
}
