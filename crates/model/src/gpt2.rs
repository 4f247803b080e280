//! The GPT-2 family, written once on an [`Engine`]'s operations: forward and explicit backward of each unit.
//!
//! A model is a list of units: the embedding, the blocks, the head. A unit does not know that it stands in
//! stage 3 of 5, nor whose microbatch it computes.
//!
//! Dropout sites of a layer position: 0 embedding or attention output, 1 attention weights, 2 feed-forward.

use crate::config::Architecture;
use crate::engine::{Activation, Attention, Engine, Linear, Norm, Shape, Span};
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
        let (d, f) = (self.width, self.inner);
        let parameter =
            |name: String, shape: &[usize], initial| Parameter { name, shape: shape.into(), initial };
        let normal = Initial::Normal(self.init_std);
        // GPT-2 starts what is added to the residual stream smaller, by the square root of how often that happens.
        let residual = Initial::Normal(self.init_std / (2.0 * self.layers as f64).sqrt());
        match unit {
            Unit::Embedding => vec![
                parameter("wte.weight".into(), &[self.vocabulary, d], normal),
                parameter("wpe.weight".into(), &[self.context, d], normal),
            ],
            Unit::Block(layer) => {
                let mut list = Vec::new();
                let shared = layer / self.share_every;
                let mut pair = |name: &str, weight: &[usize], bias: usize, initial| {
                    list.push(parameter(format!("h.{shared}.{name}.weight"), weight, initial));
                    list.push(parameter(format!("h.{shared}.{name}.bias"), &[bias], Initial::Zeros));
                };
                pair("ln_1", &[d], d, Initial::Ones);
                pair("attn.c_attn", &[d, 3 * d], 3 * d, normal);
                pair("attn.c_proj", &[d, d], d, residual);
                pair("ln_2", &[d], d, Initial::Ones);
                pair("mlp.c_fc", &[d, f], f, normal);
                pair("mlp.c_proj", &[f, d], d, residual);
                list
            }
            Unit::Head => vec![
                parameter("ln_f.weight".into(), &[d], Initial::Ones),
                parameter("ln_f.bias".into(), &[d], Initial::Zeros),
                parameter(
                    if self.tied { "wte.weight" } else { "lm_head.weight" }.into(),
                    &[self.vocabulary, d],
                    normal,
                ),
            ],
        }
    }

    /// Multiplications and additions of a forward pass, for each token.
    pub fn forward_operations(&self, unit: Unit) -> u64 {
        let (d, f) = (self.width as u64, self.inner as u64);
        match unit {
            Unit::Embedding => d,
            Unit::Block(_) => 2 * (4 * d * d + 2 * d * f) + 2 * self.context as u64 * d,
            Unit::Head => 2 * d * self.vocabulary as u64,
        }
    }
}

/// Where a unit's parameters stand in a flat vector: of weights, or of gradients.
#[derive(Clone, Debug)]
pub enum Places {
    /// The embedding's.
    Embedding {
        /// Table of tokens.
        tokens: Span,
        /// Table of positions.
        positions: Span,
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
        let (d, f) = (architecture.width, architecture.inner);
        let norm =
            |i: usize| Norm { weight: spans[i], bias: spans[i + 1], epsilon: architecture.norm_epsilon };
        let linear =
            |i: usize, inputs, outputs| Linear { weight: spans[i], bias: spans[i + 1], inputs, outputs };
        match unit {
            Unit::Embedding => Places::Embedding { tokens: spans[0], positions: spans[1] },
            Unit::Block(_) => Places::Block(Box::new(BlockPlaces {
                attention_norm: norm(0),
                attention_in: linear(2, d, 3 * d),
                attention_out: linear(4, d, d),
                mlp_norm: norm(6),
                mlp_in: linear(8, d, f),
                mlp_out: linear(10, f, d),
            })),
            Unit::Head => Places::Head { norm: norm(0), table: spans[2] },
        }
    }
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
    6 * architecture.width + architecture.inner
}

impl<E: Engine> Pass<'_, E> {
    /// Embeds the tokens.
    pub fn embed(&self, tokens: Span, positions: Span) -> E::Buffer {
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

    /// Adds to the gradients of both tables.
    pub fn embed_backward(&self, d_out: &E::Buffer, grads: &mut E::Buffer, tokens: Span, positions: Span) {
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
        let (qkv, attention_in) = engine.norm_linear(&x, weights, at.attention_norm, at.attention_in);
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
        let (qkv, _) = engine.norm_linear(x, weights, at.attention_norm, at.attention_in);
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
        let d_qkv = engine.attention_backward(
            shape,
            self.attention(),
            &kept.qkv,
            &kept.attended,
            &kept.attention,
            of_attention,
            &d_attended,
        );
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
        Attention {
            heads: self.architecture.heads,
            head_width: self.architecture.width / self.architecture.heads,
            documents: self.documents,
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
