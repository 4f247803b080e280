//! A run on a swarm, as it is handed to the simulator: the very machines that a real run would have, with the sizes and
//! costs of the user's own model.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use starling_model::pipeline::{self, StagePlan};
use starling_model::run::{Keeping, Run};
use starling_model::stage::Keep;
use starling_node::charter::Charter;
use starling_sim::network;
use starling_sim::scenario::{self, Scenario, Sizes};
use starling_swarm::ids::{SiteId, Step};
use starling_swarm::spec::Spec;

use crate::plan::swarm::{self, Swarm};
use crate::units::Link;
use crate::words;

/// Elements that stand for a gradient in the simulator, at the most: enough for every part that it is cut into.
const ELEMENTS: u64 = 4096;
/// Share by which the time of a computation varies.
const JITTER: f64 = 0.02;
/// What the simulator sends of a gradient where stages share parameters.
const SHARED_PART: f64 = 0.25;

/// A run on a swarm.
#[derive(Clone, Debug)]
pub struct Case {
    pub run: Run,
    pub vocabulary: usize,
    pub swarm: Swarm,
}

/// A case that can be simulated.
pub struct Prepared {
    pub scenario: Scenario,
    /// What a step would take if every device were at work all the time.
    pub ideal_s: f64,
    /// Peers that have too little memory for the largest stage.
    pub left_out: usize,
    /// What the simulator does not count of what stages send each other of parameters that they share.
    pub uncounted_s: f64,
    /// The average stage's gradient against the largest one's: the simulator's stages have gradients of one size.
    pub mean_gradient: f64,
}

/// Tokens of a microbatch.
pub fn tokens(run: &Run) -> f64 {
    f64::from(run.train.microbatch.min(run.train.batch)) * run.model.context as f64
}

impl Case {
    /// The stages that the run would have.
    pub fn stages(&self) -> Result<Vec<StagePlan>> {
        self.stages_that_keep(self.keep()?)
    }

    /// What stages keep between forward and backward. Each peer decides by its own memory; here all keep less if one must.
    fn keep(&self) -> Result<Keep> {
        let most =
            self.stages_that_keep(Keep::All)?.iter().map(|stage| stage.memory_bytes).max().unwrap_or(0);
        let said = (self.run.train.memory_gb > 0.0).then_some((self.run.train.memory_gb * 1e9) as u64);
        let memories = self.swarm.peers.iter().filter_map(|peer| peer.memory_bytes);
        Ok(self.run.train.keep.or_less(memories.chain(said).all(|memory| memory >= most)))
    }

    fn stages_that_keep(&self, keep: Keep) -> Result<Vec<StagePlan>> {
        let architecture = self.run.model.architecture(self.vocabulary);
        let rule = self.run.optimiser.rule();
        Ok(pipeline::plan(&architecture, rule, (&self.run.train, self.run.swarm), keep)?)
    }

    /// Operations of a stage for a microbatch, forward and backward; what was not kept is computed once more.
    pub fn operations(&self, stage: &StagePlan) -> f64 {
        let architecture = self.run.model.architecture(self.vocabulary);
        let training: u64 = stage.units.iter().map(|&unit| architecture.training_operations(unit)).sum();
        let again = match stage.keep {
            Keep::All => 0,
            Keep::Input => stage.forward_operations,
        };
        tokens(&self.run) * (training + again) as f64
    }

    /// Elements of all weights; what stages share counts once.
    pub fn parameters(&self) -> f64 {
        let architecture = self.run.model.architecture(self.vocabulary);
        let all = architecture.units().into_iter().flat_map(|unit| architecture.parameters(unit));
        let by_name: BTreeMap<String, usize> = all.map(|one| (one.name.clone(), one.elements())).collect();
        by_name.into_values().map(|elements| elements as f64).sum()
    }

    /// Tokens of a step.
    pub fn step_tokens(&self) -> f64 {
        f64::from(self.run.train.batch) * self.run.model.context as f64
    }

    /// What the simulator needs; an error says why no such swarm could train.
    pub fn prepare(&self) -> Result<Prepared> {
        let stages = self.stages()?;
        let swarm = self.who_can_hold(&stages)?;
        let definition = self.run.definition(self.vocabulary, String::new());
        let charter = Charter::new(self.run.clone(), definition, swarm.peers.len())?;
        let element = element_bytes(&self.run);
        let gradients = stages.iter().map(|stage| stage.gradient);
        let largest = gradients.clone().max().unwrap_or(0);
        let mean = gradients.sum::<u64>() as f64 / stages.len() as f64;
        let operations: Vec<f64> = stages.iter().map(|stage| self.operations(stage)).collect();
        let of_a_stage = operations.iter().sum::<f64>() / stages.len() as f64;
        let costs = operations.iter().map(|operations| operations / of_a_stage.max(1.0)).collect();
        let sizes = Sizes {
            activation: (tokens(&self.run) * self.run.model.width as f64 * swarm.wire_bytes) as u64,
            gradient: largest * element,
            state: charter.spec.state_bytes,
        };
        let microbatches = f64::from(charter.spec.lots.microbatches);
        let speeds = swarm.peers.iter().map(|peer| peer.tflops * 1e12 / of_a_stage.max(1.0));
        let ideal_s = microbatches * stages.len() as f64 / speeds.clone().sum::<f64>();
        let scenario = Scenario {
            peers: swarm.peers.iter().zip(speeds).map(|(peer, speed)| simulated(peer.site, speed)).collect(),
            drivers: sites(&swarm),
            inside: simulated_link(&swarm.lan),
            between: simulated_link(&swarm.link),
            spec: simulated_spec(Spec { costs, ..charter.spec }, largest),
            sizes,
            patience_us: u64::MAX / 4,
            ..Scenario::small(self.run.seed, stages.len() as u16, 1)
        };
        Ok(Prepared {
            ideal_s,
            left_out: self.swarm.peers.len() - swarm.peers.len(),
            uncounted_s: self.uncounted_s(&stages, &swarm, sizes.gradient),
            mean_gradient: mean / largest.max(1) as f64,
            scenario,
        })
    }

    /// The swarm without those who cannot hold the largest stage: they would not be let in.
    pub fn who_can_hold(&self, stages: &[StagePlan]) -> Result<Swarm> {
        let Some((number, largest)) = stages.iter().enumerate().max_by_key(|(_, stage)| stage.memory_bytes)
        else {
            bail!("a model without stages trains nothing");
        };
        let needed = largest.memory_bytes;
        let mut swarm = self.swarm.clone();
        swarm.peers.retain(|peer| peer.memory_bytes.is_none_or(|memory| memory >= needed));
        let (able, all) = (swarm.peers.len(), self.swarm.peers.len());
        if able >= stages.len() {
            return Ok(swarm);
        }
        if able == all {
            bail!(
                "{} stages need at least one peer each, and there {}: the run would never begin. Name more peers \
                 (--peers {}), or cut the model into fewer stages (--stages {})",
                stages.len(),
                if all == 1 { "is 1".into() } else { format!("are {all}") },
                stages.len(),
                all.max(1)
            );
        }
        let most = self.swarm.peers.iter().filter_map(|peer| peer.memory_bytes).max().unwrap_or(0);
        bail!(
            "stage {number} needs {}, and {} of {all} peers {} that much (the largest: {}): the run would never begin. {}",
            words::bytes(needed),
            if able == 0 { "none".into() } else { format!("only {able}") },
            if able == 1 { "has" } else { "have" },
            words::bytes(most),
            self.remedy(most)
        );
    }

    /// What makes the largest stage fit into so much memory.
    fn remedy(&self, memory: u64) -> String {
        let fits = |case: &Case| {
            let largest =
                |stages: Vec<StagePlan>| stages.iter().map(|stage| stage.memory_bytes).max().unwrap_or(0);
            case.run.problems().is_empty() && case.stages().is_ok_and(|stages| largest(stages) <= memory)
        };
        let with = |change: &dyn Fn(&mut Run)| {
            let mut case = self.clone();
            change(&mut case.run);
            case
        };
        let train = &self.run.train;
        let mut ways = Vec::new();
        let most = (self.run.model.layers + 2).min(self.swarm.peers.len());
        let more = (train.stages + 1..=most).find(|&stages| fits(&with(&|run| run.train.stages = stages)));
        ways.extend(more.map(|stages| format!("with --stages {stages}")));
        let sizes = std::iter::successors(Some(train.microbatch / 2), |size| Some(size / 2));
        let smaller =
            sizes.take_while(|&size| size > 0).find(|&size| fits(&with(&|run| run.train.microbatch = size)));
        ways.extend(smaller.map(|size| format!("with --set train.microbatch={size}")));
        if train.keep == Keeping::All && fits(&with(&|run| run.train.keep = Keeping::Input)) {
            ways.push("with --set train.keep=input".into());
        }
        match ways.is_empty() {
            true => "No other number of stages or size of microbatches would fit either: use peers with more memory".into(),
            false => format!("It fits {}, or on peers with more memory", ways.join(", ")),
        }
    }

    /// The simulator sends a quarter of a gradient between stages that share parameters. What is missing goes over the link
    /// on which the nearest partner is: in one's own site, if there are enough peers in it for all stages.
    fn uncounted_s(&self, stages: &[StagePlan], swarm: &Swarm, gradient_bytes: u64) -> f64 {
        let shared = (self.shared_elements(stages) * element_bytes(&self.run)) as f64;
        let mut in_site: BTreeMap<u16, usize> = BTreeMap::new();
        swarm.peers.iter().for_each(|peer| *in_site.entry(peer.site).or_default() += 1);
        let is_near = in_site.values().all(|&peers| peers >= stages.len());
        let link = if is_near { swarm.lan } else { swarm.link };
        (shared - SHARED_PART * gradient_bytes as f64).max(0.0) / link.bytes_per_s
    }

    /// The most that a stage has of parameters that others use too.
    fn shared_elements(&self, stages: &[StagePlan]) -> u64 {
        let architecture = self.run.model.architecture(self.vocabulary);
        let mut users: BTreeMap<String, BTreeMap<usize, u64>> = BTreeMap::new();
        for (number, stage) in stages.iter().enumerate() {
            for parameter in stage.units.iter().flat_map(|&unit| architecture.parameters(unit)) {
                let elements = parameter.elements() as u64;
                *users.entry(parameter.name).or_default().entry(number).or_default() += elements;
            }
        }
        let shared = users.values().filter(|stages| stages.len() > 1);
        let of = |number: usize| shared.clone().filter_map(|stages| stages.get(&number)).sum();
        (0..stages.len()).map(of).max().unwrap_or(0)
    }
}

/// Bytes of an element of a gradient.
pub fn element_bytes(run: &Run) -> u64 {
    run.train.precision.dtype().size() as u64
}

fn simulated(site: u16, speed: f64) -> scenario::Peer {
    scenario::Peer { site: SiteId(site), speed, jitter: JITTER, joins_us: 0 }
}

/// A driver in every site.
fn sites(swarm: &Swarm) -> Vec<SiteId> {
    let sites: std::collections::BTreeSet<SiteId> =
        swarm.peers.iter().map(|peer| SiteId(peer.site)).collect();
    sites.into_iter().collect()
}

fn simulated_link(link: &Link) -> network::Link {
    let latency_us = (link.latency_s * 1e6) as u64;
    network::Link { bytes_per_s: link.bytes_per_s, latency_us, jitter_us: latency_us / 20, loss: 0.0 }
}

/// The run as its machines would know it, but with few elements, each of which stands for many.
fn simulated_spec(spec: Spec, largest: u64) -> Spec {
    let elements = largest.clamp(1, ELEMENTS);
    let part = (spec.tuning.part_elements as f64 * elements as f64 / largest.max(1) as f64).ceil() as u64;
    let mut spec = Spec { elements: vec![elements], steps: Step(u64::MAX), memory_bytes: 1, ..spec };
    spec.tuning.part_elements = part.max(1);
    spec
}

/// The link of a scenario in few words.
pub fn links(swarm: &Swarm) -> String {
    match swarm.sites() {
        0 | 1 => format!("{} between peers", swarm::link(&swarm.lan)),
        _ => format!("{} between sites, {} inside", swarm::link(&swarm.link), swarm::link(&swarm.lan)),
    }
}
