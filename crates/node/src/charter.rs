//! What every node of a run must know of it. The coordinator makes it; who joins is told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use starling_model::config::Architecture;
use starling_model::holding;
use starling_model::pipeline::{self, BuildError, StagePlan};
use starling_model::run::{self, Definition, Run};
use starling_model::stage::Keep;
use starling_swarm::ids::{RunId, StageId, Step};
use starling_swarm::lots::Lots;
use starling_swarm::spec::{Reduce, Spec, Sync, Tuning};
use starling_swarm::time::Span;
use starling_transport::endpoint::Limits;

use crate::host::Build;

/// See the module's head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Charter {
    /// The run, resolved.
    pub run: Run,
    /// What defines its training.
    pub definition: Definition,
    /// The run, as far as the machines need to know it.
    pub spec: Spec,
}

impl Charter {
    /// The charter of a run that begins with `peers` workers.
    pub fn new(run: Run, definition: Definition, peers: usize) -> Result<Charter, CharterError> {
        let (architecture, rule) = (run.model.architecture(definition.vocabulary), run.optimiser.rule());
        // Who has not memory for everything keeps less, if the run file leaves that open.
        let least = run.train.keep.or_less(false);
        let stages = pipeline::plan(&architecture, rule, (&run.train, run.swarm), least)?;
        let operations = stages.iter().map(|stage| stage.forward_operations as f64);
        let mean = operations.clone().sum::<f64>() / stages.len() as f64;
        let element = run.train.precision.dtype().size() as u64;
        let largest = stages.iter().map(|stage| stage.parameters).max().unwrap_or(0);
        let state_bytes = largest * element * (1 + rule.moments() as u64);
        let most = Limits::default().body_bytes;
        if state_bytes > most {
            return Err(CharterError::State { state_bytes, most });
        }
        let uses = stages.iter().map(|stage| uses_elsewhere(&architecture, &stages, stage) * element);
        if let Some(uses_bytes) = uses.max().filter(|&bytes| bytes > most) {
            return Err(CharterError::Uses { uses_bytes, most });
        }
        let lots = run.train.lots();
        let tuning = Tuning {
            quorum: peers.max(stages.len()),
            jobs: holding::most_jobs(lots),
            depth: holding::IN_FLIGHT,
            keep_bytes: holding::KEPT_BYTES,
            deposit: Span::from_s_f64(run.swarm.deposit_every_s),
            ..Tuning::default()
        };
        let lots = Lots { microbatches: lots.microbatches, lots: lots.lots };
        let spec = Spec {
            run: run_id(&definition),
            stages: stages.len() as u16,
            costs: operations.map(|operations| operations / mean).collect(),
            lots,
            sync: Sync::Step,
            reduce: match run.swarm.reduce {
                run::Reduce::Exact => Reduce::Exact,
                run::Reduce::Fast => Reduce::Fast,
            },
            steps: Step(run.train.steps),
            checkpoint_every: run.checkpoint.every,
            elements: stages.iter().map(|stage| stage.gradient).collect(),
            shared: shared_sets(&architecture, &stages),
            state_bytes,
            memory_bytes: match run.train.device.is_emulated() {
                true => 0,
                false => stages.iter().map(|stage| stage.memory_bytes).max().unwrap_or(0),
            },
            tuning,
        };
        Ok(Charter { run, definition, spec })
    }

    /// The hash of what defines the training.
    pub fn identity(&self) -> [u8; 32] {
        identity(&self.definition)
    }

    /// What this machine can do: microbatches a second in an average stage, and the class of its arithmetic.
    pub fn measure(&self) -> Result<(f64, String), BuildError> {
        let (run, rule) = (&self.run, self.run.optimiser.rule());
        let architecture = run.model.architecture(self.definition.vocabulary);
        let stages = pipeline::plan(&architecture, rule, (&run.train, run.swarm), Keep::Input)?;
        let forward: u64 = stages.iter().map(|stage| stage.forward_operations).sum();
        let tokens = run.train.microbatch.min(run.train.batch) as usize * architecture.context;
        let operations = 3.0 * forward as f64 * tokens as f64 / stages.len() as f64;
        let per_s = pipeline::measure(&architecture, rule, &run.train)?;
        Ok((per_s / operations.max(1.0), pipeline::class(&run.train)?))
    }

    /// What a worker with so much memory keeps between forward and backward, whatever stage it holds.
    pub fn keep(&self, available_bytes: Option<u64>) -> Result<Keep, BuildError> {
        let (run, rule) = (&self.run, self.run.optimiser.rule());
        let architecture = run.model.architecture(self.definition.vocabulary);
        let stages = pipeline::plan(&architecture, rule, (&run.train, run.swarm), Keep::All)?;
        let needed = stages.iter().map(|stage| stage.memory_bytes).max().unwrap_or(0);
        Ok(run.train.keep.or_less(available_bytes.is_none_or(|bytes| needed <= bytes)))
    }

    /// How this process makes a stage that keeps this much.
    pub fn build(&self, keep: Keep) -> Build {
        let architecture = self.run.model.architecture(self.definition.vocabulary);
        let run = self.run.clone();
        let rule = run.optimiser.rule();
        Arc::new(move |stage| {
            let train = (&run.train, run.swarm);
            pipeline::build_worker(&architecture, rule, train, run.seed, (stage.0.into(), keep))
        })
    }
}

/// The sets of stages that use the same parameters.
fn shared_sets(architecture: &Architecture, stages: &[StagePlan]) -> Vec<Vec<StageId>> {
    let mut users: BTreeMap<String, BTreeSet<StageId>> = BTreeMap::new();
    for (stage, number) in stages.iter().zip(0..) {
        for parameter in stage.units.iter().flat_map(|&unit| architecture.parameters(unit)) {
            users.entry(parameter.name).or_default().insert(StageId(number));
        }
    }
    let several: BTreeSet<BTreeSet<StageId>> =
        users.into_values().filter(|stages| stages.len() > 1).collect();
    several.into_iter().map(|stages| stages.into_iter().collect()).collect()
}

/// Elements of the gradients of a stage's uses of what other stages use too.
fn uses_elsewhere(architecture: &Architecture, stages: &[StagePlan], stage: &StagePlan) -> u64 {
    let names = |stage: &StagePlan| -> BTreeSet<String> {
        stage.units.iter().flat_map(|&unit| architecture.parameters(unit)).map(|one| one.name).collect()
    };
    let others = stages.iter().filter(|other| other.units != stage.units);
    let elsewhere: BTreeSet<String> = others.flat_map(names).collect();
    let uses = stage.units.iter().flat_map(|&unit| architecture.parameters(unit));
    uses.filter(|one| elsewhere.contains(&one.name)).map(|one| one.elements() as u64).sum()
}

fn identity(definition: &Definition) -> [u8; 32] {
    blake3::Hash::from_hex(definition.identity()).map_or([0; 32], |hash| *hash.as_bytes())
}

fn run_id(definition: &Definition) -> RunId {
    let [a, b, c, d, e, f, g, h, ..] = identity(definition);
    RunId(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}

/// Why a run cannot be trained by a swarm.
#[derive(Debug, thiserror::Error)]
pub enum CharterError {
    /// What a joiner would have to be sent is too large for one letter.
    #[error(
        "the state of a stage would be {:.1} GB, and a peer can be sent {:.1} GB; cut the model into more stages \
         (train.stages)",
        *.state_bytes as f64 / 1e9, *.most as f64 / 1e9
    )]
    State {
        /// Bytes of the largest stage's weights and moments.
        state_bytes: u64,
        /// Bytes that can be sent.
        most: u64,
    },
    /// What stages would have to send each other of the parameters that they share is too large for one letter.
    #[error(
        "a stage would have to send {:.1} GB of the gradients of parameters that it shares with others, and can send \
         {:.1} GB; share fewer layers, or cut the model where none is shared",
        *.uses_bytes as f64 / 1e9, *.most as f64 / 1e9
    )]
    Uses {
        /// Bytes of the gradients.
        uses_bytes: u64,
        /// Bytes that can be sent.
        most: u64,
    },
    /// There are no such stages.
    #[error(transparent)]
    Build(#[from] BuildError),
}

#[cfg(test)]
mod tests {
    use starling_model::config::ModelConfig;
    use starling_model::run::TrainConfig;

    use super::*;

    fn charter(layers: usize, stages: usize) -> Result<Charter, CharterError> {
        let model = ModelConfig { width: 8192, layers, heads: 64, ..Default::default() };
        let run = Run { model, train: TrainConfig { stages, ..Default::default() }, ..Default::default() };
        let definition = run.definition(257, String::new());
        Charter::new(run, definition, 1)
    }

    #[test]
    fn a_stage_whose_state_could_not_be_sent_is_refused_before_anything_begins() {
        let refused = charter(8, 2).map(|charter| charter.spec.state_bytes);
        assert!(matches!(refused, Err(CharterError::State { state_bytes, .. }) if state_bytes > 30 << 30));
    }

    #[test]
    fn stages_that_use_the_same_parameters_are_found() {
        let small = ModelConfig { width: 16, layers: 4, heads: 2, share_every: 3, ..Default::default() };
        let train = TrainConfig { stages: 3, ..Default::default() };
        let run = Run { model: small, train, ..Default::default() };
        let definition = run.definition(257, String::new());
        let shared = Charter::new(run, definition, 1).map(|charter| charter.spec.shared);
        let expected = vec![vec![StageId(0), StageId(1)], vec![StageId(0), StageId(2)]];
        assert_eq!(shared.ok(), Some(expected));
    }
}
