//! Llama's parameters, named as in Hugging Face's files, and what they are to a [`transformer`](super).
//!
//! Queries, keys and values have a matrix each there, and so have the two halves of the feed-forward part. They stand one
//! behind the other, a row for each output: so each group is one matrix, and one product.

use super::{BlockPlaces, Places, Unit, parameter};
use crate::config::Architecture;
use crate::engine::{Linear, Norm, Span};
use crate::layout::{Initial, Parameter};

/// Matrices of a block that are one product, and how wide their outputs are.
struct Group {
    names: &'static [&'static str],
    outputs: Vec<usize>,
    inputs: usize,
    has_bias: bool,
}

/// A block's groups: into attention, out of it, into the feed-forward part, out of it.
fn groups(architecture: &Architecture) -> [Group; 4] {
    let Architecture { width: d, inner: f, attention_bias, mlp_bias, .. } = *architecture;
    let attention = architecture.attention(&[]);
    let (attended, keys) = (attention.width(), attention.key_width());
    let group = |names, outputs: &[usize], inputs, has_bias| Group {
        names,
        outputs: outputs.into(),
        inputs,
        has_bias,
    };
    let into_attention = &["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
    [
        group(into_attention, &[attended, keys, keys], d, attention_bias),
        group(&["self_attn.o_proj"], &[d], attended, attention_bias),
        group(&["mlp.gate_proj", "mlp.up_proj"], &[f, f], d, mlp_bias),
        group(&["mlp.down_proj"], &[d], f, mlp_bias),
    ]
}

/// The parameters that a unit uses, in the order of its layout.
pub fn parameters(architecture: &Architecture, unit: Unit) -> Vec<Parameter> {
    let Architecture { width: d, vocabulary, init_std, tied, share_every, .. } = *architecture;
    let normal = Initial::Normal(init_std);
    match unit {
        Unit::Embedding => vec![parameter("embed_tokens.weight".into(), &[vocabulary, d], normal)],
        Unit::Block(layer) => {
            let shared = layer / share_every;
            let named = |name: &str, shape: &[usize], initial| {
                parameter(format!("layers.{shared}.{name}"), shape, initial)
            };
            let norm = |name: &str| named(&format!("{name}.weight"), &[d], Initial::Ones);
            let matrices = |group: &Group| {
                let members = || group.names.iter().zip(group.outputs.clone());
                let weight =
                    |(name, outputs)| named(&format!("{name}.weight"), &[outputs, group.inputs], normal);
                let bias = |(name, outputs)| named(&format!("{name}.bias"), &[outputs], Initial::Zeros);
                let biases = members().map(bias).take(if group.has_bias { group.names.len() } else { 0 });
                members().map(weight).chain(biases).collect::<Vec<_>>()
            };
            let [attention_in, attention_out, mlp_in, mlp_out] = &groups(architecture);
            [
                vec![norm("input_layernorm")],
                matrices(attention_in),
                matrices(attention_out),
                vec![norm("post_attention_layernorm")],
                matrices(mlp_in),
                matrices(mlp_out),
            ]
            .concat()
        }
        Unit::Head => vec![
            parameter("norm.weight".into(), &[d], Initial::Ones),
            parameter(
                if tied { "embed_tokens.weight" } else { "lm_head.weight" }.into(),
                &[vocabulary, d],
                normal,
            ),
        ],
    }
}

/// Where a unit's parameters stand, from the spans of [`parameters`] in that order.
pub fn places(architecture: &Architecture, unit: Unit, spans: &[Span]) -> Places {
    let epsilon = architecture.norm_epsilon;
    let mut spans = spans.iter().copied();
    let mut next = || spans.next().unwrap_or(Span { start: 0, len: 0 });
    let norm = |weight: Span| Norm { weight, bias: after(weight), epsilon, centred: false };
    match unit {
        Unit::Embedding => Places::Embedding { tokens: next(), positions: None },
        Unit::Block(_) => {
            let [attention_in, attention_out, mlp_in, mlp_out] = groups(architecture);
            let linear = |group: Group, next: &mut dyn FnMut() -> Span| {
                let mut joined = || group.names.iter().map(|_| next()).reduce(join);
                let weight = joined().unwrap_or(Span { start: 0, len: 0 });
                let bias = if group.has_bias { joined() } else { None };
                Linear {
                    weight,
                    bias: bias.unwrap_or(after(weight)),
                    inputs: group.inputs,
                    outputs: group.outputs.iter().sum(),
                    row_per_output: true,
                }
            };
            Places::Block(Box::new(BlockPlaces {
                attention_norm: norm(next()),
                attention_in: linear(attention_in, &mut next),
                attention_out: linear(attention_out, &mut next),
                mlp_norm: norm(next()),
                mlp_in: linear(mlp_in, &mut next),
                mlp_out: linear(mlp_out, &mut next),
            }))
        }
        Unit::Head => Places::Head { norm: norm(next()), table: next() },
    }
}

/// Nothing, right behind a span.
fn after(span: Span) -> Span {
    Span { start: span.start + span.len, len: 0 }
}

/// Two spans that stand one behind the other.
fn join(a: Span, b: Span) -> Span {
    debug_assert_eq!(after(a).start, b.start, "a layout keeps the order of a unit's parameters");
    Span { start: a.start, len: a.len + b.len }
}
