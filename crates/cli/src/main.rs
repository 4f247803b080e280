//! `starling`: trains one model on machines that are far apart.

mod checkpoint;
mod eval;
mod generate;
mod interrupt;
mod plot;
mod progress;
mod report;
mod run_folder;
mod schema;
mod session;
mod train;
mod words;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Train one model on machines that are far apart; churn does not change the training.
#[derive(Parser)]
#[command(version, arg_required_else_help = true, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a run file, or a plain text file with sensible defaults
    Train(train::Arguments),
    /// Loss, perplexity and bits per byte on held-out text
    Eval(eval::Arguments),
    /// Let a trained model write
    Generate(generate::Arguments),
    /// Look into checkpoints
    Checkpoint(checkpoint::Arguments),
    /// Print the JSON Schema of run files, for editors that complete and check them
    Schema,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Train(arguments) => train::run(arguments),
        Command::Eval(arguments) => eval::run(&arguments),
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Checkpoint(arguments) => checkpoint::run(&arguments),
        Command::Schema => schema::run(),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
