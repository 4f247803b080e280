//! `starling checkpoint`: looks into checkpoints.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use starling_model::checkpoint::Checkpoint;
use starling_model::reference::stages;

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

fn inspect(path: &std::path::Path) -> Result<ExitCode> {
    let path = checkpoint_at(path)?;
    let checkpoint = Checkpoint::open(&path)?;
    let manifest = &checkpoint.manifest;
    println!("{}", path.display());
    println!("  run           {} ({})", manifest.run.name, &manifest.identity[..16]);
    println!("  step          {} of {}", manifest.step, manifest.run.train.steps);
    println!("  next sample   {}", manifest.next_sample);
    println!("  next lr       {:.3e}", manifest.next_lr);
    println!("  skipped       {} updates", manifest.skipped);
    println!("  arithmetic    {}", manifest.class);
    println!("  weights       {}", manifest.weights_hash);
    for file in &manifest.files {
        println!(
            "  {:<13} {:>9} bytes  blake3 {}",
            file.name,
            file.bytes,
            &file.blake3[..16.min(file.blake3.len())]
        );
    }
    println!("\n  {:<28} {:>16} {:>10}", "tensor", "shape", "elements");
    for (name, (shape, _)) in checkpoint.tensors()? {
        let elements: usize = shape.iter().product();
        let shape: Vec<String> = shape.iter().map(ToString::to_string).collect();
        println!("  {name:<28} {:>16} {:>10}", shape.join(" × "), words::count(elements as f64));
    }
    Ok(ExitCode::SUCCESS)
}

fn verify(path: &std::path::Path) -> Result<ExitCode> {
    let path = checkpoint_at(path)?;
    let checkpoint = Checkpoint::open(&path)?;
    let manifest = &checkpoint.manifest;
    let architecture = manifest.run.model.architecture(manifest.definition.vocabulary);
    let mut stages =
        stages(&architecture, manifest.run.optimiser.rule(), &manifest.run.train, manifest.run.seed)?;
    checkpoint.restore(&mut stages)?;
    let bytes: u64 = manifest.files.iter().map(|file| file.bytes).sum();
    println!(
        "{} is whole: step {}, {} files, {} bytes, every hash as in the manifest",
        path.display(),
        manifest.step,
        manifest.files.len(),
        words::count(bytes as f64)
    );
    Ok(ExitCode::SUCCESS)
}
