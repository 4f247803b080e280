//! What must hold whatever happens: one file an invariant, each fed with facts as they occur.

mod bounded;
mod committed_first;
mod equal_to_reference;
mod exactly_once;
mod journal_is_one_history;
mod never_back;
mod never_emptied;

use starling_swarm::ids::*;
use starling_swarm::journal::Record;
use starling_swarm::spec::Spec;
use starling_swarm::worker::Queues;

use crate::host::Counted;
use crate::toy::Toy;

/// Something that happened and that an invariant may want to know.
#[derive(Clone, Copy, Debug)]
pub enum Fact<'a> {
    /// A record of the coordinator's is safe.
    Journaled(&'a Record),
    /// A part of a stage's reduced gradient was written, the sum over these microbatches.
    Reduced {
        /// Which stage.
        stage: StageId,
        /// Which step.
        step: Step,
        /// Which microbatches.
        counted: Counted,
    },
    /// A peer's state is now this.
    State {
        /// Who.
        peer: PeerId,
        /// Which life of it.
        life: u64,
        /// Which stage.
        stage: StageId,
        /// In which history.
        epoch: Epoch,
        /// Which version.
        version: Step,
        /// The weights.
        weights: u64,
        /// Whether by an update, and not by loading.
        applied: bool,
    },
    /// A worker's queues.
    WorkerQueues(PeerId, Queues),
    /// A driver's queues: leases, microbatches in flight.
    DriverQueues(DriverId, (usize, usize)),
}

/// One invariant.
pub trait Invariant {
    /// Its name.
    fn name(&self) -> &'static str;
    /// Takes note of a fact; an error says what does not hold.
    fn observe(&mut self, fact: Fact<'_>) -> Result<(), String>;
}

/// All invariants of a run.
pub fn all(toy: Toy, spec: &Spec) -> Vec<Box<dyn Invariant>> {
    vec![
        Box::new(exactly_once::ExactlyOnce::new(toy.lots)),
        Box::new(equal_to_reference::EqualToReference::new(toy)),
        Box::new(never_back::NeverBack::default()),
        Box::new(never_emptied::NeverEmptied::default()),
        Box::new(committed_first::CommittedFirst::default()),
        Box::new(journal_is_one_history::JournalIsOneHistory::default()),
        Box::new(bounded::Bounded::new(spec)),
    ]
}
