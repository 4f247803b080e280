//! `starling eval`: how good a trained model is.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use starling_corpus::{DataConfig, SourceConfig, Split, Tokeniser};
use starling_model::checkpoint::Checkpoint;
use starling_model::stage::Loss;

use crate::run_folder::checkpoint_at;
use crate::session::{Session, open_corpus_as};
use crate::weights::Weights;
use crate::words;

/// Loss, perplexity and bits per byte on held-out text
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling eval runs/quickstart\n  starling eval runs/my --text other.txt\n  starling eval gpt2-folder --text wiki.txt --stride 512"
)]
pub struct Arguments {
    /// A run's folder, one of its checkpoints, or with --text a folder that Hugging Face's transformers wrote
    path: PathBuf,
    /// Evaluate on all of this text instead of the run's own held-out documents
    #[arg(long, value_name = "FILE")]
    text: Option<PathBuf>,
    /// Go on by so many tokens from window to window: each token is scored once, after as many others as there is room
    /// for. Better numbers, and slower ones [default: a whole window]
    #[arg(long, value_name = "TOKENS", requires = "text", value_parser = clap::value_parser!(u64).range(1..))]
    stride: Option<u64>,
    /// Windows of so many tokens [default: the model's context]
    #[arg(long, value_name = "TOKENS", requires = "text", value_parser = clap::value_parser!(u64).range(1..))]
    context: Option<u64>,
    /// Windows at the most; 0 means all
    #[arg(long, default_value_t = 0)]
    windows: u64,
    /// Threads; 0 means one for every core
    #[arg(long, default_value_t = 0)]
    threads: usize,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let scratch = tempfile::tempdir().context("cannot make a temporary folder")?;
    let (name, measured) = match &arguments.text {
        Some(text) => on_text(arguments, text, scratch.path())?,
        None => {
            let path = checkpoint_at(&arguments.path)?;
            let checkpoint = Checkpoint::open(&path)?;
            let mut run = checkpoint.manifest.run.clone();
            run.train.threads = arguments.threads;
            let manifest = &checkpoint.manifest;
            // What the run began with is in the checkpoint.
            let began_with = run.initial.is_some().then_some(&manifest.tokeniser);
            let corpus = open_corpus_as(&run, scratch.path(), began_with)?;
            let mut session = Session::open_to_ask(run, corpus, manifest.definition.vocabulary)?;
            // Another text would have other held-out documents, some of them trained on.
            session.restore(&checkpoint)?;
            let name = format!("{}, step {}", path.display(), checkpoint.manifest.step);
            (name, session.held_out(arguments.windows)?)
        }
    };
    let (loss, bits) =
        measured.context("the run holds no documents out (data.held_out = 0); name a text with --text")?;
    words::show(&format!(
        "{name}\n  tokens         {}\n  loss           {:.4} nats per token\n  perplexity     {:.3}\n  bits per byte  {bits:.4}\n",
        loss.tokens,
        loss.mean(),
        loss.mean().exp(),
    ))
}

/// How good weights are on a text that they may never have seen.
fn on_text(arguments: &Arguments, text: &Path, scratch: &Path) -> Result<(String, Option<(Loss, f64)>)> {
    let weights = Weights::open(&arguments.path)?;
    if let Tokeniser::Words { .. } | Tokeniser::Ids { .. } = weights.tokeniser {
        bail!(
            "the model knows only the words of its generated languages, or only numbers; it cannot read {}",
            text.display()
        );
    }
    let mut run = weights.run.clone();
    (run.train.threads, run.initial) = (arguments.threads, None);
    let (asked, known) = (arguments.context, run.model.context);
    run.model.context = asked.map_or(known, |asked| asked as usize);
    if run.model.context > known {
        bail!(
            "--context {}, and the model knows {known} positions; use as many at the most",
            run.model.context
        );
    }
    // Documents end as they did in training, where that is known.
    let split = match &run.data.sources[..] {
        [source, ..] => source.split,
        [] => Split::detect(text)?,
    };
    let source = SourceConfig { path: std::path::absolute(text)?, weight: 1.0, split };
    let document_mask = run.data.document_mask;
    run.data = DataConfig { sources: vec![source], held_out: 0.0, document_mask, ..Default::default() };
    let corpus = starling_corpus::open_as(&run.data, Path::new("."), scratch, Some(&weights.tokeniser))
        .context("the text cannot be read")?;
    // A text that is shorter than the model's context is one window.
    let tokens = corpus.sources.iter().map(|(text, _)| text.tokens()).min().unwrap_or(0);
    run.model.context = run.model.context.min(tokens.saturating_sub(1).max(1) as usize);
    let mut session = Session::open_to_ask(run, corpus, weights.vocabulary)?;
    weights.put_into(session.reference.stages_mut())?;
    let measured = match arguments.stride {
        Some(stride) => session.sliding(stride, arguments.windows)?,
        None => session.trained_on(arguments.windows)?,
    };
    Ok((weights.name.clone(), measured))
}
