//! A scenario: peers, links, faults, and what is deliberately broken, as plain data.

use starling_swarm::ids::*;
use starling_swarm::lots::Lots;
use starling_swarm::spec::{Reduce, Spec, Sync, Tuning};
use starling_swarm::time::Span;

use crate::fault::Fault;
use crate::network::Link;
use crate::toy::Toy;

/// Everything that a simulation depends on: the same scenario gives the same history.
#[derive(Clone, Debug, PartialEq)]
pub struct Scenario {
    /// Seeds jitter, speeds' noise and the toy weights.
    pub seed: u64,
    /// The run.
    pub spec: Spec,
    /// Peers, by number.
    pub peers: Vec<Peer>,
    /// Drivers, by number: the site of each.
    pub drivers: Vec<SiteId>,
    /// Links inside a site.
    pub inside: Link,
    /// Links between sites.
    pub between: Link,
    /// What goes wrong, and when, in microseconds.
    pub faults: Vec<(u64, Fault)>,
    /// A microbatch of which the loss is not finite.
    pub poison: Option<(Step, Microbatch)>,
    /// What is deliberately broken, to see that it is caught.
    pub sabotage: Option<Sabotage>,
    /// Bytes of things.
    pub sizes: Sizes,
    /// How long one sync of the journal takes.
    pub sync_us: u64,
    /// After the last fault is over, the run must be done within this.
    pub patience_us: u64,
    /// The run is looked at until then, and need not be done: for measuring, not for proving progress.
    pub until_us: Option<u64>,
}

/// A simulated peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peer {
    /// Where it stands.
    pub site: SiteId,
    /// Microbatches a second, forward and backward.
    pub speed: f64,
    /// Share by which each computation's time varies.
    pub jitter: f64,
    /// When it starts.
    pub joins_us: u64,
}

/// Bytes of things.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// An activation, or its gradient.
    pub activation: u64,
    /// A stage's gradient.
    pub gradient: u64,
    /// A stage's state: weights and moments.
    pub state: u64,
}

/// A rule that is broken on purpose, once: the negative controls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A gradient is folded twice.
    Double,
    /// A gradient is not folded.
    Drop,
    /// A forward pass uses the weights of the version before.
    StaleFold,
    /// A peer applies its update as soon as it is prepared.
    ApplyBeforeCommit,
    /// The journal says that a commit is safe, and loses it.
    LostCommit,
}

impl Scenario {
    /// `stages` stages with `replicas` peers each at one site, one driver, nothing going wrong.
    pub fn small(seed: u64, stages: u16, replicas: usize) -> Scenario {
        let lots = Lots { microbatches: 8, lots: 4 };
        let peer = Peer { site: SiteId(0), speed: 20.0, jitter: 0.1, joins_us: 0 };
        let peers = vec![peer; stages as usize * replicas];
        let tuning = Tuning {
            beat: Span::ms(200),
            silence: Span::ms(800),
            slack: Span::ms(100),
            unknown: Span::s(1),
            pause: Span::s(2),
            quorum: peers.len(),
            ..Tuning::default()
        };
        let spec = Spec {
            run: RunId(seed),
            stages,
            costs: Vec::new(),
            lots,
            sync: Sync::Step,
            reduce: Reduce::Exact,
            steps: Step(5),
            checkpoint_every: 2,
            elements: vec![8],
            shared: Vec::new(),
            state_bytes: 3_000_000,
            memory_bytes: 1,
            tuning,
        };
        Scenario {
            seed,
            spec,
            peers,
            drivers: vec![SiteId(0)],
            inside: Link::LOCAL,
            between: Link::INTERCONTINENTAL,
            faults: Vec::new(),
            poison: None,
            sabotage: None,
            sizes: Sizes { activation: 100_000, gradient: 1_000_000, state: 3_000_000 },
            sync_us: 2_000,
            patience_us: 60_000_000,
            until_us: None,
        }
    }

    /// Peers that are all alike, ten microbatches a second each, in so many sites with a driver each, and links between sites
    /// as inside them: what they do not do is the schedule's doing.
    pub fn alike(sites: u16, stages: u16, replicas: usize, lots: Lots, reduce: Reduce) -> Scenario {
        let mut scenario = Scenario::small(1, stages, replicas);
        let spec = &mut scenario.spec;
        (spec.lots, spec.reduce, spec.checkpoint_every) = (lots, reduce, 0);
        spec.elements = vec![256]; // Enough that every member can own a part.
        spec.tuning.jobs = 128;
        for (number, peer) in scenario.peers.iter_mut().enumerate() {
            *peer = Peer { site: SiteId(number as u16 % sites), speed: 10.0, jitter: 0.02, joins_us: 0 };
        }
        scenario.drivers = (0..sites).map(SiteId).collect();
        scenario.between = scenario.inside;
        scenario.patience_us = u64::MAX / 4;
        scenario
    }

    /// The first stage and the last use the same parameters from now on, if they are two.
    pub fn share(&mut self) {
        let ends = vec![StageId(0), StageId(self.spec.stages.saturating_sub(1))];
        self.spec.shared = if self.spec.stages > 1 { vec![ends] } else { Vec::new() };
    }

    /// The arithmetic of this run.
    pub fn toy(&self) -> Toy {
        let Spec { stages, lots, sync, reduce, .. } = self.spec;
        let elements = self.spec.elements(StageId(0));
        let shares = !self.spec.shared.is_empty();
        Toy { seed: self.seed, stages, lots, sync, reduce, elements, shares, poison: self.poison }
    }

    /// When the last fault is over.
    pub fn healed_us(&self) -> u64 {
        let joins = self.peers.iter().map(|peer| peer.joins_us);
        self.faults.iter().map(|(at, fault)| at + fault.lasts_us()).chain(joins).max().unwrap_or(0)
    }
}
