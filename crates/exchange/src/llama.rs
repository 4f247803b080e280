//! The family `llama`: what its `config.json` says, and which tensor of its files is which parameter.
//!
//! Parameters have the names that the files have, without `model.`; its linear layers store outputs × inputs, as we do.

use serde::Deserialize;
use serde_json::{Value, json};
use starling_model::config::{Architecture, Family, ModelConfig, Rope, RopeScaling};

use crate::family::Refused;

/// What of a `config.json` matters to us; the rest is about training, sampling or other frameworks.
#[derive(Deserialize)]
#[serde(default)]
pub(crate) struct Config {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: String,
    max_position_embeddings: usize,
    initializer_range: f64,
    rms_norm_eps: f64,
    tie_word_embeddings: bool,
    attention_bias: bool,
    mlp_bias: bool,
    attention_dropout: f64,
    /// As `transformers` wrote it before its version 5; then `rope_parameters` has both.
    rope_theta: Option<f64>,
    rope_scaling: Option<Rotary>,
    rope_parameters: Option<Rotary>,
    partial_rotary_factor: Option<f64>,
}

impl Default for Config {
    /// What `transformers` fills in for a field that is left out.
    fn default() -> Config {
        Config {
            vocab_size: 32000,
            hidden_size: 4096,
            intermediate_size: 11008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: None,
            head_dim: None,
            hidden_act: "silu".into(),
            max_position_embeddings: 2048,
            initializer_range: 0.02,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            rope_theta: None,
            rope_scaling: None,
            rope_parameters: None,
            partial_rotary_factor: None,
        }
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Rotary {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    /// What the type was called at first.
    r#type: Option<String>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<usize>,
    partial_rotary_factor: Option<f64>,
}

impl Rotary {
    fn scaling(&self, context: usize) -> Result<Option<RopeScaling>, Refused> {
        let missing = |field: &'static str| (field, "nothing".to_string());
        let factor = || self.factor.ok_or_else(|| missing("rope_scaling.factor"));
        match self.rope_type.as_deref().or(self.r#type.as_deref()).unwrap_or("default") {
            "default" => Ok(None),
            "linear" => Ok(Some(RopeScaling::Linear { factor: factor()? })),
            "llama3" => Ok(Some(RopeScaling::Llama3 {
                factor: factor()?,
                low: self.low_freq_factor.ok_or_else(|| missing("rope_scaling.low_freq_factor"))?,
                high: self.high_freq_factor.ok_or_else(|| missing("rope_scaling.high_freq_factor"))?,
                context: self.original_max_position_embeddings.unwrap_or(context),
            })),
            other => Err(("rope_scaling.rope_type", other.into())),
        }
    }
}

impl Config {
    /// The model that it describes, and its vocabulary; or the field that is not implemented, and its value.
    pub(crate) fn resolve(self) -> Result<(ModelConfig, usize), Refused> {
        if self.hidden_act != "silu" && self.hidden_act != "swish" {
            return Err(("hidden_act", self.hidden_act));
        }
        let rotary = self.rope_parameters.or(self.rope_scaling).unwrap_or_default();
        let partial = self.partial_rotary_factor.or(rotary.partial_rotary_factor);
        if let Some(partial) = partial.filter(|&partial| partial != 1.0) {
            return Err(("partial_rotary_factor", partial.to_string()));
        }
        let rope = Rope {
            theta: rotary.rope_theta.or(self.rope_theta).unwrap_or(Rope::default().theta),
            scaling: rotary.scaling(self.max_position_embeddings)?,
        };
        let heads = self.num_attention_heads;
        let model = ModelConfig {
            family: Family::Llama,
            context: self.max_position_embeddings,
            width: self.hidden_size,
            layers: self.num_hidden_layers,
            heads,
            key_heads: self.num_key_value_heads.filter(|&key_heads| key_heads != heads),
            head_width: self.head_dim.filter(|&w| w.checked_mul(heads) != Some(self.hidden_size)),
            inner: Some(self.intermediate_size),
            rope: Some(rope),
            attention_bias: self.attention_bias,
            mlp_bias: self.mlp_bias,
            tied: self.tie_word_embeddings,
            attention_dropout: Some(self.attention_dropout).filter(|&rate| rate != 0.0),
            norm_epsilon: self.rms_norm_eps,
            init_std: self.initializer_range,
            ..ModelConfig::default()
        };
        Ok((model, self.vocab_size))
    }
}

/// Whether a tensor is a table that `transformers` makes by itself: old files hold it.
pub(crate) fn is_no_parameter(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
}

/// The `config.json` of a model, for `transformers` before its version 5 and since.
pub(crate) fn config(architecture: &Architecture, end_of_text: u32, dtype: &str) -> Value {
    let rope = architecture.rope;
    let mut scaling = match rope.scaling {
        None => json!({ "rope_type": "default" }),
        Some(RopeScaling::Linear { factor }) => json!({ "rope_type": "linear", "factor": factor }),
        Some(RopeScaling::Llama3 { factor, low, high, context }) => json!({
            "rope_type": "llama3", "factor": factor, "low_freq_factor": low, "high_freq_factor": high,
            "original_max_position_embeddings": context,
        }),
    };
    let before_5 = if rope.scaling.is_some() { scaling.clone() } else { Value::Null };
    scaling["rope_theta"] = json!(rope.theta);
    json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": architecture.vocabulary,
        "hidden_size": architecture.width,
        "intermediate_size": architecture.inner,
        "num_hidden_layers": architecture.layers,
        "num_attention_heads": architecture.heads,
        "num_key_value_heads": architecture.key_heads,
        "head_dim": architecture.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": architecture.context,
        "initializer_range": architecture.init_std,
        "rms_norm_eps": architecture.norm_epsilon,
        "tie_word_embeddings": architecture.tied,
        "attention_bias": architecture.attention_bias,
        "mlp_bias": architecture.mlp_bias,
        "attention_dropout": architecture.attention_dropout,
        "rope_theta": rope.theta,
        "rope_scaling": before_5,
        "rope_parameters": scaling,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "torch_dtype": dtype,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolved(text: &str) -> Result<ModelConfig, Refused> {
        serde_json::from_str::<Config>(text).unwrap().resolve().map(|(model, _)| model)
    }

    #[test]
    fn what_is_not_implemented_is_refused_by_name() {
        assert!(resolved("{}").is_ok());
        for (text, field, value) in [
            (r#"{"hidden_act": "gelu"}"#, "hidden_act", "gelu"),
            (r#"{"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}"#, "rope_scaling.rope_type", "yarn"),
            (r#"{"rope_scaling": {"type": "dynamic", "factor": 4.0}}"#, "rope_scaling.rope_type", "dynamic"),
            (r#"{"rope_scaling": {"type": "linear"}}"#, "rope_scaling.factor", "nothing"),
            (r#"{"partial_rotary_factor": 0.5}"#, "partial_rotary_factor", "0.5"),
        ] {
            assert_eq!(resolved(text).err(), Some((field, value.to_string())), "{text}");
        }
    }

    #[test]
    fn positions_of_old_and_new_files_are_the_same() {
        let scaling = r#""factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3""#;
        let old = format!(r#"{{"rope_theta": 500000.0, "rope_scaling": {{{scaling}}}}}"#);
        let new = format!(r#"{{"rope_parameters": {{"rope_theta": 500000.0, {scaling}}}}}"#);
        let model = resolved(&old).unwrap();
        assert_eq!(model, resolved(&new).unwrap());
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 8192 };
        assert_eq!(model.rope, Some(Rope { theta: 500_000.0, scaling: Some(scaling) }));
    }

    #[test]
    fn a_config_that_is_written_is_read_as_the_same_model() {
        let text = r#"{"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8,
            "intermediate_size": 50, "rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0},
            "attention_bias": true, "vocab_size": 311}"#;
        let model = resolved(text).unwrap();
        let written = config(&model.architecture(311), 0, "float32").to_string();
        assert_eq!(resolved(&written).unwrap(), model);
    }
}
