//! Decoder-only transformers, written once on an [`Engine`]'s operations: forward and explicit backward of each unit.
//! A family (`gpt2`, `llama`) says which parameters there are and what they are here.
//!
//! A model is a list of units: the embedding, the blocks, the head. A unit does not know that it stands in
//! stage 3 of 5, nor whose microbatch it computes.
//!
//! Dropout sites of a layer position: 0 embedding or attention output, 1 attention weights, 2 feed-forward.

mod gpt2;
mod llama;

use crate::config::{Architecture, Family};
use crate::engine::{Activation, Attention, Dtype, Engine, Linear, Norm, Shape, Span};
use crate::layout::{Initial, Parameter};
use crate::random::Dropout;

/// One unit of the model; a stage is a contiguous run of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Tokens and positions to hidden states.
    Embedding,
    /// The transformer block of this number.
    Block(usize),
    /// Last norm, logits, loss.
    Head,
}

impl Architecture {
    /// The units in order: embedding, blocks, head.
    pub fn units(&self) -> Vec<Unit> {
        let blocks = (0..self.layers).map(Unit::Block);
        [Unit::Embedding].into_iter().chain(blocks).chain([Unit::Head]).collect()
    }

    /// The parameters that a unit uses, in the order of its layout. A norm's bias follows its weight.
    pub fn parameters(&self, unit: Unit) -> Vec<Parameter> {
        match self.family {
            Family::Gpt2 => gpt2::parameters(self, unit),
            Family::Llama => llama::parameters(self, unit),
        }
    }

    /// Multiplications and additions of a forward pass, for each token.
    pub fn forward_operations(&self, unit: Unit) -> u64 {
        let (d, f) = (self.width as u64, self.inner as u64);
        let attention = self.attention(&[]);
        let (attended, qkv) = (attention.width() as u64, attention.qkv_width() as u64);
        match unit {
            Unit::Embedding => d,
            Unit::Block(_) => {
                let into_inner = self.activation.takes() as u64 * f;
                2 * d * (qkv + attended + into_inner + f) + 2 * self.context as u64 * attended
            }
            Unit::Head => 2 * d * self.vocabulary as u64,
        }
    }

    /// The same of forward and backward, for each token: backward costs twice what forward does, and attention's
    /// probabilities are made again in it.
    pub fn training_operations(&self, unit: Unit) -> u64 {
        let again = match unit {
            Unit::Block(_) => 2 * self.context as u64 * self.attention(&[]).width() as u64,
            Unit::Embedding | Unit::Head => 0,
        };
        3 * self.forward_operations(unit) + again
    }
}

fn parameter(name: String, shape: &[usize], initial: Initial) -> Parameter {
    Parameter { name, shape: shape.into(), initial }
}

/// Where a unit's parameters stand in a flat vector: of weights, or of gradients.
#[derive(Clone, Debug)]
pub enum Places {
    /// The embedding's.
    Embedding {
        /// Table of tokens.
        tokens: Span,
        /// Table of positions, in a family that has one.
        positions: Option<Span>,
    },
    /// A block's.
    Block(Box<BlockPlaces>),
    /// The head's.
    Head {
        /// Last norm.
        norm: Norm,
        /// Output table.
        table: Span,
    },
}

/// Where a block's parameters stand.
#[derive(Clone, Copy, Debug)]
pub struct BlockPlaces {
    attention_norm: Norm,
    attention_in: Linear,
    attention_out: Linear,
    mlp_norm: Norm,
    mlp_in: Linear,
    mlp_out: Linear,
}

impl Places {
    /// From the spans of [`Architecture::parameters`], in that order.
    pub fn new(architecture: &Architecture, unit: Unit, spans: &[Span]) -> Places {
        match architecture.family {
            Family::Gpt2 => gpt2::places(architecture, unit, spans),
            Family::Llama => llama::places(architecture, unit, spans),
        }
    }
}

/// Cosines and sines by which positions turn queries and keys, `[n, w]`: for [`Engine::rotate`].
pub fn rotation<E: Engine>(engine: &E, architecture: &Architecture, positions: &[u32]) -> Option<E::Buffer> {
    if architecture.family != Family::Llama {
        return None;
    }
    let speeds = architecture.rope.speeds(architecture.head_width);
    let mut rotation = engine.zeros(positions.len() * architecture.head_width);
    let mut row = Vec::new();
    for (n, &position) in positions.iter().enumerate() {
        row.clear();
        let mut push = |x: f64| match engine.dtype() {
            Dtype::F32 => row.extend_from_slice(&(x as f32).to_le_bytes()),
            Dtype::F64 => row.extend_from_slice(&x.to_le_bytes()),
        };
        // Sine and cosine are `libm`'s, not the system's: peers of one numerics class must agree.
        let angles = || speeds.iter().map(|speed| f64::from(position as f32 * speed));
        angles().for_each(|angle| push(libm::cos(angle)));
        angles().for_each(|angle| push(libm::sin(angle)));
        engine.write(&mut rotation, n * architecture.head_width, &row);
    }
    Some(rotation)
}

/// What all units of a stage see of one microbatch.
pub struct Pass<'a, E: Engine> {
    /// The engine.
    pub engine: &'a E,
    /// The model.
    pub architecture: &'a Architecture,
    /// The stage's weights.
    pub weights: &'a E::Buffer,
    /// Rows and columns.
    pub shape: Shape,
    /// Token ids; empty where the first unit is not the embedding.
    pub tokens: &'a [u32],
    /// Position of each token.
    pub positions: &'a [u32],
    /// What [`rotation`] makes of them; none in a family that embeds them.
    pub rotation: Option<E::Buffer>,
    /// Document of each token.
    pub documents: &'a [u32],
    /// Global sample number of each row.
    pub samples: &'a [u64],
    /// The run's seed.
    pub seed: u64,
    /// Whether dropout is on.
    pub training: bool,
}

/// What a block keeps of its forward pass for its backward pass: each operation's input, and what the engine wants.
pub struct BlockKept<E: Engine> {
    x: E::Buffer,
    attention_in: E::Kept,
    qkv: E::Buffer,
    attention: E::Kept,
    attended: E::Buffer,
    attention_out: E::Kept,
    middle: E::Buffer,
    mlp_in: E::Kept,
    inner: E::Buffer,
    mlp_out: E::Kept,
}

/// Elements that a block keeps for each token in [`BlockKept`]'s buffers, besides what the engine wants.
pub fn block_kept_elements(architecture: &Architecture) -> usize {
    let Architecture { width, inner, activation, .. } = *architecture;
    let attention = architecture.attention(&[]);
    2 * width + attention.qkv_width() + attention.width() + activation.takes() * inner
}

impl<E: Engine> Pass<'_, E> {
    /// Embeds the tokens.
    pub fn embed(&self, tokens: Span, positions: Option<Span>) -> E::Buffer {
        let dropout = self.dropout(self.architecture.embedding_dropout, 0, 0);
        self.engine.embed(
            self.shape,
            self.architecture.width,
            self.tokens,
            self.positions,
            self.weights,
            tokens,
            positions,
            dropout,
        )
    }

    /// Adds to the gradients of the tables.
    pub fn embed_backward(
        &self,
        d_out: &E::Buffer,
        grads: &mut E::Buffer,
        tokens: Span,
        positions: Option<Span>,
    ) {
        let dropout = self.dropout(self.architecture.embedding_dropout, 0, 0);
        self.engine.embed_backward(
            self.shape,
            self.architecture.width,
            self.tokens,
            self.positions,
            dropout,
            d_out,
            grads,
            tokens,
            positions,
        );
    }

    /// Block `layer`: `middle = x + attention(norm(x))`, then `middle + mlp(norm(middle))`.
    pub fn block(&self, layer: usize, at: &BlockPlaces, x: E::Buffer) -> (E::Buffer, BlockKept<E>) {
        let (engine, weights, shape) = (self.engine, self.weights, self.shape);
        let [after_attention, of_attention, after_mlp] = self.block_dropouts(layer);
        let (mut qkv, attention_in) = engine.norm_linear(&x, weights, at.attention_norm, at.attention_in);
        self.rotate(&mut qkv, false);
        let (attended, attention) = engine.attention(shape, self.attention(), &qkv, of_attention);
        let (middle, attention_out) = engine.linear_residual(
            shape,
            Activation::Identity,
            &attended,
            weights,
            at.attention_out,
            after_attention,
            &x,
        );
        let (inner, mlp_in) = engine.norm_linear(&middle, weights, at.mlp_norm, at.mlp_in);
        let activation = self.architecture.activation;
        let (out, mlp_out) =
            engine.linear_residual(shape, activation, &inner, weights, at.mlp_out, after_mlp, &middle);
        let kept = BlockKept {
            x,
            attention_in,
            qkv,
            attention,
            attended,
            attention_out,
            middle,
            mlp_in,
            inner,
            mlp_out,
        };
        (out, kept)
    }

    /// The next tokens of one text through a block, without dropout; `known` tokens came before and are in
    /// `memory`. All of them at the beginning, then one by one.
    pub fn block_onward(
        &self,
        at: &BlockPlaces,
        x: &E::Buffer,
        known: usize,
        memory: &mut E::Buffer,
    ) -> E::Buffer {
        let (engine, weights, shape) = (self.engine, self.weights, self.shape);
        let none = Dropout::none();
        let (mut qkv, _) = engine.norm_linear(x, weights, at.attention_norm, at.attention_in);
        self.rotate(&mut qkv, false);
        engine.remember(self.attention(), &qkv, known, memory);
        let attended = match known {
            0 => engine.attention(shape, self.attention(), &qkv, none).0,
            _ => engine.recall(self.attention(), &qkv, known + 1, memory),
        };
        let identity = Activation::Identity;
        let (middle, _) =
            engine.linear_residual(shape, identity, &attended, weights, at.attention_out, none, x);
        let (inner, _) = engine.norm_linear(&middle, weights, at.mlp_norm, at.mlp_in);
        let activation = self.architecture.activation;
        engine.linear_residual(shape, activation, &inner, weights, at.mlp_out, none, &middle).0
    }

    /// Turns the gradient of a block's output into that of its input, in place; adds to `grads` at `to`.
    pub fn block_backward(
        &self,
        layer: usize,
        at: &BlockPlaces,
        kept: BlockKept<E>,
        d_stream: &mut E::Buffer,
        grads: &mut E::Buffer,
        to: &BlockPlaces,
    ) {
        let (engine, weights, shape) = (self.engine, self.weights, self.shape);
        let [after_attention, of_attention, after_mlp] = self.block_dropouts(layer);
        let d_inner = engine.linear_residual_backward(
            shape,
            self.architecture.activation,
            &kept.inner,
            &kept.mlp_out,
            weights,
            at.mlp_out,
            after_mlp,
            d_stream,
            grads,
            to.mlp_out,
        );
        engine.norm_linear_backward(
            &kept.middle,
            &kept.mlp_in,
            weights,
            at.mlp_norm,
            at.mlp_in,
            &d_inner,
            d_stream,
            grads,
            to.mlp_norm,
            to.mlp_in,
        );
        let d_attended = engine.linear_residual_backward(
            shape,
            Activation::Identity,
            &kept.attended,
            &kept.attention_out,
            weights,
            at.attention_out,
            after_attention,
            d_stream,
            grads,
            to.attention_out,
        );
        let mut d_qkv = engine.attention_backward(
            shape,
            self.attention(),
            &kept.qkv,
            &kept.attended,
            &kept.attention,
            of_attention,
            &d_attended,
        );
        self.rotate(&mut d_qkv, true);
        engine.norm_linear_backward(
            &kept.x,
            &kept.attention_in,
            weights,
            at.attention_norm,
            at.attention_in,
            &d_qkv,
            d_stream,
            grads,
            to.attention_norm,
            to.attention_in,
        );
    }

    fn attention(&self) -> Attention<'_> {
        self.architecture.attention(self.documents)
    }

    fn rotate(&self, qkv: &mut E::Buffer, back: bool) {
        if let Some(rotation) = &self.rotation {
            self.engine.rotate(self.attention(), rotation, qkv, back);
        }
    }

    /// Dropouts of a block: after attention, of the attention weights, after the feed-forward part.
    fn block_dropouts(&self, layer: usize) -> [Dropout<'_>; 3] {
        let Architecture { residual_dropout, attention_dropout, .. } = *self.architecture;
        // Position 0 is the embedding's.
        let position = layer + 1;
        [
            self.dropout(residual_dropout, position, 0),
            self.dropout(attention_dropout, position, 1),
            self.dropout(residual_dropout, position, 2),
        ]
    }

    fn dropout(&self, rate: f64, position: usize, site: u16) -> Dropout<'_> {
        Dropout {
            rate: if self.training { rate } else { 0.0 },
            seed: self.seed,
            place: Dropout::place(position, site),
            samples: self.samples,
        }
    }
}
