//! `starling corpus`: text to tokens, once, before anything is trained.

mod build;
mod import;
mod inspect;

use std::process::ExitCode;

use anyhow::Result;

/// Make token shards of text files, and look into them
///
/// A corpus is a folder: the tokens of all documents in hashed shards, the tokenizer.json that made them, and
/// corpus.json. Train on it with `starling train FOLDER`, or name it in a run file: [[data.sources]] path = "FOLDER".
#[derive(clap::Subcommand)]
pub enum Command {
    Build(build::Arguments),
    Import(import::Arguments),
    Inspect(inspect::Arguments),
}

pub fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Build(arguments) => build::run(arguments),
        Command::Import(arguments) => import::run(arguments),
        Command::Inspect(arguments) => inspect::run(&arguments),
    }
}
