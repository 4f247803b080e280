//! The family `gpt2`: what its `config.json` says, and which tensor of its files is which parameter.
//!
//! Parameters have the names that the files have, without `transformer.`; its `Conv1D` stores inputs × outputs, as we do.

use serde::Deserialize;
use serde_json::{Value, json};
use starling_model::config::{Architecture, Family, ModelConfig};
use starling_model::engine::Activation;

use crate::family::Refused;

/// What of a `config.json` matters to us; the rest is about training, sampling or other frameworks.
#[derive(Deserialize)]
#[serde(default)]
pub(crate) struct Config {
    vocab_size: usize,
    n_positions: usize,
    n_embd: usize,
    n_layer: usize,
    n_head: usize,
    n_inner: Option<usize>,
    activation_function: String,
    resid_pdrop: f64,
    embd_pdrop: f64,
    attn_pdrop: f64,
    layer_norm_epsilon: f64,
    initializer_range: f64,
    tie_word_embeddings: bool,
    scale_attn_weights: bool,
    scale_attn_by_inverse_layer_idx: bool,
    add_cross_attention: bool,
}

impl Default for Config {
    /// What `transformers` fills in for a field that is left out.
    fn default() -> Config {
        Config {
            vocab_size: 50257,
            n_positions: 1024,
            n_embd: 768,
            n_layer: 12,
            n_head: 12,
            n_inner: None,
            activation_function: "gelu_new".into(),
            resid_pdrop: 0.1,
            embd_pdrop: 0.1,
            attn_pdrop: 0.1,
            layer_norm_epsilon: 1e-5,
            initializer_range: 0.02,
            tie_word_embeddings: true,
            scale_attn_weights: true,
            scale_attn_by_inverse_layer_idx: false,
            add_cross_attention: false,
        }
    }
}

impl Config {
    /// The model that it describes, and its vocabulary; or the field that is not implemented, and its value.
    pub(crate) fn resolve(self) -> Result<(ModelConfig, usize), Refused> {
        let activation = match self.activation_function.as_str() {
            "gelu" => Activation::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" => Activation::GeluNew,
            other => return Err(("activation_function", other.into())),
        };
        let unknown = [
            ("scale_attn_weights", !self.scale_attn_weights),
            ("scale_attn_by_inverse_layer_idx", self.scale_attn_by_inverse_layer_idx),
            ("add_cross_attention", self.add_cross_attention),
        ];
        if let Some((field, _)) = unknown.into_iter().find(|(_, is_set)| *is_set) {
            return Err((field, (field != "scale_attn_weights").to_string()));
        }
        let other = |rate: f64| (rate != self.resid_pdrop).then_some(rate);
        let model = ModelConfig {
            family: Family::Gpt2,
            context: self.n_positions,
            width: self.n_embd,
            layers: self.n_layer,
            heads: self.n_head,
            inner: self.n_inner,
            activation: Some(activation).filter(|&activation| activation != Activation::GeluNew),
            tied: self.tie_word_embeddings,
            share_every: 1,
            dropout: self.resid_pdrop,
            embedding_dropout: other(self.embd_pdrop),
            attention_dropout: other(self.attn_pdrop),
            norm_epsilon: self.layer_norm_epsilon,
            init_std: self.initializer_range,
            ..ModelConfig::default()
        };
        Ok((model, self.vocab_size))
    }
}

/// Whether a tensor is a mask of causal attention: old files hold it.
pub(crate) fn is_no_parameter(name: &str) -> bool {
    name.starts_with("h.") && (name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias"))
}

/// The `config.json` of a model; none if `transformers` knows no such activation.
pub(crate) fn config(architecture: &Architecture, end_of_text: u32, dtype: &str) -> Option<Value> {
    let activation = match architecture.activation {
        Activation::Gelu => "gelu",
        Activation::GeluNew => "gelu_new",
        _ => return None,
    };
    Some(json!({
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": architecture.vocabulary,
        "n_positions": architecture.context,
        "n_embd": architecture.width,
        "n_layer": architecture.layers,
        "n_head": architecture.heads,
        "n_inner": architecture.inner,
        "activation_function": activation,
        "resid_pdrop": architecture.residual_dropout,
        "embd_pdrop": architecture.embedding_dropout,
        "attn_pdrop": architecture.attention_dropout,
        "layer_norm_epsilon": architecture.norm_epsilon,
        "initializer_range": architecture.init_std,
        "tie_word_embeddings": architecture.tied,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": dtype,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_implemented_is_refused_by_name() {
        let refused = |text: &str| serde_json::from_str::<Config>(text).unwrap().resolve().err();
        assert_eq!(refused("{}"), None);
        assert_eq!(
            refused(r#"{"activation_function": "relu"}"#),
            Some(("activation_function", "relu".into()))
        );
        assert_eq!(refused(r#"{"scale_attn_weights": false}"#), Some(("scale_attn_weights", "false".into())));
        assert_eq!(
            refused(r#"{"scale_attn_by_inverse_layer_idx": true}"#),
            Some(("scale_attn_by_inverse_layer_idx", "true".into()))
        );
    }
}
