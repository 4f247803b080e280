//! The one-process loop: the whole of training in view, without network or concurrency. It is the truth that
//! every distributed run is compared with, and the first file to read.
//!
//! The model may be cut into any number of stages and a step into any number of lots. Stages are separate
//! objects, and what crosses between them is bytes, just as between machines.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use starling_corpus::Sampler;

use crate::batch;
use crate::config::Architecture;
use crate::cut::cut;
use crate::engine::naive::Naive;
use crate::local::LocalStage;
use crate::lots::Lots;
use crate::optimiser::Rule;
use crate::reduce::{reduce_piece, settle_shared};
use crate::run::{Precision, Run, TrainConfig};
use crate::stage::{Commit, Folded, Input, Loss, Meta, Microbatch, Output, Stage, StageError, Want};

/// A model in training, in one process.
pub struct Reference {
    run: Run,
    sampler: Sampler,
    stages: Vec<Box<dyn Stage>>,
}

/// What one step did.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// Which step, counted from 0.
    pub step: u64,
    /// Loss over the step's samples, before the update.
    pub loss: Loss,
    /// Global norm of the mean gradient, before clipping.
    pub norm: f64,
    /// Learning rate.
    pub lr: f64,
    /// Whether the update was skipped because the gradient was not finite.
    pub skipped: bool,
}

impl Reference {
    /// The run at step 0. The run must have no problems, and the sampler be made for it.
    pub fn new(run: Run, vocabulary: usize, sampler: Sampler) -> Result<Reference, BuildError> {
        let architecture = run.model.architecture(vocabulary);
        let stages = stages(&architecture, run.optimiser.rule(), &run.train, run.seed)?;
        Ok(Reference { run, sampler, stages })
    }

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.stages[0].version()
    }

    /// One step: every microbatch forward and backward through every stage, the sums reduced, one commit.
    pub fn step(&mut self) -> Result<StepReport, StageError> {
        let step = self.steps_done();
        let lots = self.run.train.lots();
        let mut loss = Loss::default();
        for index in 0..lots.microbatches {
            loss += self.microbatch(Microbatch { step, index, version: step }, lots)?;
        }
        self.reduce(lots)?;
        let norm = self.gradient_norm(loss.tokens)?;
        let update = self.run.optimiser.update(step, self.run.train.steps, loss.tokens, norm);
        // A gradient that is not finite would ruin the weights: every stage skips the update.
        let skipped = !norm.is_finite();
        let commit = Commit { version: step, update: (!skipped).then_some(update) };
        for stage in &mut self.stages {
            stage.apply(&commit)?;
        }
        Ok(StepReport { step, loss, norm, lr: update.lr, skipped })
    }

    /// One microbatch through the pipeline and back; each stage folds its gradient into the lot.
    fn microbatch(&mut self, microbatch: Microbatch, lots: Lots) -> Result<Loss, StageError> {
        let (mut input, meta) = self.contents(microbatch);
        let keep = self.run.train.keep;
        let mut tickets = Vec::new();
        let mut loss = Loss::default();
        for stage in &mut self.stages {
            let (output, ticket) = stage.forward(microbatch, input, meta.clone(), keep)?;
            tickets.push(ticket);
            input = Input::Tokens(Vec::new());
            match output {
                Output::Hidden(hidden) => input = Input::Hidden(hidden),
                Output::Loss(sum) => loss = sum,
                Output::Logits(_) => {}
            }
        }
        let mut gradient = None;
        for (stage, ticket) in self.stages.iter_mut().zip(tickets).rev() {
            let (before, pending) = stage.backward(ticket, gradient)?;
            let _: Folded = stage.fold(pending, lots)?;
            gradient = before;
        }
        Ok(loss)
    }

    /// The samples of a microbatch: numbered through the whole run, so that their contents are fixed.
    fn contents(&self, microbatch: Microbatch) -> (Input, Meta) {
        let TrainConfig { batch, microbatch: size, .. } = self.run.train;
        let first = microbatch.step * u64::from(batch);
        let from = u64::from(microbatch.index) * u64::from(size);
        let to = (from + u64::from(size)).min(batch.into());
        batch::training(&self.sampler, first + from..first + to, self.run.data.document_mask)
    }

    /// Sums each stage's lots in the fixed tree, then parameters that have several uses.
    fn reduce(&mut self, lots: Lots) -> Result<(), StageError> {
        for stage in &mut self.stages {
            let len = stage.gradient_len();
            let sum = reduce_piece(&[&**stage], lots.lots, 0..len)?;
            stage.begin_reduce();
            stage.write_reduced(0, &sum.ok_or(StageError::Incomplete { missing: len })?)?;
        }
        let mut all: Vec<Vec<&mut dyn Stage>> = Vec::new();
        for stage in &mut self.stages {
            all.push(vec![&mut **stage]);
        }
        settle_shared(&mut all)
    }

    /// Global norm of the mean gradient: squares are summed parameter by parameter, in the order of names.
    fn gradient_norm(&self, tokens: u64) -> Result<f64, StageError> {
        let mut squares = BTreeMap::new();
        for stage in &self.stages {
            squares.extend(stage.prepare()?.sums_of_squares);
        }
        Ok(squares.values().sum::<f64>().sqrt() / tokens as f64)
    }

    /// The hash of all weights; the same however the model is cut.
    pub fn weights_hash(&self) -> String {
        weights_hash(self.stages.iter().map(|stage| stage.weight_hashes()))
    }

    /// The stages, to be saved or asked.
    pub fn stages(&self) -> &[Box<dyn Stage>] {
        &self.stages
    }

    /// The stages, to be restored.
    pub fn stages_mut(&mut self) -> &mut [Box<dyn Stage>] {
        &mut self.stages
    }

    /// The run.
    pub fn run(&self) -> &Run {
        &self.run
    }

    /// Where samples come from.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }
}

/// Builds the stages of a model, with initial weights.
pub fn stages(
    architecture: &Architecture,
    rule: Rule,
    train: &TrainConfig,
    seed: u64,
) -> Result<Vec<Box<dyn Stage>>, BuildError> {
    let cuts = cut(architecture, train.stages);
    Ok(match train.precision {
        Precision::F32 => {
            let engine = Arc::new(Naive::<f32>::new(train.threads)?);
            let stage = |cut| LocalStage::new(engine.clone(), architecture.clone(), cut, rule, seed);
            cuts.into_iter().map(|cut| Box::new(stage(cut)) as Box<dyn Stage>).collect()
        }
        Precision::F64 => {
            let engine = Arc::new(Naive::<f64>::new(train.threads)?);
            let stage = |cut| LocalStage::new(engine.clone(), architecture.clone(), cut, rule, seed);
            cuts.into_iter().map(|cut| Box::new(stage(cut)) as Box<dyn Stage>).collect()
        }
    })
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

/// The engine could not be started.
#[derive(Debug, thiserror::Error)]
#[error("the engine's threads could not be started: {0}; use fewer with train.threads")]
pub struct BuildError(#[from] rayon::ThreadPoolBuildError);
