//! The naive engine: obvious loops, no cleverness, in f32 or f64. It is the judge of every later engine, so it
//! must be possible to check it by reading.
//!
//! Work is split over threads by rows of the result only; an element is always computed by one thread in one order.

mod attend;
mod norm;
mod product;
mod real;
mod update;

use std::borrow::Cow;
use std::sync::Arc;

use rayon::prelude::*;

pub use real::Real;

use self::attend::Sample;
use self::norm::{NormWeights, normalise, normalise_backward};
use self::product::{add_column_sums, add_product, transposed};
use super::heap::{Buffer, Heap};
use super::{Activation, Attention, Dtype, Engine, Linear, NO_TARGET, Norm, Shape, Span};
use crate::optimiser::{Rule, Update};
use crate::random::Dropout;

/// Elements that one task takes of element-wise work; no result depends on it.
const CHUNK: usize = 4096;
/// Tokens whose logits are held at a time.
const HEAD_TOKENS: usize = 64;

/// The naive engine in precision `T`; see the module's head.
pub struct Naive<T> {
    pool: rayon::ThreadPool,
    heap: Arc<Heap<T>>,
}

impl<T: Real> Naive<T> {
    /// An engine with its own `threads` threads; 0 means one for every core.
    pub fn new(threads: usize) -> Result<Naive<T>, rayon::ThreadPoolBuildError> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        Ok(Naive { pool, heap: Heap::new() })
    }
}

impl<T: Real> Engine for Naive<T> {
    type Buffer = Buffer<T>;
    /// The log-sum-exp of attention, `[b,h,t]`; nothing for other operations, which compute it again.
    type Kept = Vec<T>;

    fn inside<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    fn dtype(&self) -> Dtype {
        T::DTYPE
    }

    fn class(&self) -> String {
        format!("naive-{}", if T::DTYPE == Dtype::F32 { "f32" } else { "f64" })
    }

    fn reserve(&self, bytes: u64) {
        if let Ok(len) = usize::try_from(bytes / T::DTYPE.size() as u64) {
            self.heap.reserve(len);
        }
    }

    fn zeros(&self, len: usize) -> Buffer<T> {
        self.heap.zeros(len)
    }

    fn copy(&self, buffer: &Buffer<T>, span: Span) -> Buffer<T> {
        self.heap.copy(&buffer[span.range()])
    }

    fn len(&self, buffer: &Buffer<T>) -> usize {
        buffer.len()
    }

    fn read(&self, buffer: &Buffer<T>, span: Span) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(span.len * T::DTYPE.size());
        buffer[span.range()].iter().for_each(|x| x.push_bytes(&mut bytes));
        bytes
    }

    fn write(&self, buffer: &mut Buffer<T>, start: usize, bytes: &[u8]) {
        let elements = bytes.chunks_exact(T::DTYPE.size()).map(T::from_bytes);
        buffer[start..].iter_mut().zip(elements).for_each(|(slot, x)| *slot = x);
    }

    fn add(&self, into: &mut Buffer<T>, into_span: Span, from: &Buffer<T>, from_span: Span) {
        for (sum, &x) in into[into_span.range()].iter_mut().zip(&from[from_span.range()]) {
            *sum += x;
        }
    }

    fn sum_of_squares(&self, buffer: &Buffer<T>, span: Span) -> f64 {
        update::sum_of_squares(&buffer[span.range()])
    }

    fn embed(
        &self,
        shape: Shape,
        width: usize,
        tokens: &[u32],
        positions: &[u32],
        weights: &Buffer<T>,
        table: Span,
        position_table: Option<Span>,
        dropout: Dropout<'_>,
    ) -> Buffer<T> {
        let mut out = self.zeros(shape.tokens() * width);
        for (n, out_row) in out.chunks_exact_mut(width).enumerate() {
            out_row.copy_from_slice(&weights[table.start + tokens[n] as usize * width..][..width]);
            if let Some(places) = position_table {
                let place = &weights[places.start + positions[n] as usize * width..][..width];
                out_row.iter_mut().zip(place).for_each(|(out, &place)| *out += place);
            }
        }
        apply_dropout(shape, dropout, &mut out);
        out
    }

    fn embed_backward(
        &self,
        shape: Shape,
        width: usize,
        tokens: &[u32],
        positions: &[u32],
        dropout: Dropout<'_>,
        d_out: &Buffer<T>,
        grads: &mut Buffer<T>,
        table: Span,
        position_table: Option<Span>,
    ) {
        let mut d_sum = d_out.to_vec();
        apply_dropout(shape, dropout, &mut d_sum);
        for (n, d_row) in d_sum.chunks_exact(width).enumerate() {
            let word = table.start + tokens[n] as usize * width;
            let place = position_table.map(|places| places.start + positions[n] as usize * width);
            for start in [word].into_iter().chain(place) {
                grads[start..][..width].iter_mut().zip(d_row).for_each(|(sum, &d)| *sum += d);
            }
        }
    }

    fn norm_linear(
        &self,
        x: &Buffer<T>,
        weights: &Buffer<T>,
        norm: Norm,
        linear: Linear,
    ) -> (Buffer<T>, Vec<T>) {
        self.pool.install(|| {
            let normed = normalise(x, norm_weights(weights, norm));
            (self.heap.copy(&product_and_bias(&normed, weights, linear)), Vec::new())
        })
    }

    fn norm_linear_backward(
        &self,
        x: &Buffer<T>,
        _kept: &Vec<T>,
        weights: &Buffer<T>,
        norm: Norm,
        linear: Linear,
        d_out: &Buffer<T>,
        d_x: &mut Buffer<T>,
        grads: &mut Buffer<T>,
        grad_norm: Norm,
        grad_linear: Linear,
    ) {
        self.pool.install(|| {
            let norm_weights = norm_weights(weights, norm);
            let normed = normalise(x, norm_weights);
            let d_normed = product_backward(&normed, weights, linear, d_out, grads, grad_linear);
            let (d_weight, d_bias) = norm_gradients(grads, grad_norm);
            normalise_backward(x, norm_weights, &d_normed, d_x, d_weight, d_bias);
        });
    }

    fn rotate(&self, attention: Attention<'_>, rotation: &Buffer<T>, qkv: &mut Buffer<T>, back: bool) {
        let (w, half) = (attention.head_width, attention.head_width / 2);
        let tokens = qkv.chunks_exact_mut(attention.qkv_width()).zip(rotation.chunks_exact(w));
        for (qkv, rotation) in tokens {
            let (queries_and_keys, _) = qkv.split_at_mut(attention.width() + attention.key_width());
            for head in queries_and_keys.chunks_exact_mut(w) {
                for i in 0..half {
                    let (cos, sin) = (rotation[i], rotation[half + i]);
                    let sin = if back { -sin } else { sin };
                    let (x, y) = (head[i], head[half + i]);
                    head[i] = x * cos - y * sin;
                    head[half + i] = y * cos + x * sin;
                }
            }
        }
    }

    fn attention(
        &self,
        shape: Shape,
        attention: Attention<'_>,
        qkv: &Buffer<T>,
        dropout: Dropout<'_>,
    ) -> (Buffer<T>, Vec<T>) {
        let width = attention.width();
        let mut out = self.zeros(shape.tokens() * width);
        let mut log_sum_exp = vec![T::ZERO; shape.tokens() * attention.heads];
        self.pool.install(|| {
            out.par_chunks_mut(shape.columns * width)
                .zip(log_sum_exp.par_chunks_mut(shape.columns * attention.heads))
                .enumerate()
                .for_each(|(row, (out, log_sum_exp))| {
                    sample(shape, attention, qkv, dropout, row).forward(out, log_sum_exp);
                });
        });
        (out, log_sum_exp)
    }

    fn attention_backward(
        &self,
        shape: Shape,
        attention: Attention<'_>,
        qkv: &Buffer<T>,
        out: &Buffer<T>,
        log_sum_exp: &Vec<T>,
        dropout: Dropout<'_>,
        d_out: &Buffer<T>,
    ) -> Buffer<T> {
        let of_out = shape.columns * attention.width();
        let of_sums = shape.columns * attention.heads;
        let mut d_qkv = self.zeros(qkv.len());
        self.pool.install(|| {
            let of_qkv = shape.columns * attention.qkv_width();
            d_qkv.par_chunks_mut(of_qkv).enumerate().for_each(|(row, d_qkv)| {
                sample(shape, attention, qkv, dropout, row).backward(
                    &out[row * of_out..][..of_out],
                    &log_sum_exp[row * of_sums..][..of_sums],
                    &d_out[row * of_out..][..of_out],
                    d_qkv,
                );
            });
        });
        d_qkv
    }

    /// Token after token, its keys and then its values.
    fn remember(&self, attention: Attention<'_>, qkv: &Buffer<T>, known: usize, memory: &mut Buffer<T>) {
        let (width, whole) = (attention.width(), attention.qkv_width());
        let places = memory.chunks_exact_mut(whole - width).skip(known);
        qkv.chunks_exact(whole).zip(places).for_each(|(qkv, place)| place.copy_from_slice(&qkv[width..]));
    }

    fn recall(
        &self,
        attention: Attention<'_>,
        qkv: &Buffer<T>,
        known: usize,
        memory: &Buffer<T>,
    ) -> Buffer<T> {
        let (width, whole) = (attention.width(), attention.qkv_width());
        // As if the query were the last of a text.
        let mut text = self.zeros(known * whole);
        for (token, place) in text.chunks_exact_mut(whole).zip(memory.chunks_exact(whole - width)) {
            token[width..].copy_from_slice(place);
        }
        text[(known - 1) * whole..][..width].copy_from_slice(&qkv[..width]);
        let (shape, documents) = (Shape { rows: 1, columns: known }, vec![0; known]);
        let attention = Attention { documents: &documents, ..attention };
        let (out, _) = self.attention(shape, attention, &text, Dropout::none());
        self.heap.copy(&out[(known - 1) * width..])
    }

    fn linear_residual(
        &self,
        shape: Shape,
        activation: Activation,
        x: &Buffer<T>,
        weights: &Buffer<T>,
        linear: Linear,
        dropout: Dropout<'_>,
        residual: &Buffer<T>,
    ) -> (Buffer<T>, Vec<T>) {
        self.pool.install(|| {
            let active = activated(activation, x, linear.inputs);
            let mut out = product_and_bias(&active, weights, linear);
            apply_dropout(shape, dropout, &mut out);
            out.iter_mut().zip(&**residual).for_each(|(o, &r)| *o = r + *o);
            (self.heap.copy(&out), Vec::new())
        })
    }

    fn linear_residual_backward(
        &self,
        shape: Shape,
        activation: Activation,
        x: &Buffer<T>,
        _kept: &Vec<T>,
        weights: &Buffer<T>,
        linear: Linear,
        dropout: Dropout<'_>,
        d_out: &Buffer<T>,
        grads: &mut Buffer<T>,
        grad_linear: Linear,
    ) -> Buffer<T> {
        self.pool.install(|| {
            let active = activated(activation, x, linear.inputs);
            let mut d_product = d_out.to_vec();
            apply_dropout(shape, dropout, &mut d_product);
            let d_active = product_backward(&active, weights, linear, &d_product, grads, grad_linear);
            self.heap.copy(&activated_backward(activation, x, linear.inputs, d_active))
        })
    }

    fn head_loss(&self, x: &Buffer<T>, weights: &Buffer<T>, norm: Norm, table: Span, targets: &[u32]) -> f64 {
        self.pool.install(|| {
            let head = Head::new(x, weights, norm, table);
            let blocks = targets.chunks(HEAD_TOKENS).enumerate();
            blocks.fold(0.0, |loss, (block, targets)| head.loss(&head.logits(block), targets, loss))
        })
    }

    fn head_loss_backward(
        &self,
        x: &Buffer<T>,
        weights: &Buffer<T>,
        norm: Norm,
        table: Span,
        targets: &[u32],
        grads: &mut Buffer<T>,
        grad_norm: Norm,
        grad_table: Span,
    ) -> (f64, Buffer<T>) {
        self.pool.install(|| {
            let head = Head::new(x, weights, norm, table);
            let (width, vocabulary) = (head.width, head.vocabulary);
            let (mut loss, mut d_normed) = (0.0, vec![T::ZERO; x.len()]);
            for (block, targets) in targets.chunks(HEAD_TOKENS).enumerate() {
                let mut d_logits = head.logits(block);
                loss = head.loss(&d_logits, targets, loss);
                d_logits.par_chunks_mut(vocabulary).zip(targets).for_each(|(row, &target)| {
                    let total = log_sum_exp(row);
                    for (word, d) in row.iter_mut().enumerate() {
                        let hit = if word == target as usize { T::ONE } else { T::ZERO };
                        *d = if target == NO_TARGET { T::ZERO } else { (*d - total).exp() - hit };
                    }
                });
                let first = block * HEAD_TOKENS * width;
                let here = first..first + targets.len() * width;
                let table_vd = &weights[table.range()];
                add_product(&mut d_normed[here.clone()], &d_logits, table_vd, vocabulary, width);
                let d_logits_vn = transposed(&d_logits, vocabulary);
                let d_table = &mut grads[grad_table.range()];
                add_product(d_table, &d_logits_vn, &head.normed[here], targets.len(), width);
            }
            let mut d_x = self.zeros(x.len());
            let (d_weight, d_bias) = norm_gradients(grads, grad_norm);
            normalise_backward(x, norm_weights(weights, norm), &d_normed, &mut d_x, d_weight, d_bias);
            (loss, d_x)
        })
    }

    fn head_logits(
        &self,
        x: &Buffer<T>,
        weights: &Buffer<T>,
        norm: Norm,
        table: Span,
        chosen: &[usize],
    ) -> Vec<f32> {
        let width = norm.weight.len;
        let rows: Vec<T> = chosen.iter().flat_map(|&n| x[n * width..][..width].iter().copied()).collect();
        self.pool.install(|| {
            let normed = normalise(&rows, norm_weights(weights, norm));
            let mut logits = vec![T::ZERO; chosen.len() * table.len / width];
            let table_dv = transposed(&weights[table.range()], width);
            add_product(&mut logits, &normed, &table_dv, width, table.len / width);
            logits.iter().map(|x| x.to_f64() as f32).collect()
        })
    }

    fn kept_elements(&self, heads: usize) -> usize {
        heads
    }

    fn optimise(
        &self,
        rule: &Rule,
        update: &Update,
        decay: bool,
        weights: &mut Buffer<T>,
        moments: &mut [Buffer<T>],
        span: Span,
        gradient: &Buffer<T>,
        gradient_span: Span,
    ) {
        let mut moments = moments.iter_mut().map(|moment| &mut moment[span.range()]);
        let first = moments.next().unwrap_or_default();
        let second = moments.next().unwrap_or_default();
        self.pool.install(|| {
            let (weights, gradient) = (&mut weights[span.range()], &gradient[gradient_span.range()]);
            update::update(rule, update, decay, weights, first, second, gradient);
        });
    }
}

/// Normalised tokens and the transposed table, from which logits are made a block of tokens at a time.
struct Head<T> {
    normed: Vec<T>,
    table_dv: Vec<T>,
    width: usize,
    vocabulary: usize,
}

impl<T: Real> Head<T> {
    fn new(x: &[T], weights: &[T], norm: Norm, table: Span) -> Head<T> {
        let width = norm.weight.len;
        Head {
            normed: normalise(x, norm_weights(weights, norm)),
            table_dv: transposed(&weights[table.range()], width),
            width,
            vocabulary: table.len / width,
        }
    }

    /// Logits of block `block` of [`HEAD_TOKENS`] tokens (the last may be shorter).
    fn logits(&self, block: usize) -> Vec<T> {
        let size = HEAD_TOKENS * self.width;
        let normed = &self.normed[block * size..self.normed.len().min((block + 1) * size)];
        let mut logits = vec![T::ZERO; normed.len() / self.width * self.vocabulary];
        add_product(&mut logits, normed, &self.table_dv, self.width, self.vocabulary);
        logits
    }

    /// `sum`, and the loss of a block with these logits.
    fn loss(&self, logits: &[T], targets: &[u32], sum: f64) -> f64 {
        let rows = logits.chunks_exact(self.vocabulary).zip(targets);
        let with_target = rows.filter(|&(_, &target)| target != NO_TARGET);
        with_target.fold(sum, |sum, (row, &target)| {
            sum + (log_sum_exp(row).to_f64() - row[target as usize].to_f64())
        })
    }
}

/// `x·W + bias`.
fn product_and_bias<T: Real>(x: &[T], weights: &[T], linear: Linear) -> Vec<T> {
    let len = x.len() / linear.inputs * linear.outputs;
    let mut out: Vec<T> = match &weights[linear.bias.range()] {
        [] => vec![T::ZERO; len],
        bias => bias.iter().copied().cycle().take(len).collect(),
    };
    add_product(&mut out, x, &by_inputs(weights, linear), linear.inputs, linear.outputs);
    out
}

/// A layer's weight with a row for each input.
fn by_inputs<T: Real>(weights: &[T], linear: Linear) -> Cow<'_, [T]> {
    let weight = &weights[linear.weight.range()];
    if linear.row_per_output { transposed(weight, linear.inputs).into() } else { weight.into() }
}

/// The same with a row for each output.
fn by_outputs<T: Real>(weights: &[T], linear: Linear) -> Cow<'_, [T]> {
    let weight = &weights[linear.weight.range()];
    if linear.row_per_output { weight.into() } else { transposed(weight, linear.outputs).into() }
}

/// The gradient of `x` in `x·W + bias`; adds to the gradients of weight and bias.
fn product_backward<T: Real>(
    x: &[T],
    weights: &[T],
    linear: Linear,
    d_out: &[T],
    grads: &mut [T],
    grad_linear: Linear,
) -> Vec<T> {
    let (inputs, outputs) = (linear.inputs, linear.outputs);
    let tokens = x.len() / inputs;
    let d_weight = &mut grads[grad_linear.weight.range()];
    if linear.row_per_output {
        add_product(d_weight, &transposed(d_out, outputs), x, tokens, inputs);
    } else {
        add_product(d_weight, &transposed(x, inputs), d_out, tokens, outputs);
    }
    if grad_linear.bias.len > 0 {
        add_column_sums(&mut grads[grad_linear.bias.range()], d_out);
    }
    let mut d_x = vec![T::ZERO; x.len()];
    add_product(&mut d_x, d_out, &by_outputs(weights, linear), outputs, inputs);
    d_x
}

fn norm_weights<T>(weights: &[T], norm: Norm) -> NormWeights<'_, T> {
    NormWeights {
        weight: &weights[norm.weight.range()],
        bias: &weights[norm.bias.range()],
        epsilon: norm.epsilon,
        centred: norm.centred,
    }
}

/// The gradients of gain and bias, which stand one after the other in every layout.
fn norm_gradients<T>(grads: &mut [T], norm: Norm) -> (&mut [T], &mut [T]) {
    let (before, after) = grads.split_at_mut(norm.bias.start);
    (&mut before[norm.weight.range()], &mut after[..norm.bias.len])
}

fn sample<'a, T>(
    shape: Shape,
    attention: Attention<'a>,
    qkv: &'a [T],
    dropout: Dropout<'a>,
    row: usize,
) -> Sample<'a, T> {
    let size = shape.columns * attention.qkv_width();
    Sample {
        attention,
        documents: &attention.documents[row * shape.columns..][..shape.columns],
        qkv: &qkv[row * size..][..size],
        dropout,
        row,
    }
}

fn apply_dropout<T: Real>(shape: Shape, dropout: Dropout<'_>, values: &mut [T]) {
    if dropout.rate == 0.0 || values.is_empty() {
        return;
    }
    for (row, values) in values.chunks_exact_mut(values.len() / shape.rows).enumerate() {
        for (element, value) in values.iter_mut().enumerate() {
            *value = *value * T::of(dropout.factor(row, element as u64));
        }
    }
}

fn log_sum_exp<T: Real>(row: &[T]) -> T {
    let max = row.iter().copied().fold(row[0], |max, x| if x > max { x } else { max });
    max + row.iter().fold(T::ZERO, |sum, &x| sum + (x - max).exp()).ln()
}

/// `activation(x)`, rows of `width`.
fn activated<T: Real>(activation: Activation, x: &[T], width: usize) -> Vec<T> {
    if activation != Activation::SwiGlu {
        return x.par_iter().with_min_len(CHUNK).map(|&x| activate(activation, x).0).collect();
    }
    let row = |x: &[T]| (0..width).map(|i| activate(activation, x[i]).0 * x[width + i]).collect::<Vec<T>>();
    x.par_chunks_exact(2 * width).with_min_len(16).flat_map_iter(row).collect()
}

/// The gradient of `x`, given that of `activation(x)`.
fn activated_backward<T: Real>(activation: Activation, x: &[T], width: usize, mut d: Vec<T>) -> Vec<T> {
    if activation != Activation::SwiGlu {
        d.iter_mut().zip(x).for_each(|(d, &x)| *d = *d * activate(activation, x).1);
        return d;
    }
    let mut d_x = vec![T::ZERO; x.len()];
    let rows = x.chunks_exact(2 * width).zip(d.chunks_exact(width));
    for (d_x, (x, d)) in d_x.chunks_exact_mut(2 * width).zip(rows) {
        for i in 0..width {
            let (active, slope) = activate(activation, x[i]);
            d_x[i] = d[i] * x[width + i] * slope;
            d_x[width + i] = d[i] * active;
        }
    }
    d_x
}

/// √(2/π) and the cubic coefficient of GPT-2's GELU.
const GELU_NEW: (f64, f64) = (0.797_884_560_802_865_4, 0.044_715);

/// The activation and its slope at `x`; of SwiGLU what becomes of its first half.
fn activate<T: Real>(activation: Activation, x: T) -> (T, T) {
    let half = T::of(0.5);
    match activation {
        Activation::Identity => (x, T::ONE),
        Activation::Gelu => {
            let share = half * (T::ONE + (x * T::of(std::f64::consts::FRAC_1_SQRT_2)).erf());
            let density = T::of(1.0 / std::f64::consts::TAU.sqrt()) * (-(x * x) * half).exp();
            (x * share, share + x * density)
        }
        Activation::GeluNew => {
            let (root, cubic) = (T::of(GELU_NEW.0), T::of(GELU_NEW.1));
            let tanh = (root * (x + cubic * x * x * x)).tanh();
            let share = half * (T::ONE + tanh);
            let slope = root * (T::ONE + T::of(3.0) * cubic * x * x);
            (x * share, share + half * x * (T::ONE - tanh * tanh) * slope)
        }
        Activation::SwiGlu => {
            let share = T::ONE / (T::ONE + (-x).exp());
            (x * share, share + x * share * (T::ONE - share))
        }
    }
}
