//! Starling's side of `cargo xtask bench step`: trains a model on given batches, some steps at a time, when it is told to.
//!
//! ```text
//! reads   DIR/job.json     {model, optimiser, batch, steps, threads}
//!         DIR/batches.bin  u32, little endian, [steps, batch, context + 1]
//! writes  DIR/weights.safetensors, the initial weights, and ends, if it is called with `write-weights` behind DIR;
//!         called with `bf16`, its products take bf16
//! stdin   one number of steps a line
//! stdout  one line of JSON each: {"seconds", "losses", "peak_kib"}
//! ```

use std::error::Error;
use std::io::{BufRead, Write};
use std::path::Path;
use std::time::Instant;

use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
use serde::Deserialize;
use starling_model::config::ModelConfig;
use starling_model::engine::Shape;
use starling_model::optimiser::OptimiserConfig;
use starling_model::pipeline::{self, Stages};
use starling_model::reduce::settle_shared;
use starling_model::run::{Precision, TrainConfig};
use starling_model::stage::{Commit, Input, Keep, Loss, Meta, Microbatch, Output, Reduction, Stage, State};

#[derive(Deserialize)]
struct Job {
    vocabulary: usize,
    model: ModelConfig,
    optimiser: OptimiserConfig,
    batch: u32,
    steps: u64,
    threads: usize,
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args_os().skip(1);
    let directory = arguments.next().ok_or("which folder has the job?")?;
    let directory = Path::new(&directory);
    let job: Job = serde_json::from_slice(&std::fs::read(directory.join("job.json"))?)?;
    let batches = std::fs::read(directory.join("batches.bin"))?;
    let batches: Vec<u32> = batches.as_chunks().0.iter().map(|&x| u32::from_le_bytes(x)).collect();
    let before_kib = memory("VmRSS:")?;

    let what = arguments.next();
    let precision = if what.as_deref() == Some("bf16".as_ref()) { Precision::Bf16 } else { Precision::F32 };
    let Job { batch, steps, threads, .. } = job;
    let train =
        TrainConfig { steps, batch, microbatch: batch, lots: 1, threads, precision, ..Default::default() };
    let architecture = job.model.architecture(job.vocabulary);
    let mut stages = pipeline::build(&architecture, job.optimiser.rule(), &train, 1)?;
    if what.as_deref() == Some("write-weights".as_ref()) {
        return write_weights(&stages, &directory.join("weights.safetensors"));
    }
    for line in std::io::stdin().lock().lines() {
        let began = Instant::now();
        let mut losses = Vec::new();
        for _ in 0..line?.trim().parse::<u64>()? {
            losses.push(step(&mut stages, &job, &train, &batches)?);
        }
        let seconds = began.elapsed().as_secs_f64();
        let peak_kib = memory("VmHWM:")? - before_kib;
        println!("{}", serde_json::json!({ "seconds": seconds, "losses": losses, "peak_kib": peak_kib }));
        std::io::stdout().flush()?;
    }
    Ok(())
}

/// One step of one microbatch, as the reference loop does it.
fn step(stages: &mut Stages, job: &Job, train: &TrainConfig, batches: &[u32]) -> Result<f64, Box<dyn Error>> {
    let version = stages[0].version();
    let (lots, columns) = (train.lots(), job.model.context);
    let shape = Shape { rows: job.batch as usize, columns };
    let rows = &batches[version as usize * shape.rows * (columns + 1)..][..shape.rows * (columns + 1)];
    let tokens = rows.chunks(columns + 1).flat_map(|row| &row[..columns]).copied().collect();
    let meta = Meta {
        shape,
        samples: (0..u64::from(job.batch)).collect(),
        positions: (0..shape.tokens()).map(|n| (n % columns) as u32).collect(),
        documents: vec![0; shape.tokens()],
        targets: rows.chunks(columns + 1).flat_map(|row| &row[1..]).copied().collect(),
    };
    let microbatch = Microbatch { step: version, index: 0, version };
    let [stage] = &mut stages[..] else { return Err("the model is one stage".into()) };
    let (output, ticket) = stage.forward(microbatch, Input::Tokens(tokens), meta, Keep::All)?;
    let Output::Loss(Loss { sum, tokens }) = output else { return Err("the last stage has the loss".into()) };
    let (_, pending) = stage.backward(ticket, None)?;
    stage.fold(pending, lots)?;
    let reduction = Reduction { step: version, attempt: 0 };
    stage.reduce_alone(reduction)?;
    let mut squares = stage.sums_of_squares(reduction)?;
    squares.extend(settle_shared(&mut [vec![&mut **stage]], reduction)?);
    let norm = squares.values().sum::<f64>().sqrt() / tokens as f64;
    let update = job.optimiser.update(version, job.steps, version, tokens, norm);
    stage.apply(&Commit { step: version, version, update: Some(update) })?;
    Ok(sum / tokens as f64)
}

fn write_weights(stages: &[Box<dyn Stage>], path: &Path) -> Result<(), Box<dyn Error>> {
    let mut tensors = Vec::new();
    for stage in stages {
        for (parameter, span) in stage.layout().entries() {
            tensors.push((parameter, stage.read(stage.version(), State::Weights, span.range())?));
        }
    }
    let mut views = Vec::new();
    for (parameter, bytes) in &tensors {
        views.push((&parameter.name, TensorView::new(Dtype::F32, parameter.shape.clone(), bytes)?));
    }
    Ok(serialize_to_file(views, None, path)?)
}

/// A figure of this process's memory, as Linux tells it.
fn memory(key: &str) -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix(key)).ok_or("no such figure")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse()?)
}
