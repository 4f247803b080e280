//! `cargo xtask fuzz`: the targets of `fuzz/` through cargo-fuzz, which needs the nightly toolchain.

use anyhow::{Result, bail};

use xtask::tool::{ensure, output, root, run as run_tool, tool};

#[derive(clap::Args)]
pub struct Arguments {
    /// The target; without it each one runs in turn
    target: Option<String>,
    /// How long to fuzz each target
    #[arg(long, value_name = "N", default_value_t = 60)]
    seconds: u32,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    if !root().join("fuzz/Cargo.toml").exists() {
        bail!("there is no fuzz/Cargo.toml yet, so there is nothing to fuzz");
    }
    ensure(
        "the nightly toolchain",
        "rustup run nightly rustc --version",
        "rustup toolchain install nightly --profile minimal",
    )?;
    ensure("cargo-fuzz", "cargo fuzz --version", "cargo install cargo-fuzz --locked")?;

    let listed = output(&mut tool("rustup run nightly cargo fuzz list"))?;
    let known: Vec<&str> = listed.split_whitespace().collect();
    let chosen = match &arguments.target {
        None => known,
        Some(target) if known.contains(&target.as_str()) => vec![target.as_str()],
        Some(target) => bail!("there is no fuzz target `{target}`; there are: {}", known.join(", ")),
    };
    for target in chosen {
        let mut fuzz = tool("rustup run nightly cargo fuzz run");
        run_tool(fuzz.args([target, "--", &format!("-max_total_time={}", arguments.seconds)]))?;
    }
    Ok(())
}
