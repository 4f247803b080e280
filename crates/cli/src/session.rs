//! From a run to everything that is needed to train or ask it: corpus, sampler, stages.

use std::fmt::Write;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, bail};
use starling_corpus::{Corpus, Sampler, Tokeniser};
use starling_model::batch;
use starling_model::checkpoint::{Checkpoint, Progress};
use starling_model::engine::NO_TARGET;
use starling_model::pipeline::{BuildError, loss_over};
use starling_model::reference::Reference;
use starling_model::run::{Definition, Difference, Run};
use starling_model::stage::{Input, Loss, Meta};
use starling_node::driver::Text;

use crate::weights::{self, Weights};

/// Tokens that are computed together where nothing is learnt: enough for speed, few for memory.
const TOKENS_AT_A_TIME: usize = 4096;

/// An opened run.
pub struct Session {
    pub reference: Reference,
    pub definition: Definition,
    pub tokeniser: Tokeniser,
}

impl Session {
    /// Opens the corpus (its shards are made in `cache` if need be) and builds the model at step 0.
    pub fn open(run: Run, cache: &Path) -> Result<Session> {
        let mut run = run;
        let initial = weights::initial(&mut run)?;
        let corpus = open_corpus(&run, cache, initial.as_ref())?;
        let vocabulary = initial.as_ref().map(|weights| weights.vocabulary);
        let mut session = Session::with(run, corpus, vocabulary, Reference::new)?;
        if let Some(weights) = initial {
            weights.put_into(session.reference.stages_mut())?;
        }
        Ok(session)
    }

    /// The same only to be asked about a corpus, in one piece; its weights are put in later.
    pub fn open_to_ask(mut run: Run, corpus: Corpus, vocabulary: usize) -> Result<Session> {
        run.train.stages = 1;
        let at_a_time = (TOKENS_AT_A_TIME / run.model.context).max(1) as u32;
        run.train.microbatch = run.train.batch.min(at_a_time);
        Session::with(run, corpus, Some(vocabulary), Reference::to_ask)
    }

    fn with(
        run: Run,
        corpus: Corpus,
        vocabulary: Option<usize>,
        build: impl FnOnce(Run, usize, Sampler) -> Result<Reference, BuildError>,
    ) -> Result<Session> {
        let tokeniser = corpus.tokeniser.clone();
        let vocabulary = model_vocabulary(&tokeniser, vocabulary)?;
        let definition = run.definition(vocabulary, corpus.content_hash().to_hex().to_string());
        let sampler = Sampler::new(corpus, run.data.held_out, run.model.context, run.seed)
            .with_context(|| format!("{} cannot be trained on as it is", named(&run)))?;
        let reference = build(run, vocabulary, sampler)?;
        Ok(Session { reference, definition, tokeniser })
    }

    /// Puts a checkpoint of the same run into the model.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let differences = checkpoint.manifest.definition.differences(&self.definition);
        if !differences.is_empty() {
            bail!("the checkpoint is of another training:\n{}", explained(&differences));
        }
        Ok(self.reference.restore(checkpoint)?)
    }

    /// What a checkpoint says of this run.
    pub fn progress(&self) -> Progress {
        Progress {
            run: self.reference.run().clone(),
            definition: self.definition.clone(),
            tokeniser: self.tokeniser.clone(),
            skipped: self.reference.skipped(),
        }
    }

    /// Loss on `most` held-out windows at the most (0: all), and bits per byte of their text.
    pub fn held_out(&self, most: u64) -> Result<Option<(Loss, f64)>> {
        let sampler = self.reference.sampler();
        let mask = self.reference.run().data.document_mask;
        self.loss(sampler.held_out_windows(), most, |windows| batch::held_out(sampler, windows, mask))
    }

    /// The same on the windows that it could be trained on.
    pub fn trained_on(&self, most: u64) -> Result<Option<(Loss, f64)>> {
        let sampler = self.reference.sampler();
        let mask = self.reference.run().data.document_mask;
        self.loss(sampler.windows_per_epoch(), most, |windows| batch::training(sampler, windows, mask))
    }

    /// The same on the whole text, in windows that go on by `stride` tokens: every token is scored once, and all but the first
    /// after at least `context − stride` others.
    pub fn sliding(&self, stride: u64, most: u64) -> Result<Option<(Loss, f64)>> {
        let Some((text, _)) = self.reference.sampler().corpus().sources.first() else { return Ok(None) };
        let targets = text.tokens().saturating_sub(1);
        let context = (self.reference.run().model.context as u64).min(targets);
        let stride = stride.min(context).max(1);
        let end = |window: u64| (context + window * stride).min(targets);
        let piece = |window: u64| {
            let start = end(window) - context;
            let scored_before = if window == 0 { 0 } else { end(window - 1) };
            let mut tokens = Vec::new();
            text.read(start..end(window) + 1, &mut tokens);
            (tokens, scored_before.saturating_sub(start) as usize)
        };
        let windows = if targets == 0 { 0 } else { 1 + (targets - context).div_ceil(stride) };
        self.loss(windows, most, |windows| batch::scored(windows.map(piece).collect()))
    }

    fn loss(
        &self,
        windows: u64,
        most: u64,
        mut contents: impl FnMut(Range<u64>) -> (Input, Meta),
    ) -> Result<Option<(Loss, f64)>> {
        let windows = if most == 0 { windows } else { windows.min(most) };
        let at_a_time = self.reference.run().train.microbatch;
        let mut bytes = 0;
        let loss = loss_over(self.reference.stages(), windows, at_a_time, |windows| {
            let (input, meta) = contents(windows);
            let targets = meta.targets.iter().filter(|&&target| target != NO_TARGET);
            bytes += targets.map(|&target| self.tokeniser.bytes_of(target)).sum::<u64>();
            (input, meta)
        })?;
        let bits_per_byte = loss.sum / std::f64::consts::LN_2 / bytes.max(1) as f64;
        Ok((loss.tokens > 0).then_some((loss, bits_per_byte)))
    }

    /// Numbers of weights.
    pub fn parameters(&self) -> u64 {
        let stages = self.reference.stages().iter();
        let parameters = stages.flat_map(|stage| stage.layout().entries());
        let sizes: std::collections::BTreeMap<&str, u64> =
            parameters.map(|(p, span)| (p.name.as_str(), span.len as u64)).collect();
        sizes.values().sum()
    }
}

/// Differences of two definitions, and what to do.
fn explained(differences: &[Difference]) -> String {
    let mut text = String::new();
    for (key, was, is) in differences {
        let _ = writeln!(text, "  {key}: {was} there, {is} here");
    }
    match differences {
        [(key, was, _)] if key == "optimiser.decay_steps" => {
            let _ = write!(text, "to train longer and keep the schedule, add --set {key}={was}");
        }
        [(key, ..)] if key == "corpus" => text.push_str("the text was changed since; put the old one back"),
        _ => text.push_str("set these back to go on, or start a new run with --out"),
    }
    text
}

/// The corpus as a user knows it.
fn named(run: &Run) -> String {
    let paths: Vec<String> =
        run.data.sources.iter().map(|source| source.path.display().to_string()).collect();
    if paths.is_empty() { "the generated corpus".into() } else { paths.join(", ") }
}

/// Tokens that a model knows: as many as the text has, or as many as the weights that it begins with say.
pub fn model_vocabulary(tokeniser: &Tokeniser, given: Option<usize>) -> Result<usize> {
    let (known, vocabulary) = (tokeniser.vocabulary(), given.unwrap_or(tokeniser.vocabulary()));
    if known > vocabulary {
        bail!(
            "the text has {known} kinds of tokens, and the weights that the run begins with know {vocabulary}; build the \
             corpus with their tokeniser (starling corpus build --tokeniser FOLDER/tokenizer.json)"
        );
    }
    Ok(vocabulary)
}

/// Opens what a driver of the run reads. One that begins with a tokeniser of others must have that here too.
pub fn open_text(run: &Run, cache: &Path) -> Result<(Text, String)> {
    let initial = run.initial.as_ref().map(|initial| Weights::open(&initial.path)).transpose()?;
    let corpus = open_corpus(run, cache, initial.as_ref())?;
    let (tokeniser, hash) = (corpus.tokeniser.clone(), corpus.content_hash().to_hex().to_string());
    let sampler = Sampler::new(corpus, run.data.held_out, run.model.context, run.seed)?;
    Ok((Text { sampler, tokeniser }, hash))
}

/// Opens what the run is trained on; text is tokenised as it was for the weights that the run begins with, if any. The
/// paths in a resolved run are absolute.
pub fn open_corpus(run: &Run, cache: &Path, initial: Option<&Weights>) -> Result<Corpus> {
    open_corpus_as(run, cache, initial.map(|weights| &weights.tokeniser))
}

/// The same with the tokeniser of the weights.
pub fn open_corpus_as(run: &Run, cache: &Path, tokeniser: Option<&Tokeniser>) -> Result<Corpus> {
    let tokeniser = tokeniser.filter(|tokeniser| matches!(tokeniser, Tokeniser::HuggingFace(_)));
    starling_corpus::open_as(&run.data, Path::new("."), cache, tokeniser)
        .context("the corpus cannot be opened")
}
