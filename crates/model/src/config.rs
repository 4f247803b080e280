//! The `[model]` section of a run file, and the architecture it resolves to.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use starling_corpus::Problem;

use crate::engine::Activation;

/// Positions of a sample are numbered in 20 bits where dropout names its random numbers.
const MOST_CONTEXT: usize = 1 << 20;
/// And heads in ten.
const MOST_HEADS: usize = 1 << 10;
/// Parameters of one model: what still fits every size computation with room to spare.
const MOST_PARAMETERS: u128 = 1 << 46;

/// The `[model]` section of a run file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// Which architecture.
    pub family: Family,
    /// Positions that the model sees at once.
    pub context: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Number of transformer blocks.
    pub layers: usize,
    /// Attention heads; must divide `width`.
    pub heads: usize,
    /// Inner width of the feed-forward part; by default 4 × `width`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inner: Option<usize>,
    /// Activation of the feed-forward part.
    pub activation: Activation,
    /// Whether the output layer uses the table of embeddings.
    pub tied: bool,
    /// So many consecutive blocks share one set of weights (ALBERT's way); 1 shares nothing.
    pub share_every: usize,
    /// Dropout after every sub-layer; also of embeddings and attention where these say nothing else.
    pub dropout: f64,
    /// Dropout of the embeddings.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_dropout: Option<f64>,
    /// Dropout of the attention weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_dropout: Option<f64>,
    /// Added to the variance in normalisations.
    pub norm_epsilon: f64,
    /// Standard deviation of initial weights.
    pub init_std: f64,
}

impl Default for ModelConfig {
    fn default() -> Self {
        ModelConfig {
            family: Family::Gpt2,
            context: 128,
            width: 128,
            layers: 4,
            heads: 4,
            inner: None,
            activation: Activation::GeluNew,
            tied: true,
            share_every: 1,
            dropout: 0.0,
            embedding_dropout: None,
            attention_dropout: None,
            norm_epsilon: 1e-5,
            init_std: 0.02,
        }
    }
}

/// The model families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Family {
    /// GPT-2: learned positions, LayerNorm before each sub-layer, GELU, biases.
    Gpt2,
}

impl ModelConfig {
    /// What is wrong with the section, each with a remedy.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut say = |key: &str, message: String, remedy: String| {
            problems.push(Problem::new(format!("model.{key}"), message, remedy));
        };
        let sizes = [
            ("context", self.context),
            ("width", self.width),
            ("layers", self.layers),
            ("heads", self.heads),
        ];
        for (key, value) in sizes {
            if value == 0 {
                say(key, format!("{key} is 0"), "use at least 1".into());
            }
        }
        if self.context > MOST_CONTEXT {
            say(
                "context",
                format!("{} positions are too many", self.context),
                format!("use at most {MOST_CONTEXT}"),
            );
        }
        if self.inner == Some(0) {
            say("inner", "the inner width is 0".into(), "leave it out for 4 × width".into());
        }
        if self.heads > 0 && !self.width.is_multiple_of(self.heads) {
            let near = (0..self.heads.min(MOST_HEADS)).map(|less| self.heads - less);
            let near = near.chain(1..2).find(|&h| self.width.is_multiple_of(h)).unwrap_or(1);
            let width = self.width.checked_next_multiple_of(self.heads).unwrap_or(self.heads);
            say(
                "heads",
                format!("{} heads do not divide the width {}", self.heads, self.width),
                format!("use {near} heads, or a width of {width}"),
            );
        }
        if self.heads > MOST_HEADS {
            say("heads", format!("{} heads are too many", self.heads), format!("use at most {MOST_HEADS}"));
        }
        if self.layers > 16_000 {
            say("layers", format!("{} layers are too many", self.layers), "use at most 16000".into());
        }
        if self.share_every == 0 {
            say("share_every", "layers cannot be shared every 0".into(), "use 1 to share nothing".into());
        }
        let rates = [
            ("dropout", Some(self.dropout)),
            ("embedding_dropout", self.embedding_dropout),
            ("attention_dropout", self.attention_dropout),
        ];
        for (key, rate) in rates {
            if rate.is_some_and(|rate| !(0.0..1.0).contains(&rate)) {
                say(key, "a dropout rate lies in [0, 1)".into(), "use 0.1, or 0 for none".into());
            }
        }
        if !(self.norm_epsilon as f32 > 0.0 && self.norm_epsilon.is_finite()) {
            say("norm_epsilon", "it must be positive".into(), "use 1e-5".into());
        }
        if !(self.init_std >= 0.0 && self.init_std.is_finite()) {
            say("init_std", "it must not be negative".into(), "use 0.02".into());
        }
        // Saturating: with absurd sizes the answer is "too many" all the same.
        let (d, f) = (self.width as u128, self.inner.unwrap_or(self.width.saturating_mul(4)) as u128);
        let block = d.saturating_mul(4 * d).saturating_add(d.saturating_mul(2 * f));
        let tables = d.saturating_mul(self.context as u128);
        let size = block.saturating_mul(self.layers as u128).saturating_add(tables);
        if size > MOST_PARAMETERS {
            say("width", format!("the model would have {size} parameters"), "use a smaller width".into());
        }
        problems
    }

    /// The architecture for a vocabulary. The section must have no [`problems`](Self::problems).
    pub fn architecture(&self, vocabulary: usize) -> Architecture {
        Architecture {
            vocabulary,
            context: self.context,
            width: self.width,
            layers: self.layers,
            heads: self.heads,
            inner: self.inner.unwrap_or(4 * self.width),
            activation: self.activation,
            tied: self.tied,
            share_every: self.share_every,
            embedding_dropout: self.embedding_dropout.unwrap_or(self.dropout),
            attention_dropout: self.attention_dropout.unwrap_or(self.dropout),
            residual_dropout: self.dropout,
            norm_epsilon: self.norm_epsilon,
            init_std: self.init_std,
        }
    }
}

impl Architecture {
    /// Elements of all parameters, each counted once.
    pub fn elements(&self) -> u128 {
        let mut sizes = std::collections::BTreeMap::new();
        for parameter in self.units().into_iter().flat_map(|unit| self.parameters(unit)) {
            let size = parameter.shape.iter().fold(1u128, |size, &n| size.saturating_mul(n as u128));
            sizes.insert(parameter.name, size);
        }
        sizes.values().fold(0, |sum, &size| sum.saturating_add(size))
    }
}

/// Everything that determines a model's mathematics, resolved. The fields are those of [`ModelConfig`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs, reason = "the fields are those of `ModelConfig`")]
pub struct Architecture {
    pub vocabulary: usize,
    pub context: usize,
    pub width: usize,
    pub layers: usize,
    pub heads: usize,
    pub inner: usize,
    pub activation: Activation,
    pub tied: bool,
    pub share_every: usize,
    pub embedding_dropout: f64,
    pub attention_dropout: f64,
    pub residual_dropout: f64,
    pub norm_epsilon: f64,
    pub init_std: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_that_do_not_divide_the_width_come_with_a_remedy() {
        let config = ModelConfig { width: 64, heads: 5, ..Default::default() };
        let [problem] = &config.problems()[..] else { panic!("one problem expected") };
        assert_eq!(problem.key, "model.heads");
        assert_eq!(problem.remedy, "use 4 heads, or a width of 65");
    }

    #[test]
    fn absurd_sizes_are_refused_without_overflow() {
        let config = ModelConfig { width: usize::MAX, layers: usize::MAX, ..Default::default() };
        assert!(!config.problems().is_empty());
    }
}
