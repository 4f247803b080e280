//! Text files to a corpus folder: read, tokenise, write, on all cores, in bounded memory, and so that a crash
//! at any instant costs one unfinished shard.
//!
//! The result is a function of the inputs and the options: not of the number of threads, nor of how often the
//! build was killed. Inputs are read in order and cut into batches at places that only they determine;
//! a shard ends with the first batch that fills it. Each finished shard records where in the inputs it ends,
//! and a build that goes on begins there.

mod batches;
mod error;
pub mod import;
mod inputs;
mod output;
mod parallel;
#[cfg(feature = "parquet")]
mod parquet;
mod records;
mod sample;
mod site;
mod streams;

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use batches::Position;
pub use error::BuildError;
pub use inputs::Form;
use inputs::Input;
use output::Output;
use parallel::Job;
pub use records::Trouble;
use site::{Plan, Site};

use crate::folder::{self, Manifest, TOKENISER};
use crate::text::Split;
use crate::tokeniser::{self, HuggingFace, Tokeniser};

/// The folder within a corpus folder that exists while it is being built.
pub const BUILDING: &str = "building";

/// What is to be built.
#[derive(Clone, Debug)]
pub struct Options {
    /// Files, folders and patterns.
    pub inputs: Vec<String>,
    /// The corpus folder.
    pub out: PathBuf,
    /// What makes tokens of text.
    pub tokeniser: TokeniserChoice,
    /// What the files are, if their names do not say it.
    pub form: Option<Form>,
    /// What ends a document in plain text; looked up in each file if it is not given.
    pub split: Option<Split>,
    /// The field of a JSON record that holds the text.
    pub field: String,
    /// Whether documents that cannot be used are left out and counted, or end the build.
    pub skip_bad: bool,
    /// A shard ends when it has so many tokens.
    pub shard_tokens: u64,
    /// Threads that tokenise.
    pub threads: usize,
    /// Whether what an earlier build left in the folder is thrown away.
    pub restart: bool,
}

/// What makes tokens of text.
#[derive(Clone, Debug)]
pub enum TokeniserChoice {
    /// Tokens are bytes.
    Bytes,
    /// The text of a `tokenizer.json`, and the name of its end of text if it is not a usual one.
    Json {
        /// The text of the file.
        json: String,
        /// The token that stands between documents.
        end_of_text: Option<String>,
    },
    /// One that is learned from the inputs.
    Train {
        /// How many ids it has.
        vocabulary: usize,
        /// How much text it learns from, at the most.
        sample_bytes: usize,
        /// Which part of the inputs that is.
        seed: u64,
    },
}

/// How far a build is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// What is being done.
    pub phase: Phase,
    /// Bytes of the files that were read, those of an earlier start included.
    pub read_bytes: u64,
    /// Bytes of all files.
    pub total_bytes: u64,
    /// Bytes of text that were tokenised since this start.
    pub text_bytes: u64,
    /// Tokens so far, those of an earlier start included.
    pub tokens: u64,
}

/// What a build is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Draws the text that the tokeniser learns from.
    Sampling,
    /// Learns the tokeniser.
    Training,
    /// Tokenises everything.
    Tokenising,
}

/// What was built.
#[derive(Clone, Debug)]
pub struct Report {
    /// What `corpus.json` says.
    pub manifest: Manifest,
    /// Shards that an earlier start had finished.
    pub resumed: usize,
}

/// Builds a corpus folder, or goes on where an earlier build of the same inputs and options was interrupted.
/// `watch` sees how far it is, and may ask to stop.
pub fn build(
    options: &Options,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Report, BuildError> {
    let inputs = inputs::resolve(&options.inputs, options.form, options.split)?;
    let given = match &options.tokeniser {
        TokeniserChoice::Bytes => Some(Tokeniser::Bytes),
        TokeniserChoice::Train { .. } => None,
        TokeniserChoice::Json { json, end_of_text } => {
            Some(Tokeniser::HuggingFace(HuggingFace::parse(json, end_of_text.as_deref())?))
        }
    };
    let site = Site::claim(&options.out, &Plan::new(options, &inputs), Plan::difference, options.restart)?;
    let total_bytes = inputs.iter().map(|input| input.bytes).sum();
    let mut build = Build { options, inputs, site, total_bytes, watch };
    let tokeniser = match given {
        Some(tokeniser) => tokeniser,
        None => build.trained()?,
    };
    build.run(&tokeniser)
}

struct Build<'a> {
    options: &'a Options,
    inputs: Vec<Input>,
    site: Site,
    total_bytes: u64,
    watch: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

impl Build<'_> {
    /// The tokeniser that the inputs teach; the one of an earlier start if it got so far.
    fn trained(&mut self) -> Result<Tokeniser, BuildError> {
        let TokeniserChoice::Train { vocabulary, sample_bytes, seed } = self.options.tokeniser else {
            return Ok(Tokeniser::Bytes);
        };
        let json = self.site.trained();
        if let Some(trained) = json.and_then(|json| HuggingFace::parse(&json, None).ok()) {
            return Ok(Tokeniser::HuggingFace(trained));
        }
        let count = Arc::new(AtomicU64::new(0));
        let total_bytes = self.total_bytes;
        let at = |phase, count: &AtomicU64| {
            let read_bytes = count.load(Ordering::Relaxed).min(total_bytes);
            Progress { phase, read_bytes, total_bytes, text_bytes: 0, tokens: 0 }
        };
        let Options { field, skip_bad, .. } = self.options;
        let texts = sample::draw(&self.inputs, (field, *skip_bad), sample_bytes, seed, &count, || {
            told(self.watch, at(Phase::Sampling, &count))
        })?;
        if texts.is_empty() {
            return Err(BuildError::Empty);
        }
        told(self.watch, at(Phase::Training, &count))?;
        let trained = tokeniser::train(&texts, vocabulary)?;
        folder::write_whole(&self.site.path().join(TOKENISER), trained.json().as_bytes())?;
        Ok(Tokeniser::HuggingFace(trained))
    }

    fn run(self, tokeniser: &Tokeniser) -> Result<Report, BuildError> {
        let Build { options, inputs, site, total_bytes, watch } = self;
        let mut output = Output::resume(site, tokeniser, options.shard_tokens);
        let (resumed, from) = (output.finished(), output.position());
        let count = Arc::new(AtomicU64::new(inputs.iter().take(from.input).map(|input| input.bytes).sum()));
        let mut progress =
            Progress { phase: Phase::Tokenising, read_bytes: 0, total_bytes, text_bytes: 0, tokens: 0 };
        let Options { field, skip_bad, threads, .. } = options;
        let job = Job { inputs: &inputs, field, skip_bad: *skip_bad, tokeniser, threads: *threads };
        job.run(from, &count, |batch| {
            output.push(batch.documents(), batch.text_bytes, batch.left_out, batch.next)?;
            progress.read_bytes = count.load(Ordering::Relaxed).min(total_bytes);
            progress.text_bytes += batch.text_bytes;
            progress.tokens = output.tokens();
            told(watch, progress)
        })?;
        output.finish(Position { input: inputs.len(), byte: 0 })?;
        if let Some(input) = inputs.iter().find(|input| !input.is_unchanged()) {
            return Err(BuildError::Changed { path: input.path.clone() });
        }
        Ok(Report { manifest: output.publish()?, resumed })
    }
}

fn told(watch: &mut dyn FnMut(Progress) -> ControlFlow<()>, progress: Progress) -> Result<(), BuildError> {
    match watch(progress) {
        ControlFlow::Continue(()) => Ok(()),
        ControlFlow::Break(()) => Err(BuildError::Interrupted),
    }
}

#[cfg(test)]
mod tests;
