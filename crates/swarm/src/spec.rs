//! What all machines of a run know of it, and the few numbers that tune them. Defaults live here, once.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::ids::{RunId, StageId, Step};
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
    /// What a microbatch costs each stage, against an average of 1; all the same if nothing is said of a stage.
    pub costs: Vec<f64>,
    /// The step's microbatches and lots.
    pub lots: Lots,
    /// How the replicas of a stage agree.
    pub sync: Sync,
    /// How gradients are added up.
    pub reduce: Reduce,
    /// Steps to be done.
    pub steps: Step,
    /// A checkpoint after every so many steps; 0: never.
    pub checkpoint_every: u64,
    /// Elements of the gradient of each stage; the last number also counts for stages of which none is said.
    pub elements: Vec<u64>,
    /// Sets of stages that use the same parameters: what each of a set has of their gradient is added up over all of
    /// it, in the order of stages.
    pub shared: Vec<Vec<StageId>>,
    /// Bytes of a stage's state: weights and moments.
    pub state_bytes: u64,
    /// Bytes that a peer must have to hold a stage.
    pub memory_bytes: u64,
    /// The numbers that tune the machines.
    pub tuning: Tuning,
}

impl Spec {
    /// What a microbatch costs a stage, against the average.
    pub fn cost(&self, stage: StageId) -> f64 {
        let cost = self.costs.get(stage.0 as usize).copied().filter(|cost| cost.is_finite());
        cost.map_or(1.0, |cost| cost.max(1e-3))
    }

    /// Elements of the gradient of a stage.
    pub fn elements(&self, stage: StageId) -> u64 {
        self.elements.get(stage.0 as usize).or(self.elements.last()).copied().unwrap_or(0)
    }

    /// The other stages that use parameters of this one.
    pub fn partners(&self, stage: StageId) -> BTreeSet<StageId> {
        let sets = self.shared.iter().filter(|set| set.contains(&stage));
        sets.flatten().copied().filter(|other| *other != stage && other.0 < self.stages).collect()
    }

    /// What a microbatch costs, of every stage.
    pub fn all_costs(&self) -> Vec<f64> {
        (0..self.stages).map(|stage| self.cost(StageId(stage))).collect()
    }
}

/// How the replicas of a stage agree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Sync {
    /// Every step is computed with the weights that the step before it made: one big machine.
    #[default]
    Step,
    /// A step is computed with the weights that the step before the last made, so that the reduction of one
    /// step is hidden behind the work of the next: one big machine with gradients that are one step late.
    Delayed,
}

/// How gradients are added up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reduce {
    /// In the fixed tree over lots: the bits do not depend on who computed what.
    #[default]
    Exact,
    /// Every holder adds up all that it has before it sends: least traffic, and the last bits depend on who
    /// computed what.
    Fast,
}

impl Sync {
    /// By how many steps the weights lag behind.
    pub fn lag(self) -> u64 {
        match self {
            Sync::Step => 0,
            Sync::Delayed => 1,
        }
    }

    /// The version of the weights with which a step is computed.
    pub fn weights_of(self, step: Step) -> Step {
        Step(step.0.saturating_sub(self.lag()))
    }

    /// Whether a step is open for who has the weights of `version`, and of those before that are still kept.
    pub fn is_open(self, version: Step, step: Step) -> bool {
        version <= step && step.0 <= version.0.saturating_add(self.lag())
    }

    /// The last step that can be computed by who has the weights of `version` and none after.
    pub fn last_step(self, version: Step) -> Step {
        Step(version.0.saturating_add(self.lag()))
    }

    /// The first step that can be computed by who has the weights of `version` and none before.
    pub fn first_step(self, version: Step) -> Step {
        if version == Step(0) { version } else { Step(version.0.saturating_add(self.lag())) }
    }
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
    /// Microbatches that a worker keeps between forward and backward, at the most. As many more may wait for forward.
    pub jobs: usize,
    /// Elements of a gradient that are added up at a time, at the most, unless that would be very many parts.
    pub part_elements: u64,
    /// Messages that a worker keeps because they are ahead of it, at the most.
    pub ahead: usize,
    /// Bytes of activations and their gradients that a worker keeps until the commit, so that a lot that was
    /// lost in another stage can be done again without computing it here once more.
    pub keep_bytes: u64,
    /// Microbatches that a driver keeps in flight, at the most.
    pub in_flight: usize,
    /// Microbatches in flight for every peer; the drivers of several sites share them.
    pub depth: usize,
    /// Lots that a driver holds at a time, at the most.
    pub leases: usize,
    /// What a hop to another site costs a driver's choice, against the response times of peers.
    pub far: Span,
    /// How often a worker leaves a copy of its sums with another of its stage, so that they outlive it; 0: never.
    pub deposit: Span,
    /// When peers are moved to another stage.
    pub rebalance: Policy,
    /// Peers that must have said hello before the run starts (at least one a stage).
    pub quorum: usize,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning {
            beat: Span::ms(500),
            silence: Span::ms(2500),
            slack: Span::ms(500),
            unknown: Span::s(10),
            pause: Span::s(30),
            jobs: 32,
            part_elements: 2 << 20,
            ahead: 1024,
            keep_bytes: 1 << 30,
            in_flight: 1 << 16,
            depth: 4,
            leases: 1 << 12,
            far: Span::ms(100),
            deposit: Span(0),
            rebalance: Policy::WhenItPays(Span::s(1800)),
            quorum: 1,
        }
    }
}
