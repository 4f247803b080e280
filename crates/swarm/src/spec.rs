//! What all machines of a run know of it, and the few numbers that tune them. Defaults live here, once.

use serde::{Deserialize, Serialize};

use crate::ids::{RunId, Step};
use crate::lots::Lots;
use crate::rebalance::Policy;
use crate::time::Span;

/// The run, as far as the machines need to know it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spec {
    /// Which run.
    pub run: RunId,
    /// Stages of the pipeline.
    pub stages: u16,
    /// The step's microbatches and lots.
    pub lots: Lots,
    /// Steps to be done.
    pub steps: Step,
    /// A checkpoint after every so many steps; 0: never.
    pub checkpoint_every: u64,
    /// Elements of the gradient of a stage.
    pub elements: u64,
    /// Bytes of a stage's state: weights and moments.
    pub state_bytes: u64,
    /// Bytes that a peer must have to hold a stage.
    pub memory_bytes: u64,
    /// The numbers that tune the machines.
    pub tuning: Tuning,
}

/// How patient, how eager and how large the queues are.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    /// Between two beats of a worker or driver.
    pub beat: Span,
    /// A member is removed when it was silent for its measured rhythm plus this.
    pub silence: Span,
    /// Added to every measured deadline.
    pub slack: Span,
    /// A deadline of which nothing was measured.
    pub unknown: Span,
    /// How long a step may wait for a joiner that is about to be ready.
    pub pause: Span,
    /// Microbatches that a worker keeps between forward and backward, at the most.
    pub jobs: usize,
    /// Messages that a worker keeps because they are ahead of it, at the most.
    pub ahead: usize,
    /// Microbatches that a driver keeps in flight, at the most.
    pub in_flight: usize,
    /// Lots that a driver holds at a time, at the most.
    pub leases: usize,
    /// What a hop to another site costs a driver's choice, against the response times of peers.
    pub far: Span,
    /// When peers are moved to another stage.
    pub rebalance: Policy,
    /// Peers that must have said hello before the run starts (at least one a stage).
    pub quorum: usize,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning {
            beat: Span::s(1),
            silence: Span::s(4),
            slack: Span::ms(500),
            unknown: Span::s(10),
            pause: Span::s(30),
            jobs: 32,
            ahead: 256,
            in_flight: 16,
            leases: 8,
            far: Span::ms(100),
            rebalance: Policy::WhenItPays(Span::s(1800)),
            quorum: 1,
        }
    }
}
