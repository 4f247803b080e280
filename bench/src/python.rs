//! The Python environment of those benchmarks that compare Starling with PyTorch.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use xtask::tool::{program, root, run as run_tool, works};

/// A Python that can import these packages (named as they are imported), from `target/venv`.
///
/// The environment is made on first use and kept, because PyTorch is a download of gigabytes.
pub fn environment(packages: &[&str]) -> Result<PathBuf> {
    let venv = root().join("target/venv");
    let python = venv.join(if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" });
    if imports(&python, packages) {
        return Ok(python);
    }
    eprintln!("making a Python environment with {} in {}", packages.join(", "), venv.display());
    if packages.contains(&"torch") {
        eprintln!("(PyTorch is several gigabytes; this is needed once)");
    }
    if !works(program(&python).args(["-m", "pip", "--version"])) {
        let system = if cfg!(windows) { "python" } else { "python3" };
        run_tool(program(system).args(["-m", "venv"]).arg(&venv))
            .context("a Python 3 with its `venv` module is needed for this benchmark")?;
    }
    run_tool(program(&python).args(["-m", "pip", "install"]).args(packages))?;
    Ok(python)
}

fn imports(python: &Path, packages: &[&str]) -> bool {
    works(program(python).args(["-c", &format!("import {}", packages.join(", "))]))
}
