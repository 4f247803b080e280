//! The one-process loop: the whole of training in view, without network or concurrency. It is the truth that
//! every distributed run is compared with, and the first file to read.
//!
//! The model may be cut into any number of stages and a step into any number of lots. Stages are separate
//! objects, and what crosses between them is bytes, just as between machines.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;

use starling_corpus::Sampler;

use crate::batch;
use crate::checkpoint::{Checkpoint, RestoreError};
use crate::lots::Lots;
use crate::optimiser::Rule;
use crate::pipeline::{self, BuildError, Stages, weights_hash};
use crate::reduce::settle_shared;
use crate::run::{Run, TrainConfig};
use crate::stage::{
    Commit, Folded, Input, Keep, Loss, Meta, Microbatch, Output, Reduction, Stage, StageError,
};

/// A model in training, in one process.
pub struct Reference {
    run: Run,
    /// What stages keep between forward and backward.
    keep: Keep,
    sampler: Sampler,
    stages: Stages,
    /// Steps whose update was skipped.
    skipped: u64,
    /// Steps whose update is to be left out.
    left_out: BTreeSet<u64>,
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
    /// Whether the update was skipped, because the gradient was not finite or was to be left out.
    pub skipped: bool,
}

impl Reference {
    /// The run at step 0. The run must have no problems, and the sampler be made for it.
    pub fn new(run: Run, vocabulary: usize, sampler: Sampler) -> Result<Reference, BuildError> {
        let rule = run.optimiser.rule();
        Reference::with(run, rule, vocabulary, sampler)
    }

    /// The same, only to be asked: it cannot learn, and takes less memory.
    pub fn to_ask(run: Run, vocabulary: usize, sampler: Sampler) -> Result<Reference, BuildError> {
        Reference::with(run, Rule::Fixed, vocabulary, sampler)
    }

    fn with(run: Run, rule: Rule, vocabulary: usize, sampler: Sampler) -> Result<Reference, BuildError> {
        let architecture = run.model.architecture(vocabulary);
        let keep = pipeline::keep(&architecture, rule, &run.train)?;
        let train = TrainConfig { keep: keep.into(), ..run.train.clone() };
        let stages = pipeline::build(&architecture, rule, &train, run.seed)?;
        Ok(Reference { run, keep, sampler, stages, skipped: 0, left_out: BTreeSet::new() })
    }

    /// What stages keep between forward and backward.
    pub fn keep(&self) -> Keep {
        self.keep
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
        let reduction = Reduction { step, attempt: 0 };
        let norm = self.reduce(reduction)?.sqrt() / loss.tokens as f64;
        let applied = step - self.skipped;
        let update = self.run.optimiser.update(step, self.run.train.steps, applied, loss.tokens, norm);
        // A gradient that is not finite would ruin the weights: every stage skips the update.
        let skipped = !norm.is_finite() || self.left_out.contains(&step);
        let commit = Commit { step, version: step, update: (!skipped).then_some(update) };
        for stage in &mut self.stages {
            stage.apply(&commit)?;
        }
        self.skipped += u64::from(skipped);
        Ok(StepReport { step, loss, norm, lr: update.lr, skipped })
    }

    /// One microbatch through the pipeline and back; each stage folds its gradient into the lot.
    fn microbatch(&mut self, microbatch: Microbatch, lots: Lots) -> Result<Loss, StageError> {
        let (mut input, meta) = self.contents(microbatch);
        let mut tickets = Vec::new();
        let mut loss = Loss::default();
        for stage in &mut self.stages {
            let (output, ticket) = stage.forward(microbatch, input, meta.clone(), self.keep)?;
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

    fn contents(&self, microbatch: Microbatch) -> (Input, Meta) {
        let samples = self.run.train.samples(microbatch.step, microbatch.index);
        batch::training(&self.sampler, samples, self.run.data.document_mask)
    }

    /// Each stage's lots were summed in the fixed tree as they were sealed; then come parameters that have several uses.
    /// Returns Σ g² of all: parameter by parameter, in the order of names.
    fn reduce(&mut self, reduction: Reduction) -> Result<f64, StageError> {
        let mut squares = BTreeMap::new();
        for stage in &mut self.stages {
            stage.reduce_alone(reduction)?;
            squares.extend(stage.sums_of_squares(reduction)?);
        }
        let mut all: Vec<Vec<&mut dyn Stage>> = Vec::new();
        for stage in &mut self.stages {
            all.push(vec![&mut **stage]);
        }
        squares.extend(settle_shared(&mut all, reduction)?);
        Ok(squares.values().sum())
    }

    /// Goes on from a checkpoint, however that was cut; refused, it leaves everything as it was.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<(), RestoreError> {
        checkpoint.restore(&mut self.stages)?;
        self.skipped = checkpoint.manifest.skipped;
        Ok(())
    }

    /// Lets the updates of these steps be left out, should they be done from now on.
    pub fn leave_out(&mut self, steps: RangeInclusive<u64>) {
        self.left_out.extend(steps);
    }

    /// Whether the update of a step is to be left out.
    pub fn leaves_out(&self, step: u64) -> bool {
        self.left_out.contains(&step)
    }

    /// Steps whose update was skipped.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// The hash of all weights; the same however the model is cut.
    pub fn weights_hash(&self) -> String {
        weights_hash(self.stages.iter().map(|stage| stage.weight_hashes()))
    }

    /// The stages, to put other weights into before the first step.
    pub fn stages_mut(&mut self) -> &mut [Box<dyn Stage>] {
        &mut self.stages
    }

    /// The stages, to be saved or asked.
    pub fn stages(&self) -> &[Box<dyn Stage>] {
        &self.stages
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
