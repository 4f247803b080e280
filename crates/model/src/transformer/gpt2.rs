//! GPT-2's parameters, named as in Hugging Face's files, and what they are to a [`transformer`](super).

use super::{BlockPlaces, Places, Unit, parameter};
use crate::config::Architecture;
use crate::engine::{Linear, Norm, Span};
use crate::layout::{Initial, POSITIONS, Parameter};

/// The parameters that a unit uses, in the order of its layout.
pub fn parameters(architecture: &Architecture, unit: Unit) -> Vec<Parameter> {
    let Architecture { width: d, inner: f, vocabulary, context, init_std, layers, tied, share_every, .. } =
        *architecture;
    let normal = Initial::Normal(init_std);
    // GPT-2 starts what is added to the residual stream smaller, by the square root of how often that happens.
    let residual = Initial::Normal(init_std / (2.0 * layers as f64).sqrt());
    match unit {
        Unit::Embedding => vec![
            parameter("wte.weight".into(), &[vocabulary, d], normal),
            parameter(POSITIONS.into(), &[context, d], normal),
        ],
        Unit::Block(layer) => {
            let mut list = Vec::new();
            let shared = layer / share_every;
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
            parameter(if tied { "wte.weight" } else { "lm_head.weight" }.into(), &[vocabulary, d], normal),
        ],
    }
}

/// Where a unit's parameters stand, from the spans of [`parameters`] in that order.
pub fn places(architecture: &Architecture, unit: Unit, spans: &[Span]) -> Places {
    let (d, f, epsilon) = (architecture.width, architecture.inner, architecture.norm_epsilon);
    let norm = |i: usize| Norm { weight: spans[i], bias: spans[i + 1], epsilon, centred: true };
    let linear = |i: usize, inputs, outputs| Linear {
        weight: spans[i],
        bias: spans[i + 1],
        inputs,
        outputs,
        row_per_output: false,
    };
    match unit {
        Unit::Embedding => Places::Embedding { tokens: spans[0], positions: Some(spans[1]) },
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
