//! `cargo xtask soak`: the minutes of chaos of the test suite, for hours.

use anyhow::{Result, bail};

use xtask::tool::{run as run_tool, tool};

#[derive(clap::Args)]
pub struct Arguments {
    /// For how long
    #[arg(long, value_name = "N", default_value_t = 1.0)]
    hours: f64,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    if !(arguments.hours > 0.0 && arguments.hours <= 1000.0) {
        bail!("{} hours cannot be waited for; use more than 0 and at most 1000", arguments.hours);
    }
    // Without the test runner's time limits.
    let mut soak =
        tool("cargo test --release --locked --package starling --test swarm -- minutes_of_chaos --nocapture");
    run_tool(soak.env("STARLING_CHAOS_MINUTES", (60.0 * arguments.hours).to_string()))
}
