//! What the families have in common: which file's tensor is which parameter.

use serde_json::Value;
use starling_model::config::{Architecture, Family, ModelConfig};
use starling_model::transformer::Unit;

use crate::{gpt2, llama};

/// A field of a config that is not implemented, and its value.
pub(crate) type Refused = (&'static str, String);

/// The model that a `config.json` of this `model_type` describes, and its vocabulary; none if the type is unknown.
pub(crate) fn resolve(
    model_type: &str,
    text: &str,
) -> Option<serde_json::Result<Result<(ModelConfig, usize), Refused>>> {
    match model_type {
        "gpt2" => Some(serde_json::from_str(text).map(gpt2::Config::resolve)),
        "llama" => Some(serde_json::from_str(text).map(llama::Config::resolve)),
        _ => None,
    }
}

/// The `config.json` of a model; none if `transformers` knows no such activation.
pub(crate) fn config(architecture: &Architecture, end_of_text: u32, dtype: &str) -> Option<Value> {
    match architecture.family {
        Family::Gpt2 => gpt2::config(architecture, end_of_text, dtype),
        Family::Llama => Some(llama::config(architecture, end_of_text, dtype)),
    }
}

/// Keys of `[model]` for which the `config.json` has no place, and their values: who trains the model there trains another.
/// What it computes when it is asked is the same.
pub(crate) fn unsaid(architecture: &Architecture) -> Vec<(&'static str, String)> {
    let dropouts = match architecture.family {
        Family::Gpt2 => &[][..],
        Family::Llama => &[
            ("model.dropout", architecture.residual_dropout),
            ("model.embedding_dropout", architecture.embedding_dropout),
        ],
    };
    let dropouts =
        dropouts.iter().filter(|(_, rate)| *rate != 0.0).map(|(key, rate)| (*key, rate.to_string()));
    let shared = Some(architecture.share_every).filter(|&layers| layers > 1);
    dropouts.chain(shared.map(|layers| ("model.share_every", layers.to_string()))).collect()
}

/// What stands before all names but the output layer's, and before a block's number.
fn prefixes(family: Family) -> (&'static str, &'static str) {
    match family {
        Family::Gpt2 => ("transformer.", "h."),
        Family::Llama => ("model.", "layers."),
    }
}

const OUTPUT: &str = "lm_head.weight";

/// The name that a tensor of a file has as a parameter; none if it is no parameter: what `transformers` can make by itself,
/// and the output layer of a model that has none of its own.
pub(crate) fn parameter_of(family: Family, tensor: &str, tied: bool) -> Option<&str> {
    let name = tensor.strip_prefix(prefixes(family).0).unwrap_or(tensor);
    let is_made = match family {
        Family::Gpt2 => gpt2::is_no_parameter(name),
        Family::Llama => llama::is_no_parameter(name),
    };
    let is_borrowed = tied && name == OUTPUT;
    (!is_made && !is_borrowed).then_some(name)
}

/// The tensors of a file: their names, and the parameters that they are. Layers that share their weights are written out.
pub(crate) fn tensors(architecture: &Architecture) -> Vec<(String, String)> {
    let (prefix, block) = prefixes(architecture.family);
    let mut tensors: Vec<(String, String)> = Vec::new();
    for unit in architecture.units() {
        for parameter in architecture.parameters(unit) {
            let in_block = parameter.name.strip_prefix(block).and_then(|rest| rest.split_once('.'));
            let name = match (unit, in_block) {
                (Unit::Block(layer), Some((_, rest))) => format!("{prefix}{block}{layer}.{rest}"),
                _ if parameter.name == OUTPUT => OUTPUT.into(),
                _ => format!("{prefix}{}", parameter.name),
            };
            if !tensors.iter().any(|(known, _)| *known == name) {
                tensors.push((name, parameter.name));
            }
        }
    }
    tensors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_named_with_and_without_the_prefix_and_tables_are_passed_over() {
        let gpt2 = |tensor, tied| parameter_of(Family::Gpt2, tensor, tied);
        assert_eq!(gpt2("transformer.h.3.ln_1.weight", true), Some("h.3.ln_1.weight"));
        assert_eq!(gpt2("h.3.attn.c_attn.bias", true), Some("h.3.attn.c_attn.bias"));
        assert_eq!(gpt2("h.3.attn.bias", true), None);
        assert_eq!(gpt2("lm_head.weight", true), None);
        assert_eq!(gpt2("lm_head.weight", false), Some("lm_head.weight"));
        let llama = |tensor| parameter_of(Family::Llama, tensor, false);
        assert_eq!(llama("model.layers.0.mlp.up_proj.weight"), Some("layers.0.mlp.up_proj.weight"));
        assert_eq!(llama("model.layers.0.self_attn.rotary_emb.inv_freq"), None);
    }
}
