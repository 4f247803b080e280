//! `cargo xtask`: the commands that work on the project itself. `cargo xtask verify` is the gate.

mod cross;
mod fix;
mod fuzz;
mod licences;
mod soak;
mod spdx;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use xtask::tool::{run, tool};

/// A program of its own, so that the gate need not wait until all that is measured is built.
const BENCH: &str = "cargo run --quiet --release --locked --package starling-bench --";

/// Work on Starling itself.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Check everything that must hold before a commit; changes nothing in the source tree
    Verify(verify::Arguments),
    /// Mend what can be mended by machine: formatting, and the lints that carry a fix
    Fix,
    /// Run a benchmark, or list them
    #[command(disable_help_flag = true)]
    Bench {
        /// What to measure, and how: `cargo xtask bench --help`
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Let real processes be killed, stopped and cut off for hours, and compare every step with one process
    Soak(soak::Arguments),
    /// Test the kernels for aarch64 under an emulator, and check the program for Windows
    Cross(cross::Arguments),
    /// Run the fuzz targets of `fuzz/` for a while (nightly toolchain)
    Fuzz(fuzz::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Fix => fix::run(),
        Command::Bench { arguments } => run(tool(BENCH).args(arguments)),
        Command::Soak(arguments) => soak::run(&arguments),
        Command::Cross(arguments) => cross::run(&arguments),
        Command::Fuzz(arguments) => fuzz::run(&arguments),
    };
    xtask::exit(outcome)
}
