//! `cargo xtask verify`: the one gate. It writes nothing into the source tree and stops at the first failure.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::ValueEnum;

use crate::licences;
use xtask::tool::{ensure, run as run_tool, tool};

#[derive(clap::Args)]
pub struct Arguments {
    /// Run this step alone
    #[arg(long, value_name = "STEP")]
    only: Option<Step>,
}

/// The steps, in the order in which they run: the quick ones first.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Step {
    Format,
    Clippy,
    Tests,
    Doctests,
    Docs,
    Licences,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let steps = match &arguments.only {
        Some(step) => std::slice::from_ref(step),
        None => Step::value_variants(),
    };
    let mut taken = Vec::new();
    for &step in steps {
        eprintln!("\n── {} ──", step.name());
        let start = Instant::now();
        let outcome = step.check();
        taken.push((step, start.elapsed(), outcome.is_ok()));
        if let Err(error) = outcome {
            print_table(&taken);
            let name = step.name();
            return Err(error).with_context(|| {
                format!(
                    "verify stopped at `{name}`; {}; again with `cargo xtask verify --only {name}`",
                    step.advice()
                )
            });
        }
    }
    print_table(&taken);
    Ok(())
}

impl Step {
    fn name(self) -> String {
        self.to_possible_value().expect("no step is hidden").get_name().to_owned()
    }

    fn check(self) -> Result<()> {
        match self {
            Self::Format => {
                ensure("rustfmt", "cargo fmt --version", "rustup component add rustfmt")?;
                run_tool(&mut tool("cargo fmt --all -- --check"))
            }
            Self::Clippy => {
                ensure("clippy", "cargo clippy --version", "rustup component add clippy")?;
                run_tool(&mut tool(
                    "cargo clippy --workspace --all-targets --all-features --locked -- -D warnings",
                ))
            }
            Self::Tests => {
                let install = "cargo install cargo-nextest --locked";
                ensure("cargo-nextest (the test runner)", "cargo nextest --version", install)?;
                run_tool(&mut tool("cargo nextest run --workspace --all-features --locked"))
            }
            Self::Doctests => run_tool(&mut tool("cargo test --doc --workspace --all-features --locked")),
            Self::Docs => {
                let mut docs =
                    tool("cargo doc --no-deps --workspace --all-features --document-private-items --locked");
                run_tool(docs.env("RUSTDOCFLAGS", "-D warnings"))
            }
            Self::Licences => licences::check(),
        }
    }

    fn advice(self) -> &'static str {
        match self {
            Self::Format => "`cargo xtask fix` mends it",
            Self::Clippy => "`cargo xtask fix` mends some lints, the others are named above",
            Self::Tests | Self::Doctests => "the failing tests are named above",
            Self::Docs => "the broken documentation is named above",
            Self::Licences => "the dependencies are named below",
        }
    }
}

fn print_table(taken: &[(Step, Duration, bool)]) {
    eprintln!();
    for (step, time, passed) in taken {
        let outcome = if *passed { "ok" } else { "FAILED" };
        eprintln!("{:<10}{:>8.1} s  {outcome}", step.name(), time.as_secs_f64());
    }
    eprintln!();
}
