//! `starling train`: one run in this process.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use starling_corpus::{CorpusFolder, DataConfig, SourceConfig, Split};
use starling_model::checkpoint::{self, Checkpoint};
use starling_model::generate::{Choice, generate};
use starling_model::guard::Guard;
use starling_model::reference::StepReport;
use starling_model::run::{Keeping, Run};
use starling_model::stage::Keep;
use starling_node::events::{self, Event, EventLog, guarded};

use crate::interrupt::{self, Interrupt};
use crate::progress::Progress;
use crate::report::{self, Beside, Yardsticks};
use crate::run_folder::{RunFolder, write_whole};
use crate::session::Session;
use crate::words;

/// Updates skipped one after another after which a run stops: it would not come back by itself.
const MOST_SKIPPED: u64 = 10;

/// Train a run file, or a text file or corpus with sensible defaults
///
/// Everything goes into one folder: run.toml (the run with every default filled in), events.jsonl,
/// checkpoints, loss.svg and report.md, and curves for TensorBoard (tensorboard --logdir runs). Ctrl-C writes a checkpoint; --resume goes on from the last one,
/// whatever ended the process.
#[derive(clap::Args)]
#[command(
    after_help = "Examples:\n  starling train examples/quickstart.toml\n  starling train my.txt --set train.steps=2000\n  starling train my.txt --resume\n  starling train my-corpus        # made by `starling corpus build`"
)]
pub struct Arguments {
    /// A run file (.toml), a folder made by `starling corpus build`, or any text file
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
    let named = parse(&arguments.input, &arguments.set);
    let folder = match folder_of(arguments.out.as_deref(), &named) {
        Some(folder) => folder,
        None => return named.map(|_| ExitCode::FAILURE),
    };
    let is_new = !folder.path().exists();
    let _lock = folder.claim()?;
    let opened = open(&arguments, named, &folder);
    if opened.is_err() && is_new {
        let _ = std::fs::remove_dir_all(folder.path()); // Nothing is in it but what was made a moment ago.
    }
    let session = opened?;
    write_whole(&folder.run_file(), &toml::to_string(session.reference.run())?)?;
    Training::start(session, &folder)?.go_on(&interrupt)
}

/// The run's folder; none if it is named by a run file that cannot be read.
pub fn folder_of(out: Option<&Path>, named: &Result<Run>) -> Option<RunFolder> {
    match (out, named) {
        (Some(out), _) => Some(RunFolder::at(out)),
        (None, Ok(run)) => Some(RunFolder::at(&Path::new("runs").join(&run.name))),
        (None, Err(_)) => None,
    }
}

/// Opens a new run, or the one in the folder.
fn open(arguments: &Arguments, named: Result<Run>, folder: &RunFolder) -> Result<Session> {
    let shown = folder.path().display();
    if !arguments.resume {
        let named = named?;
        if folder.is_used() {
            bail!(
                "{shown} holds a run already. Go on with it by --resume, or start another with --out FOLDER; \
                 nothing was changed"
            );
        }
        return Session::open(named, &folder.corpus());
    }
    let run = if folder.run_file().exists() {
        let recorded = parse(&folder.run_file(), &arguments.set)?;
        tell_differences(arguments, named.ok(), &recorded, folder);
        recorded
    } else {
        named?
    };
    let mut session = Session::open(run, &folder.corpus())?;
    restore(&mut session, folder)?;
    Ok(session)
}

/// A run goes on as it is recorded: says where what was named differs from it.
fn tell_differences(arguments: &Arguments, named: Option<Run>, recorded: &Run, folder: &RunFolder) {
    let Some(named) = named else { return };
    let mut text = String::new();
    for (key, named, recorded) in named.differences(recorded).iter().filter(|(key, ..)| key != "name") {
        let _ = write!(text, "\n  {key}: {recorded}, not {named}");
    }
    if !text.is_empty() {
        words::tell(&format!(
            "note: the run goes on as recorded in {}, which differs from {}:{text}\n  (--set changes a setting)",
            folder.run_file().display(),
            arguments.input.display(),
        ));
    }
}

/// Reads a run file, or makes a run for a text file; paths of data become absolute.
pub fn parse(input: &Path, overrides: &[String]) -> Result<Run> {
    let shown = input.display().to_string();
    if input.is_dir() && !CorpusFolder::is_one(input) {
        bail!(
            "{shown} is a folder; name a run file (.toml), a text file, or a folder that `starling corpus build` made"
        );
    }
    let is_run_file = input.extension().is_some_and(|extension| extension == "toml");
    let mut run = if is_run_file {
        let text =
            std::fs::read_to_string(input).with_context(|| format!("cannot read the run file {shown}"))?;
        Run::parse(&text, &shown, overrides)?
    } else {
        for_text(input)?.with(&shown, overrides)?
    };
    let base = if is_run_file { input.parent().unwrap_or(Path::new("")) } else { Path::new("") };
    for source in &mut run.data.sources {
        source.path = std::path::absolute(base.join(&source.path))
            .with_context(|| format!("cannot find {}", source.path.display()))?;
    }
    if let Some(initial) = &mut run.initial {
        initial.path = std::path::absolute(base.join(&initial.path))
            .with_context(|| format!("cannot find {}", initial.path.display()))?;
    }
    Ok(run)
}

/// What `starling train my.txt` means: a small model of bytes that learns to spell within minutes; or of the tokens
/// of a corpus.
fn for_text(text: &Path) -> Result<Run> {
    let split = if text.is_dir() { Split::default() } else { Split::detect(text)? };
    let source = SourceConfig { path: text.to_path_buf(), weight: 1.0, split };
    Ok(Run { data: DataConfig { sources: vec![source], ..Default::default() }, ..Default::default() })
}

/// Puts the newest checkpoint that is whole into the session; newer ones are moved out of its way.
fn restore(session: &mut Session, folder: &RunFolder) -> Result<()> {
    let mut damaged = Vec::new();
    for path in folder.checkpoints_newest_first()? {
        let checkpoint = match Checkpoint::open(&path) {
            Ok(checkpoint) => checkpoint,
            Err(error) => {
                damaged.push((path, error));
                continue;
            }
        };
        session.restore(&checkpoint)?;
        for (path, error) in damaged {
            words::tell(&format!("warning: {error}; it was moved to {}.damaged", path.display()));
            checkpoint::set_aside(&path).with_context(|| format!("cannot move {} away", path.display()))?;
        }
        let manifest = &checkpoint.manifest;
        let (was, is) = (&manifest.run.train, &session.reference.run().train);
        let class = session.reference.stages().first().map(|stage| stage.class());
        if (was.microbatch, was.lots) != (is.microbatch, is.lots) || class.as_ref() != Some(&manifest.class) {
            words::tell(
                "note: microbatches, lots or the engine differ from the checkpoint's; sums run in another order from \
                 here on, so the last bits will differ",
            );
        }
        words::tell(&format!("going on from step {} ({})", manifest.step, path.display()));
        return Ok(());
    }
    if let Some((_, error)) = damaged.into_iter().next() {
        let advice = "no checkpoint of the run can be used; move them away to start from the beginning";
        return Err(error).context(advice);
    }
    words::tell(&format!("no checkpoint yet in {}; starting from the beginning", folder.path().display()));
    Ok(())
}

/// A run that is being trained.
struct Training<'a> {
    session: Session,
    folder: &'a RunFolder,
    log: EventLog,
    progress: Progress,
    guard: Guard,
}

impl Training<'_> {
    fn start(session: Session, folder: &RunFolder) -> Result<Training<'_>> {
        let run = session.reference.run();
        let (step, steps) = (session.reference.steps_done(), run.train.steps);
        let (guard, left_out) = match run.guard.is_on() && folder.events().exists() {
            true => guarded(&run.guard, &events::read(&folder.events())?),
            false => (Guard::new(&run.guard), BTreeSet::new()),
        };
        let mut log = EventLog::open(&folder.events())?.with_curves(&folder.curves())?;
        log.append(Event::Started {
            version: env!("CARGO_PKG_VERSION").into(),
            identity: session.definition.identity(),
            step,
            steps,
            parameters: session.parameters(),
            stages: run.train.stages,
        })?;
        words::tell(&format!(
            "{}: {} parameters in {} stage{}, {} windows of {} tokens an epoch, into {}",
            run.name,
            words::count(session.parameters() as f64),
            run.train.stages,
            if run.train.stages == 1 { "" } else { "s" },
            words::count(session.reference.sampler().windows_per_epoch() as f64),
            run.model.context,
            folder.path().display(),
        ));
        if run.train.keep == Keeping::Auto && session.reference.keep() == Keep::Input {
            words::tell(
                "there is not memory to keep all activations: backward computes them again, which takes about a third \
                 longer (a smaller train.microbatch would keep them)",
            );
        }
        let progress = Progress::new(step, steps);
        let mut session = session;
        left_out.into_iter().for_each(|step| session.reference.leave_out(step..=step));
        Ok(Training { session, folder, log, progress, guard })
    }

    fn go_on(mut self, interrupt: &Interrupt) -> Result<ExitCode> {
        let run = self.session.reference.run().clone();
        // What was restored, or made from nothing, need not be saved again.
        let mut saved = self.session.reference.steps_done();
        let mut skipped = 0;
        while self.session.reference.steps_done() < run.train.steps {
            if interrupt.asked() {
                return self.interrupted(saved);
            }
            let report = self.step()?;
            let done = report.step + 1;
            if !self.session.reference.leaves_out(report.step)
                && self.guard.is_spike(report.step, report.loss.mean())
            {
                self.go_back(&report)?;
                (saved, skipped) = (self.session.reference.steps_done(), 0);
                continue;
            }
            skipped = if report.skipped { skipped + 1 } else { 0 };
            if skipped == MOST_SKIPPED {
                self.progress.finish();
                bail!(
                    "the gradient was not finite in {MOST_SKIPPED} steps one after another: the training has diverged. \
                     The last checkpoint is of step {saved}; go on from an earlier one, with a smaller optimiser.lr"
                );
            }
            let last = done == run.train.steps;
            if !last && is_due(run.evaluate.every, done) {
                self.evaluate(run.evaluate.windows)?;
                self.show_sample()?;
            }
            if last || is_due(run.checkpoint.every, done) {
                self.save()?;
                saved = done;
            }
        }
        self.finish()
    }

    /// The loss of a step was a spike: goes back to the newest checkpoint, and leaves some updates out.
    fn go_back(&mut self, report: &StepReport) -> Result<()> {
        let (last, loss) = (report.step, report.loss.mean());
        let first = self.guard.leave_out(last, self.session.reference.run().checkpoint.every);
        self.log.append(Event::LeftOut { first, last, loss })?;
        self.progress.say(&format!(
            "step {last:>6}: the loss is {loss:.4}, a spike; back to the last checkpoint, and the updates from step {first} \
             to {last} are left out"
        ));
        let run = self.session.reference.run().clone();
        let (_, left_out) = guarded(&run.guard, &events::read(&self.folder.events())?);
        if self.folder.checkpoints_newest_first()?.is_empty() {
            self.session = Session::open(run, &self.folder.corpus())?;
        }
        restore(&mut self.session, self.folder)?;
        left_out.into_iter().for_each(|step| self.session.reference.leave_out(step..=step));
        let to = self.session.reference.steps_done();
        if let Err(times) = self.guard.goes_back(to) {
            self.progress.finish();
            bail!(
                "the loss had a spike {times} times after the checkpoint of step {to}: the training diverges. Go on with \
                 --resume and a smaller optimiser.lr, or with a larger guard.spike"
            );
        }
        Ok(self.log.append(Event::WentBack { from: last, to })?)
    }

    fn step(&mut self) -> Result<StepReport> {
        let start = Instant::now();
        let report = self.session.reference.step()?;
        let done = report.step + 1;
        let hashed = is_due(self.session.reference.run().train.hash_every, done);
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
        Ok(report)
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
        let go_on = |_| ControlFlow::Continue(());
        let tokens = generate(stages, context, vec![start], count, choice, &[start], go_on)?;
        let text = self.session.tokeniser.decode(&tokens[1..]);
        self.progress.say(&format!(
            "         it writes: {}",
            words::printable(text.trim()).replace('\n', "\n           ")
        ));
        Ok(self.log.append(Event::Sample { step, text })?)
    }

    fn save(&mut self) -> Result<()> {
        let stages = self.session.reference.stages();
        checkpoint::save(&self.folder.checkpoints(), &self.session.progress(), stages)?;
        Ok(self.log.append(Event::Checkpoint { step: self.session.reference.steps_done() })?)
    }

    fn interrupted(mut self, saved: u64) -> Result<ExitCode> {
        let step = self.session.reference.steps_done();
        self.progress.finish();
        if saved != step {
            self.save()?;
        }
        self.log.append(Event::Interrupted { step })?;
        report::write(self.folder, &self.session, None, &Beside::default())?;
        words::tell(&format!(
            "stopped at step {step}. Go on with:\n  {}",
            resume_command(std::env::args().collect())
        ));
        Ok(ExitCode::from(interrupt::EXIT))
    }

    fn finish(mut self) -> Result<ExitCode> {
        self.evaluate(0)?;
        self.show_sample()?;
        self.progress.finish();
        let weights = self.session.reference.weights_hash();
        self.log.append(Event::Finished { step: self.session.reference.steps_done(), weights })?;
        let yardsticks = Yardsticks::measure(self.session.reference.sampler());
        let report = report::write(self.folder, &self.session, yardsticks.as_ref(), &Beside::default())?;
        let shown = self.folder.path().display();
        words::show(&format!("\n{report}\n- plot: {shown}/loss.svg\n- try it: starling generate {shown}\n"))
    }
}

/// The command that goes on with a run: settings are recorded in its folder.
fn resume_command(arguments: Vec<String>) -> String {
    let mut words = Vec::new();
    let mut arguments = arguments.into_iter();
    while let Some(argument) = arguments.next() {
        if argument == "--set" {
            arguments.next();
        } else if argument != "--resume" && !argument.starts_with("--set=") {
            let plain = argument.chars().all(|c| c.is_alphanumeric() || "-_./=:,+@%".contains(c));
            let quoted = format!("'{}'", argument.replace('\'', "'\\''"));
            words.push(if plain { argument } else { quoted });
        }
    }
    words.join(" ") + " --resume"
}

/// Whether something that happens every so many steps is due.
fn is_due(every: u64, done: u64) -> bool {
    every > 0 && done.is_multiple_of(every)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_to_go_on_can_be_typed_as_it_is_shown() {
        let typed =
            ["starling", "train", "my text's.txt", "--set", "train.steps=5", "--set=seed=1", "--out", "a/b"];
        let command = resume_command(typed.map(String::from).to_vec());
        assert_eq!(command, "starling train 'my text'\\''s.txt' --out a/b --resume");
    }
}
