//! `starling`: trains one model on machines that are far apart.
#![warn(clippy::print_stdout, clippy::print_stderr, reason = "they panic when nobody listens; see `words`")]

mod checkpoint;
mod corpus;
mod eval;
mod export;
mod generate;
mod hosting;
mod interrupt;
mod join;
mod key;
mod plan;
mod plot;
mod progress;
mod report;
mod run;
mod run_folder;
mod schema;
mod session;
mod sim;
mod status;
mod support;
mod train;
mod units;
mod up;
mod weights;
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
    Up(up::Arguments),
    Join(join::Arguments),
    #[command(subcommand)]
    Run(run::Command),
    Status(status::Arguments),
    Watch(status::WatchArguments),
    Key(key::Arguments),
    Train(train::Arguments),
    #[command(subcommand)]
    Corpus(corpus::Command),
    Plan(plan::Arguments),
    Eval(eval::Arguments),
    Generate(generate::Arguments),
    Export(export::Arguments),
    Sim(sim::Arguments),
    Checkpoint(checkpoint::Arguments),
    Support(support::Arguments),
    /// Print the JSON Schema of run files, for editors that complete and check them
    Schema,
}

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Up(arguments) => up::run(arguments),
        Command::Join(arguments) => join::run(arguments),
        Command::Run(command) => run::run(command),
        Command::Status(arguments) => status::run(&arguments),
        Command::Watch(arguments) => status::watch(&arguments),
        Command::Key(arguments) => key::run(&arguments),
        Command::Corpus(command) => corpus::run(command),
        Command::Train(arguments) => train::run(arguments),
        Command::Plan(arguments) => plan::run(&arguments),
        Command::Eval(arguments) => eval::run(&arguments),
        Command::Generate(arguments) => generate::run(&arguments),
        Command::Export(arguments) => export::run(&arguments),
        Command::Sim(arguments) => sim::run(&arguments),
        Command::Checkpoint(arguments) => checkpoint::run(&arguments),
        Command::Support(arguments) => support::run(&arguments),
        Command::Schema => schema::run(),
    };
    result.unwrap_or_else(|error| {
        words::tell(&format!("error: {}", told(&error)));
        ExitCode::FAILURE
    })
}

/// An error and its causes, but none that a message has told already.
fn told(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_cause_is_told_once() {
        let cause = anyhow::anyhow!("disk full");
        let inner = cause.context("cannot write a.txt: disk full");
        assert_eq!(
            super::told(&inner.context("the run stops")),
            "the run stops: cannot write a.txt: disk full"
        );
    }
}
