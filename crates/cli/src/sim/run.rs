//! One scenario from its file: run, watched, and told in tables and a plot.

use std::collections::VecDeque;
use std::fmt::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::Instant;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressStyle};
use starling_sim::scenario::Scenario;
use starling_sim::world::{Outcome, Sample, World};
use starling_swarm::spec::{Reduce, Sync};

use crate::interrupt::{self, Interrupt};
use crate::plot::{self, Series, Style};
use crate::sim::file;
use crate::words;

/// Looks at a run from its start to its end.
const LOOKS: u64 = 400;
/// Columns of the small plot on the terminal.
const COLUMNS: usize = 60;
/// What was told last.
const TOLD: usize = 8;

pub fn run(path: &Path, plot: Option<&Path>) -> Result<ExitCode> {
    let scenario = file::read(path)?;
    let interrupt = Interrupt::listen()?;
    let length_us = scenario.until_us.unwrap_or(1);
    let bar = ProgressBar::new(length_us);
    let style = ProgressStyle::with_template("{bar:24.cyan/blue} {msg}, done in {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let started = Instant::now();
    let mut samples = Vec::new();
    let (result, told) =
        World::new(&scenario).run_observed((length_us / LOOKS).max(1), &mut |sample: Sample| {
            bar.set_position(sample.at_us);
            bar.set_message(format!("{}, step {}", clock(sample.at_us), sample.step));
            samples.push(sample);
            !interrupt.asked()
        });
    bar.finish_and_clear();
    let outcome = match result {
        Ok(outcome) => outcome,
        Err(violation) => {
            let log: String = told.iter().map(|(at, what)| format!("{:>10}  {what}\n", clock(*at))).collect();
            words::show(&format!("{log}\nAn invariant does not hold: {violation}\n"))?;
            return Ok(ExitCode::FAILURE);
        }
    };
    let story = Story { scenario: &scenario, samples: &samples, outcome: &outcome };
    let mut out = story.heading(started.elapsed().as_secs_f64());
    story.throughput(&mut out);
    story.stages(&mut out);
    story.waiting(&mut out);
    decisions(&mut out, &told);
    if let Some(path) = plot {
        std::fs::write(path, story.plot()).with_context(|| format!("cannot write {}", path.display()))?;
        let _ = writeln!(out, "\nThe plot is in {}.", path.display());
    }
    words::show(&out)?;
    Ok(if interrupt.asked() { ExitCode::from(interrupt::EXIT) } else { ExitCode::SUCCESS })
}

/// What is told of a run.
struct Story<'a> {
    scenario: &'a Scenario,
    samples: &'a [Sample],
    outcome: &'a Outcome,
}

impl Story<'_> {
    fn heading(&self, took_s: f64) -> String {
        let (spec, outcome) = (&self.scenario.spec, self.outcome);
        let sync = match spec.sync {
            Sync::Step => "every step waits for its sums",
            Sync::Delayed => "sums arrive one step late",
        };
        let reduce = match spec.reduce {
            Reduce::Exact => "summed in the reference's order",
            Reduce::Fast => "summed in any order",
        };
        format!(
            "{} peers, {} stages, {} microbatches a step; {sync}, {reduce}\n\
             {} simulated in {took_s:.1} s, {} events; every invariant held\n\n",
            self.scenario.peers.len(),
            spec.stages,
            spec.lots.microbatches,
            clock(outcome.done_us),
            words::count(outcome.events as f64),
        )
    }

    /// What was done, against what the peers that were alive could have done in equally fast stages.
    fn throughput(&self, out: &mut String) {
        let outcome = self.outcome;
        let done = outcome.step as f64 * f64::from(self.scenario.spec.lots.microbatches);
        let seconds = outcome.done_us as f64 / 1e6;
        let possible: f64 = self.possible().iter().map(|(_, rate)| rate).sum::<f64>();
        let possible = possible / (self.samples.len() as f64).max(1.0);
        let _ = writeln!(
            out,
            "steps        {} closed, {} rollbacks\n\
             throughput   {:.2} microbatches/s, {:.1} % of the {possible:.2} that those alive could do\n\
             WAN          {} between sites ({} a step), {} in all",
            outcome.step,
            outcome.rollbacks,
            done / seconds,
            100.0 * done / seconds / possible.max(1e-9),
            words::bytes(outcome.wan_bytes),
            words::bytes(outcome.wan_bytes / outcome.step.max(1)),
            words::bytes(outcome.bytes),
        );
        let rates = self.rates();
        if rates.len() > 1 {
            let _ = writeln!(out, "over time    {}", small_plot(&rates, outcome.done_us as f64 / 1e6));
        }
    }

    fn stages(&self, out: &mut String) {
        let Some(last) = self.samples.last() else { return };
        out.push_str("\nstage   peers at the end   at work\n");
        for (stage, (holders, busy_us)) in last.holders.iter().zip(&last.busy_us).enumerate() {
            let every_us = self.samples[0].at_us as f64;
            let there_us: f64 =
                self.samples.iter().map(|sample| sample.holders[stage] as f64 * every_us).sum();
            let _ = writeln!(
                out,
                "{stage:>5}   {holders:>16}   {:>5.1} %",
                (100.0 * *busy_us as f64 / there_us.max(1.0)).min(100.0)
            );
        }
    }

    fn waiting(&self, out: &mut String) {
        if let Some(last) = self.samples.last() {
            let why: String = last.why.chars().take(200).collect();
            let _ = writeln!(out, "\nat the end it waited for {why}");
        }
    }

    /// Microbatches a second between two commits.
    fn rates(&self) -> Vec<(f64, f64)> {
        let microbatches = f64::from(self.scenario.spec.lots.microbatches);
        let pairs = self.outcome.commits_us.windows(2).filter(|pair| pair[1] > pair[0]);
        pairs.map(|pair| (pair[1] as f64 / 1e6, microbatches * 1e6 / (pair[1] - pair[0]) as f64)).collect()
    }

    /// What those alive could do.
    fn possible(&self) -> Vec<(f64, f64)> {
        let stages = f64::from(self.scenario.spec.stages);
        self.samples.iter().map(|sample| (sample.at_us as f64 / 1e6, sample.alive / stages)).collect()
    }

    fn plot(&self) -> String {
        let series = |name: &str, colour, points, style| Series {
            name: name.into(),
            colour,
            points: plot::thinned(points),
            style,
        };
        let all = [
            series("what those alive could do", "#e08a00", self.possible(), Style::Thin),
            series("done, from commit to commit", "#1f5fa8", self.rates(), Style::Line),
        ];
        plot::svg("throughput", "seconds", "microbatches a second", &all)
    }
}

fn decisions(out: &mut String, told: &[(u64, String)]) {
    if told.is_empty() {
        return;
    }
    let last: VecDeque<&(u64, String)> = told.iter().rev().take(TOLD).collect();
    let _ = writeln!(out, "\nwhat was decided, the last {} of {}:", last.len(), told.len());
    for (at, what) in last.into_iter().rev() {
        let _ = writeln!(out, "{:>10}  {what}", clock(*at));
    }
}

/// Rates over time in one line, from nothing to what all but the highest tenth are below: after a stall a step that
/// was done in the meantime closes at once.
fn small_plot(rates: &[(f64, f64)], length_s: f64) -> String {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let mut sorted: Vec<f64> = rates.iter().map(|(_, rate)| *rate).collect();
    sorted.sort_by(f64::total_cmp);
    let highest = sorted.get(sorted.len() * 9 / 10).copied().unwrap_or(1.0);
    let bar = |column: usize| {
        let at = (column as f64 + 0.5) / COLUMNS as f64 * length_s;
        let after = rates.partition_point(|(until, _)| *until < at);
        let rate = rates.get(after).map_or(0.0, |(_, rate)| *rate);
        BARS[((rate / highest * 7.0).round() as usize).min(7)]
    };
    let bars: String = (0..COLUMNS).map(bar).collect();
    format!("{bars}  (█: {highest:.2} microbatches/s or more)")
}

/// 5400000000 → "1 h 30 min".
fn clock(us: u64) -> String {
    let seconds = us as f64 / 1e6;
    match seconds {
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min {:02.0} s", (s / 60.0).floor(), (s % 60.0).floor()),
        s => format!("{:.0} h {:02.0} min", (s / 3600.0).floor(), (s % 3600.0 / 60.0).floor()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_their_own_units() {
        assert_eq!(clock(1_500_000), "1.5 s");
        assert_eq!(clock(125_000_000), "2 min 05 s");
        assert_eq!(clock(3 * 3600 * 1_000_000 + 60_000_000), "3 h 01 min");
    }

    #[test]
    fn the_small_plot_shows_a_stall() {
        let rates = [(10.0, 8.0), (30.0, 1.0), (40.0, 8.0)];
        let line = small_plot(&rates, 40.0);
        assert_eq!(line.chars().filter(|bar| *bar == '█').count(), 30 + 1, "{line}");
        assert!(line.contains("▂"), "{line}");
    }
}
