//! What the coordinator writes down, synced, before it acts on it: membership, commits, checkpoints, epochs,
//! amendments and its terms; and what a reader of the journal knows then. Nothing else survives a restart: the
//! ledger is rebuilt from the workers' seals.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::ids::*;
use crate::message::Capability;

/// The end of a step, the same for every stage and replica.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit {
    /// Whose it is: a coordinator adopts only those of earlier terms than its own.
    pub term: Term,
    /// The history.
    pub epoch: Epoch,
    /// The step: applied to the version of that number, it makes the next.
    pub step: Step,
    /// What every update needs (clip factor, learning rate…); made by the host, opaque here.
    pub constants: Vec<u8>,
    /// The hash of each stage's reduced gradient; a peer that has another one does not apply.
    pub digests: Vec<Digest>,
    /// Who saves the version that this makes: one peer a stage, or nobody.
    pub savers: Vec<PeerId>,
    /// The step's gradient is not finite, whoever computes it: the next version has the same weights, everywhere.
    pub skipped: bool,
}

/// A member's place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Place {
    /// The number of its admission.
    pub member: MemberNo,
    /// Which life of the peer was admitted.
    pub incarnation: u64,
    /// What it was given to hold.
    pub stage: StageId,
    /// What it said of itself.
    pub capability: Capability,
}

/// One record of the journal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Record {
    /// A coordinator took over.
    Term(Term),
    /// A peer was admitted, or a member was given another stage.
    Placed(PeerId, Place),
    /// A peer is no member any more.
    Removed(PeerId),
    /// A step was closed.
    Commit(Arc<Commit>),
    /// All stages of this version are saved.
    Checkpoint(Step),
    /// All stages went back to this version under a new epoch.
    Rollback(Epoch, Step),
    /// Before this journal began, the update of this step was skipped.
    Skipped(Step),
    /// The run was amended: its last step.
    LastStep(Step),
    /// The run was amended: from this step on commits' constants are made with these settings, opaque here.
    Amended(Step, Vec<u8>),
    /// The run was paused, or resumed.
    Paused(bool),
    /// A peer computes wrongly: it is no member any more, and not let in again; or it is forgiven.
    Quarantined(PeerId, bool),
    /// The loss of a step was a spike: all stages went back to this version under a new epoch, and the updates of the
    /// steps from the first of these two to the last are left out.
    LeftOut(Epoch, Step, (Step, Step)),
}

/// What the journal says.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct JournalState {
    /// The last coordinator's term.
    pub term: Term,
    /// The history.
    pub epoch: Epoch,
    /// The step that is open: the version that the commits made.
    pub step: Step,
    /// The last commit of this epoch.
    pub last_commit: Option<Arc<Commit>>,
    /// The last version that all stages saved; version 0 is made from the seed.
    pub checkpoint: Step,
    /// Members, with the stages that they were given.
    pub members: BTreeMap<PeerId, Place>,
    /// The last step, if amended.
    pub last_step: Option<Step>,
    /// Settings that were amended, by the first step that they are for. A rollback before it does not undo them.
    pub amendments: BTreeMap<Step, Vec<u8>>,
    /// Whether the run is paused.
    pub paused: bool,
    /// Peers that compute wrongly.
    pub quarantined: BTreeSet<PeerId>,
    /// The steps of this history whose update was skipped.
    pub skipped: BTreeSet<Step>,
    /// The steps since the checkpoint whose update is to be left out.
    pub left_out: BTreeSet<Step>,
}

impl JournalState {
    /// Reads a journal from its start.
    pub fn replay<'a>(records: impl IntoIterator<Item = &'a Record>) -> JournalState {
        let mut state = JournalState::default();
        records.into_iter().for_each(|record| state.enter(record));
        state
    }

    /// The amended settings of a step.
    pub fn amendment(&self, step: Step) -> Option<&[u8]> {
        self.amendments.range(..=step).next_back().map(|(_, settings)| settings.as_slice())
    }

    /// Takes one more record.
    pub fn enter(&mut self, record: &Record) {
        match record {
            Record::Term(term) => self.term = *term,
            Record::Placed(peer, place) => {
                self.members.insert(*peer, place.clone());
            }
            Record::Removed(peer) => {
                self.members.remove(peer);
            }
            Record::Commit(commit) => {
                self.epoch = commit.epoch;
                self.step = commit.step.next();
                self.last_commit = Some(commit.clone());
                self.skipped.extend(commit.skipped.then_some(commit.step));
            }
            Record::Checkpoint(step) => {
                self.checkpoint = *step;
                self.left_out = self.left_out.split_off(step);
            }
            Record::Rollback(epoch, step) => self.go_back(*epoch, *step),
            Record::LeftOut(epoch, step, (first, last)) => {
                self.go_back(*epoch, *step);
                self.left_out.extend((first.0..=last.0).map(Step));
            }
            Record::Skipped(step) => drop(self.skipped.insert(*step)),
            Record::LastStep(step) => self.last_step = Some(*step),
            Record::Amended(from, settings) => {
                // After a rollback an earlier order may be for a later step: the last word counts.
                self.amendments.split_off(from);
                self.amendments.insert(*from, settings.clone());
            }
            Record::Paused(paused) => self.paused = *paused,
            Record::Quarantined(peer, true) => {
                self.members.remove(peer);
                self.quarantined.insert(*peer);
            }
            Record::Quarantined(peer, false) => drop(self.quarantined.remove(peer)),
        }
    }

    fn go_back(&mut self, epoch: Epoch, step: Step) {
        (self.epoch, self.step, self.last_commit) = (epoch, step, None);
        self.skipped.split_off(&step);
    }
}
