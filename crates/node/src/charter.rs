//! What every node of a run must know of it. The coordinator makes it; who joins is told.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use starling_model::config::Architecture;
use starling_model::engine::Dtype;
use starling_model::pipeline::{self, BuildError, StagePlan};
use starling_model::run::{self, Definition, Precision, Run};
use starling_swarm::ids::{RunId, StageId, Step};
use starling_swarm::lots::Lots;
use starling_swarm::spec::{Reduce, Spec, Sync, Tuning};

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
        let stages = pipeline::plan(&architecture, rule, &run.train)?;
        let operations = stages.iter().map(|stage| stage.forward_operations as f64);
        let mean = operations.clone().sum::<f64>() / stages.len() as f64;
        let element = match run.train.precision {
            Precision::F32 => Dtype::F32.size(),
            Precision::F64 => Dtype::F64.size(),
        } as u64;
        let largest = stages.iter().map(|stage| stage.parameters).max().unwrap_or(0);
        let lots = run.train.lots();
        let spec = Spec {
            run: run_id(&definition),
            stages: stages.len() as u16,
            costs: operations.map(|operations| operations / mean).collect(),
            lots: Lots { microbatches: lots.microbatches, lots: lots.lots },
            sync: Sync::Step,
            reduce: match run.swarm.reduce {
                run::Reduce::Exact => Reduce::Exact,
                run::Reduce::Fast => Reduce::Fast,
            },
            steps: Step(run.train.steps),
            checkpoint_every: run.checkpoint.every,
            elements: stages.iter().map(|stage| stage.gradient).collect(),
            shared: shared_sets(&architecture, &stages),
            state_bytes: largest * element * (1 + rule.moments() as u64),
            memory_bytes: match run.train.device.is_emulated() {
                true => 0,
                false => stages.iter().map(|stage| stage.memory_bytes).max().unwrap_or(0),
            },
            tuning: Tuning { quorum: peers.max(stages.len()), ..Tuning::default() },
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
        let stages = pipeline::plan(&architecture, rule, &run.train)?;
        let forward: u64 = stages.iter().map(|stage| stage.forward_operations).sum();
        let tokens = run.train.microbatch.min(run.train.batch) as usize * architecture.context;
        let operations = 3.0 * forward as f64 * tokens as f64 / stages.len() as f64;
        let per_s = pipeline::measure(&architecture, rule, &run.train)?;
        Ok((per_s / operations.max(1.0), pipeline::class(&run.train)?))
    }

    /// How this process makes a stage.
    pub fn build(&self) -> Build {
        let architecture = self.run.model.architecture(self.definition.vocabulary);
        let (rule, train, seed) = (self.run.optimiser.rule(), self.run.train.clone(), self.run.seed);
        Arc::new(move |stage| pipeline::build_stage(&architecture, rule, &train, seed, stage.0.into()))
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
    /// There are no such stages.
    #[error(transparent)]
    Build(#[from] BuildError),
}
