//! `step`: whole training steps of Starling's fast engine and of PyTorch, turn by turn, on the same weights and batches.
//!
//! Both sides are processes that wait for their turn, so that neither is measured in another minute than the other: on
//! a machine that others use too, only the ratios of neighbouring turns mean something.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::json;
use starling_model::config::{Family, ModelConfig};
use starling_model::optimiser::{Decay, OptimiserConfig};
use starling_model::random::uniform;

use super::sides::{PAIRS, Side, mean_and_bound};
use super::{Arguments, Figure, Must};
use crate::python;
use xtask::tool::{program, root, run as run_tool, tool};

/// Steps before the first turn.
const WARM_UP: u64 = 2;

/// What is trained, and what is demanded of it.
struct Size {
    name: &'static str,
    vocabulary: usize,
    model: ModelConfig,
    batch: u32,
    /// Steps of one turn.
    steps: u64,
    must: f64,
}

fn sizes() -> [Size; 4] {
    let model =
        |context, width, layers, heads| ModelConfig { context, width, layers, heads, ..Default::default() };
    [
        Size { name: "S", vocabulary: 8192, model: model(128, 256, 4, 4), batch: 8, steps: 4, must: 1.15 },
        Size { name: "M", vocabulary: 8192, model: model(256, 512, 8, 8), batch: 4, steps: 1, must: 1.05 },
        Size {
            name: "L",
            vocabulary: 50257,
            model: model(1024, 768, 12, 12),
            batch: 1,
            steps: 1,
            must: 1.05,
        },
        Size {
            name: "llama",
            vocabulary: 8192,
            model: ModelConfig { family: Family::Llama, key_heads: Some(2), ..model(512, 512, 8, 8) },
            batch: 2,
            steps: 1,
            must: 1.05,
        },
    ]
}

pub fn run(arguments: &Arguments) -> Result<Vec<Figure>> {
    let python = python::environment(&["torch", "numpy", "safetensors"])?;
    run_tool(&mut tool("cargo build --release --package starling-model --example step"))?;
    let mut figures = Vec::new();
    let only: Vec<&str> = arguments.only.as_deref().map(|only| only.split(',').collect()).unwrap_or_default();
    for size in sizes().iter().filter(|size| only.is_empty() || only.contains(&size.name)) {
        for threads in [1, 2] {
            figures.extend(compare(&python, size, threads, arguments)?);
        }
    }
    Ok(figures)
}

fn compare(python: &Path, size: &Size, threads: usize, arguments: &Arguments) -> Result<Vec<Figure>> {
    let directory = root().join("target/bench/step");
    fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    write_job(&directory, size, threads, arguments)?;
    let ours = || program(root().join("target/release/examples/step"));
    run_tool(ours().arg(&directory).arg("write-weights"))?;
    let script = root().join("bench/python/step.py");
    let mut starling = Side::start(ours().arg(&directory).args(arguments.bf16.then_some("bf16")))?;
    let mut torch = Side::start(program(python).arg(script).arg(&directory))?;
    let mut single = arguments.bf16.then(|| Side::start(ours().arg(&directory))).transpose()?;

    let (mut ratios, mut to_single) = (Vec::new(), Vec::new());
    // Of ours, PyTorch's, and ours with f32.
    let mut least = [f64::INFINITY; 3];
    let (mut most, mut most_to_single, mut peaks) = (0f64, 0f64, (0, 0));
    for turn in 0..=PAIRS {
        let steps = if turn == 0 { WARM_UP } else { size.steps };
        let (ours, theirs) = (starling.turn::<Turn>(steps)?, torch.turn::<Turn>(steps)?);
        let single = single.as_mut().map(|side| side.turn::<Turn>(steps)).transpose()?;
        most = most.max(ours.difference(&theirs));
        most_to_single = single.iter().fold(most_to_single, |most, single| most.max(ours.difference(single)));
        if turn == 0 {
            continue;
        }
        ratios.push((theirs.seconds / ours.seconds).ln());
        to_single.extend(single.iter().map(|single| (single.seconds / ours.seconds).ln()));
        peaks = (ours.peak_kib, theirs.peak_kib);
        for (least, turn) in least.iter_mut().zip([Some(&ours), Some(&theirs), single.as_ref()]) {
            *least = turn.map_or(*least, |turn| least.min(turn.seconds));
        }
        let single = single.map(|single| format!(", f32 {:.3} s", single.seconds)).unwrap_or_default();
        let (ours, theirs) = (ours.seconds, theirs.seconds);
        eprintln!("{}, {threads} threads: {ours:.3} s, PyTorch {theirs:.3} s{single}", size.name);
    }
    let name = |what: &str| format!("{}, {threads} threads: {what}", size.name);
    let figure = |what: &str, value, must| Figure { name: name(what), value, unit: String::new(), must };
    let demanded = |must| Some(must).filter(|_| !arguments.compiled && !arguments.bf16);
    let (mean, low) = mean_and_bound(&ratios);
    let mut figures = vec![
        figure("tokens/s ÷ PyTorch's", mean.exp(), demanded(Must::AtLeast(size.must))),
        figure("lower 95 % bound", low.exp(), None),
        figure("the same of the least times", least[1] / least[0], None),
        figure("memory ÷ PyTorch's", peaks.0 as f64 / peaks.1 as f64, demanded(Must::AtMost(0.6))),
    ];
    if arguments.bf16 {
        let (mean, low) = mean_and_bound(&to_single);
        figures.push(figure("tokens/s ÷ our f32's", mean.exp(), None));
        figures.push(figure("lower 95 % bound", low.exp(), None));
        figures.push(figure("the same of the least times", least[2] / least[0], None));
        figures.push(figure("largest difference of a loss from f32's", most_to_single, None));
    } else {
        figures.push(figure("largest difference of a loss", most, Some(Must::AtMost(1e-4))));
    }
    Ok(figures)
}

fn write_job(directory: &Path, size: &Size, threads: usize, arguments: &Arguments) -> Result<()> {
    let steps = WARM_UP + PAIRS as u64 * size.steps;
    let optimiser =
        OptimiserConfig { lr: 3e-4, warmup_steps: 0, decay: Decay::Constant, ..Default::default() };
    let job = json!({
        "vocabulary": size.vocabulary, "model": size.model, "optimiser": optimiser,
        "batch": size.batch, "steps": steps, "threads": threads,
        "compiled": arguments.compiled, "bf16": arguments.bf16,
    });
    fs::write(directory.join("job.json"), serde_json::to_string_pretty(&job)?)?;
    let tokens = steps * u64::from(size.batch) * (size.model.context as u64 + 1);
    let token = |i| (uniform(7, i) * size.vocabulary as f64) as u32;
    fs::write(
        directory.join("batches.bin"),
        (0..tokens).flat_map(|i| token(i).to_le_bytes()).collect::<Vec<u8>>(),
    )?;
    Ok(())
}

/// What a side did in its turn.
#[derive(Deserialize)]
struct Turn {
    seconds: f64,
    losses: Vec<f64>,
    /// The most memory that it has taken since its start.
    peak_kib: u64,
}

impl Turn {
    /// How far the losses of the same steps lie apart at the most.
    fn difference(&self, other: &Turn) -> f64 {
        self.losses.iter().zip(&other.losses).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
    }
}
