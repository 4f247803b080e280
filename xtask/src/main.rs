//! `cargo xtask`: the commands that work on the project itself. `cargo xtask verify` is the gate.

mod bench;
mod cross;
mod fix;
mod fuzz;
mod licences;
mod python;
mod soak;
mod spdx;
mod tool;
mod verify;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

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
    Bench(bench::Arguments),
    /// Let real processes be killed, stopped and cut off for hours, and compare every step with one process
    Soak(soak::Arguments),
    /// Test the kernels for aarch64 under an emulator
    Cross,
    /// Run the fuzz targets of `fuzz/` for a while (nightly toolchain)
    Fuzz(fuzz::Arguments),
}

fn main() -> ExitCode {
    let outcome = match Arguments::parse().command {
        Command::Verify(arguments) => verify::run(&arguments),
        Command::Fix => fix::run(),
        Command::Bench(arguments) => bench::run(&arguments),
        Command::Soak(arguments) => soak::run(&arguments),
        Command::Cross => cross::run(),
        Command::Fuzz(arguments) => fuzz::run(&arguments),
    };
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    eprintln!("error: {error}");
    error.chain().skip(1).for_each(|cause| eprintln!("  because {cause}"));
    ExitCode::FAILURE
}
