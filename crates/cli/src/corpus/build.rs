//! `starling corpus build`.

use std::io::IsTerminal;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use starling_corpus::Split;
use starling_corpus::build::{self, BuildError, Form, Options, Phase, Progress, TokeniserChoice};
use starling_corpus::folder::LeftOut;

use crate::interrupt::{self, Interrupt};
use crate::words;

/// Between two lines when nobody watches.
const QUIET: Duration = Duration::from_secs(5);

/// Tokenise text files into a corpus folder
///
/// Reads .txt and .md (plain text) and .jsonl and .ndjson (one JSON object a line), each also compressed as .gz or
/// .zst, and .parquet if it was built with `--features parquet`; names files, folders (with all below them) or
/// patterns. Works on all cores in bounded memory. Whatever interrupts it, the same command goes on, and the result
/// is the same bytes.
///
/// Without --tokeniser or --bytes, a byte-level BPE vocabulary is learned from a sample of the inputs; its
/// tokenizer.json is one that Hugging Face's libraries read.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling corpus build books/*.txt --out my-corpus --vocabulary 8192\n  starling corpus build 'crawl/*.jsonl.zst' --field content --out crawl --tokeniser tokenizer.json\n  starling corpus build notes/ --bytes --out notes-corpus\n  starling train my-corpus"
)]
pub struct Arguments {
    /// Files, folders, or patterns in quotes
    #[arg(required = true)]
    inputs: Vec<String>,
    /// The corpus folder to make
    #[arg(long, value_name = "FOLDER")]
    out: PathBuf,
    /// Use this tokenizer.json
    #[arg(long, value_name = "FILE", conflicts_with_all = ["vocabulary", "bytes"])]
    tokeniser: Option<PathBuf>,
    /// The token of that file which stands between documents, if it has no usual name
    #[arg(long, value_name = "TOKEN", requires = "tokeniser")]
    end_of_text: Option<String>,
    /// Let every byte be a token, a vocabulary of 257
    #[arg(long, conflicts_with = "vocabulary")]
    bytes: bool,
    /// Learn a vocabulary of so many tokens, <|endoftext|> included
    #[arg(long, value_name = "TOKENS", default_value_t = 8192)]
    vocabulary: usize,
    /// Learn it from so many megabytes of text at the most
    #[arg(long, value_name = "MB", default_value_t = 64)]
    sample: usize,
    /// Seed that chooses those megabytes
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// What the files are, if their names do not say it
    #[arg(long, value_enum)]
    format: Option<FormName>,
    /// What ends a document in plain text [default: what each file's first megabyte looks like]
    #[arg(long, value_enum)]
    split: Option<SplitName>,
    /// The field of a JSON object that holds the text
    #[arg(long, default_value = "text")]
    field: String,
    /// Leave out documents that are not UTF-8, not JSON or lack the field, and count them
    #[arg(long)]
    skip_bad: bool,
    /// A shard ends when it has so many tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 1 << 25)]
    shard_tokens: u64,
    /// Threads; 0 means one for every core
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Throw away what an earlier build left in the folder
    #[arg(long)]
    restart: bool,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum FormName {
    /// Plain text
    Text,
    /// One JSON object a line
    Jsonl,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum SplitName {
    /// Documents are separated by blank lines
    BlankLine,
    /// Every line is a document
    Line,
    /// Every file is a document
    File,
}

pub fn run(arguments: Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::listen()?;
    let options = resolved(arguments)?;
    let start = Instant::now();
    let mut shown = Shown::new();
    let built = build::build(&options, &mut |progress| {
        shown.see(progress);
        if interrupt.asked() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    shown.bar.finish_and_clear();
    let report = match built {
        Err(error @ BuildError::Interrupted) => {
            words::tell(&error.to_string());
            return Ok(ExitCode::from(interrupt::EXIT));
        }
        built => built?,
    };
    let manifest = &report.manifest;
    let out = options.out.display();
    if report.resumed > 0 {
        words::tell(&format!("{} shards were there already", report.resumed));
    }
    if let Some(told) = told_left_out(&manifest.left_out) {
        words::tell(&format!("left out: {told}"));
    }
    words::show(&format!(
        "{out}: {} tokens of {} documents in {} shard{}, vocabulary {}, {:.2} bytes a token, {}\n- look into it: starling corpus inspect {out}\n- train on it:  starling train {out}\n",
        words::count(manifest.tokens as f64),
        words::count(manifest.documents as f64),
        manifest.shards.len(),
        if manifest.shards.len() == 1 { "" } else { "s" },
        manifest.vocabulary,
        manifest.text_bytes as f64 / manifest.tokens.max(1) as f64,
        words::time(start.elapsed()),
    ))
}

fn resolved(arguments: Arguments) -> Result<Options> {
    let tokeniser = match &arguments.tokeniser {
        Some(path) => TokeniserChoice::Json {
            json: std::fs::read_to_string(path)
                .with_context(|| format!("cannot read the tokeniser {}", path.display()))?,
            end_of_text: arguments.end_of_text,
        },
        None if arguments.bytes => TokeniserChoice::Bytes,
        None => TokeniserChoice::Train {
            vocabulary: arguments.vocabulary,
            sample_bytes: arguments.sample.saturating_mul(1_000_000),
            seed: arguments.seed,
        },
    };
    let threads = match arguments.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    Ok(Options {
        inputs: arguments.inputs,
        out: arguments.out,
        tokeniser,
        form: arguments.format.map(|form| match form {
            FormName::Text => Form::Text,
            FormName::Jsonl => Form::Jsonl,
        }),
        split: arguments.split.map(|split| match split {
            SplitName::BlankLine => Split::BlankLine,
            SplitName::Line => Split::Line,
            SplitName::File => Split::File,
        }),
        field: arguments.field,
        skip_bad: arguments.skip_bad,
        shard_tokens: arguments.shard_tokens.max(1),
        threads,
        restart: arguments.restart,
    })
}

/// What was left out, in words; nothing if nothing was.
pub(super) fn told_left_out(left_out: &LeftOut) -> Option<String> {
    let LeftOut { empty, not_utf8, not_json, no_text, unencodable } = *left_out;
    let told: Vec<String> = [
        (empty, "without text"),
        (not_utf8, "not UTF-8"),
        (not_json, "not JSON"),
        (no_text, "without the field"),
        (unencodable, "that the tokeniser refuses"),
    ]
    .iter()
    .filter(|(count, _)| *count > 0)
    .map(|(count, what)| format!("{count} {what}"))
    .collect();
    (!told.is_empty()).then(|| told.join(", "))
}

/// The live line: what is being done, how fast, and how long it will take.
struct Shown {
    bar: ProgressBar,
    phase: Option<(Phase, Instant, u64)>,
    last_line: Option<Instant>,
}

impl Shown {
    fn new() -> Shown {
        let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:24.cyan/blue} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Shown { bar, phase: None, last_line: None }
    }

    fn see(&mut self, progress: Progress) {
        let begun = match self.phase {
            Some((phase, begun, before)) if phase == progress.phase => (begun, before),
            _ => {
                let now = Instant::now();
                self.phase = Some((progress.phase, now, progress.read_bytes));
                (now, progress.read_bytes)
            }
        };
        let line = line(progress, begun.0.elapsed().as_secs_f64(), begun.1);
        self.bar.set_length(progress.total_bytes);
        self.bar.set_position(progress.read_bytes);
        self.bar.set_message(line.clone());
        let due = self.last_line.map_or(progress.phase == Phase::Training, |last| last.elapsed() >= QUIET);
        if !std::io::stderr().is_terminal() && due {
            words::tell(&line);
        }
        if due || self.last_line.is_none() {
            self.last_line = Some(Instant::now());
        }
    }
}

fn line(progress: Progress, seconds: f64, before: u64) -> String {
    let seconds = seconds.max(1e-3);
    let read = progress.read_bytes.saturating_sub(before) as f64;
    let left = progress.total_bytes.saturating_sub(progress.read_bytes) as f64 / (read / seconds).max(1.0);
    let eta = words::time(Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX));
    let share = 100.0 * progress.read_bytes as f64 / progress.total_bytes.max(1) as f64;
    match progress.phase {
        Phase::Sampling => format!("drawing a sample  {share:>3.0} %  ETA {eta}"),
        Phase::Training => "learning a vocabulary from the sample".into(),
        Phase::Tokenising => format!(
            "{share:>3.0} %  {:.1} MB/s  {} tokens  ETA {eta}",
            progress.text_bytes as f64 / seconds / 1e6,
            words::count(progress.tokens as f64),
        ),
    }
}
