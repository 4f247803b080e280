//! A pipeline in one process: its stages built, asked, and hashed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::config::Architecture;
use crate::cut::cut;
use crate::engine::Shape;
use crate::engine::naive::{Naive, Real};
use crate::gpt2::Unit;
use crate::local::{LocalStage, Units};
use crate::memory;
use crate::optimiser::Rule;
use crate::run::{Precision, TrainConfig};
use crate::stage::{Input, Loss, Meta, Output, Stage, StageError, Want};

/// The stages of a model, in order.
pub type Stages = Vec<Box<dyn Stage>>;

/// Builds the stages of a model, with initial weights, if this machine's memory is enough for them.
pub fn build(
    architecture: &Architecture,
    rule: Rule,
    train: &TrainConfig,
    seed: u64,
) -> Result<Stages, BuildError> {
    match train.precision {
        Precision::F32 => build_in::<f32>(architecture, rule, train, seed),
        Precision::F64 => build_in::<f64>(architecture, rule, train, seed),
    }
}

/// One stage of a model, with initial weights, on its own engine.
pub fn build_stage(
    architecture: &Architecture,
    rule: Rule,
    train: &TrainConfig,
    seed: u64,
    index: usize,
) -> Result<Box<dyn Stage>, BuildError> {
    fn build_in<T: Real>(
        architecture: &Architecture,
        rule: Rule,
        train: &TrainConfig,
        seed: u64,
        range: Range<usize>,
    ) -> Result<Box<dyn Stage>, BuildError> {
        let engine = Arc::new(Naive::<T>::new(train.threads)?);
        Ok(Box::new(LocalStage::new(engine, architecture.clone(), range, rule, seed)))
    }
    let range = cut(architecture, train.stages).get(index).cloned();
    let range = range.ok_or(BuildError::Stage { index, stages: train.stages })?;
    match train.precision {
        Precision::F32 => build_in::<f32>(architecture, rule, train, seed, range),
        Precision::F64 => build_in::<f64>(architecture, rule, train, seed, range),
    }
}

/// What one stage of a run would be, found without taking memory for it.
#[derive(Clone, Debug, PartialEq)]
pub struct StagePlan {
    /// Its units.
    pub units: Vec<Unit>,
    /// Elements of its weights.
    pub parameters: u64,
    /// Elements of a gradient as it is reduced, a slot for each use of a parameter.
    pub gradient: u64,
    /// Bytes that a peer of it needs, with one microbatch in flight.
    pub memory_bytes: u64,
    /// Multiplications and additions of a forward pass, for each token.
    pub forward_operations: u64,
}

/// The stages that a run would have.
pub fn plan(
    architecture: &Architecture,
    rule: Rule,
    train: &TrainConfig,
) -> Result<Vec<StagePlan>, BuildError> {
    match train.precision {
        Precision::F32 => plan_in::<f32>(architecture, rule, train),
        Precision::F64 => plan_in::<f64>(architecture, rule, train),
    }
}

fn plan_in<T: Real>(
    architecture: &Architecture,
    rule: Rule,
    train: &TrainConfig,
) -> Result<Vec<StagePlan>, BuildError> {
    let engine = Arc::new(Naive::<T>::new(1)?);
    let plan_of = |range: Range<usize>| {
        let units = Units::new(engine.clone(), architecture.clone(), range.clone(), 0);
        let list = architecture.units()[range].to_vec();
        StagePlan {
            parameters: units.layout.len() as u64,
            gradient: units.gradient_len as u64,
            memory_bytes: units.plan(rule.moments(), microbatch_shape(architecture, train), 1, train.keep),
            forward_operations: list.iter().map(|&unit| architecture.forward_operations(unit)).sum(),
            units: list,
        }
    };
    Ok(cut(architecture, train.stages).into_iter().map(plan_of).collect())
}

fn microbatch_shape(architecture: &Architecture, train: &TrainConfig) -> Shape {
    Shape { rows: train.microbatch.min(train.batch) as usize, columns: architecture.context }
}

fn build_in<T: Real>(
    architecture: &Architecture,
    rule: Rule,
    train: &TrainConfig,
    seed: u64,
) -> Result<Stages, BuildError> {
    let engine = Arc::new(Naive::<T>::new(train.threads)?);
    let shape = microbatch_shape(architecture, train);
    let lay_out = |cut| Units::new(engine.clone(), architecture.clone(), cut, seed);
    let parts: Vec<Units<Naive<T>>> = cut(architecture, train.stages).into_iter().map(lay_out).collect();
    // One microbatch is in flight at a time.
    let needed: u64 = parts
        .iter()
        .fold(0, |sum, units| sum.saturating_add(units.plan(rule.moments(), shape, 1, train.keep)));
    if let Some(available) = memory::available_bytes().filter(|&available| available < needed) {
        return Err(BuildError::Memory { needed, available });
    }
    let stage = |units| Box::new(LocalStage::with(units, rule, seed)) as Box<dyn Stage>;
    Ok(parts.into_iter().map(stage).collect())
}

/// Forward through all stages, without dropout.
pub fn infer(
    stages: &[Box<dyn Stage>],
    mut input: Input,
    meta: &Meta,
    want: Want,
) -> Result<Output, StageError> {
    for stage in stages {
        match stage.infer(input, meta, want)? {
            Output::Hidden(hidden) => input = Input::Hidden(hidden),
            output => return Ok(output),
        }
    }
    Err(StageError::Unknown("head: the last stage of the model is missing".into()))
}

/// Loss over windows `0..windows`, some at a time; `contents` makes microbatches of them.
pub fn loss_over(
    stages: &[Box<dyn Stage>],
    windows: u64,
    at_a_time: u32,
    mut contents: impl FnMut(Range<u64>) -> (Input, Meta),
) -> Result<Loss, StageError> {
    let mut loss = Loss::default();
    let mut first = 0;
    while first < windows {
        let end = windows.min(first + u64::from(at_a_time));
        let (input, meta) = contents(first..end);
        if let Output::Loss(sum) = infer(stages, input, &meta, Want::Loss)? {
            loss += sum;
        }
        first = end;
    }
    Ok(loss)
}

/// The hash of all weights from those of all stages: of the parameters in the order of names.
pub fn weights_hash(stages: impl Iterator<Item = BTreeMap<String, [u8; 32]>>) -> String {
    let parameters: BTreeMap<String, [u8; 32]> = stages.flatten().collect();
    let mut hasher = blake3::Hasher::new_derive_key("starling 2026 weights");
    for (name, hash) in parameters {
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hasher.update(&hash);
    }
    hasher.finalize().to_hex().to_string()
}

/// Why the stages could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The engine could not be started.
    #[error("the engine's threads could not be started; use fewer with train.threads")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// There is no such stage.
    #[error("the run has {stages} stages, and none of number {index}")]
    Stage {
        /// Which was asked for.
        index: usize,
        /// How many there are.
        stages: usize,
    },
    /// Too large for this machine.
    #[error(
        "the run needs about {:.1} GB of memory and {:.1} GB are available; use a smaller model.width, \
         model.layers or train.microbatch, or train.keep = \"input\"",
        *.needed as f64 / 1e9, *.available as f64 / 1e9
    )]
    Memory {
        /// Bytes that it needs.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
}
