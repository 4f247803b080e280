//! The fast engine for processors: f32, fused kernels, instructions chosen at run time.
//!
//! Its numerics class is the path through the instruction set (`isa`) and the revision of its kernels, nothing else. Every sum has an order that
//! is fixed by the operation's sizes: threads, caches and neighbours in a microbatch have no part in it. Where the
//! naive engine is obvious, this one is measured: `cargo xtask bench step`.
//!
//! With [`Cpu::bf16`] the products of linear layers and of the head round their operands to bf16, and only they: sums, norms,
//! attention, the loss and updates stay single. That is a class of its own, on processors that have the instructions. Others could
//! only go through the same roundings slower than f32 is, which nobody wants: they are refused.
//!
//! What it keeps for backward is small: statistics of norms, the log-sum-exp of attention.

mod activate;
mod attend;
mod head;
mod isa;
mod lanes;
mod maths;
mod norm;
mod one_row;
mod pairs;
mod peak;
mod product;
mod recall;
mod rows;
mod update;

use rayon::prelude::*;

pub use self::isa::{Isa, IsaError, PairsError};

use self::activate::{Activate, GateBackward, MultiplySlope};
use self::attend::{Head, Sizes};
use self::isa::Pairs;
use self::norm::NormWeights;
use self::product::{Matrix, Start, Workshop};
use self::rows::AddTo;
use super::heap::{self, Heap};
use super::{Activation, Attention, Dtype, Engine, Linear, Norm, Shape, Span, Work};
use crate::optimiser::{Rule, Update};
use crate::random::Dropout;

/// Part of the numerics class: whoever changes an order of sums, a size of blocks or a polynomial counts it up.
const REVISION: u32 = 1;

/// A vector of floats.
pub type Buffer = heap::Buffer<f32>;

/// The engine; see the module's head.
pub struct Cpu {
    pool: rayon::ThreadPool,
    shop: Workshop,
}

/// What a forward operation leaves for its backward.
pub enum Kept {
    /// Nothing: it computes again.
    Nothing,
    /// Mean and scale of each normalised row.
    Statistics(Buffer),
    /// The log-sum-exp of attention, `[b,h,t]`.
    LogSumExp(Buffer),
}

impl Cpu {
    /// An engine with its own `threads` threads (0 means one for every core), on the fastest path that there is or the
    /// one that the environment asks for.
    pub fn new(threads: usize) -> Result<Cpu, CpuError> {
        Cpu::on(Isa::chosen()?, threads)
    }

    /// The same on this path.
    pub fn on(isa: Isa, threads: usize) -> Result<Cpu, CpuError> {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build()?;
        Ok(Cpu { pool, shop: Workshop { isa, heap: Heap::new(), pairs: None } })
    }

    /// An engine whose products take bf16, if this processor can.
    pub fn bf16(threads: usize) -> Result<Cpu, CpuError> {
        let isa = Isa::chosen()?;
        let pairs = Some(Pairs::beside(isa)?);
        let mut cpu = Cpu::on(isa, threads)?;
        cpu.shop.pairs = pairs;
        Ok(cpu)
    }

    fn take(&self, len: usize) -> Buffer {
        self.shop.heap.take(len)
    }

    /// Sizes and places of one head of one sample.
    fn head<'a>(
        shape: Shape,
        attention: Attention<'a>,
        qkv: &'a [f32],
        dropout: Dropout<'a>,
        number: usize,
    ) -> Head<'a> {
        let (row, head) = (number / attention.heads, number % attention.heads);
        let size = shape.columns * attention.qkv_width();
        Head {
            attention,
            documents: &attention.documents[row * shape.columns..][..shape.columns],
            qkv: &qkv[row * size..][..size],
            dropout,
            row,
            head,
        }
    }

    /// Adds to the gradients of weight and bias: `x` and the gradient of `x·W + bias` are given.
    fn add_linear_gradients(&self, x: &[f32], d_out: &[f32], linear: Linear, grads: &mut [f32], to: Linear) {
        let (inputs, outputs) = (linear.inputs, linear.outputs);
        let (x_ni, d_no) = (Matrix::of_rows(x, inputs), Matrix::of_rows(d_out, outputs));
        let (columns, left, right) =
            if linear.row_per_output { (inputs, d_no, x_ni) } else { (outputs, x_ni, d_no) };
        let (d_weight, tokens) = (&mut grads[to.weight.range()], x.len() / inputs);
        self.shop.product(d_weight, columns, left.transposed(), right, tokens, Start::Present, |_, _| {});
        if to.bias.len > 0 {
            norm::add_column_sums(self.shop.isa, d_out, &mut grads[to.bias.range()]);
        }
    }
}

/// `d_x +=` of a normalisation, and adds to the gradients of gain and bias.
fn norm_backward(
    isa: Isa,
    x: &[f32],
    statistics: &[f32],
    weights: NormWeights<'_>,
    d_normed: &[f32],
    d_x: &mut [f32],
    (d_weight, d_bias): (&mut [f32], &mut [f32]),
) {
    let rows = 16 * weights.weight.len();
    let operands = x.par_chunks(rows).zip(d_normed.par_chunks(rows)).zip(statistics.par_chunks(32));
    d_x.par_chunks_mut(rows).zip(operands).for_each(|(d_x, ((x, d_out), statistics))| {
        isa.run(norm::Backward { x, statistics, norm: weights, d_out, d_x });
    });
    norm::add_gradients(isa, x, statistics, d_normed, d_weight, d_bias);
}

impl Engine for Cpu {
    type Buffer = Buffer;
    type Kept = Kept;

    fn inside<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }

    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn class(&self) -> String {
        let numbers = if self.shop.pairs.is_some() { "bf16" } else { "f32" };
        format!("cpu-{numbers}-{}-{REVISION}", self.shop.isa.name())
    }

    fn peak(&self) -> Option<f64> {
        let Workshop { isa, pairs, .. } = self.shop;
        Some(self.pool.broadcast(|_| peak::of_thread(isa, pairs)).into_iter().sum())
    }

    fn reserve(&self, bytes: u64) {
        if let Ok(len) = usize::try_from(bytes / size_of::<f32>() as u64) {
            self.shop.heap.reserve(len);
        }
    }

    fn zeros(&self, len: usize) -> Buffer {
        self.shop.heap.zeros(len)
    }

    fn copy(&self, buffer: &Buffer, span: Span) -> Buffer {
        self.shop.heap.copy(&buffer[span.range()])
    }

    fn len(&self, buffer: &Buffer) -> usize {
        buffer.len()
    }

    fn read(&self, buffer: &Buffer, span: Span) -> Vec<u8> {
        let mut bytes = vec![0; 4 * span.len];
        for (to, x) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(&buffer[span.range()]) {
            *to = x.to_le_bytes();
        }
        bytes
    }

    fn write(&self, buffer: &mut Buffer, start: usize, bytes: &[u8]) {
        for (slot, &x) in buffer[start..].iter_mut().zip(bytes.as_chunks::<4>().0) {
            *slot = f32::from_le_bytes(x);
        }
    }

    fn add(&self, into: &mut Buffer, into_span: Span, from: &Buffer, from_span: Span) {
        let (into, from) = (&mut into[into_span.range()], &from[from_span.range()]);
        self.pool.install(|| rows::add(self.shop.isa, into, from));
    }

    fn sum_of_squares(&self, buffer: &Buffer, span: Span) -> f64 {
        update::sum_of_squares(&buffer[span.range()])
    }

    fn embed(
        &self,
        shape: Shape,
        width: usize,
        tokens: &[u32],
        positions: &[u32],
        weights: &Buffer,
        table: Span,
        position_table: Option<Span>,
        dropout: Dropout<'_>,
    ) -> Buffer {
        let mut out = self.take(shape.tokens() * width);
        self.pool.install(|| {
            out.par_chunks_mut(width).enumerate().with_min_len(16).for_each(|(n, out)| {
                out.copy_from_slice(&weights[table.start + tokens[n] as usize * width..][..width]);
                if let Some(places) = position_table {
                    let from = &weights[places.start + positions[n] as usize * width..][..width];
                    self.shop.isa.run(AddTo { to: out, from });
                }
                rows::apply_dropout(shape, dropout, n, width, out);
            });
        });
        out
    }

    fn embed_backward(
        &self,
        shape: Shape,
        width: usize,
        tokens: &[u32],
        positions: &[u32],
        dropout: Dropout<'_>,
        d_out: &Buffer,
        grads: &mut Buffer,
        table: Span,
        position_table: Option<Span>,
    ) {
        let dropped = self.dropped(shape, dropout, d_out);
        let d_sum: &[f32] = dropped.as_deref().unwrap_or(d_out);
        for (n, d_row) in d_sum.chunks_exact(width).enumerate() {
            let word = table.start + tokens[n] as usize * width;
            let place = position_table.map(|places| places.start + positions[n] as usize * width);
            for start in [word].into_iter().chain(place) {
                grads[start..][..width].iter_mut().zip(d_row).for_each(|(sum, d)| *sum += d);
            }
        }
    }

    fn norm_linear(&self, x: &Buffer, weights: &Buffer, norm: Norm, linear: Linear) -> (Buffer, Kept) {
        let tokens = x.len() / linear.inputs;
        let mut out = self.take(tokens * linear.outputs);
        let statistics = self.pool.install(|| {
            let (normed, statistics) = self.normalise(x, norm_weights(weights, norm));
            let (weight_io, bias) = weight_and_bias(weights, linear);
            let normed = Matrix::of_rows(&normed, linear.inputs);
            self.shop.product(&mut out, linear.outputs, normed, weight_io, linear.inputs, bias, |_, _| {});
            statistics
        });
        (out, Kept::Statistics(statistics))
    }

    fn norm_linear_backward(
        &self,
        x: &Buffer,
        kept: &Kept,
        weights: &Buffer,
        norm: Norm,
        linear: Linear,
        d_out: &Buffer,
        d_x: &mut Buffer,
        grads: &mut Buffer,
        grad_norm: Norm,
        grad_linear: Linear,
    ) {
        let Kept::Statistics(statistics) = kept else { unreachable!("forward kept statistics") };
        let (inputs, outputs) = (linear.inputs, linear.outputs);
        let isa = self.shop.isa;
        self.pool.install(|| {
            let norm_weights = norm_weights(weights, norm);
            let mut normed = self.take(x.len());
            norm::normalise_again(isa, x, norm_weights, statistics, &mut normed);
            self.add_linear_gradients(&normed, d_out, linear, grads, grad_linear);
            let mut d_normed = normed;
            let weight_oi = weight_and_bias(weights, linear).0.transposed();
            let d_no = Matrix::of_rows(d_out, outputs);
            self.shop.product(&mut d_normed, inputs, d_no, weight_oi, outputs, Start::Zero, |_, _| {});
            let to = norm_gradients(grads, grad_norm);
            norm_backward(isa, x, statistics, norm_weights, &d_normed, d_x, to);
        });
    }

    fn rotate(&self, attention: Attention<'_>, rotation: &Buffer, qkv: &mut Buffer, back: bool) {
        self.pool.install(|| rows::rotate(self.shop.isa, attention, rotation, qkv, back));
    }

    fn attention(
        &self,
        shape: Shape,
        attention: Attention<'_>,
        qkv: &Buffer,
        dropout: Dropout<'_>,
    ) -> (Buffer, Kept) {
        let Attention { heads, head_width, .. } = attention;
        let size = shape.columns * head_width;
        let mut out = self.take(shape.tokens() * heads * head_width);
        let mut log_sum_exp = self.take(shape.tokens() * heads);
        self.pool.install(|| {
            // Head after head; then put into the tokens' rows.
            let mut by_head = self.take(out.len());
            by_head.par_chunks_mut(size).zip(log_sum_exp.par_chunks_mut(shape.columns)).enumerate().for_each(
                |(number, (out, log_sum_exp))| {
                    let head = Self::head(shape, attention, qkv, dropout, number);
                    let scratch = &mut self.take(attend::Forward::scratch(head.sizes()));
                    self.shop.isa.run(attend::Forward { head, out, log_sum_exp, scratch });
                },
            );
            rows::interleave(&by_head, &mut out, shape.columns, attention);
        });
        (out, Kept::LogSumExp(log_sum_exp))
    }

    fn attention_backward(
        &self,
        shape: Shape,
        attention: Attention<'_>,
        qkv: &Buffer,
        out: &Buffer,
        kept: &Kept,
        dropout: Dropout<'_>,
        d_out: &Buffer,
    ) -> Buffer {
        let Kept::LogSumExp(log_sum_exp) = kept else { unreachable!("forward kept sums") };
        let head_width = attention.head_width;
        let (columns, sample) = (shape.columns, shape.columns * attention.width());
        let mut d_qkv = self.take(qkv.len());
        self.pool.install(|| {
            let mut by_head = self.take(3 * shape.tokens() * attention.width());
            by_head.par_chunks_mut(3 * columns * head_width).enumerate().for_each(|(number, d_parts)| {
                let head = Self::head(shape, attention, qkv, dropout, number);
                let scratch = &mut self.take(attend::Backward::scratch(head.sizes()));
                let of_sample = head.row * sample..(head.row + 1) * sample;
                self.shop.isa.run(attend::Backward {
                    head,
                    out: &out[of_sample.clone()],
                    d_out: &d_out[of_sample],
                    log_sum_exp: &log_sum_exp[number * columns..][..columns],
                    d_parts,
                    scratch,
                });
            });
            rows::interleave_qkv(self.shop.isa, &by_head, &mut d_qkv, columns, attention);
        });
        d_qkv
    }

    fn remember(&self, attention: Attention<'_>, qkv: &Buffer, known: usize, memory: &mut Buffer) {
        recall::remember(attention, qkv, known, memory);
    }

    fn recall(&self, attention: Attention<'_>, qkv: &Buffer, known: usize, memory: &Buffer) -> Buffer {
        let head_width = attention.head_width;
        let capacity = memory.len() / (2 * attention.key_width());
        let mut out = self.take(attention.width());
        self.pool.install(|| {
            out.par_chunks_mut(head_width).enumerate().for_each(|(head, out)| {
                let mut scores = self.take(known);
                let size = capacity * head_width;
                let of_head = &memory[2 * attention.key_head(head) * size..][..2 * size];
                let (keys, values) = of_head.split_at(size);
                let query = &qkv[head * head_width..][..head_width];
                self.shop.isa.run(recall::Recall { query, keys, values, capacity, scores: &mut scores, out });
            });
        });
        out
    }

    fn linear_residual(
        &self,
        shape: Shape,
        activation: Activation,
        x: &Buffer,
        weights: &Buffer,
        linear: Linear,
        dropout: Dropout<'_>,
        residual: &Buffer,
    ) -> (Buffer, Kept) {
        let (inputs, outputs) = (linear.inputs, linear.outputs);
        let mut out = self.take(residual.len());
        self.pool.install(|| {
            let active = self.active(activation, x, inputs);
            let active: &[f32] = active.as_deref().unwrap_or(x);
            let (weight_io, bias) = weight_and_bias(weights, linear);
            let finish = |first: usize, out: &mut [f32]| {
                for (n, out) in out.chunks_exact_mut(outputs).enumerate() {
                    rows::apply_dropout(shape, dropout, first + n, outputs, out);
                }
                self.shop.isa.run(AddTo { from: &residual[first * outputs..][..out.len()], to: out });
            };
            let active = Matrix::of_rows(active, inputs);
            self.shop.product(&mut out, outputs, active, weight_io, inputs, bias, finish);
        });
        (out, Kept::Nothing)
    }

    fn linear_residual_backward(
        &self,
        shape: Shape,
        activation: Activation,
        x: &Buffer,
        _kept: &Kept,
        weights: &Buffer,
        linear: Linear,
        dropout: Dropout<'_>,
        d_out: &Buffer,
        grads: &mut Buffer,
        grad_linear: Linear,
    ) -> Buffer {
        let (inputs, outputs) = (linear.inputs, linear.outputs);
        let mut d_active = self.take(x.len() / activation.takes());
        self.pool.install(|| {
            let dropped = self.dropped(shape, dropout, d_out);
            let d_product: &[f32] = dropped.as_deref().unwrap_or(d_out);
            let active = self.active(activation, x, inputs);
            self.add_linear_gradients(active.as_deref().unwrap_or(x), d_product, linear, grads, grad_linear);
            drop(active);
            let weight_oi = weight_and_bias(weights, linear).0.transposed();
            let d_no = Matrix::of_rows(d_product, outputs);
            self.shop.product(&mut d_active, inputs, d_no, weight_oi, outputs, Start::Zero, |first, d| {
                if activation != Activation::SwiGlu {
                    let x = &x[first * inputs..][..d.len()];
                    self.shop.isa.run(MultiplySlope { activation, x, d });
                }
            });
            if activation != Activation::SwiGlu {
                return d_active;
            }
            let mut d_x = self.take(x.len());
            let rows = activate::rows(inputs);
            let operands = x.par_chunks(2 * rows * inputs).zip(d_active.par_chunks(rows * inputs));
            d_x.par_chunks_mut(2 * rows * inputs).zip(operands).for_each(|(d_x, (x, d))| {
                self.shop.isa.run(GateBackward { x, d, d_x, width: inputs });
            });
            d_x
        })
    }

    fn head_loss(&self, x: &Buffer, weights: &Buffer, norm: Norm, table: Span, targets: &[u32]) -> f64 {
        let width = norm.weight.len;
        self.pool.install(|| {
            let (normed, _) = self.normalise(x, norm_weights(weights, norm));
            let loss = head::Loss { normed: &normed, table: &weights[table.range()], width, targets };
            loss.compute(&self.shop, None)
        })
    }

    fn head_loss_backward(
        &self,
        x: &Buffer,
        weights: &Buffer,
        norm: Norm,
        table: Span,
        targets: &[u32],
        grads: &mut Buffer,
        grad_norm: Norm,
        grad_table: Span,
    ) -> (f64, Buffer) {
        let width = norm.weight.len;
        self.pool.install(|| {
            let norm_weights = norm_weights(weights, norm);
            let (normed, statistics) = self.normalise(x, norm_weights);
            let mut d_normed = self.take(x.len());
            let loss = head::Loss { normed: &normed, table: &weights[table.range()], width, targets };
            let d_table = &mut grads[grad_table.range()];
            let sum = loss.compute(&self.shop, Some(head::Gradients { d_normed: &mut d_normed, d_table }));
            let mut d_x = normed;
            d_x.fill(0.0);
            let to = norm_gradients(grads, grad_norm);
            norm_backward(self.shop.isa, x, &statistics, norm_weights, &d_normed, &mut d_x, to);
            (sum, d_x)
        })
    }

    fn head_logits(
        &self,
        x: &Buffer,
        weights: &Buffer,
        norm: Norm,
        table: Span,
        chosen: &[usize],
    ) -> Vec<f32> {
        let width = norm.weight.len;
        let vocabulary = table.len / width;
        self.pool.install(|| {
            let mut rows = self.take(chosen.len() * width);
            for (row, &n) in rows.chunks_exact_mut(width).zip(chosen) {
                row.copy_from_slice(&x[n * width..][..width]);
            }
            let (normed, _) = self.normalise(&rows, norm_weights(weights, norm));
            if chosen.len() == 1 && self.shop.pairs.is_none() {
                return one_row::dots(&self.shop, &weights[table.range()], &normed);
            }
            let mut logits = self.take(vocabulary * chosen.len());
            let normed = Matrix::of_rows(&normed, width);
            head::multiply(
                &self.shop,
                &mut logits,
                chosen.len(),
                &weights[table.range()],
                normed,
                width,
                chosen.len(),
            );
            let of_token = |token| (0..vocabulary).map(move |word| word * chosen.len() + token);
            (0..chosen.len()).flat_map(of_token).map(|at| logits[at]).collect()
        })
    }

    fn kept_elements(&self, heads: usize) -> usize {
        // The log-sum-exp, and mean and scale of two norms.
        heads + 4
    }

    fn working_elements(&self, work: Work) -> u128 {
        // Backward of a block, at its widest: gradients of the stream, of attention's output, of queries, keys and values by
        // head and by token; or of the inner part, and what is active of it. As much as an inner part lies between them.
        let (attended, qkv) = (work.attention.width(), work.attention.qkv_width());
        let of_block = work.tokens() * (2 * work.width + 4 * attended + qkv + work.inner) as u128;
        let logits = head::working(work.tokens().min(head::TOKENS as u128) as usize, work.vocabulary);
        let of_head = 3 * work.tokens() * work.width as u128 + logits as u128;
        let sizes = Sizes::new(work.shape.columns, work.attention.head_width);
        let of_thread = product::SLIVERS + attend::Forward::scratch(sizes) + attend::Backward::scratch(sizes);
        let threads = self.pool.current_num_threads();
        let packed = product::packed(work.inner.max(qkv));
        of_block.max(of_head) + (packed + threads * of_thread) as u128
    }

    fn optimise(
        &self,
        rule: &Rule,
        update: &Update,
        decay: bool,
        weights: &mut Buffer,
        moments: &mut [Buffer],
        span: Span,
        gradient: &Buffer,
        gradient_span: Span,
    ) {
        let mut moments = moments.iter_mut().map(|moment| &mut moment[span.range()]);
        let first = moments.next().unwrap_or_default();
        let second = moments.next().unwrap_or_default();
        self.pool.install(|| {
            let (weights, gradient) = (&mut weights[span.range()], &gradient[gradient_span.range()]);
            update::update(self.shop.isa, rule, update, decay, weights, first, second, gradient);
        });
    }
}

impl Cpu {
    /// Normalised rows, and mean and scale of each.
    fn normalise(&self, x: &[f32], weights: NormWeights<'_>) -> (Buffer, Buffer) {
        let mut normed = self.take(x.len());
        let mut statistics = self.take(2 * (x.len() / weights.weight.len()));
        norm::normalise(self.shop.isa, x, weights, &mut normed, &mut statistics);
        (normed, statistics)
    }

    /// `activation(x)`, rows of `width`; or nothing where that is `x` itself.
    fn active(&self, activation: Activation, x: &[f32], width: usize) -> Option<Buffer> {
        if activation == Activation::Identity {
            return None;
        }
        let mut active = self.take(x.len() / activation.takes());
        let task = activate::rows(width) * width;
        let pieces = active.par_chunks_mut(task).zip(x.par_chunks(activation.takes() * task));
        pieces.for_each(|(out, x)| self.shop.isa.run(Activate { activation, x, out, width }));
        Some(active)
    }

    /// `d` after dropout, or nothing where that is `d` itself.
    fn dropped(&self, shape: Shape, dropout: Dropout<'_>, d: &[f32]) -> Option<Buffer> {
        if dropout.rate == 0.0 || d.is_empty() {
            return None;
        }
        let mut dropped = self.take(d.len());
        dropped.copy_from_slice(d);
        let width = d.len() / shape.tokens();
        for (n, row) in dropped.chunks_exact_mut(width).enumerate() {
            rows::apply_dropout(shape, dropout, n, width, row);
        }
        Some(dropped)
    }
}

fn norm_weights(weights: &[f32], norm: Norm) -> NormWeights<'_> {
    NormWeights {
        weight: &weights[norm.weight.range()],
        bias: &weights[norm.bias.range()],
        epsilon: norm.epsilon as f32,
        centred: norm.centred,
    }
}

/// A layer's weight, inputs × outputs, and what its products begin with.
fn weight_and_bias(weights: &[f32], linear: Linear) -> (Matrix<'_>, Start<'_>) {
    let weight = &weights[linear.weight.range()];
    let weight = if linear.row_per_output {
        Matrix::of_rows(weight, linear.inputs).transposed()
    } else {
        Matrix::of_rows(weight, linear.outputs)
    };
    let bias = &weights[linear.bias.range()];
    (weight, if bias.is_empty() { Start::Zero } else { Start::Row(bias) })
}

/// The gradients of gain and bias, which stand one after the other in every layout.
fn norm_gradients(grads: &mut [f32], norm: Norm) -> (&mut [f32], &mut [f32]) {
    let (before, after) = grads.split_at_mut(norm.bias.start);
    (&mut before[norm.weight.range()], &mut after[..norm.bias.len])
}

/// Why the engine cannot start.
#[derive(Debug, thiserror::Error)]
pub enum CpuError {
    /// The instructions that are asked for are not there.
    #[error(transparent)]
    Isa(#[from] IsaError),
    /// There is nothing that multiplies bf16.
    #[error(transparent)]
    Pairs(#[from] PairsError),
    /// Its threads could not be started.
    #[error("the engine's threads could not be started; use fewer with train.threads")]
    Threads(#[from] rayon::ThreadPoolBuildError),
}
