//! A pipeline in one process: its stages built, asked, and hashed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::config::Architecture;
use crate::cut::cut;
use crate::device::Device;
use crate::engine::cpu::{Cpu, CpuError};
use crate::engine::emulated::Emulated;
use crate::engine::naive::Naive;
use crate::engine::{Engine, Shape};
use crate::holding::{device_bytes, worker_bytes};
use crate::local::{LocalStage, Units};
use crate::optimiser::Rule;
use crate::run::{Precision, SwarmConfig, TrainConfig};
use crate::stage::{Hidden, Input, Keep, Loss, Memory, Meta, Microbatch, Output, Stage, StageError, Want};
use crate::transformer::Unit;

/// The stages of a model, in order.
pub type Stages = Vec<Box<dyn Stage>>;

/// Does something with the engine that a run asks for, whatever its type; leaves the function if it cannot be had.
macro_rules! with_engine {
    ($train:expr, $engine:ident => $work:expr) => {
        match ($train.device, $train.precision) {
            (Device::Cpu, Precision::F32) => {
                let $engine = Arc::new(Cpu::new($train.threads)?);
                $work
            }
            (Device::Cpu, Precision::Bf16) => {
                let $engine = Arc::new(Cpu::bf16($train.threads)?);
                $work
            }
            (Device::Naive, Precision::Bf16) => return Err(BuildError::Naive),
            (Device::Naive, Precision::F32) => {
                let $engine = Arc::new(Naive::<f32>::new($train.threads)?);
                $work
            }
            (Device::Cpu | Device::Naive, Precision::F64) => {
                let $engine = Arc::new(Naive::<f64>::new($train.threads)?);
                $work
            }
            (Device::Emulated(tflops), _) => {
                let $engine = Arc::new(Emulated::new(tflops));
                $work
            }
        }
    };
}

/// Builds the stages of a model, with initial weights, if this machine's memory is enough for them. With
/// [`Rule::Fixed`] they can only be asked, and take little more than their weights; a model that is trained with bf16 is asked with
/// f32, so that any machine can.
pub fn build(
    architecture: &Architecture,
    rule: Rule,
    train: &TrainConfig,
    seed: u64,
) -> Result<Stages, BuildError> {
    let train = if rule == Rule::Fixed { &train.untrained() } else { train };
    with_engine!(train, engine => build_on(engine, architecture, rule, train, seed))
}

/// One stage of a model, with initial weights, on its own engine.
pub fn build_stage(
    architecture: &Architecture,
    rule: Rule,
    train: &TrainConfig,
    seed: u64,
    index: usize,
) -> Result<Box<dyn Stage>, BuildError> {
    let (range, architecture) = (range_of(architecture, train.stages, index)?, architecture.clone());
    Ok(with_engine!(train, engine => Box::new(LocalStage::new(engine, architecture, range, rule, seed))))
}

/// The same for a worker of a swarm that keeps this much: it has taken the memory that it will need.
pub fn build_worker(
    architecture: &Architecture,
    rule: Rule,
    (train, swarm): (&TrainConfig, SwarmConfig),
    seed: u64,
    (index, keep): (usize, Keep),
) -> Result<Box<dyn Stage>, BuildError> {
    let range = range_of(architecture, train.stages, index)?;
    let size = (rule.moments(), microbatch_shape(architecture, train));
    Ok(with_engine!(train, engine => {
        let units = Units::new(engine.clone(), architecture.clone(), range, seed);
        let needed = device_bytes(&units, size, train, swarm, (index, keep));
        check_memory(needed, train, rule)?;
        engine.reserve(needed);
        Box::new(LocalStage::with(units, rule, seed))
    }))
}

/// The units of a stage.
fn range_of(architecture: &Architecture, stages: usize, index: usize) -> Result<Range<usize>, BuildError> {
    cut(architecture, stages).get(index).cloned().ok_or(BuildError::NoStage { index, stages })
}

fn check_memory(needed: u64, train: &TrainConfig, rule: Rule) -> Result<(), BuildError> {
    match train.memory_bytes().filter(|&available| available < needed) {
        Some(available) if rule == Rule::Fixed => Err(BuildError::MemoryToAsk { needed, available }),
        Some(available) => Err(BuildError::Memory { needed, available }),
        None => Ok(()),
    }
}

/// The numerics class of a run's peers: those of one class agree bit for bit.
pub fn class(train: &TrainConfig) -> Result<String, BuildError> {
    Ok(with_engine!(train, engine => engine.class()))
}

/// Operations a second of this machine, measured on one sample in a block of the model: the best of some tries, so
/// that others who work here at this moment count little.
pub fn measure(architecture: &Architecture, rule: Rule, train: &TrainConfig) -> Result<f64, BuildError> {
    const TRIES: usize = 20;
    const LONG_ENOUGH: Duration = Duration::from_millis(300);
    let train = TrainConfig { stages: architecture.units().len(), ..train.clone() };
    let mut block = build_stage(architecture, rule, &train, 0, 1)?;
    let shape = Shape { rows: 1, columns: architecture.context };
    let (width, dtype, tokens) = (architecture.width, block.dtype(), shape.tokens());
    let hidden = Hidden { shape, width, dtype, bytes: vec![0; tokens * width * dtype.size()] };
    let (positions, zeros) = ((0..tokens as u32).collect(), vec![0; tokens]);
    let meta = Meta { shape, samples: vec![0], positions, documents: zeros.clone(), targets: zeros };
    let began = Instant::now();
    let mut best = Duration::MAX;
    for index in 0..TRIES as u32 {
        let try_began = Instant::now();
        let of = Microbatch { step: 0, index, version: 0 };
        let (_, ticket) = block.forward(of, Input::Hidden(hidden.clone()), meta.clone(), Keep::All)?;
        let (_, pending) = block.backward(ticket, Some(hidden.clone()))?;
        best = best.min(try_began.elapsed());
        block.discard(pending);
        if began.elapsed() > LONG_ENOUGH {
            break;
        }
    }
    // Backward is twice forward.
    let operations = 3 * architecture.forward_operations(Unit::Block(0)) * tokens as u64;
    Ok(operations as f64 / best.as_secs_f64().max(1e-9))
}

/// Operations a second that the run's device can do at the most; see [`Engine::peak`].
pub fn peak(train: &TrainConfig) -> Result<Option<f64>, BuildError> {
    Ok(with_engine!(train, engine => engine.peak()))
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
    /// Bytes that a worker of a swarm needs for it, all in all.
    pub memory_bytes: u64,
    /// Multiplications and additions of a forward pass, for each token.
    pub forward_operations: u64,
    /// What it keeps between forward and backward.
    pub keep: Keep,
}

/// The stages that a run would have, if they keep this much.
pub fn plan(
    architecture: &Architecture,
    rule: Rule,
    (train, swarm): (&TrainConfig, SwarmConfig),
    keep: Keep,
) -> Result<Vec<StagePlan>, BuildError> {
    let train = &train.untrained();
    Ok(with_engine!(train, engine => plan_on(engine, architecture, rule, (train, swarm), keep)))
}

/// What one process that trains the whole model keeps between forward and backward.
pub fn keep(architecture: &Architecture, rule: Rule, train: &TrainConfig) -> Result<Keep, BuildError> {
    let train = &train.untrained();
    let needed = with_engine!(train, engine => {
        let parts = lay_out(&engine, architecture, train, 0);
        needed(&parts, rule, microbatch_shape(architecture, train), Keep::All)
    });
    Ok(train.keep.or_less(train.memory_bytes().is_none_or(|bytes| needed <= bytes)))
}

fn plan_on<E: Engine>(
    engine: Arc<E>,
    architecture: &Architecture,
    rule: Rule,
    (train, swarm): (&TrainConfig, SwarmConfig),
    keep: Keep,
) -> Vec<StagePlan> {
    let size = (rule.moments(), microbatch_shape(architecture, train));
    let plan_of = |(stage, range): (usize, Range<usize>)| {
        let units = Units::new(engine.clone(), architecture.clone(), range.clone(), 0);
        let list = architecture.units()[range].to_vec();
        StagePlan {
            parameters: units.layout.len() as u64,
            gradient: units.gradient_len as u64,
            memory_bytes: worker_bytes(&units, size, train, swarm, (stage, keep)),
            forward_operations: list.iter().map(|&unit| architecture.forward_operations(unit)).sum(),
            units: list,
            keep,
        }
    };
    cut(architecture, train.stages).into_iter().enumerate().map(plan_of).collect()
}

fn microbatch_shape(architecture: &Architecture, train: &TrainConfig) -> Shape {
    Shape { rows: train.microbatch.min(train.batch) as usize, columns: architecture.context }
}

fn build_on<E: Engine>(
    engine: Arc<E>,
    architecture: &Architecture,
    rule: Rule,
    train: &TrainConfig,
    seed: u64,
) -> Result<Stages, BuildError> {
    let shape = microbatch_shape(architecture, train);
    let parts = lay_out(&engine, architecture, train, seed);
    let all = needed(&parts, rule, shape, Keep::All);
    let keep = train.keep.or_less(train.memory_bytes().is_none_or(|bytes| all <= bytes));
    check_memory(needed(&parts, rule, shape, keep), train, rule)?;
    let stage = |units| Box::new(LocalStage::with(units, rule, seed)) as Box<dyn Stage>;
    Ok(parts.into_iter().map(stage).collect())
}

fn lay_out<E: Engine>(
    engine: &Arc<E>,
    architecture: &Architecture,
    train: &TrainConfig,
    seed: u64,
) -> Vec<Units<E>> {
    let units = |cut| Units::new(engine.clone(), architecture.clone(), cut, seed);
    cut(architecture, train.stages).into_iter().map(units).collect()
}

/// Bytes that one process needs for all stages: one microbatch is in flight at a time.
fn needed<E: Engine>(parts: &[Units<E>], rule: Rule, shape: Shape, keep: Keep) -> u64 {
    let needs = |units: &Units<E>| match rule {
        Rule::Fixed => units.plan_to_ask(shape),
        _ => units.plan(rule.moments(), shape, 1, keep),
    };
    parts.iter().map(needs).fold(0, u64::saturating_add)
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

/// Goes on with a text through all stages: the logits of what follows; see [`Stage::proceed`].
pub fn proceed(
    stages: &[Box<dyn Stage>],
    memories: &mut [Memory],
    mut input: Input,
    meta: &Meta,
) -> Result<Vec<f32>, StageError> {
    for (stage, memory) in stages.iter().zip(memories) {
        match stage.proceed(memory, input, meta)? {
            Output::Hidden(hidden) => input = Input::Hidden(hidden),
            Output::Logits(logits) => return Ok(logits),
            Output::Loss(_) => break,
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

/// So many bytes, in words.
fn amount(bytes: u64) -> String {
    match bytes {
        1_000_000_000.. => format!("{:.1} GB", bytes as f64 / 1e9),
        _ => format!("{:.1} MB", bytes as f64 / 1e6),
    }
}

/// Why the stages could not be built.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// The engine could not be started.
    #[error("the engine's threads could not be started; use fewer with train.threads")]
    Threads(#[from] rayon::ThreadPoolBuildError),
    /// The fast engine could not be started.
    #[error(transparent)]
    Cpu(#[from] CpuError),
    /// Only the fast engine has it.
    #[error(
        "the naive engine does not compute with bf16; use train.precision = \"f32\", or train.device = \"cpu\""
    )]
    Naive,
    /// A stage refused.
    #[error(transparent)]
    Stage(#[from] StageError),
    /// There is no such stage.
    #[error("the run has {stages} stages, and none of number {index}")]
    NoStage {
        /// Which was asked for.
        index: usize,
        /// How many there are.
        stages: usize,
    },
    /// Too large for this machine.
    #[error(
        "the run needs about {} of memory and {} are available; use a smaller model.width, \
         model.layers or train.microbatch, or another train.keep or train.memory_gb if the run file says one",
        amount(*.needed), amount(*.available)
    )]
    Memory {
        /// Bytes that it needs.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
    /// Too large to be asked on this machine.
    #[error(
        "asking the model needs about {} of memory and {} are available; ask about fewer tokens at a time, \
         or on a larger machine",
        amount(*.needed), amount(*.available)
    )]
    MemoryToAsk {
        /// Bytes that it needs.
        needed: u64,
        /// Bytes that there are.
        available: u64,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::ModelConfig;
    use crate::optimiser::OptimiserConfig;
    use crate::run::Keeping;
    use crate::run::Run;

    fn with(device: Device) -> TrainConfig {
        TrainConfig { precision: Precision::Bf16, device, threads: 1, ..TrainConfig::default() }
    }

    #[test]
    fn a_model_that_is_trained_with_bf16_can_be_asked_on_every_machine() {
        let architecture = ModelConfig { context: 4, width: 4, layers: 1, heads: 1, ..Default::default() };
        assert!(build(&architecture.architecture(9), Rule::Fixed, &with(Device::Cpu), 1).is_ok());
    }

    #[test]
    fn a_run_with_bf16_can_be_planned_on_every_machine_and_takes_what_it_takes_with_f32() {
        let architecture = ModelConfig { context: 4, width: 4, layers: 1, heads: 1, ..Default::default() };
        let plan_with = |precision| {
            let train = TrainConfig { precision, ..with(Device::Cpu) };
            let rule = OptimiserConfig::default().rule();
            plan(&architecture.architecture(9), rule, (&train, SwarmConfig::default()), Keep::All).unwrap()
        };
        assert_eq!(plan_with(Precision::Bf16), plan_with(Precision::F32));
    }

    #[test]
    fn the_naive_engine_is_not_asked_for_bf16() {
        let run = Run { train: with(Device::Naive), ..Run::default() };
        assert!(run.problems().iter().any(|problem| problem.key == "train.precision"));
        let (architecture, rule) = (run.model.architecture(9), OptimiserConfig::default().rule());
        assert!(matches!(build(&architecture, rule, &run.train, 1), Err(BuildError::Naive)));
    }

    #[test]
    fn where_there_is_not_memory_for_everything_less_is_kept() {
        let model = ModelConfig { context: 64, width: 32, layers: 6, heads: 2, ..Default::default() };
        let (architecture, rule) = (model.architecture(100), Rule::Sgd { momentum: 0.0, weight_decay: 0.0 });
        let train = TrainConfig { batch: 8, microbatch: 8, threads: 1, ..TrainConfig::default() };
        let engine = Arc::new(Naive::<f32>::new(1).unwrap());
        let train = TrainConfig { device: Device::Naive, ..train };
        let shape = microbatch_shape(&architecture, &train);
        let bytes = |keep| needed(&lay_out(&engine, &architecture, &train, 0), rule, shape, keep);
        let (all, less) = (bytes(Keep::All), bytes(Keep::Input));
        assert!(3 * less < 2 * all, "{less} of {all}");
        let with =
            |bytes: u64, kept| TrainConfig { memory_gb: bytes as f64 / 1e9, keep: kept, ..train.clone() };
        let kept = |bytes, said| keep(&architecture, rule, &with(bytes, said)).unwrap();
        assert_eq!(kept(all + 9, Keeping::Auto), Keep::All);
        assert_eq!(kept(all - 9, Keeping::Auto), Keep::Input);
        assert_eq!(kept(all - 9, Keeping::All), Keep::All);
        let built = |bytes, said| build(&architecture, rule, &with(bytes, said), 0);
        assert!(built(less + 9, Keeping::Auto).is_ok());
        for (bytes, said) in [(less - 9, Keeping::Auto), (all - 9, Keeping::All)] {
            assert!(matches!(built(bytes, said), Err(BuildError::Memory { .. })));
        }
    }
}
