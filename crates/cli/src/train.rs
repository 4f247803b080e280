//! `starling train`: one run in this process.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use starling_corpus::{DataConfig, SourceConfig, Split};
use starling_model::checkpoint::{self, Checkpoint};
use starling_model::generate::{Choice, generate};
use starling_model::run::Run;
use starling_node::events::{Event, EventLog};

use crate::interrupt::{self, Interrupt};
use crate::progress::Progress;
use crate::report::{self, Yardsticks};
use crate::run_folder::{RunFolder, write_whole};
use crate::session::Session;
use crate::words;

/// Bytes of a text in which blank lines are looked for: are its documents paragraphs, or lines?
const LOOK_BYTES: u64 = 1 << 20;

/// Train a run file, or a plain text file with sensible defaults
///
/// Everything goes into one folder: run.toml (the run with every default filled in), events.jsonl,
/// checkpoints, loss.svg and report.md. Ctrl-C writes a checkpoint; --resume goes on from the last one,
/// whatever ended the process.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling train examples/quickstart.toml\n  starling train my.txt --set train.steps=2000\n  starling train my.txt --resume"
)]
pub struct Arguments {
    /// A run file (.toml), or any text file
    input: PathBuf,
    /// Go on from the last checkpoint in the run's folder, with the settings recorded there
    #[arg(long)]
    resume: bool,
    /// Override a setting, as --set optimiser.lr=1e-3; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<String>,
    /// The run's folder [default: runs/NAME]
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

pub fn run(arguments: Arguments) -> Result<ExitCode> {
    let interrupt = Interrupt::listen()?;
    let (run, folder) = resolve(&arguments)?;
    let _lock = folder.claim()?;
    let mut session = Session::open(run, &folder.corpus())?;
    if arguments.resume {
        restore(&mut session, &folder)?;
    }
    write_whole(&folder.run_file(), &toml::to_string(session.reference.run())?)?;
    Training::start(session, &folder)?.go_on(&interrupt)
}

/// The run that the arguments mean, and its folder.
fn resolve(arguments: &Arguments) -> Result<(Run, RunFolder)> {
    let named = parse(&arguments.input, &arguments.set);
    let folder = match (&arguments.out, &named) {
        (Some(out), _) => RunFolder::at(out),
        (None, Ok(run)) => RunFolder::at(&Path::new("runs").join(&run.name)),
        (None, Err(_)) => return Ok((named?, RunFolder::at(Path::new("runs")))),
    };
    let shown = folder.path().display();
    match (folder.is_used(), arguments.resume) {
        (true, false) => bail!(
            "{shown} holds a run already. Go on with it by --resume, or start another with --out FOLDER; nothing was changed"
        ),
        (true, true) if folder.run_file().exists() => {
            Ok((parse(&folder.run_file(), &arguments.set)?, folder))
        }
        _ => Ok((named?, folder)),
    }
}

/// Reads a run file, or makes a run for a text file; paths of data become absolute.
fn parse(input: &Path, overrides: &[String]) -> Result<Run> {
    let shown = input.display().to_string();
    let is_run_file = input.extension().is_some_and(|extension| extension == "toml");
    let mut run = if is_run_file {
        let text =
            std::fs::read_to_string(input).with_context(|| format!("cannot read the run file {shown}"))?;
        Run::parse(&text, &shown, overrides)?
    } else {
        let defaults = toml::to_string(&for_text(input)?)?;
        Run::parse(&defaults, &shown, overrides)?
    };
    let base = if is_run_file { input.parent().unwrap_or(Path::new("")) } else { Path::new("") };
    for source in &mut run.data.sources {
        source.path = std::path::absolute(base.join(&source.path))
            .with_context(|| format!("cannot find {}", source.path.display()))?;
    }
    Ok(run)
}

/// What `starling train my.txt` means: a small model of bytes that learns to spell within minutes.
fn for_text(text: &Path) -> Result<Run> {
    let mut beginning = Vec::new();
    let file = File::open(text).with_context(|| format!("cannot read {}", text.display()))?;
    file.take(LOOK_BYTES)
        .read_to_end(&mut beginning)
        .with_context(|| format!("cannot read {}", text.display()))?;
    let paragraphs = beginning.windows(2).any(|pair| pair == b"\n\n");
    let split = if paragraphs { Split::BlankLine } else { Split::Line };
    let source = SourceConfig { path: text.to_path_buf(), weight: 1.0, split };
    Ok(Run { data: DataConfig { sources: vec![source], ..Default::default() }, ..Default::default() })
}

/// Puts the newest checkpoint that is whole into the session.
fn restore(session: &mut Session, folder: &RunFolder) -> Result<()> {
    let checkpoints = folder.checkpoints_newest_first()?;
    let mut damaged = Vec::new();
    for path in &checkpoints {
        match Checkpoint::open(path) {
            Ok(checkpoint) => {
                for error in damaged {
                    eprintln!("warning: {error}");
                }
                session.restore(&checkpoint)?;
                let (was, is) = (&checkpoint.manifest.run.train, &session.reference.run().train);
                if (was.microbatch, was.lots) != (is.microbatch, is.lots) {
                    eprintln!(
                        "note: microbatches or lots differ from the checkpoint's; sums run in another order from here on, so the last bits will differ"
                    );
                }
                eprintln!("going on from step {} ({})", checkpoint.manifest.step, path.display());
                return Ok(());
            }
            Err(error) => damaged.push(error),
        }
    }
    if let Some(error) = damaged.into_iter().next() {
        return Err(error)
            .context("no checkpoint of the run can be used; move them away to start from the beginning");
    }
    eprintln!("no checkpoint yet in {}; starting from the beginning", folder.path().display());
    Ok(())
}

/// A run that is being trained.
struct Training<'a> {
    session: Session,
    folder: &'a RunFolder,
    log: EventLog,
    progress: Progress,
}

impl Training<'_> {
    fn start(session: Session, folder: &RunFolder) -> Result<Training<'_>> {
        let run = session.reference.run();
        let (step, steps) = (session.reference.steps_done(), run.train.steps);
        let mut log = EventLog::open(&folder.events())?;
        log.append(Event::Started {
            version: env!("CARGO_PKG_VERSION").into(),
            identity: session.definition.identity(),
            step,
            steps,
            parameters: session.parameters(),
            stages: run.train.stages,
        })?;
        eprintln!(
            "{}: {} parameters in {} stage{}, {} windows of {} tokens an epoch, into {}",
            run.name,
            words::count(session.parameters() as f64),
            run.train.stages,
            if run.train.stages == 1 { "" } else { "s" },
            words::count(session.reference.sampler().windows_per_epoch() as f64),
            run.model.context,
            folder.path().display(),
        );
        let progress = Progress::new(step, steps);
        Ok(Training { session, folder, log, progress })
    }

    fn go_on(mut self, interrupt: &Interrupt) -> Result<ExitCode> {
        let run = self.session.reference.run().clone();
        let mut saved = None;
        while self.session.reference.steps_done() < run.train.steps {
            if interrupt.asked() {
                return self.interrupted(saved);
            }
            let done = self.step()?;
            let last = done == run.train.steps;
            if !last && is_due(run.evaluate.every, done) {
                self.evaluate(run.evaluate.windows)?;
                self.show_sample()?;
            }
            if last || is_due(run.checkpoint.every, done) {
                self.save()?;
                saved = Some(done);
            }
        }
        self.finish()
    }

    fn step(&mut self) -> Result<u64> {
        let start = Instant::now();
        let report = self.session.reference.step()?;
        let done = report.step + 1;
        let hashed = is_due(self.session.reference.run().train.hash_every, done);
        self.session.skipped += u64::from(report.skipped);
        self.log.append(Event::Step {
            step: report.step,
            loss: report.loss.mean(),
            tokens: report.loss.tokens,
            lr: report.lr,
            norm: report.norm,
            seconds: start.elapsed().as_secs_f64(),
            weights: hashed.then(|| self.session.reference.weights_hash()),
            skipped: report.skipped,
        })?;
        self.progress.step(&report);
        Ok(done)
    }

    fn evaluate(&mut self, windows: u64) -> Result<()> {
        let Some((loss, bits_per_byte)) = self.session.held_out(windows)? else { return Ok(()) };
        let step = self.session.reference.steps_done();
        self.log.append(Event::Evaluated { step, loss: loss.mean(), tokens: loss.tokens, bits_per_byte })?;
        let (mean, perplexity) = (loss.mean(), loss.mean().exp());
        self.progress.say(&format!(
            "step {step:>6}: held-out loss {mean:.4}, perplexity {perplexity:.2}, {bits_per_byte:.3} bits per byte"
        ));
        Ok(())
    }

    fn show_sample(&mut self) -> Result<()> {
        let count = self.session.reference.run().evaluate.sample_tokens as usize;
        if count == 0 {
            return Ok(());
        }
        let step = self.session.reference.steps_done();
        let choice = Choice { seed: step, ..Choice::default() };
        let context = self.session.reference.run().model.context;
        let start = self.session.tokeniser.end_of_text();
        let stages = self.session.reference.stages();
        let tokens = generate(stages, context, vec![start], count, choice, Some(start), |_| {})?;
        let text = self.session.tokeniser.decode(&tokens[1..]);
        self.progress.say(&format!("         it writes: {}", text.trim().replace('\n', "\n           ")));
        Ok(self.log.append(Event::Sample { step, text })?)
    }

    fn save(&mut self) -> Result<()> {
        let stages = self.session.reference.stages();
        checkpoint::save(&self.folder.checkpoints(), &self.session.progress(), stages)?;
        Ok(self.log.append(Event::Checkpoint { step: self.session.reference.steps_done() })?)
    }

    fn interrupted(mut self, saved: Option<u64>) -> Result<ExitCode> {
        let step = self.session.reference.steps_done();
        self.progress.finish();
        if saved != Some(step) {
            self.save()?;
        }
        self.log.append(Event::Interrupted { step })?;
        report::write(self.folder, &self.session, None)?;
        let program = std::env::args().next().unwrap_or("starling".into());
        let arguments: Vec<String> = std::env::args().skip(1).filter(|a| a != "--resume").collect();
        eprintln!(
            "stopped at step {step}, with a checkpoint. Go on with:\n  {program} {} --resume",
            arguments.join(" ")
        );
        Ok(ExitCode::from(interrupt::EXIT))
    }

    fn finish(mut self) -> Result<ExitCode> {
        self.evaluate(0)?;
        self.show_sample()?;
        self.progress.finish();
        let weights = self.session.reference.weights_hash();
        self.log.append(Event::Finished { step: self.session.reference.steps_done(), weights })?;
        let yardsticks = Yardsticks::measure(self.session.reference.sampler());
        let report = report::write(self.folder, &self.session, yardsticks.as_ref())?;
        let shown = self.folder.path().display();
        words::show(&format!("\n{report}\n- plot: {shown}/loss.svg\n- try it: starling generate {shown}\n"))
    }
}

/// Whether something that happens every so many steps is due.
fn is_due(every: u64, done: u64) -> bool {
    every > 0 && done.is_multiple_of(every)
}
