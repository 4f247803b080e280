//! Calling other programs from the root of the project, and getting those that are missing.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};

/// The root of the project, wherever the command was typed.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().expect("xtask/ lies in the root of the project").to_path_buf()
}

/// A program about to be called in the root of the project.
pub fn program(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(name);
    command.current_dir(root());
    // What cargo tells this program of its own package is not for another cargo: some crates are built anew by it.
    let own = |name: &str| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_");
    for (name, _) in std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(own)) {
        command.env_remove(name);
    }
    command
}

/// The same from a plain line: `tool("cargo fmt --all")`.
pub fn tool(line: &str) -> Command {
    let mut words = line.split_whitespace();
    let mut command = program(words.next().expect("a line names its program"));
    command.args(words);
    command
}

/// Shows the command, runs it in the foreground and demands that it succeeds.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = shown(command);
    eprintln!("$ {shown}");
    let status = command.status().with_context(|| format!("cannot start `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}` failed ({status})");
    }
    Ok(())
}

/// What the command prints. Its errors go to the user's terminal.
pub fn output(command: &mut Command) -> Result<String> {
    let shown = shown(command);
    let output =
        command.stderr(Stdio::inherit()).output().with_context(|| format!("cannot start `{shown}`"))?;
    if !output.status.success() {
        bail!("`{shown}` failed ({})", output.status);
    }
    String::from_utf8(output.stdout).with_context(|| format!("`{shown}` printed something that is not UTF-8"))
}

/// Whether the command runs and succeeds, quietly.
pub fn works(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

/// Runs `install` unless `probe` already works.
pub fn ensure(what: &str, probe: &str, install: &str) -> Result<()> {
    if works(&mut tool(probe)) {
        return Ok(());
    }
    eprintln!("{what} is missing; installing it");
    run(&mut tool(install)).with_context(|| format!("{what} is needed and could not be installed"))
}

fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}
