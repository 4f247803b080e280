//! `torch-band`: the same GPT-2 on the same text, trained by Starling and by PyTorch with five seeds each, every one with its
//! own weights and order of samples: do Starling's losses lie where PyTorch's do?
//!
//! The band at a step is where one more curve of PyTorch's would lie with a probability of 95 %: the mean of its five
//! curves, each smoothed over [`SMOOTH`] steps, and [`WIDE`] standard deviations on either side. (Of six curves of one kind
//! the sixth lies outside the range of the others in a third of all places, so that range would say nothing.) The job lies in `target/bench/torch-band/`; the head of
//! `bench/python/torch_band.py` describes it.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use starling_corpus::Sampler;
use starling_model::config::ModelConfig;
use starling_model::reference::Reference;
use starling_model::run::{Run, TrainConfig};

use super::torch_parity::{corpus_of, described};
use super::{Arguments, Figure, Must};
use crate::python;
use xtask::tool::{program, root, run as run_tool};

const STEPS: u64 = 400;
const SEEDS: u64 = 5;
/// Steps over which a curve is smoothed.
const SMOOTH: usize = 20;
/// Standard deviations on either side of the mean: Student's t for four degrees of freedom and 95 %, × √(1 + 1/5).
const WIDE: f64 = 3.04;
/// Steps at the end whose mean loss is compared.
const LAST: usize = 100;

/// The mean loss of each step, before its update.
type Curve = Vec<f64>;

pub fn run(arguments: &Arguments) -> Result<Vec<Figure>> {
    let python = python::environment(&["torch", "numpy", "safetensors"])?;
    let directory = root().join("target/bench/torch-band");
    fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let mut ours = Vec::new();
    for seed in 0..SEEDS {
        eprintln!("Starling trains {STEPS} steps, seed {seed}");
        let mut reference = open(arguments.text.as_deref(), seed, &directory)?;
        if seed == 0 {
            write_job(&directory, &reference)?;
        }
        ours.push(train(&mut reference)?);
    }
    eprintln!("PyTorch trains {STEPS} steps, {SEEDS} times");
    let script = root().join("bench/python/torch_band.py");
    run_tool(program(&python).env("PYTHONDONTWRITEBYTECODE", "1").arg(script).arg("--dir").arg(&directory))?;
    let theirs: Vec<Curve> = serde_json::from_slice(&fs::read(directory.join("curves.json"))?)?;
    compare(&ours, &theirs, &directory)
}

fn open(text: Option<&Path>, seed: u64, directory: &Path) -> Result<Reference> {
    let run = Run {
        name: "torch-band".into(),
        seed,
        model: ModelConfig { context: 64, width: 64, layers: 4, heads: 4, ..Default::default() },
        data: corpus_of(text)?,
        train: TrainConfig { steps: STEPS, batch: 16, microbatch: 16, ..Default::default() },
        ..Default::default()
    };
    let corpus = starling_corpus::open(&run.data, directory, &directory.join("corpus"))?;
    let vocabulary = corpus.tokeniser.vocabulary();
    let sampler = Sampler::new(corpus, run.data.held_out, run.model.context, run.seed)?;
    Ok(Reference::new(run, vocabulary, sampler)?)
}

fn train(reference: &mut Reference) -> Result<Curve> {
    (0..STEPS).map(|_| Ok(reference.step()?.loss.mean())).collect()
}

fn write_job(directory: &Path, reference: &Reference) -> Result<()> {
    let run = reference.run();
    let mut job = described(run, reference.sampler().corpus().tokeniser.vocabulary());
    job["init_std"] = json!(run.model.init_std);
    job["seeds"] = json!(SEEDS);
    fs::write(directory.join("job.json"), serde_json::to_string_pretty(&job)?)?;
    let sampler = reference.sampler();
    let tokens = (0..sampler.windows_per_epoch()).flat_map(|sample| sampler.window(sample).tokens);
    Ok(fs::write(directory.join("windows.bin"), tokens.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())?)
}

/// Mean and standard deviation.
fn spread(values: impl Iterator<Item = f64> + Clone) -> (f64, f64) {
    let count = values.clone().count() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let variance = values.map(|x| (x - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (mean, variance.sqrt())
}

fn smoothed(curve: &Curve) -> Curve {
    curve.windows(SMOOTH).map(|losses| losses.iter().sum::<f64>() / SMOOTH as f64).collect()
}

fn compare(ours: &[Curve], theirs: &[Curve], directory: &Path) -> Result<Vec<Figure>> {
    let whole = |curve: &Curve| curve.len() as u64 == STEPS;
    ensure!(ours.iter().chain(theirs).all(whole), "not every training has all its steps");
    let (our_curves, their_curves): (Vec<_>, Vec<_>) =
        (ours.iter().map(smoothed).collect(), theirs.iter().map(smoothed).collect());
    let band: Vec<(f64, f64)> =
        (0..their_curves[0].len()).map(|i| spread(their_curves.iter().map(move |curve| curve[i]))).collect();
    let inside = |curve: &Vec<f64>| {
        curve.iter().zip(&band).filter(|(loss, (mean, wide))| (*loss - mean).abs() <= WIDE * wide).count()
    };
    let points = (our_curves.len() * band.len()) as f64;
    let share = our_curves.iter().map(inside).sum::<usize>() as f64 / points;
    fs::write(directory.join("curves.svg"), drawing(&our_curves, &band))?;
    let at_the_end = |curves: &[Curve]| {
        let last = |curve: &Curve| curve[curve.len() - LAST..].iter().sum::<f64>() / LAST as f64;
        spread(curves.iter().map(last))
    };
    let ((our_mean, our_wide), (their_mean, their_wide)) = (at_the_end(ours), at_the_end(theirs));
    let apart = (our_mean - their_mean).abs() / their_wide;
    let figure =
        |name: &str, value, unit: &str, must| Figure { name: name.into(), value, unit: unit.into(), must };
    // Of curves of one kind 0.95 would be inside on average; neighbouring places are not independent.
    Ok(vec![
        figure("Starling's losses inside the band of PyTorch's seeds", share, "", Some(Must::AtLeast(0.9))),
        figure("loss of the last 100 steps, Starling, mean of five seeds", our_mean, "nat", None),
        figure("the same, standard deviation", our_wide, "nat", None),
        figure("loss of the last 100 steps, PyTorch, mean of five seeds", their_mean, "nat", None),
        figure("the same, standard deviation", their_wide, "nat", None),
        figure("the means' difference ÷ PyTorch's standard deviation", apart, "", Some(Must::AtMost(1.5))),
    ])
}

/// PyTorch's band in grey, Starling's curves over it.
fn drawing(curves: &[Vec<f64>], band: &[(f64, f64)]) -> String {
    const SIZE: (f64, f64) = (720.0, 360.0);
    const MARGIN: f64 = 40.0;
    let all = curves.iter().flatten().copied().chain(band.iter().map(|(mean, _)| *mean));
    let (least, most) = all.fold((f64::MAX, f64::MIN), |(least, most), x| (least.min(x), most.max(x)));
    let x = |i: usize| MARGIN + (SIZE.0 - 2.0 * MARGIN) * i as f64 / (band.len() - 1) as f64;
    let y = |loss: f64| SIZE.1 - MARGIN - (SIZE.1 - 2.0 * MARGIN) * (loss - least) / (most - least);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
        SIZE.0, SIZE.1
    );
    let edge =
        |side: f64| band.iter().enumerate().map(move |(i, (mean, wide))| (i, mean + side * WIDE * wide));
    let point = |(i, loss): (usize, f64)| format!("{:.1},{:.1}", x(i), y(loss));
    let upper: Vec<String> = edge(1.0).map(point).collect();
    let lower: Vec<String> = edge(-1.0).map(point).collect();
    let outline: Vec<&String> = upper.iter().chain(lower.iter().rev()).collect();
    let outline = outline.into_iter().cloned().collect::<Vec<_>>().join(" ");
    let _ = writeln!(out, "<polygon points=\"{outline}\" fill=\"#c8c8c8\"/>");
    for curve in curves {
        let line: Vec<String> = curve.iter().copied().enumerate().map(point).collect();
        let line = line.join(" ");
        let _ = writeln!(
            out,
            "<polyline points=\"{line}\" fill=\"none\" stroke=\"#d2451e\" stroke-width=\"1\"/>"
        );
    }
    for loss in [least, (least + most) / 2.0, most] {
        let _ = writeln!(out, "<text x=\"4\" y=\"{:.1}\">{loss:.2}</text>", y(loss) + 4.0);
    }
    for i in [0, (band.len() - 1) / 2, band.len() - 1] {
        let step = i + SMOOTH / 2;
        let _ = writeln!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{step}</text>",
            x(i),
            SIZE.1 - MARGIN + 16.0
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{0:.1}\" y=\"{1:.1}\" text-anchor=\"end\">grey: PyTorch, where a sixth seed of its would be (95 %); \
         red: Starling, {SEEDS} seeds</text>\n\
         <text x=\"{0:.1}\" y=\"{2:.1}\" text-anchor=\"end\">loss over {SMOOTH} steps</text>\n</svg>",
        SIZE.0 - MARGIN,
        MARGIN,
        MARGIN + 16.0
    );
    out
}
