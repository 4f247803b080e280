//! hivemind's all-reduce, side by side: four processes, its own runner, no matchmaking.

use anyhow::{Context, Result};

use crate::python;
use xtask::tool::{output, program, root};

/// The median of some rounds, in seconds.
pub fn all_reduce() -> Result<f64> {
    let python = python::environment(&["torch", "hivemind"])?;
    let script = root().join("bench/python/all_reduce.py");
    let text = output(program(&python).arg(script))?;
    let last = text.lines().last().unwrap_or_default();
    last.trim().parse().with_context(|| format!("hivemind's benchmark said {last:?}"))
}
