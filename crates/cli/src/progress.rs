//! What a person sees while a run goes on: a live line on a terminal, a line now and then in a file.

use std::collections::VecDeque;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use starling_model::reference::StepReport;

use crate::words;

/// Between two lines when nobody watches.
const QUIET: Duration = Duration::from_secs(5);
/// Steps over which the rate is measured.
const RECENT: usize = 50;

pub struct Progress {
    bar: ProgressBar,
    steps: u64,
    recent: VecDeque<(Instant, u64)>,
    last_line: Option<Instant>,
}

impl Progress {
    pub fn new(done: u64, steps: u64) -> Progress {
        let bar = ProgressBar::with_draw_target(Some(steps), ProgressDrawTarget::stderr());
        let style = ProgressStyle::with_template("{bar:24.cyan/blue} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(done);
        let recent = VecDeque::from([(Instant::now(), 0)]);
        Progress { bar, steps, recent, last_line: None }
    }

    /// Shows a step that was done.
    pub fn step(&mut self, report: &StepReport) {
        let done = report.step + 1;
        self.recent.push_back((Instant::now(), report.loss.tokens));
        if self.recent.len() > RECENT {
            self.recent.pop_front();
        }
        let rate = self.tokens_per_s();
        let left = self.seconds_per_step() * (self.steps - done) as f64;
        let eta = words::time(Duration::try_from_secs_f64(left).unwrap_or(Duration::MAX));
        let line = format!(
            "step {done:>6}/{}  loss {:.4}  {:>7} tokens/s  lr {:.2e}  norm {:.2}  ETA {eta}",
            self.steps,
            report.loss.mean(),
            words::count(rate),
            report.lr,
            report.norm,
        );
        self.bar.set_position(done);
        self.bar.set_message(line.clone());
        let due = self.last_line.is_none_or(|last| last.elapsed() >= QUIET) || done == self.steps;
        if !std::io::stderr().is_terminal() && due {
            words::tell(&line);
            self.last_line = Some(Instant::now());
        }
        if report.skipped {
            let why = if report.norm.is_finite() { "left out, as was decided" } else { "not finite" };
            self.say(&format!("step {done}: the gradient was {why}; the update was skipped"));
        }
    }

    /// Says something that stays.
    pub fn say(&self, text: &str) {
        self.bar.suspend(|| words::tell(text));
    }

    /// Clears the live line.
    pub fn finish(&self) {
        self.bar.finish_and_clear();
    }

    fn tokens_per_s(&self) -> f64 {
        let tokens: u64 = self.recent.iter().skip(1).map(|(_, tokens)| tokens).sum();
        tokens as f64 / self.span().as_secs_f64().max(1e-9)
    }

    fn seconds_per_step(&self) -> f64 {
        self.span().as_secs_f64() / self.recent.len().saturating_sub(1).max(1) as f64
    }

    fn span(&self) -> Duration {
        match (self.recent.front(), self.recent.back()) {
            (Some((first, _)), Some((last, _))) => last.duration_since(*first),
            _ => Duration::ZERO,
        }
    }
}
