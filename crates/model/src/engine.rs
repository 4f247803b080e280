//! The lower level of compute: about ten fused operations with explicit backward, on buffers that the engine owns.
//!
//! Models are written once on these operations ([`crate::transformer`]); an engine is written once for all models.
//! The operations are coarse enough to be fast (a fused kernel each) and few enough to be written twice: the
//! [`naive`] engine is the second implementation of every one, and the judge of all others.
//!
//! What an engine promises beyond the mathematics:
//! - a result depends on the operands alone, never on the number of threads or on earlier calls;
//! - two rows (samples) of a microbatch do not influence each other's activations, so a sample's activations
//!   do not depend on the microbatch it travels in;
//! - applying an update uses + − × ÷ √ only, without contraction.
//!
//! Legend for shapes: `b` rows (samples), `t` columns (positions), `n = b·t`, `d` width, `f` inner width,
//! `h` heads, `k` heads of keys and values, `w` width of a head, `v` vocabulary.

pub mod cpu;
pub mod emulated;
mod heap;
pub mod naive;

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::optimiser::{Rule, Update};
use crate::random::Dropout;

/// How an element is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Dtype {
    /// IEEE single precision, 4 bytes.
    F32,
    /// IEEE double precision, 8 bytes.
    F64,
}

impl Dtype {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::F64 => 8,
        }
    }
}

/// A contiguous piece of a flat buffer, in elements. (`Range` is not `Copy`.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First element.
    pub start: usize,
    /// Number of elements.
    pub len: usize,
}

impl Span {
    /// The same as a range of elements.
    pub fn range(self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// Rows (samples) and columns (positions) of a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Samples.
    pub rows: usize,
    /// Positions of each sample.
    pub columns: usize,
}

impl Shape {
    /// Tokens: rows × columns.
    pub fn tokens(self) -> usize {
        self.rows * self.columns
    }
}

/// The sizes that an engine's need of memory depends on.
#[derive(Clone, Copy, Debug)]
pub struct Work {
    /// Of a microbatch.
    pub shape: Shape,
    /// Of the residual stream.
    pub width: usize,
    /// Of the feed-forward part: what goes into its activation, for each token.
    pub inner: usize,
    /// Of attention, in documents that are nobody's.
    pub attention: Attention<'static>,
    /// Of the head; 0 without one.
    pub vocabulary: usize,
}

impl Work {
    /// Tokens of a microbatch, however many a plan asks for.
    pub fn tokens(&self) -> u128 {
        self.shape.rows as u128 * self.shape.columns as u128
    }
}

/// Where a normalisation's gain and bias stand in a flat buffer.
#[derive(Clone, Copy, Debug)]
pub struct Norm {
    /// Gain, `d`.
    pub weight: Span,
    /// Bias, `d`, right behind the gain; empty in one that is not centred.
    pub bias: Span,
    /// Added to the variance.
    pub epsilon: f64,
    /// Whether a row's mean is taken away (LayerNorm) or not (RMSNorm).
    pub centred: bool,
}

/// Where a linear layer's weight and bias stand in a flat buffer.
#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// Weight.
    pub weight: Span,
    /// Bias, outputs; empty if it has none.
    pub bias: Span,
    /// Width of the input.
    pub inputs: usize,
    /// Width of the output.
    pub outputs: usize,
    /// How the weight is stored: a row for each output, or (GPT-2's way) a row for each input.
    pub row_per_output: bool,
}

/// What stands between two linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// Nothing.
    Identity,
    /// GELU with the error function.
    Gelu,
    /// GPT-2's GELU, with the hyperbolic tangent.
    GeluNew,
    /// Llama's: the first half of a row, x·σ(x) of it, times the second half.
    #[serde(rename = "swiglu")]
    SwiGlu,
}

impl Activation {
    /// Elements that go in for each that comes out.
    pub fn takes(self) -> usize {
        if self == Activation::SwiGlu { 2 } else { 1 }
    }
}

/// Causal self-attention over `heads` heads of width `head_width`, inside documents.
#[derive(Clone, Copy, Debug)]
pub struct Attention<'a> {
    /// Number of heads.
    pub heads: usize,
    /// Number of heads that keys and values have; each serves as many heads in a row.
    pub key_heads: usize,
    /// Width of one head.
    pub head_width: usize,
    /// For each token the number of its document in its row; attention stays inside a document.
    pub documents: &'a [u32],
}

impl Attention<'_> {
    /// Elements of a token's queries, and of the result.
    pub fn width(&self) -> usize {
        self.heads * self.head_width
    }

    /// Elements of a token's keys, and of its values.
    pub fn key_width(&self) -> usize {
        self.key_heads * self.head_width
    }

    /// Elements of a token's queries, keys and values.
    pub fn qkv_width(&self) -> usize {
        self.width() + 2 * self.key_width()
    }

    /// The head of keys and values that serves a head.
    pub fn key_head(&self, head: usize) -> usize {
        head / (self.heads / self.key_heads)
    }

    /// Where the queries (0), keys (1) or values (2) of a head begin in a token's row.
    pub fn place(&self, which: usize, head: usize) -> usize {
        match which {
            0 => head * self.head_width,
            _ => (self.heads + (which - 1) * self.key_heads + self.key_head(head)) * self.head_width,
        }
    }
}

/// The target of a position that carries no loss.
pub const NO_TARGET: u32 = u32::MAX;

/// One implementation of the operations on one kind of device.
///
/// `_backward` operations *add* to gradients of parameters (`grads`), and to gradients of residual streams
/// where they say so. Weights and gradients are flat buffers; [`Span`]s say where a parameter stands.
pub trait Engine: Send + Sync + 'static {
    /// A flat vector of elements, wherever the device keeps it.
    type Buffer: Send + Sync + 'static;
    /// What a forward operation leaves for its backward besides its operands (statistics, a log-sum-exp, an
    /// activation): the engine's own business.
    type Kept: Send + Sync + 'static;

    /// Does several operations one after another where the engine computes. Only time depends on it: each operation
    /// by itself would be handed to the engine's threads and back.
    fn inside<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        work()
    }

    /// How elements are stored, and cross a boundary.
    fn dtype(&self) -> Dtype;
    /// The numerics class: peers of one class agree bit for bit.
    fn class(&self) -> String;

    /// Operations a second that the device can do at the most, measured, where that means something.
    fn peak(&self) -> Option<f64> {
        None
    }

    /// Takes so much memory from the system now, if the engine keeps any for itself: what is taken later comes out of it.
    fn reserve(&self, _bytes: u64) {}

    /// A buffer of zeros.
    fn zeros(&self, len: usize) -> Self::Buffer;
    /// A buffer with a copy of a piece.
    fn copy(&self, buffer: &Self::Buffer, span: Span) -> Self::Buffer;
    /// Elements of a buffer.
    fn len(&self, buffer: &Self::Buffer) -> usize;
    /// Little-endian bytes of a piece.
    fn read(&self, buffer: &Self::Buffer, span: Span) -> Vec<u8>;
    /// Overwrites from element `start` on with little-endian bytes.
    fn write(&self, buffer: &mut Self::Buffer, start: usize, bytes: &[u8]);
    /// `into[into_span] += from[from_span]`, element by element.
    fn add(&self, into: &mut Self::Buffer, into_span: Span, from: &Self::Buffer, from_span: Span);
    /// Σ x² in f64, in an order that is the engine's own and depends on the number of elements alone.
    fn sum_of_squares(&self, buffer: &Self::Buffer, span: Span) -> f64;

    /// `out[n,d] = dropout(table[token] + positions[position])`, where there is a table of positions.
    fn embed(
        &self,
        shape: Shape,
        width: usize,
        tokens: &[u32],
        positions: &[u32],
        weights: &Self::Buffer,
        table: Span,
        position_table: Option<Span>,
        dropout: Dropout<'_>,
    ) -> Self::Buffer;
    /// Adds to the gradients of the tables.
    fn embed_backward(
        &self,
        shape: Shape,
        width: usize,
        tokens: &[u32],
        positions: &[u32],
        dropout: Dropout<'_>,
        d_out: &Self::Buffer,
        grads: &mut Self::Buffer,
        table: Span,
        position_table: Option<Span>,
    );

    /// `out[n,outputs] = norm(x)·W + bias`.
    fn norm_linear(
        &self,
        x: &Self::Buffer,
        weights: &Self::Buffer,
        norm: Norm,
        linear: Linear,
    ) -> (Self::Buffer, Self::Kept);
    /// `d_x +=`, and adds to the gradients of norm and linear at (`grad_norm`, `grad_linear`).
    fn norm_linear_backward(
        &self,
        x: &Self::Buffer,
        kept: &Self::Kept,
        weights: &Self::Buffer,
        norm: Norm,
        linear: Linear,
        d_out: &Self::Buffer,
        d_x: &mut Self::Buffer,
        grads: &mut Self::Buffer,
        grad_norm: Norm,
        grad_linear: Linear,
    );

    /// Turns queries and keys of `qkv[n,(h+2k)·w]` by their positions, in place: elements i and i + w/2 of a head by the
    /// angle whose cosine and sine are elements i and i + w/2 of the token's row in `rotation[n,w]`. `back` undoes it, and
    /// so turns gradients.
    fn rotate(&self, attention: Attention<'_>, rotation: &Self::Buffer, qkv: &mut Self::Buffer, back: bool);

    /// `qkv[n,(h+2k)·w]` to `out[n,h·w]`, with dropout on the attention weights. Never keeps anything of size t².
    fn attention(
        &self,
        shape: Shape,
        attention: Attention<'_>,
        qkv: &Self::Buffer,
        dropout: Dropout<'_>,
    ) -> (Self::Buffer, Self::Kept);
    /// The gradient of `qkv`; probabilities are made again.
    fn attention_backward(
        &self,
        shape: Shape,
        attention: Attention<'_>,
        qkv: &Self::Buffer,
        out: &Self::Buffer,
        kept: &Self::Kept,
        dropout: Dropout<'_>,
        d_out: &Self::Buffer,
    ) -> Self::Buffer;

    /// Puts the keys and values of a text's next tokens (`qkv[n,(h+2k)·w]`), of which `known` came before, into `memory`:
    /// 2·k·w elements for each token that there will ever be.
    fn remember(&self, attention: Attention<'_>, qkv: &Self::Buffer, known: usize, memory: &mut Self::Buffer);
    /// What the last of `known` tokens, all of them remembered, attends to: `qkv[1,(h+2k)·w]` to `out[1,h·w]`.
    fn recall(
        &self,
        attention: Attention<'_>,
        qkv: &Self::Buffer,
        known: usize,
        memory: &Self::Buffer,
    ) -> Self::Buffer;

    /// `out = residual + dropout(activation(x)·W + bias)`; `x` has as many elements as the activation takes.
    fn linear_residual(
        &self,
        shape: Shape,
        activation: Activation,
        x: &Self::Buffer,
        weights: &Self::Buffer,
        linear: Linear,
        dropout: Dropout<'_>,
        residual: &Self::Buffer,
    ) -> (Self::Buffer, Self::Kept);
    /// The gradient of `x`; the residual's gradient is `d_out` itself.
    fn linear_residual_backward(
        &self,
        shape: Shape,
        activation: Activation,
        x: &Self::Buffer,
        kept: &Self::Kept,
        weights: &Self::Buffer,
        linear: Linear,
        dropout: Dropout<'_>,
        d_out: &Self::Buffer,
        grads: &mut Self::Buffer,
        grad_linear: Linear,
    ) -> Self::Buffer;

    /// Sum over all targets of −ln softmax(norm(x)·tableᵀ) at the target; `table` is `v` × `d`. Never holds all logits.
    fn head_loss(
        &self,
        x: &Self::Buffer,
        weights: &Self::Buffer,
        norm: Norm,
        table: Span,
        targets: &[u32],
    ) -> f64;
    /// The same sum, and its gradient with respect to `x`; adds to those of norm and table. Forward and backward are one:
    /// the gradient needs nothing that forward does not know, and logits would have to be made twice.
    fn head_loss_backward(
        &self,
        x: &Self::Buffer,
        weights: &Self::Buffer,
        norm: Norm,
        table: Span,
        targets: &[u32],
        grads: &mut Self::Buffer,
        grad_norm: Norm,
        grad_table: Span,
    ) -> (f64, Self::Buffer);
    /// Logits of the chosen tokens (numbered 0..n), one after another.
    fn head_logits(
        &self,
        x: &Self::Buffer,
        weights: &Self::Buffer,
        norm: Norm,
        table: Span,
        chosen: &[usize],
    ) -> Vec<f32>;

    /// Elements of what a block's operations keep for one token.
    fn kept_elements(&self, heads: usize) -> usize;
    /// Elements that are at work on one microbatch, besides its gradient and what is kept.
    fn working_elements(&self, work: Work) -> u128 {
        // Backward of the feed-forward part: its input, what becomes active of it, slopes, gradients of both.
        work.tokens() * 4 * (work.inner + work.width.max(work.attention.width())) as u128
    }

    /// One update of the parameter at `span`: weights and moments in place, from `gradient[gradient_span]`.
    /// `decay` says whether weight decay concerns this parameter.
    fn optimise(
        &self,
        rule: &Rule,
        update: &Update,
        decay: bool,
        weights: &mut Self::Buffer,
        moments: &mut [Self::Buffer],
        span: Span,
        gradient: &Self::Buffer,
        gradient_span: Span,
    );
}
