//! Every operation of the naive engine in f64 agrees with finite differences, in every operand.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use starling_model::engine::naive::Naive;
use starling_model::engine::{Activation, Attention, Engine, Linear, NO_TARGET, Norm, Shape, Span};
use starling_model::random::{Dropout, normals};

const SHAPE: Shape = Shape { rows: 2, columns: 5 };
const WIDTH: usize = 6;
const INNER: usize = 7;
const VOCABULARY: usize = 11;
const SAMPLES: [u64; 2] = [3, 1 << 40];
/// The second row holds two documents.
const DOCUMENTS: [u32; 10] = [0, 0, 0, 0, 0, 0, 0, 1, 1, 1];
const TOKENS: [u32; 10] = [1, 4, 1, 0, 10, 2, 2, 3, 9, 9];
const POSITIONS: [u32; 10] = [0, 1, 2, 3, 4, 0, 1, 0, 1, 2];
const TARGETS: [u32; 10] = [4, 1, 0, 10, NO_TARGET, 2, NO_TARGET, 9, 9, 0];

fn engine() -> Naive<f64> {
    Naive::new(1).unwrap()
}

fn numbers(name: &str, count: usize) -> Vec<f64> {
    normals(1, name, count).map(|x| 0.7 * x).collect()
}

type Buffer = <Naive<f64> as Engine>::Buffer;

fn buffer(engine: &Naive<f64>, values: &[f64]) -> Buffer {
    let mut buffer = engine.zeros(values.len());
    buffer.copy_from_slice(values);
    buffer
}

fn dropout(rate: f64) -> Dropout<'static> {
    Dropout { rate, seed: 5, place: 9, samples: &SAMPLES }
}

fn attention() -> Attention<'static> {
    Attention { heads: 2, key_heads: 2, head_width: WIDTH / 2, documents: &DOCUMENTS }
}

fn span(start: usize, len: usize) -> Span {
    Span { start, len }
}

/// A norm and a linear layer in one flat vector, and the vector's length.
fn norm_linear() -> (Norm, Linear, usize) {
    let norm = Norm { weight: span(0, WIDTH), bias: span(WIDTH, WIDTH), epsilon: 1e-5, centred: true };
    let weight = span(2 * WIDTH, WIDTH * INNER);
    let bias = span(2 * WIDTH + WIDTH * INNER, INNER);
    let linear = Linear { weight, bias, inputs: WIDTH, outputs: INNER, row_per_output: false };
    (norm, linear, 2 * WIDTH + WIDTH * INNER + INNER)
}

/// The same as Llama has them: not centred, a row for each output, without biases.
fn rms_norm_linear() -> (Norm, Linear, usize) {
    let norm = Norm { weight: span(0, WIDTH), bias: span(WIDTH, 0), epsilon: 1e-5, centred: false };
    let (weight, bias) = (span(WIDTH, WIDTH * INNER), span(WIDTH + WIDTH * INNER, 0));
    let linear = Linear { weight, bias, inputs: WIDTH, outputs: INNER, row_per_output: true };
    (norm, linear, WIDTH + WIDTH * INNER)
}

/// Compares a gradient with central differences of `value` in each element of `at`.
fn agrees(name: &str, at: &[f64], gradient: &[f64], value: impl Fn(&[f64]) -> f64) {
    assert_eq!(at.len(), gradient.len());
    let mut moved = at.to_vec();
    for i in 0..at.len() {
        let step = 1e-5;
        moved[i] = at[i] + step;
        let above = value(&moved);
        moved[i] = at[i] - step;
        let below = value(&moved);
        moved[i] = at[i];
        let difference = (above - below) / (2.0 * step);
        let error = (difference - gradient[i]).abs() / (1.0 + difference.abs());
        assert!(error < 1e-7, "{name}[{i}]: differences {difference}, gradient {}", gradient[i]);
    }
}

/// A fixed weighting turns a vector into the one number that is differentiated.
fn weighed(values: &[f64]) -> f64 {
    values.iter().zip(numbers("weighing", values.len())).map(|(x, w)| x * w).sum()
}

#[test]
fn embedding() {
    let engine = engine();
    let weights = numbers("weights", (VOCABULARY + 5) * WIDTH);
    let (table, positions) = (span(0, VOCABULARY * WIDTH), span(VOCABULARY * WIDTH, 5 * WIDTH));
    for (rate, positions) in [(0.0, Some(positions)), (0.3, Some(positions)), (0.3, None)] {
        let forward = |weights: &[f64]| {
            let weights = buffer(&engine, weights);
            engine.embed(SHAPE, WIDTH, &TOKENS, &POSITIONS, &weights, table, positions, dropout(rate))
        };
        let d_out = buffer(&engine, &numbers("weighing", SHAPE.tokens() * WIDTH));
        let mut grads = engine.zeros(weights.len());
        engine.embed_backward(
            SHAPE,
            WIDTH,
            &TOKENS,
            &POSITIONS,
            dropout(rate),
            &d_out,
            &mut grads,
            table,
            positions,
        );
        agrees("weights", &weights, &grads, |weights| weighed(&forward(weights)));
    }
}

#[test]
fn norm_and_linear() {
    [norm_linear(), rms_norm_linear()].into_iter().for_each(check_norm_and_linear);
}

fn check_norm_and_linear((norm, linear, len): (Norm, Linear, usize)) {
    let engine = engine();
    let weights = buffer(&engine, &numbers("weights", len));
    let x = buffer(&engine, &numbers("x", SHAPE.tokens() * WIDTH));
    let d_out = buffer(&engine, &numbers("weighing", SHAPE.tokens() * INNER));
    let before = numbers("before", x.len());
    let mut d_x = buffer(&engine, &before);
    let mut grads = engine.zeros(len);
    let (_, kept) = engine.norm_linear(&x, &weights, norm, linear);
    engine
        .norm_linear_backward(&x, &kept, &weights, norm, linear, &d_out, &mut d_x, &mut grads, norm, linear);
    let d_x: Vec<f64> = d_x.iter().zip(before).map(|(d, before)| d - before).collect();
    let forward = |x: &Buffer, weights: &Buffer| weighed(&engine.norm_linear(x, weights, norm, linear).0);
    agrees("x", &x, &d_x, |x| forward(&buffer(&engine, x), &weights));
    agrees("weights", &weights, &grads, |w| forward(&x, &buffer(&engine, w)));
}

#[test]
fn attention_inside_documents_with_dropout() {
    let engine = engine();
    let grouped = Attention { heads: 6, key_heads: 2, ..attention() };
    for (rate, attention) in [(0.0, attention()), (0.4, attention()), (0.0, grouped), (0.4, grouped)] {
        let qkv = buffer(&engine, &numbers("qkv", SHAPE.tokens() * attention.qkv_width()));
        let forward = |qkv: &[f64]| engine.attention(SHAPE, attention, &buffer(&engine, qkv), dropout(rate));
        let (out, sums) = forward(&qkv);
        let d_out = buffer(&engine, &numbers("weighing", out.len()));
        let d_qkv = engine.attention_backward(SHAPE, attention, &qkv, &out, &sums, dropout(rate), &d_out);
        agrees("qkv", &qkv, &d_qkv, |qkv| weighed(&forward(qkv).0));
    }
}

#[test]
fn rotation() {
    let engine = engine();
    let attention = Attention { heads: 4, key_heads: 2, head_width: 6, documents: &DOCUMENTS };
    let qkv = numbers("qkv", SHAPE.tokens() * attention.qkv_width());
    let angles: Vec<f64> = numbers("angles", SHAPE.tokens() * 3);
    let cos_sin = |angles: &[f64]| -> Vec<f64> {
        angles.iter().map(|a| a.cos()).chain(angles.iter().map(|a| a.sin())).collect()
    };
    let rotation: Vec<f64> = angles.chunks(3).flat_map(cos_sin).collect();
    let rotation = buffer(&engine, &rotation);
    let turned = |values: &[f64], back| {
        let mut values = buffer(&engine, values);
        engine.rotate(attention, &rotation, &mut values, back);
        values
    };
    let d_out = numbers("weighing", qkv.len());
    agrees("qkv", &qkv, &turned(&d_out, true), |qkv| weighed(&turned(qkv, false)));
    let there = turned(&qkv, false);
    let values = (attention.width() + attention.key_width())..attention.qkv_width();
    assert_eq!(there[values.clone()], qkv[values], "values stay");
    assert!(turned(&there, true).iter().zip(&qkv).all(|(a, b)| (a - b).abs() < 1e-12));
}

#[test]
fn linear_and_residual() {
    let engine = engine();
    let gelus = [Activation::Identity, Activation::Gelu, Activation::GeluNew];
    let cases = gelus.map(|activation| (activation, norm_linear()));
    for (activation, (_, linear, len)) in cases
        .into_iter()
        .chain([(Activation::SwiGlu, norm_linear()), (Activation::SwiGlu, rms_norm_linear())])
    {
        let weights = buffer(&engine, &numbers("weights", len));
        let x = buffer(&engine, &numbers("x", SHAPE.tokens() * activation.takes() * WIDTH));
        let residual = buffer(&engine, &numbers("residual", SHAPE.tokens() * INNER));
        let forward = |x: &[f64], w: &[f64]| {
            let (x, w) = (buffer(&engine, x), buffer(&engine, w));
            let (out, _) = engine.linear_residual(SHAPE, activation, &x, &w, linear, dropout(0.2), &residual);
            weighed(&out)
        };
        let d_out = buffer(&engine, &numbers("weighing", residual.len()));
        let mut grads = engine.zeros(len);
        let (_, kept) =
            engine.linear_residual(SHAPE, activation, &x, &weights, linear, dropout(0.2), &residual);
        let d_x = engine.linear_residual_backward(
            SHAPE,
            activation,
            &x,
            &kept,
            &weights,
            linear,
            dropout(0.2),
            &d_out,
            &mut grads,
            linear,
        );
        agrees("x", &x, &d_x, |x| forward(x, &weights));
        agrees("weights", &weights, &grads, |w| forward(&x, w));
    }
}

#[test]
fn head_and_loss() {
    let engine = engine();
    let norm = Norm { weight: span(0, WIDTH), bias: span(WIDTH, WIDTH), epsilon: 1e-5, centred: true };
    let table = span(2 * WIDTH, VOCABULARY * WIDTH);
    let weights = buffer(&engine, &numbers("weights", 2 * WIDTH + table.len));
    // More tokens than the head takes at a time.
    let targets: Vec<u32> = (0..10).flat_map(|_| TARGETS).collect();
    let x = buffer(&engine, &numbers("x", targets.len() * WIDTH));
    let mut grads = engine.zeros(weights.len());
    let (loss, d_x) = engine.head_loss_backward(&x, &weights, norm, table, &targets, &mut grads, norm, table);
    assert_eq!(loss, engine.head_loss(&x, &weights, norm, table, &targets));
    let loss = |x: &Buffer, weights: &Buffer| engine.head_loss(x, weights, norm, table, &targets);
    agrees("x", &x, &d_x, |x| loss(&buffer(&engine, x), &weights));
    agrees("weights", &weights, &grads, |w| loss(&x, &buffer(&engine, w)));

    let logits = engine.head_logits(&x, &weights, norm, table, &[3, 70]);
    let loss = |token: usize, target: usize| {
        let row = &logits[token * VOCABULARY..][..VOCABULARY];
        let total: f64 = row.iter().map(|&l| f64::from(l).exp()).sum();
        total.ln() - f64::from(row[target])
    };
    let mut only = vec![NO_TARGET; targets.len()];
    (only[3], only[70]) = (5, 6);
    let together = engine.head_loss(&x, &weights, norm, table, &only);
    assert!((together - loss(0, 5) - loss(1, 6)).abs() < 1e-5);
}

#[test]
fn huge_logits_and_scores_stay_finite() {
    let engine = Naive::<f32>::new(1).unwrap();
    let norm = Norm { weight: span(0, WIDTH), bias: span(WIDTH, WIDTH), epsilon: 1e-5, centred: true };
    let table = span(2 * WIDTH, VOCABULARY * WIDTH);
    let mut weights = engine.zeros(2 * WIDTH + table.len);
    weights.fill(1e4);
    let drawn = |name: &str, len: usize, scale: f64| {
        let mut drawn = engine.zeros(len);
        drawn.iter_mut().zip(numbers(name, len)).for_each(|(slot, x)| *slot = (scale * x) as f32);
        drawn
    };
    let x = drawn("x", TARGETS.len() * WIDTH, 1.0);
    assert!(engine.head_loss(&x, &weights, norm, table, &TARGETS).is_finite());
    let qkv = drawn("qkv", SHAPE.tokens() * 3 * WIDTH, 1e4);
    let (out, sums) = engine.attention(SHAPE, attention(), &qkv, dropout(0.0));
    assert!(out.iter().chain(&sums).all(|x| x.is_finite()));
}
