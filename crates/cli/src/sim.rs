//! `starling sim`: the swarm's own code on virtual time, with faults.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use starling_sim::fuzz::{self, Failure};
use starling_sim::world::World;

use crate::interrupt::{self, Interrupt};
use crate::words;

/// Scenarios between two looks at the clock.
const AT_A_TIME: u64 = 100;

/// Simulate a swarm and everything that can go wrong in it
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
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
    match arguments.action {
        Action::Fuzz { minutes, from } => hunt(minutes, from),
        Action::Replay { seed } => replay(seed),
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
