//! Loss, gradients and updates of small models of every family agree with PyTorch's (`golden/make_golden.py`).
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use starling_model::config::{Architecture, ModelConfig};
use starling_model::engine::cpu::{Cpu, Isa};
use starling_model::engine::naive::Naive;
use starling_model::engine::{Dtype, Engine, NO_TARGET, Shape};
use starling_model::local::LocalStage;
use starling_model::lots::{Lots, Node};
use starling_model::optimiser::{Kind, OptimiserConfig};
use starling_model::reduce::settle_shared;
use starling_model::stage::{Commit, Input, Keep, Meta, Microbatch, Output, Reduction, Stage, State};

#[derive(Deserialize)]
struct Golden {
    config: serde_json::Value,
    tokens: Vec<Vec<u32>>,
    targets: Vec<Vec<i64>>,
    documents: Option<Vec<Vec<u32>>>,
    loss_sum: f64,
    tokens_counted: u64,
    weights: BTreeMap<String, Tensor>,
    gradients: BTreeMap<String, Vec<f64>>,
    clip: f64,
    adamw: Updated,
    sgd: Updated,
    lamb: Updated,
}

#[derive(Deserialize)]
struct Tensor {
    data: Vec<f64>,
}

#[derive(Deserialize)]
struct Updated {
    learning_rate: f64,
    steps: u64,
    weights: BTreeMap<String, Vec<f64>>,
}

const CASES: [&str; 7] = [
    include_str!("golden/tied_gelu_new.json"),
    include_str!("golden/untied_gelu.json"),
    include_str!("golden/shared_layers.json"),
    include_str!("golden/document_mask.json"),
    include_str!("golden/llama.json"),
    include_str!("golden/llama_untied_biases.json"),
    include_str!("golden/llama_shared_layers.json"),
];

fn cases() -> Vec<Golden> {
    CASES.iter().map(|text| serde_json::from_str(text).unwrap()).collect()
}

impl Golden {
    fn architecture(&self) -> Architecture {
        // Besides a model's settings, the vocabulary, and whether documents are given.
        let mut config = self.config.as_object().unwrap().clone();
        let vocabulary = config.remove("vocabulary").unwrap().as_u64().unwrap();
        config.remove("document_mask");
        let config: ModelConfig = serde_json::from_value(config.into()).unwrap();
        assert_eq!(config.problems(), []);
        config.architecture(vocabulary as usize)
    }

    fn stage<E: Engine>(&self, engine: E, optimiser: &OptimiserConfig) -> LocalStage<E> {
        let architecture = self.architecture();
        let engine = Arc::new(engine);
        let units = 0..architecture.units().len();
        let mut stage = LocalStage::new(engine, architecture, units, optimiser.rule(), 0);
        for (name, tensor) in &self.weights {
            let start = stage.layout().span(name).unwrap().start;
            stage.write(State::Weights, start, &bytes(stage.dtype(), &tensor.data)).unwrap();
        }
        stage
    }

    fn microbatch(&self) -> (Input, Meta) {
        let shape = Shape { rows: self.tokens.len(), columns: self.tokens[0].len() };
        let documents: Vec<u32> = match &self.documents {
            Some(documents) => documents.concat(),
            None => vec![0; shape.tokens()],
        };
        let position = |n: usize| {
            let start = n - n % shape.columns;
            (start..n).rev().take_while(|&before| documents[before] == documents[n]).count() as u32
        };
        let target = |t: &i64| if *t < 0 { NO_TARGET } else { *t as u32 };
        let meta = Meta {
            shape,
            samples: (0..shape.rows as u64).collect(),
            positions: (0..shape.tokens()).map(position).collect(),
            documents: documents.clone(),
            targets: self.targets.iter().flatten().map(target).collect(),
        };
        (Input::Tokens(self.tokens.concat()), meta)
    }
}

fn bytes(dtype: Dtype, values: &[f64]) -> Vec<u8> {
    match dtype {
        Dtype::F32 => values.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
        Dtype::F64 => values.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

fn values(dtype: Dtype, bytes: &[u8]) -> Vec<f64> {
    match dtype {
        Dtype::F32 => bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x).into()).collect(),
        Dtype::F64 => bytes.as_chunks().0.iter().map(|&x| f64::from_le_bytes(x)).collect(),
    }
}

/// Forward, backward, reduce: everything before the commit; returns the loss and each parameter's gradient.
fn gradients(golden: &Golden, stage: &mut dyn Stage) -> (f64, u64, BTreeMap<String, Vec<f64>>) {
    let (input, meta) = golden.microbatch();
    let microbatch = Microbatch { step: 0, index: 0, version: stage.version() };
    let (output, ticket) = stage.forward(microbatch, input, meta, Keep::All).unwrap();
    let Output::Loss(loss) = output else { panic!("a whole model has a loss") };
    let (_, pending) = stage.backward(ticket, None).unwrap();
    stage.fold(pending, Lots { microbatches: 1, lots: 1 }).unwrap();
    let sum = stage.read_sum(0, Node::root(1), 0..stage.gradient_len()).unwrap();
    let reduction = Reduction { step: 0, attempt: 0 };
    stage.begin_reduce(reduction).unwrap();
    stage.write_reduced(reduction, 0, &sum).unwrap();
    settle_shared(&mut [vec![&mut *stage]], reduction).unwrap();

    // A parameter's gradient stands in the slots of its uses; a shared one's is the sum over them.
    let all = values(stage.dtype(), &sum);
    let mut found: BTreeMap<String, Vec<f64>> = BTreeMap::new();
    let mut start = 0;
    for parameter in
        golden.architecture().units().into_iter().flat_map(|u| golden.architecture().parameters(u))
    {
        let slot = &all[start..start + parameter.elements()];
        start += slot.len();
        let sum = found.entry(parameter.name).or_insert_with(|| vec![0.0; slot.len()]);
        sum.iter_mut().zip(slot).for_each(|(sum, x)| *sum += x);
    }
    (loss.sum, loss.tokens, found)
}

fn agree(what: &str, ours: &[f64], theirs: &[f64], most: f64) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (i, (a, b)) in ours.iter().zip(theirs).enumerate() {
        let error = (a - b).abs() / (1.0 + b.abs());
        assert!(error <= most, "{what}[{i}]: {a} here, {b} from PyTorch");
    }
}

fn loss_and_gradients_agree<E: Engine>(engine: impl Fn() -> E, most: f64) {
    for golden in cases() {
        let mut stage = golden.stage(engine(), &OptimiserConfig::default());
        let (loss, tokens, gradients) = gradients(&golden, &mut stage);
        agree("loss", &[loss], &[golden.loss_sum], most);
        assert_eq!(tokens, golden.tokens_counted);
        assert!(gradients.keys().eq(golden.gradients.keys()));
        for (name, gradient) in &gradients {
            agree(name, gradient, &golden.gradients[name], most);
        }
    }
}

#[test]
fn loss_and_gradients_are_pytorchs_in_single_precision() {
    loss_and_gradients_agree(|| Naive::<f32>::new(1).unwrap(), 1e-5);
}

#[test]
fn loss_and_gradients_are_pytorchs_on_every_path_of_the_fast_engine() {
    for isa in Isa::available() {
        loss_and_gradients_agree(|| Cpu::on(isa, 2).unwrap(), 1e-5);
    }
}

#[test]
fn loss_and_gradients_are_pytorchs_in_double_precision() {
    loss_and_gradients_agree(|| Naive::<f64>::new(1).unwrap(), 1e-9);
}

#[test]
fn updates_are_pytorchs() {
    for golden in cases() {
        for (kind, updated) in
            [(Kind::Adamw, &golden.adamw), (Kind::Sgd, &golden.sgd), (Kind::Lamb, &golden.lamb)]
        {
            let optimiser = OptimiserConfig {
                kind,
                lr: updated.learning_rate,
                clip: golden.clip,
                warmup_steps: 0,
                decay: starling_model::optimiser::Decay::Constant,
                weight_decay: if kind == Kind::Sgd { 0.0 } else { 0.1 },
                ..Default::default()
            };
            let mut stage = golden.stage(Naive::<f64>::new(1).unwrap(), &optimiser);
            gradients(&golden, &mut stage);
            let gradient = stage.read_sum(0, Node::root(1), 0..stage.gradient_len()).unwrap();
            for step in 0..updated.steps {
                // PyTorch's optimisers saw the same gradient in every step.
                let reduction = Reduction { step, attempt: 0 };
                stage.begin_reduce(reduction).unwrap();
                stage.write_reduced(reduction, 0, &gradient).unwrap();
                let mut squares = settle_shared(&mut [vec![&mut stage]], reduction).unwrap();
                squares.extend(stage.prepare(reduction).unwrap().sums_of_squares);
                let norm = squares.values().sum::<f64>().sqrt() / golden.tokens_counted as f64;
                let update = optimiser.update(step, updated.steps, step, golden.tokens_counted, norm);
                stage.apply(&Commit { step, version: step, update: Some(update) }).unwrap();
            }
            for (name, theirs) in &updated.weights {
                let span = stage.layout().span(name).unwrap();
                let mut ours =
                    values(Dtype::F64, &stage.read(stage.version(), State::Weights, span.range()).unwrap());
                let mut theirs = theirs.clone();
                if name.ends_with("c_attn.bias") {
                    // A key's bias has no influence: its gradient is rounding noise, which Adam blows up.
                    let third = ours.len() / 3;
                    ours.drain(third..2 * third);
                    theirs.drain(third..2 * third);
                }
                agree(&format!("{kind:?} {name}"), &ours, &theirs, 1e-7);
            }
        }
    }
}
