//! `exchange`: models that `transformers` wrote give the same logits here, and models that are exported give the same there.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use starling_corpus::{DataConfig, SyntheticConfig, Tokeniser};
use starling_exchange::{END_OF_TEXT, Export, Format, Pretrained, byte_tokeniser, export};
use starling_model::checkpoint::{self, Checkpoint, Progress};
use starling_model::config::{Family, ModelConfig, Rope, RopeScaling};
use starling_model::pipeline::{self, Stages};
use starling_model::run::{Run, TrainConfig};
use starling_model::stage::{Output, Want};
use starling_model::{batch, engine::Activation};

use super::{Arguments, Figure, Must};
use crate::python;
use xtask::tool::{output, program, root, run as run_tool};

/// What the script asks its models, too.
const IDS: [u32; 12] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8];

#[derive(Deserialize)]
struct Loaded {
    logits: Vec<f32>,
    ids: Vec<u32>,
    same: bool,
    end: u32,
}

pub fn run(_: &Arguments) -> Result<Vec<Figure>> {
    let python = python::environment(&["torch", "transformers"])?;
    let script = root().join("bench/python/exchange.py");
    let directory = root().join("target/bench/exchange");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    run_tool(program(&python).arg(&script).arg("make").arg(&directory))?;
    let mut figures = Vec::new();
    for name in [
        "tied",
        "untied-gelu-inner",
        "half",
        "bf16-in-shards",
        "llama",
        "llama-3-in-shards",
        "llama-biases-tied",
    ] {
        let theirs: Vec<f32> = serde_json::from_slice(&fs::read(directory.join(format!("{name}.json")))?)?;
        let ours = logits(&imported(&directory.join(name))?)?;
        figures.push(difference(&format!("imported, {name}: largest difference of logits"), &ours, &theirs));
    }
    let untied = ModelConfig { tied: false, activation: Some(Activation::Gelu), inner: Some(50), ..model() };
    let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 64 };
    let llama = ModelConfig {
        family: Family::Llama,
        key_heads: Some(1),
        head_width: Some(10),
        rope: Some(Rope { theta: 500.0, scaling: Some(scaling) }),
        mlp_bias: true,
        ..model()
    };
    for (name, model) in [("exported", model()), ("exported-untied", untied), ("exported-llama", llama)] {
        let (folder, stages) = (directory.join(name), exported(&model, &directory.join(name))?);
        let said = output(program(&python).arg(&script).arg("load").arg(&folder))?;
        let loaded: Loaded = serde_json::from_str(said.trim())?;
        let bytes: Vec<u32> = "Grüße, 世界!\n  two spaces".bytes().map(u32::from).collect();
        if loaded.ids != bytes || !loaded.same || loaded.end != 256 {
            bail!("transformers reads the tokeniser of {name} as another one: {:?}", loaded.ids);
        }
        figures.push(difference(
            &format!("{name}: largest difference of logits"),
            &logits(&stages)?,
            &loaded.logits,
        ));
    }
    figures.push(time_of_import(&directory)?);
    Ok(figures)
}

fn model() -> ModelConfig {
    ModelConfig { context: 24, width: 42, layers: 3, heads: 3, init_std: 0.3, ..Default::default() }
}

fn built(model: &ModelConfig, vocabulary: usize) -> Result<Stages> {
    let train = TrainConfig { threads: 1, ..Default::default() };
    Ok(pipeline::build(&model.architecture(vocabulary), Run::default().optimiser.rule(), &train, 5)?)
}

fn imported(folder: &Path) -> Result<Stages> {
    let pretrained = Pretrained::open(folder)?;
    let mut stages = built(&pretrained.model, pretrained.vocabulary)?;
    pretrained.put_into(&mut stages)?;
    Ok(stages)
}

/// Writes a model of bytes to a folder; returns it as it is here.
fn exported(model: &ModelConfig, folder: &Path) -> Result<Stages> {
    let data = DataConfig { synthetic: Some(SyntheticConfig::default()), ..Default::default() };
    let run = Run { name: "exported".into(), model: model.clone(), data, ..Run::default() };
    let definition = run.definition(257, String::new());
    let progress = Progress { run, definition, tokeniser: Tokeniser::Bytes, skipped: 0 };
    let stages = built(model, 257)?;
    let aside = folder.with_extension("checkpoints");
    let checkpoint = Checkpoint::open(&checkpoint::save(&aside, &progress, &stages)?)?;
    let json = byte_tokeniser();
    let what = Export { format: Format::F32, tokeniser: Some((&json, END_OF_TEXT)), end_of_text: 256 };
    export(&checkpoint, &what, folder)?;
    Ok(stages)
}

fn logits(stages: &Stages) -> Result<Vec<f32>> {
    let (input, meta) = batch::text(&IDS, 0);
    match pipeline::infer(stages, input, &meta, Want::NextToken)? {
        Output::Logits(logits) => Ok(logits),
        _ => bail!("the last stage gives no logits"),
    }
}

fn difference(name: &str, ours: &[f32], theirs: &[f32]) -> Figure {
    let differences = ours.iter().zip(theirs).map(|(a, b)| f64::from((a - b).abs()));
    let value = if ours.len() == theirs.len() { differences.fold(0.0, f64::max) } else { f64::NAN };
    Figure { name: name.into(), value, unit: "".into(), must: Some(Must::AtMost(1e-4)) }
}

/// Opening a GPT-2 of 124 M parameters, and putting its weights into a stage.
fn time_of_import(directory: &Path) -> Result<Figure> {
    let model = ModelConfig { context: 1024, width: 768, layers: 12, heads: 12, ..Default::default() };
    let folder = directory.join("large");
    let data = DataConfig { synthetic: Some(SyntheticConfig::default()), ..Default::default() };
    let run = Run { name: "large".into(), model: model.clone(), data, ..Run::default() };
    let definition = run.definition(50257, String::new());
    let progress = Progress { run, definition, tokeniser: Tokeniser::Bytes, skipped: 0 };
    let mut stages = built(&model, 50257)?;
    let checkpoint =
        Checkpoint::open(&checkpoint::save(&directory.join("large.checkpoints"), &progress, &stages)?)?;
    export(&checkpoint, &Export { format: Format::F32, tokeniser: None, end_of_text: 0 }, &folder)?;
    drop(checkpoint);
    let start = Instant::now();
    Pretrained::open(&folder)?.put_into(&mut stages)?;
    let value = start.elapsed().as_secs_f64();
    Ok(Figure {
        name: "import of GPT-2, 124 M".into(),
        value,
        unit: "s".into(),
        must: Some(Must::AtMost(1.0)),
    })
}
