//! No stage is left without a holder by a decision: who is moved leaves another member behind. (That a stage whose
//! holders all died is filled again from its checkpoint is part of the progress that every scenario must make.)

use starling_swarm::journal::{JournalState, Record};

use crate::invariants::{Fact, Invariant};

/// See the module's head.
#[derive(Default)]
pub struct NeverEmptied {
    journal: JournalState,
}

impl Invariant for NeverEmptied {
    fn name(&self) -> &'static str {
        "no stage loses its last holder by a move"
    }

    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String> {
        let Fact::Journaled(record) = fact else { return Ok(()) };
        let journal = &mut self.journal;
        if let Record::Placed(peer, place) = record
            && let Some(before) = journal.members.get(peer)
            // Before the first commit of a history everybody is being placed anew.
            && journal.last_commit.is_some()
            // Another life of the same peer was not moved: the one before it had died.
            && (before.member, before.incarnation) == (place.member, place.incarnation)
            && before.stage != place.stage
            && !journal.members.iter().any(|(other, at)| other != peer && at.stage == before.stage)
        {
            return Err(format!(
                "{peer} moves from {} to {}, and nobody is left there",
                before.stage, place.stage
            ));
        }
        journal.enter(record);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use starling_swarm::ids::*;
    use starling_swarm::journal::{Commit, Place};
    use starling_swarm::message::Capability;

    use super::*;

    fn placed(peer: u32, stage: u16) -> Record {
        let capability = Capability {
            site: SiteId(0),
            speed: 1.0,
            memory_bytes: 1,
            link_bytes_per_s: 1.0,
            class: "toy".into(),
        };
        let member = MemberNo(peer.into());
        Record::Placed(PeerId(peer), Place { member, incarnation: 1, stage: StageId(stage), capability })
    }

    #[test]
    fn the_last_holder_may_not_move_and_one_of_two_may() {
        let mut invariant = NeverEmptied::default();
        let (constants, digests, savers) = (Vec::new(), Vec::new(), Vec::new());
        let commit = Commit {
            term: Term(1),
            epoch: Epoch(1),
            step: Step(0),
            constants,
            digests,
            savers,
            skipped: false,
        };
        for record in [placed(1, 0), placed(2, 0), placed(3, 1), Record::Commit(commit.into())] {
            assert_eq!(invariant.observe(Fact::Journaled(&record)), Ok(()));
        }
        assert_eq!(invariant.observe(Fact::Journaled(&placed(1, 1))), Ok(()));
        assert!(invariant.observe(Fact::Journaled(&placed(2, 1))).is_err());
    }
}
