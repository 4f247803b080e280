//! `starling checkpoint`: looks into checkpoints.

use std::fmt::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use starling_model::checkpoint::Checkpoint;
use starling_model::pipeline;

use crate::run_folder::checkpoint_at;
use crate::words;

/// Look into checkpoints
#[derive(clap::Args)]
pub struct Arguments {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// Say what a checkpoint is and what it holds
    Inspect {
        /// A run's folder, or one of its checkpoints
        path: PathBuf,
    },
    /// Check every byte against the manifest's hashes, and that the weights can be loaded
    Verify {
        /// A run's folder, or one of its checkpoints
        path: PathBuf,
    },
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    match &arguments.action {
        Action::Inspect { path } => inspect(path),
        Action::Verify { path } => verify(path),
    }
}

fn inspect(path: &Path) -> Result<ExitCode> {
    let path = checkpoint_at(path)?;
    let checkpoint = Checkpoint::open(&path)?;
    let manifest = &checkpoint.manifest;
    let mut out = format!("{}\n", path.display());
    let rows = [
        ("run", format!("{}, identity {}", manifest.run.name, manifest.identity)),
        ("step", format!("{} of {}", manifest.step, manifest.run.train.steps)),
        ("next sample", manifest.next_sample.to_string()),
        ("next lr", format!("{:.3e}", manifest.next_lr)),
        ("skipped", format!("{} updates", manifest.skipped)),
        ("arithmetic", manifest.class.clone()),
        ("weights", manifest.weights_hash.clone()),
    ];
    for (name, value) in rows {
        let _ = writeln!(out, "  {name:<13} {value}");
    }
    out.push_str("\n  file                      bytes  blake3\n");
    for file in &manifest.files {
        let _ = writeln!(out, "  {:<20} {:>10}  {}", file.name, file.bytes, file.blake3);
    }
    let _ = writeln!(out, "\n  {:<36} {:>14} {:>10}", "tensor", "shape", "elements");
    for (name, (shape, _)) in checkpoint.tensors()? {
        let elements: usize = shape.iter().product();
        let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
        let _ = writeln!(out, "  {name:<36} {:>14} {:>10}", shape.join(" × "), words::count(elements as f64));
    }
    words::show(&out)
}

fn verify(path: &Path) -> Result<ExitCode> {
    let path = checkpoint_at(path)?;
    let checkpoint = Checkpoint::open(&path)?;
    let manifest = &checkpoint.manifest;
    let architecture = manifest.run.model.architecture(manifest.definition.vocabulary);
    let mut stages = pipeline::build(
        &architecture,
        manifest.run.optimiser.rule(),
        &manifest.run.train.untrained(),
        manifest.run.seed,
    )?;
    checkpoint.restore(&mut stages)?;
    let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
    words::show(&format!(
        "{} is whole: step {}, {} files, {} bytes, every hash as in the manifest\n",
        path.display(),
        manifest.step,
        manifest.files.len(),
        words::count(bytes as f64)
    ))
}
