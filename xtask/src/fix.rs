//! `cargo xtask fix`: the one command that rewrites source files.

use anyhow::Result;

use xtask::tool::{ensure, run as run_tool, tool};

pub fn run() -> Result<()> {
    ensure("clippy", "cargo clippy --version", "rustup component add clippy")?;
    ensure("rustfmt", "cargo fmt --version", "rustup component add rustfmt")?;
    run_tool(&mut tool("cargo clippy --fix --allow-dirty --allow-staged --workspace --all-targets"))?;
    // Last, because a mended lint may leave a line that rustfmt would break elsewhere.
    run_tool(&mut tool("cargo fmt --all"))
}
