//! `torch-parity`: Starling and PyTorch train the same GPT-2 from the same weights on the same batches of text.
//!
//! The job lies in `target/bench/torch-parity/`, in files that both sides read; the head of
//! `bench/python/torch_parity.py` describes them.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize_to_file};
use serde_json::json;
use starling_corpus::{DataConfig, Sampler, SourceConfig, Split, SyntheticConfig};
use starling_model::config::ModelConfig;
use starling_model::reference::Reference;
use starling_model::run::{Run, TrainConfig};
use starling_model::stage::State;

use super::{Arguments, Figure, Must};
use crate::python;
use xtask::tool::{program, root, run as run_tool};

/// Steps that are compared.
const STEPS: u64 = 50;

/// Weights by name, row-major.
type Weights = BTreeMap<String, Vec<f32>>;

/// What one side made of the job.
struct Trained {
    /// The mean loss of each step, before its update.
    losses: Vec<f64>,
    /// The weights after the last step.
    weights: Weights,
}

pub fn run(arguments: &Arguments) -> Result<Vec<Figure>> {
    let python = python::environment(&["torch", "numpy", "safetensors"])?;
    let directory = root().join("target/bench/torch-parity");
    fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let run = job(arguments.text.as_deref())?;
    let mut reference = open(&run, &directory)?;
    write_job(&directory, &reference)?;

    eprintln!("PyTorch trains {STEPS} steps");
    let torch = train_with_torch(&python, &directory)?;
    eprintln!("Starling trains {STEPS} steps");
    let mut losses = Vec::new();
    for _ in 0..STEPS {
        losses.push(reference.step()?.loss.mean());
    }
    let starling = Trained { losses, weights: weights(&reference)? };
    write_curves(&directory, &starling, &torch)?;
    compare(&starling, &torch)
}

/// The lines of a text, or generated languages.
pub fn corpus_of(text: Option<&Path>) -> Result<DataConfig> {
    let Some(text) = text else {
        return Ok(DataConfig { synthetic: Some(SyntheticConfig::default()), ..Default::default() });
    };
    let path = std::path::absolute(text)?;
    let source = SourceConfig { path, weight: 1.0, split: Split::Line };
    Ok(DataConfig { sources: vec![source], ..Default::default() })
}

/// A model of bytes (of words, without a text), deep enough that an error in any layer shows in the loss.
fn job(text: Option<&Path>) -> Result<Run> {
    Ok(Run {
        name: "torch-parity".into(),
        seed: 1,
        model: ModelConfig { context: 64, width: 64, layers: 4, heads: 4, ..Default::default() },
        data: corpus_of(text)?,
        train: TrainConfig { steps: STEPS, batch: 8, microbatch: 8, ..Default::default() },
        ..Default::default()
    })
}

fn open(run: &Run, directory: &Path) -> Result<Reference> {
    let corpus = starling_corpus::open(&run.data, directory, &directory.join("corpus"))?;
    let vocabulary = corpus.tokeniser.vocabulary();
    let sampler = Sampler::new(corpus, run.data.held_out, run.model.context, run.seed)?;
    Ok(Reference::new(run.clone(), vocabulary, sampler)?)
}

/// A run's model and optimiser, as PyTorch's side reads them.
pub fn described(run: &Run, vocabulary: usize) -> serde_json::Value {
    let Run { model, optimiser, train, .. } = run;
    let learning_rates: Vec<f64> = (0..train.steps).map(|step| optimiser.lr_at(step, train.steps)).collect();
    json!({
        "model": {
            "vocabulary": vocabulary, "context": model.context, "width": model.width, "heads": model.heads,
            "layers": model.layers, "share_every": model.share_every, "tied": model.tied,
            "activation": model.architecture(vocabulary).activation, "document_mask": false,
        },
        "optimiser": {
            "kind": "adamw", "betas": [optimiser.beta1, optimiser.beta2], "eps": optimiser.epsilon,
            "weight_decay": optimiser.weight_decay,
        },
        "learning_rates": learning_rates, "clip": optimiser.clip, "steps": train.steps, "batch": train.batch,
        "threads": 2,
    })
}

fn write_job(directory: &Path, reference: &Reference) -> Result<()> {
    let train = &reference.run().train;
    let job = described(reference.run(), reference.sampler().corpus().tokeniser.vocabulary());
    fs::write(directory.join("job.json"), serde_json::to_string_pretty(&job)?)?;

    let samples = 0..STEPS * u64::from(train.batch);
    let tokens = samples.flat_map(|sample| reference.sampler().window(sample).tokens);
    fs::write(directory.join("batches.bin"), tokens.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())?;

    let mut tensors = Vec::new();
    for stage in reference.stages() {
        for (parameter, span) in stage.layout().entries() {
            tensors.push((
                &parameter.name,
                &parameter.shape,
                stage.read(stage.version(), State::Weights, span.range())?,
            ));
        }
    }
    let mut views = Vec::new();
    for (name, shape, bytes) in &tensors {
        views.push((name, TensorView::new(Dtype::F32, (*shape).clone(), bytes)?));
    }
    Ok(serialize_to_file(views, None, &directory.join("weights.safetensors"))?)
}

fn train_with_torch(python: &Path, directory: &Path) -> Result<Trained> {
    let script = root().join("bench/python/torch_parity.py");
    run_tool(program(python).env("PYTHONDONTWRITEBYTECODE", "1").arg(script).arg("--dir").arg(directory))?;
    let losses = serde_json::from_slice(&fs::read(directory.join("losses.json"))?)?;
    Ok(Trained { losses, weights: read_weights(&directory.join("final.safetensors"))? })
}

fn weights(reference: &Reference) -> Result<Weights> {
    let mut weights = Weights::new();
    for stage in reference.stages() {
        for (parameter, span) in stage.layout().entries() {
            weights.insert(
                parameter.name.clone(),
                numbers(&stage.read(stage.version(), State::Weights, span.range())?),
            );
        }
    }
    Ok(weights)
}

fn read_weights(path: &Path) -> Result<Weights> {
    let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut weights = Weights::new();
    for (name, view) in SafeTensors::deserialize(&bytes)?.tensors() {
        ensure!(view.dtype() == Dtype::F32, "{name} in {} is not f32", path.display());
        weights.insert(name, numbers(view.data()));
    }
    Ok(weights)
}

fn numbers(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks().0.iter().map(|&number| f32::from_le_bytes(number)).collect()
}

/// Both curves side by side, for a table or a plot.
fn write_curves(directory: &Path, starling: &Trained, torch: &Trained) -> Result<()> {
    let mut text = String::from("step,starling,pytorch\n");
    for (step, (ours, theirs)) in starling.losses.iter().zip(&torch.losses).enumerate() {
        text.push_str(&format!("{step},{ours:.9},{theirs:.9}\n"));
    }
    Ok(fs::write(directory.join("losses.csv"), text)?)
}

/// The loss is held to what the project promises against PyTorch, the weights to what it promises between peers whose
/// arithmetic differs.
fn compare(starling: &Trained, torch: &Trained) -> Result<Vec<Figure>> {
    let steps = torch.losses.len();
    if steps as u64 != STEPS || starling.losses.len() != steps {
        bail!("PyTorch took {steps} steps, Starling {}", starling.losses.len());
    }
    let differences = starling.losses.iter().zip(&torch.losses).map(|(ours, theirs)| (ours - theirs).abs());
    let apart = distance(&starling.weights, &torch.weights)?;
    let figure =
        |name: &str, value, unit: &str, must| Figure { name: name.into(), value, unit: unit.into(), must };
    Ok(vec![
        figure("first loss, PyTorch", torch.losses[0], "nat", None),
        figure("last loss, PyTorch", torch.losses[steps - 1], "nat", None),
        figure("largest difference of a step's loss", largest(differences), "nat", Some(Must::AtMost(1e-4))),
        figure("final weights, relative L2 distance", apart, "", Some(Must::AtMost(1e-4))),
    ])
}

/// The largest number; NaN if there is one, because `f64::max` would hide it.
fn largest(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(0.0, |most, x| if most.is_nan() || x <= most { most } else { x })
}

fn distance(ours: &Weights, theirs: &Weights) -> Result<f64> {
    ensure!(ours.keys().eq(theirs.keys()), "the two sides name their weights differently");
    let (mut apart, mut whole) = (0.0, 0.0);
    for (name, theirs) in theirs {
        ensure!(ours[name].len() == theirs.len(), "{name} has different sizes");
        for (&a, &b) in ours[name].iter().zip(theirs) {
            apart += (f64::from(a) - f64::from(b)).powi(2);
            whole += f64::from(b).powi(2);
        }
    }
    Ok((apart / whole).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nan_loss_is_not_hidden() {
        assert!(largest([1.0, f64::NAN, 2.0].into_iter()).is_nan());
        assert_eq!(largest([1.0, 3.0, 2.0].into_iter()), 3.0);
    }

    #[test]
    fn equal_weights_have_no_distance_and_missing_ones_are_refused() {
        let weights = Weights::from([("wte.weight".into(), vec![3.0, 4.0])]);
        let moved = Weights::from([("wte.weight".into(), vec![3.0, 4.5])]);
        assert_eq!(distance(&weights, &weights).unwrap(), 0.0);
        assert_eq!(distance(&moved, &weights).unwrap(), 0.1);
        assert!(distance(&Weights::new(), &weights).is_err());
    }
}
