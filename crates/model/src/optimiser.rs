//! Optimisers and learning-rate schedules: the `[optimiser]` section, and the constants that a step's commit carries.
//!
//! Everything that needs more than + − × ÷ √ (a cosine, a power) is computed once, here, in f64, and travels
//! with the commit: replicas only apply numbers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use starling_corpus::Problem;

/// The `[optimiser]` section of a run file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct OptimiserConfig {
    /// Which rule updates the weights.
    pub kind: Kind,
    /// Peak learning rate.
    pub lr: f64,
    /// Learning rate at the end of the decay, as a fraction of `lr`.
    pub final_fraction: f64,
    /// Steps over which the learning rate rises linearly from 0.
    pub warmup_steps: u64,
    /// How the learning rate falls after the warm-up.
    pub decay: Decay,
    /// Step at which the decay ends; by default the run's last step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_steps: Option<u64>,
    /// AdamW and LAMB: averaging of the gradient. SGD: momentum.
    pub beta1: f64,
    /// AdamW and LAMB: averaging of the squared gradient.
    pub beta2: f64,
    /// AdamW and LAMB: added to the denominator.
    pub epsilon: f64,
    /// Weight decay of matrices (biases and norms are left alone); decoupled in AdamW and LAMB.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm; 0 turns clipping off.
    pub clip: f64,
}

impl Default for OptimiserConfig {
    fn default() -> Self {
        OptimiserConfig {
            kind: Kind::Adamw,
            lr: 3e-3,
            final_fraction: 0.1,
            warmup_steps: 20,
            decay: Decay::Cosine,
            decay_steps: None,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
            clip: 1.0,
        }
    }
}

/// The optimisers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// Adam with decoupled weight decay.
    Adamw,
    /// Stochastic gradient descent with momentum `beta1`.
    Sgd,
    /// Layer-wise adaptive moments, for large batches.
    Lamb,
}

/// How the learning rate falls after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Decay {
    /// Not at all.
    Constant,
    /// On a straight line.
    Linear,
    /// On half a cosine wave.
    Cosine,
}

impl OptimiserConfig {
    /// What is wrong with the section, each with a remedy.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        let mut check = |ok: bool, key: &str, message: String, remedy: &str| {
            if !ok {
                problems.push(Problem::new(format!("optimiser.{key}"), message, remedy));
            }
        };
        // What is positive here must be so in single precision too: Adam divides by it.
        let positive = |x: f64| x.is_finite() && x as f32 > 0.0 && (x as f32).is_finite();
        let not_negative = |x: f64| x.is_finite() && x >= 0.0;
        let fraction = |x: f64| (0.0..1.0).contains(&x);
        let Self { lr, final_fraction, beta1, beta2, epsilon, weight_decay, clip, .. } = *self;
        check(
            positive(lr),
            "lr",
            format!("the learning rate is {lr}"),
            "use a positive number, for example 1e-3",
        );
        let ends = (0.0..=1.0).contains(&final_fraction);
        let message = format!("{final_fraction} is not between 0 and 1");
        check(ends, "final_fraction", message, "use 0.1 to end at a tenth of the peak");
        check(fraction(beta1), "beta1", format!("{beta1} is not in [0, 1)"), "use 0.9");
        check(fraction(beta2), "beta2", format!("{beta2} is not in [0, 1)"), "use 0.95 or 0.999");
        check(positive(epsilon), "epsilon", format!("{epsilon} is not a small positive number"), "use 1e-8");
        let message = format!("{weight_decay} is not a decay");
        check(not_negative(weight_decay), "weight_decay", message, "use 0.1, or 0 for none");
        check(
            not_negative(clip),
            "clip",
            format!("{clip} is not a norm"),
            "use 1.0, or 0 to turn clipping off",
        );
        problems
    }

    /// The rule that replicas apply.
    pub fn rule(&self) -> Rule {
        let OptimiserConfig { beta1, beta2, epsilon, weight_decay, .. } = *self;
        match self.kind {
            Kind::Adamw => Rule::AdamW { beta1, beta2, epsilon, weight_decay },
            Kind::Sgd => Rule::Sgd { momentum: beta1, weight_decay },
            Kind::Lamb => Rule::Lamb { beta1, beta2, epsilon, weight_decay },
        }
    }

    /// The learning rate of a step (counted from 0) in a run of `steps`.
    pub fn lr_at(&self, step: u64, steps: u64) -> f64 {
        if step < self.warmup_steps {
            return self.lr * (step + 1) as f64 / self.warmup_steps as f64;
        }
        let end = self.decay_steps.unwrap_or(steps);
        let length = end.saturating_sub(self.warmup_steps).max(1);
        let progress = ((step - self.warmup_steps) as f64 / length as f64).min(1.0);
        let height = match self.decay {
            Decay::Constant => return self.lr,
            Decay::Linear => 1.0 - progress,
            Decay::Cosine => 0.5 * (1.0 + libm::cos(std::f64::consts::PI * progress)),
        };
        self.lr * (self.final_fraction + (1.0 - self.final_fraction) * height)
    }

    /// The constants of the update that closes step `step` of `steps`: `applied` updates were applied before it (a
    /// skipped one leaves the moments alone), `norm` is the global norm of the *mean* gradient.
    pub fn update(&self, step: u64, steps: u64, applied: u64, tokens: u64, norm: f64) -> Update {
        let clip = if self.clip > 0.0 && norm > self.clip { self.clip / norm } else { 1.0 };
        Update {
            lr: self.lr_at(step, steps),
            gradient_scale: clip / tokens as f64,
            bias1: 1.0 - power(self.beta1, applied + 1),
            bias2: 1.0 - power(self.beta2, applied + 1),
        }
    }
}

/// `base` to the `exponent`, by squaring: the same bits on every platform.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}

/// A rule with its constants.
#[derive(Clone, Copy, Debug, PartialEq)]
#[allow(missing_docs, reason = "the fields are those of `OptimiserConfig`")]
pub enum Rule {
    /// Adam with decoupled weight decay.
    AdamW { beta1: f64, beta2: f64, epsilon: f64, weight_decay: f64 },
    /// Momentum; the decay enters the gradient.
    Sgd { momentum: f64, weight_decay: f64 },
    /// AdamW's direction, scaled to each parameter's own size.
    Lamb { beta1: f64, beta2: f64, epsilon: f64, weight_decay: f64 },
    /// The weights stay as they are: a model that is only asked.
    Fixed,
}

impl Rule {
    /// How many moments, each as large as the weights, it keeps.
    pub fn moments(&self) -> usize {
        match self {
            Rule::AdamW { .. } | Rule::Lamb { .. } => 2,
            Rule::Sgd { .. } => 1,
            Rule::Fixed => 0,
        }
    }
}

/// The constants of one update, the same for every stage and replica.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Update {
    /// Learning rate.
    pub lr: f64,
    /// What summed gradients are multiplied with: clip factor ÷ tokens of the step.
    pub gradient_scale: f64,
    /// Bias correction of the first moment, 1 − β₁ᵗ.
    pub bias1: f64,
    /// Bias correction of the second moment, 1 − β₂ᵗ.
    pub bias2: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_learning_rate_rises_then_falls_to_its_final_fraction() {
        let config = OptimiserConfig { lr: 1.0, warmup_steps: 10, ..Default::default() };
        assert_eq!(config.lr_at(0, 110), 0.1);
        assert_eq!(config.lr_at(9, 110), 1.0);
        assert_eq!(config.lr_at(10, 110), 1.0);
        assert!((config.lr_at(60, 110) - 0.55).abs() < 1e-12);
        assert!((config.lr_at(110, 110) - 0.1).abs() < 1e-12);
        assert_eq!(config.lr_at(500, 110), config.lr_at(110, 110));
        let linear = OptimiserConfig { decay: Decay::Linear, ..config };
        assert!((linear.lr_at(35, 110) - (0.1 + 0.9 * 0.75)).abs() < 1e-12);
    }

    #[test]
    fn clipping_scales_only_what_is_too_long() {
        let config = OptimiserConfig { clip: 2.0, ..Default::default() };
        assert_eq!(config.update(0, 10, 0, 4, 1.0).gradient_scale, 0.25);
        assert_eq!(config.update(0, 10, 0, 4, 8.0).gradient_scale, 0.0625);
        let free = OptimiserConfig { clip: 0.0, ..config };
        assert_eq!(free.update(0, 10, 0, 4, 8.0).gradient_scale, 0.25);
    }

    #[test]
    fn a_skipped_update_does_not_move_the_bias_correction() {
        let config = OptimiserConfig::default();
        let (first, after_skips) = (config.update(0, 10, 0, 1, 1.0), config.update(5, 10, 0, 1, 1.0));
        assert_eq!((first.bias1, first.bias2), (after_skips.bias1, after_skips.bias2));
    }

    #[test]
    fn infinity_is_no_setting() {
        let config = OptimiserConfig {
            clip: f64::INFINITY,
            weight_decay: f64::NAN,
            epsilon: 1e-46,
            ..Default::default()
        };
        let keys: Vec<String> = config.problems().into_iter().map(|p| p.key).collect();
        assert_eq!(keys, ["optimiser.epsilon", "optimiser.weight_decay", "optimiser.clip"]);
    }

    #[test]
    fn a_section_out_of_range_is_told_with_its_key() {
        let config = OptimiserConfig { lr: -1.0, beta2: 1.0, ..Default::default() };
        let keys: Vec<String> = config.problems().into_iter().map(|p| p.key).collect();
        assert_eq!(keys, ["optimiser.lr", "optimiser.beta2"]);
    }
}
