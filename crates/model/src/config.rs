//! The `[model]` section of a run file, and the architecture it resolves to.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use starling_corpus::Problem;

use crate::engine::{Activation, Attention};

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
    /// Attention heads.
    pub heads: usize,
    /// Heads that keys and values have; must divide `heads`. By default, and for `gpt2`, as many as `heads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key_heads: Option<usize>,
    /// Width of a head; by default, and for `gpt2`, `width` ÷ `heads`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_width: Option<usize>,
    /// Inner width of the feed-forward part; by default 4 × `width`, for `llama` 8/3 × `width` in multiples of 32.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inner: Option<usize>,
    /// Activation of the feed-forward part; by default the family's own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation: Option<Activation>,
    /// How positions turn queries and keys; for `llama`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope: Option<Rope>,
    /// Whether attention's products add a bias; for `llama` (in `gpt2` all do).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub attention_bias: bool,
    /// Whether the feed-forward part's products add a bias; for `llama`.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub mlp_bias: bool,
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
            key_heads: None,
            head_width: None,
            inner: None,
            activation: None,
            rope: None,
            attention_bias: false,
            mlp_bias: false,
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
    /// Llama: rotary positions, RMSNorm before each sub-layer, SwiGLU, keys and values of fewer heads.
    Llama,
}

/// Rotary positions: pair i of a head's elements turns by position × θ^(−2i/w).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct Rope {
    /// θ: the larger, the slower the slowest pairs turn.
    pub theta: f64,
    /// How a model that was trained on short texts reads longer ones.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scaling: Option<RopeScaling>,
}

impl Default for Rope {
    fn default() -> Self {
        Rope { theta: 10_000.0, scaling: None }
    }
}

/// Ways to make rotary positions slower.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// All pairs alike.
    Linear {
        /// So many times slower.
        factor: f64,
    },
    /// Llama 3's: pairs that turn less than `low` times in `context` positions, with a passage to those that turn more
    /// than `high` times, which stay as they are.
    Llama3 {
        /// So many times slower.
        factor: f64,
        /// Turns below which a pair is slowed down wholly.
        low: f64,
        /// Turns above which it is not.
        high: f64,
        /// Positions that the model was first trained with.
        context: usize,
    },
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
        let optional =
            [("inner", self.inner), ("key_heads", self.key_heads), ("head_width", self.head_width)];
        for (key, value) in optional {
            if value == Some(0) {
                say(key, format!("{key} is 0"), "leave it out".into());
            }
        }
        if self.head_width.is_none() && self.heads > 0 && !self.width.is_multiple_of(self.heads) {
            let near = (0..self.heads.min(MOST_HEADS)).map(|less| self.heads - less);
            let near = near.chain(1..2).find(|&h| self.width.is_multiple_of(h)).unwrap_or(1);
            let width = self.width.checked_next_multiple_of(self.heads).unwrap_or(self.heads);
            say(
                "heads",
                format!("{} heads do not divide the width {}", self.heads, self.width),
                format!("use {near} heads, or a width of {width}"),
            );
        }
        let key_heads = self.key_heads.unwrap_or(self.heads);
        if key_heads > 0 && !self.heads.is_multiple_of(key_heads) {
            say(
                "key_heads",
                format!("{key_heads} heads of keys do not divide {} heads", self.heads),
                format!(
                    "use {}",
                    (1..=key_heads.min(self.heads).min(MOST_HEADS))
                        .rev()
                        .find(|&k| self.heads.is_multiple_of(k))
                        .unwrap_or(1)
                ),
            );
        }
        let of_llama = [
            ("key_heads", self.key_heads.is_some_and(|k| k != self.heads)),
            ("head_width", self.head_width.is_some_and(|w| w.checked_mul(self.heads) != Some(self.width))),
            ("rope", self.rope.is_some()),
            ("attention_bias", self.attention_bias),
            ("mlp_bias", self.mlp_bias),
            ("activation", self.activation == Some(Activation::SwiGlu)),
        ];
        match self.family {
            Family::Gpt2 => {
                for (key, _) in of_llama.into_iter().filter(|(_, is_said)| *is_said) {
                    let remedy = "leave it out, or use family = \"llama\"".into();
                    say(key, "the family gpt2 does not have this".into(), remedy);
                }
            }
            Family::Llama => {
                if self.activation.is_some_and(|activation| activation != Activation::SwiGlu) {
                    let message = "the family llama has swiglu".into();
                    say("activation", message, "leave it out, or use family = \"gpt2\"".into());
                }
                let width = self.head_width.unwrap_or(self.width / self.heads.max(1));
                if !width.is_multiple_of(2) {
                    let message = format!("rotary positions turn pairs, and a head has {width} elements");
                    say("head_width", message, format!("use {}", (width - 1).max(2)));
                }
                for (key, message, remedy) in self.rope.unwrap_or_default().problems() {
                    say(key, message.into(), remedy.into());
                }
            }
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
        let attended = self.head_width.map_or(d, |w| (w as u128).saturating_mul(self.heads as u128));
        let block = d.saturating_mul(attended.saturating_mul(4)).saturating_add(d.saturating_mul(3 * f));
        let tables = d.saturating_mul(self.context as u128);
        let size = block.saturating_mul(self.layers as u128).saturating_add(tables);
        if size > MOST_PARAMETERS {
            say("width", format!("the model would have {size} parameters"), "use a smaller width".into());
        }
        problems
    }

    /// The architecture for a vocabulary. The section must have no [`problems`](Self::problems).
    pub fn architecture(&self, vocabulary: usize) -> Architecture {
        let (inner, activation) = match self.family {
            Family::Gpt2 => (4 * self.width, Activation::GeluNew),
            Family::Llama => ((8 * self.width).div_ceil(3).next_multiple_of(32), Activation::SwiGlu),
        };
        Architecture {
            family: self.family,
            vocabulary,
            context: self.context,
            width: self.width,
            layers: self.layers,
            heads: self.heads,
            key_heads: self.key_heads.unwrap_or(self.heads),
            head_width: self.head_width.unwrap_or(self.width / self.heads),
            inner: self.inner.unwrap_or(inner),
            activation: self.activation.unwrap_or(activation),
            rope: self.rope.unwrap_or_default(),
            attention_bias: self.attention_bias,
            mlp_bias: self.mlp_bias,
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

impl Rope {
    /// What is wrong with it: the key, what, and a remedy.
    fn problems(&self) -> Vec<(&'static str, &'static str, &'static str)> {
        let is_size = |x: f64| x.is_finite() && x > 0.0;
        let mut problems = Vec::new();
        if !(is_size(self.theta) && self.theta > 1.0) {
            problems.push(("rope.theta", "it must be more than 1", "use 10000"));
        }
        match self.scaling {
            Some(RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. }) if !is_size(factor) => {
                problems.push(("rope.scaling.factor", "it must be more than 0", "use 8"));
            }
            Some(RopeScaling::Llama3 { low, high, context, .. })
                if !(is_size(low) && is_size(high) && low < high && context > 0) =>
            {
                let message = "low must be more than 0 and less than high, and context more than 0";
                problems.push(("rope.scaling", message, "use low = 1, high = 4, context = 8192"));
            }
            _ => {}
        }
        problems
    }

    /// What each pair of elements of a head turns by from one position to the next. In single precision, and computed
    /// as `transformers` does: angles are its angles to the last bit or two, at every position.
    pub fn speeds(&self, head_width: usize) -> Vec<f32> {
        let pair = |i: usize| {
            let speed = 1.0 / libm::pow(self.theta, (2 * i) as f64 / head_width as f64);
            match self.scaling {
                None => speed as f32,
                Some(RopeScaling::Linear { factor }) => (speed / factor) as f32,
                Some(RopeScaling::Llama3 { factor, low, high, context }) => {
                    let turns = context as f64 * speed / std::f64::consts::TAU;
                    let kept = ((turns - low) / (high - low)).clamp(0.0, 1.0);
                    ((1.0 - kept) * speed / factor + kept * speed) as f32
                }
            }
        };
        (0..head_width / 2).map(pair).collect()
    }
}

impl Architecture {
    /// Its attention, in these documents.
    pub fn attention<'a>(&self, documents: &'a [u32]) -> Attention<'a> {
        let Architecture { heads, key_heads, head_width, .. } = *self;
        Attention { heads, key_heads, head_width, documents }
    }

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
    pub family: Family,
    pub vocabulary: usize,
    pub context: usize,
    pub width: usize,
    pub layers: usize,
    pub heads: usize,
    pub key_heads: usize,
    pub head_width: usize,
    pub inner: usize,
    pub activation: Activation,
    pub rope: Rope,
    pub attention_bias: bool,
    pub mlp_bias: bool,
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
    fn what_belongs_to_the_other_family_is_refused_by_name() {
        let keys = |config: ModelConfig| config.problems().into_iter().map(|p| p.key).collect::<Vec<_>>();
        let gpt2 = ModelConfig { key_heads: Some(2), mlp_bias: true, ..Default::default() };
        assert_eq!(keys(gpt2), ["model.key_heads", "model.mlp_bias"]);
        let llama = ModelConfig { family: Family::Llama, ..Default::default() };
        assert_eq!(keys(llama.clone()), [""; 0]);
        assert_eq!(
            keys(ModelConfig { activation: Some(Activation::Gelu), key_heads: Some(3), ..llama.clone() }),
            ["model.key_heads", "model.activation"]
        );
        assert_eq!(keys(ModelConfig { head_width: Some(7), ..llama.clone() }), ["model.head_width"]);
        let rope = Rope { theta: f64::NAN, scaling: Some(RopeScaling::Linear { factor: 0.0 }) };
        assert_eq!(
            keys(ModelConfig { rope: Some(rope), ..llama }),
            ["model.rope.theta", "model.rope.scaling.factor"]
        );
    }

    #[test]
    fn llama_3_slows_the_slow_pairs_and_leaves_the_fast_ones() {
        let plain = Rope { theta: 500_000.0, scaling: None };
        let scaling = RopeScaling::Llama3 { factor: 8.0, low: 1.0, high: 4.0, context: 8192 };
        let (plain, scaled) = (plain.speeds(128), Rope { scaling: Some(scaling), ..plain }.speeds(128));
        assert_eq!(plain[..28], scaled[..28]);
        assert!(plain[36..].iter().zip(&scaled[36..]).all(|(a, b)| *a == 8.0 * b));
        assert!(plain.iter().zip(&scaled).all(|(a, b)| *a <= 8.0 * b && b <= a));
    }

    #[test]
    fn absurd_sizes_are_refused_without_overflow() {
        let config = ModelConfig { width: usize::MAX, layers: usize::MAX, ..Default::default() };
        assert!(!config.problems().is_empty());
    }
}
