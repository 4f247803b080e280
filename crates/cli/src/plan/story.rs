//! What was computed and simulated, in plain words.

use std::fmt::Write;
use std::time::Duration;

use anyhow::Result;
use starling_model::pipeline::StagePlan;
use starling_model::run::Reduce;
use starling_model::stage::Keep;

use crate::plan::arithmetic::named;
use crate::plan::case::{Case, links};
use crate::plan::changes::Tried;
use crate::plan::forecast::{Churn, Forecast, Parts};
use crate::words;

/// Devices that compute for this share of a step are all that holds it up.
const AT_WORK: f64 = 0.85;
/// Columns of a bar that is the whole step.
const COLUMNS: f64 = 30.0;
/// Deaths from which on their cost can be told.
const ENOUGH_DEATHS: usize = 8;

/// What is told of a run; see the module's head.
pub struct Story<'a> {
    pub case: &'a Case,
    pub stages: &'a [StagePlan],
    pub forecast: &'a Forecast,
    pub parts: &'a Parts,
}

/// The run and the swarm.
pub fn heading(case: &Case, stages: &[StagePlan]) -> String {
    let (run, lots) = (&case.run, case.run.train.lots());
    let reduce = match run.swarm.reduce {
        Reduce::Exact => "exact",
        Reduce::Fast => "fast",
    };
    let again = match stages.first().map(|stage| stage.keep) {
        Some(Keep::Input) => "; backward computes activations again, since not everything is kept",
        _ => "",
    };
    format!(
        "{}: {} parameters in {} {}; a step of {} tokens in {}, {}, {reduce} sums\n{}; {}{again}\n\n",
        run.name,
        words::count(case.parameters()),
        stages.len(),
        if stages.len() == 1 { "stage" } else { "stages" },
        words::count(case.step_tokens()),
        several(lots.microbatches, "microbatch", "microbatches"),
        several(lots.lots, "lot", "lots"),
        case.swarm.named(),
        links(&case.swarm),
    )
}

impl Story<'_> {
    /// How fast it would be.
    pub fn prediction(&self, took: Duration) -> String {
        let Forecast { step_s, tokens_per_s, ideal_s, steps, cut_off, .. } = *self.forecast;
        let all_s = step_s * self.case.run.train.steps as f64;
        let mut out = format!(
            "\nPredicted, from {} on virtual time ({:.1} s of simulation)\n",
            several(steps, "step", "steps"),
            took.as_secs_f64()
        );
        let _ = writeln!(
            out,
            "  speed         {} tokens/s, {} a step",
            words::count(tokens_per_s),
            words::seconds(step_s)
        );
        let _ = writeln!(
            out,
            "  devices       do {:.0} % of what they could",
            100.0 * (ideal_s / step_s).min(1.0)
        );
        if self.forecast.sites > 1 {
            let wan = words::bytes(self.forecast.wan_bytes as u64);
            let rate = words::bytes((self.forecast.wan_bytes / step_s) as u64);
            let _ = writeln!(out, "  between sites {wan} a step, {rate}/s in all directions together");
        }
        let _ = writeln!(out, "  the whole run {} for {} steps", long(all_s), self.case.run.train.steps);
        if cut_off {
            let _ = writeln!(
                out,
                "  (Cut off: simulating more steps would have taken too long. --patience gives it more time.)"
            );
        }
        match self.forecast.left_out {
            0 => {}
            1 => out.push_str("  (One peer has too little memory for the largest stage, and is left out.)\n"),
            many => {
                let _ = writeln!(
                    out,
                    "  ({many} peers have too little memory for the largest stage, and are left out.)"
                );
            }
        }
        out
    }

    /// Where the time of a step goes.
    pub fn parts(&self, out: &mut String) {
        let parts = self.parts;
        out.push_str("\nWhere a step's time goes\n");
        let slowest = format!("waiting for the slowest stage, {}", parts.slowest);
        for (what, seconds) in [
            ("computing, all devices alike", parts.computing_s),
            (&slowest, parts.uneven_s),
            ("filling and draining the pipeline", parts.filling_s),
            ("waiting for the wire: latency", parts.latency_s),
            ("waiting for the wire: activations", parts.activations_s),
            ("waiting for the wire: sums", parts.sums_s),
        ] {
            let share = seconds / self.forecast.step_s;
            let bar = "█".repeat((share * COLUMNS).round() as usize);
            let line = format!("  {what:<36} {:>9} {:>4.0} %  {bar}", words::seconds(seconds), 100.0 * share);
            let _ = writeln!(out, "{}", line.trim_end());
        }
    }

    /// How busy each stage is.
    pub fn stages(&self, out: &mut String) {
        out.push_str("\nstage  peers   at work\n");
        for (number, stage) in self.forecast.stages.iter().enumerate() {
            let bar = "█".repeat((stage.share * COLUMNS).round() as usize);
            let line = format!("{number:>5}  {:>5}   {:>5.1} %  {bar}", stage.peers, 100.0 * stage.share);
            let _ = writeln!(out, "{}", line.trim_end());
        }
    }

    /// What holds it up most.
    pub fn bottleneck(&self, out: &mut String) {
        let (parts, step_s) = (self.parts, self.forecast.step_s);
        let percent = |seconds: f64| 100.0 * seconds / step_s;
        let stage = parts.slowest;
        let of_stage =
            self.stages.get(stage).map_or(String::new(), |stage| format!(" ({})", named(&stage.units)));
        let lots = self.case.run.train.lots();
        let peers = self.case.swarm.peers.len();
        let waits = [parts.uneven_s, parts.filling_s, parts.latency_s, parts.activations_s, parts.sums_s];
        let longest = waits.iter().copied().fold(0.0, f64::max);
        let text = if parts.computing_s >= AT_WORK * step_s {
            format!(
                "the devices themselves: they compute for {:.0} % of a step, in stage {stage}{of_stage} longest. Only more \
                 of them, or faster ones, bring much more.",
                percent(parts.computing_s)
            )
        } else if longest == parts.uneven_s {
            format!(
                "the compute of stage {stage}{of_stage}. All others wait for it, for {:.0} % of a step: stages cannot be cut \
                 more evenly, or its peers are too few or too slow.",
                percent(longest)
            )
        } else if longest == parts.filling_s {
            format!(
                "the pipeline, which fills and drains in every step ({:.0} % of it): {} are few for {peers} peers in {}.",
                percent(longest),
                several(lots.microbatches, "microbatch", "microbatches"),
                several(self.stages.len() as u32, "stage", "stages")
            )
        } else if longest == parts.latency_s {
            format!(
                "the latency of the links: for {:.0} % of a step messages are on their way, however small they are. More work \
                 in a step hides it.",
                percent(longest)
            )
        } else if longest == parts.activations_s {
            format!(
                "the wire: activations and their gradients, on their way from stage to stage, hold a step up for {:.0} % of \
                 its time.",
                percent(longest)
            )
        } else {
            format!(
                "the wire: the sums of gradients at the end of every step hold it up for {:.0} % of its time.",
                percent(longest)
            )
        };
        let _ = writeln!(out, "\nBottleneck: {text}");
    }

    /// What churn costs.
    pub fn churn(&self, out: &mut String, churn: &Result<Churn>, per_hour: f64, back: Duration) {
        let lives = long(3600.0 / per_hour);
        let _ =
            writeln!(out, "\nIf a peer lives {lives} on average and is replaced after {}", words::time(back));
        let churn = match churn {
            Ok(churn) => churn,
            Err(why) => {
                let _ = writeln!(out, "  {why}");
                return;
            }
        };
        let share = churn.tokens_per_s / self.forecast.tokens_per_s;
        let all_s = self.case.run.train.steps as f64 * self.case.step_tokens() / churn.tokens_per_s;
        if share <= 0.0 {
            out.push_str("  it would not get anywhere: more is lost than is done\n");
        } else {
            let _ = writeln!(
                out,
                "  speed         {} tokens/s, {:.0} % of what it is without deaths\n  the whole run {}",
                words::count(churn.tokens_per_s),
                100.0 * share,
                long(all_s),
            );
        }
        let _ = writeln!(
            out,
            "  a death costs {} of everybody's work (seen: {} in {})",
            long(churn.cost_s),
            several(churn.deaths as u64, "death", "deaths"),
            long(churn.span_s),
        );
        let every = self.case.run.checkpoint.every;
        if churn.stages_lost > 0 {
            let back = match every {
                0 => "to the beginning: there are no checkpoints (checkpoint.every)".into(),
                every => format!("to the last checkpoint, one in {every} steps"),
            };
            let _ = writeln!(
                out,
                "  {} of them left a stage without a peer, so that all went back {back}; more peers a stage prevent that",
                churn.stages_lost
            );
        }
        if churn.deaths < ENOUGH_DEATHS {
            let cut_off = if churn.cut_off { "; --patience shows more" } else { "" };
            let _ = writeln!(out, "  (So few deaths say little of their cost{cut_off}.)");
        }
    }

    /// What would bring more, and what would not.
    pub fn changes(&self, out: &mut String, tried: &[Tried]) {
        let (worth, not): (Vec<&Tried>, Vec<&Tried>) = tried.iter().partition(|tried| tried.is_worth_it());
        if worth.is_empty() {
            out.push_str("\nNone of the changes that were simulated brings more than a few per cent.\n");
        } else {
            out.push_str("\nWhat to change, each simulated alone\n");
            let what = worth.iter().map(|tried| tried.change.what.chars().count()).max().unwrap_or(0);
            for Tried { change, forecast, gain } in &worth {
                let price =
                    if change.price.is_empty() { String::new() } else { format!(" ({})", change.price) };
                let _ = writeln!(
                    out,
                    "  {:+4.0} %  {:>8} tokens/s, {:>8} a step  {:<what$}  {}{price}",
                    100.0 * gain,
                    words::count(forecast.tokens_per_s),
                    words::seconds(forecast.step_s),
                    change.what,
                    change.how,
                );
            }
        }
        if !not.is_empty() {
            let names: Vec<String> = not
                .iter()
                .map(|tried| format!("{} ({:+.0} %)", tried.change.what, 100.0 * tried.gain))
                .collect();
            let _ = writeln!(out, "  Not worth it: {}.", names.join("; "));
        }
    }
}

fn several(count: impl Into<u64>, one: &str, many: &str) -> String {
    let count = count.into();
    format!("{count} {}", if count == 1 { one } else { many })
}

/// 200000 s → "2.3 days"; less is told as anywhere.
fn long(seconds: f64) -> String {
    const DAY_S: f64 = 86_400.0;
    match seconds {
        s if s >= 1000.0 * DAY_S => format!("{} days", words::count(s / DAY_S)),
        s if s >= 2.0 * DAY_S => format!("{:.1} days", s / DAY_S),
        s if s < 60.0 => words::seconds(s),
        s => words::time(Duration::from_secs_f64(s)),
    }
}
