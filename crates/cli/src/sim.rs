//! `starling sim`: the swarm's own code on virtual time, with faults.

mod file;
mod run;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use indicatif::{ProgressBar, ProgressStyle};
use starling_sim::fuzz::{self, Failure};
use starling_sim::world::World;

use crate::interrupt::{self, Interrupt};
use crate::words;

/// Scenarios between two looks at the clock.
const AT_A_TIME: u64 = 100;

/// Simulate a swarm and everything that can go wrong in it
///
/// A scenario file says who is there, how fast devices and links are, and what goes wrong and when. The swarm's own
/// code then runs on virtual time, a day in minutes, with every invariant checked; what it tells (throughput, share
/// of what the peers could do, bytes between sites, decisions) is what a real run of that shape would do.
#[derive(clap::Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:\n  starling sim two-sites.toml --plot two-sites.svg\n  starling sim fuzz --minutes 10\n\n\
        A scenario:\n  stages = 4\n  microbatches = 256\n  length = \"10m\"\n  sync = \"delayed\"\n  \
        model = { parameters = 125e6, activation_bytes = 1_000_000 }\n  links = { between = \"200mbit,50ms\" }\n  \
        peers = [{ count = 8, site = 0, speed = 4.0 }, { count = 8, site = 1, speed = 2.0 }]\n  \
        churn = { lifetime = \"20m\", back = \"1m\" }\n  \
        faults = [{ at = \"90s\", kill-stage = { stage = 1, back = \"10s\" } }]"
)]
pub struct Arguments {
    /// A scenario file (.toml)
    scenario: Option<PathBuf>,
    /// Draw throughput over time into this file (.svg)
    #[arg(long, requires = "scenario")]
    plot: Option<PathBuf>,
    #[command(subcommand)]
    action: Option<Action>,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Run random scenarios with random faults, and check every invariant in each
    ///
    /// Peers, coordinators and drivers are killed, stopped, cut off and slowed; every microbatch must still be
    /// counted once, and every replica equal the one-process result. The first scenario that fails is made small.
    #[command(after_help = "Example:\n  starling sim fuzz --minutes 10 --from 1000000")]
    Fuzz {
        /// How long to hunt
        #[arg(long, default_value_t = 1.0)]
        minutes: f64,
        /// The first seed; each scenario is one seed further
        #[arg(long, default_value_t = 0)]
        from: u64,
    },
    /// Run the scenario of one seed, and tell what happens in it
    Replay {
        /// The seed
        seed: u64,
    },
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    match (&arguments.action, &arguments.scenario) {
        (Some(Action::Fuzz { minutes, from }), _) => hunt(*minutes, *from),
        (Some(Action::Replay { seed }), _) => replay(*seed),
        (None, Some(scenario)) => run::run(scenario, arguments.plot.as_deref()),
        (None, None) => bail!("which scenario? Name a file, or see `starling sim --help`"),
    }
}

fn hunt(minutes: f64, from: u64) -> Result<ExitCode> {
    let interrupt = Interrupt::listen()?;
    let limit = Duration::try_from_secs_f64(60.0 * minutes).unwrap_or(Duration::MAX);
    let start = Instant::now();
    let bar = ProgressBar::new(limit.as_secs());
    let style = ProgressStyle::with_template("{bar:24.cyan/blue} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut seed = from;
    while start.elapsed() < limit && !interrupt.asked() && seed < u64::MAX - AT_A_TIME {
        if let Err(failure) = fuzz::hunt(seed..seed + AT_A_TIME) {
            bar.finish_and_clear();
            words::show(&format!("{failure}\n"))?;
            return Ok(ExitCode::FAILURE);
        }
        seed += AT_A_TIME;
        bar.set_position(start.elapsed().as_secs());
        bar.set_message(format!("{} scenarios", seed - from));
    }
    bar.finish_and_clear();
    let rate = (seed - from) as f64 / start.elapsed().as_secs_f64().max(1e-9);
    words::show(&format!(
        "{} scenarios (seeds {from} to {}), {} a second: every invariant held in each\n",
        seed - from,
        seed.saturating_sub(1),
        words::count(rate)
    ))?;
    Ok(if interrupt.asked() { ExitCode::from(interrupt::EXIT) } else { ExitCode::SUCCESS })
}

fn replay(seed: u64) -> Result<ExitCode> {
    let scenario = fuzz::scenario(seed);
    let (result, told) = World::new(&scenario).run_with_log();
    let mut out = format!("{scenario:#?}\n\n");
    for (at, what) in told {
        out.push_str(&format!("{:>9.3} s  {what}\n", at as f64 / 1e6));
    }
    match result {
        Ok(outcome) => {
            let seconds = outcome.done_us as f64 / 1e6;
            words::show(&format!(
                "{out}\ndone after {seconds:.3} simulated seconds and {} events\n",
                outcome.events
            ))
        }
        Err(violation) => {
            let smallest = fuzz::shrink(scenario);
            words::show(&format!("{out}\n{}\n", Failure { seed, violation, smallest }))?;
            Ok(ExitCode::FAILURE)
        }
    }
}
