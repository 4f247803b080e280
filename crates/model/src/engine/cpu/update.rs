//! Optimiser updates: + − × ÷ √ only, each rounded by itself, so that every path gives the bits of the naive engine.

use rayon::prelude::*;

use super::isa::{Isa, Kernel};
use super::lanes::{LANES, Lanes};
use crate::optimiser::{Rule, Update};

/// Elements that one task takes.
const TASK: usize = 64 * 1024;

/// Updates one parameter in place. `first` and `second` are the moments the rule keeps (`second` may be empty).
pub fn update(
    isa: Isa,
    rule: &Rule,
    update: &Update,
    decay: bool,
    weights: &mut [f32],
    first: &mut [f32],
    second: &mut [f32],
    gradient: &[f32],
) {
    let scale = update.gradient_scale as f32;
    match *rule {
        Rule::Fixed => {}
        Rule::AdamW { beta1, beta2, epsilon, weight_decay } => {
            let adam = Adam::new(beta1, beta2, epsilon, update);
            let shrink = (1.0 - update.lr * if decay { weight_decay } else { 0.0 }) as f32;
            let step = (update.lr / update.bias1) as f32;
            weights
                .par_chunks_mut(TASK)
                .zip(first.par_chunks_mut(TASK).zip(second.par_chunks_mut(TASK)))
                .zip(gradient.par_chunks(TASK))
                .for_each(|((weights, (first, second)), gradient)| {
                    isa.run(AdamW { adam, scale, shrink, step, weights, first, second, gradient });
                });
        }
        Rule::Sgd { momentum, weight_decay } => {
            let (momentum, lr) = (momentum as f32, update.lr as f32);
            let pull = if decay { weight_decay as f32 } else { 0.0 };
            weights
                .par_chunks_mut(TASK)
                .zip(first.par_chunks_mut(TASK))
                .zip(gradient.par_chunks(TASK))
                .for_each(|((weights, first), gradient)| {
                    for i in 0..weights.len() {
                        first[i] = momentum * first[i] + (gradient[i] * scale + pull * weights[i]);
                        weights[i] -= lr * first[i];
                    }
                });
        }
        Rule::Lamb { beta1, beta2, epsilon, weight_decay } => {
            let adam = Adam::new(beta1, beta2, epsilon, update);
            let pull = if decay { weight_decay as f32 } else { 0.0 };
            let correct = (1.0 / update.bias1) as f32;
            let direction = |weight: f32, first: f32, second: f32| {
                first * correct / adam.denominator(second) + pull * weight
            };
            // The direction is made twice rather than kept: it is as large as the parameter.
            let (mut size, mut length) = (0.0, 0.0);
            for i in 0..weights.len() {
                adam.moments(&mut first[i], &mut second[i], gradient[i] * scale);
                let direction = f64::from(direction(weights[i], first[i], second[i]));
                size += f64::from(weights[i]) * f64::from(weights[i]);
                length += direction * direction;
            }
            let (size, length) = (size.sqrt(), length.sqrt());
            let trust = if decay && size > 0.0 && length > 0.0 { size / length } else { 1.0 };
            let step = (update.lr * trust) as f32;
            for i in 0..weights.len() {
                weights[i] -= step * direction(weights[i], first[i], second[i]);
            }
        }
    }
}

/// Σ x² in f64: sixteen sums, element `i` in sum `i mod 16`, added up by halves; pieces of [`TASK`] one after another.
pub fn sum_of_squares(values: &[f32]) -> f64 {
    let mut total = 0.0;
    for piece in values.chunks(TASK) {
        let mut sums = [0.0f64; LANES];
        let (whole, rest) = piece.as_chunks::<LANES>();
        for sixteen in whole {
            for i in 0..LANES {
                sums[i] += f64::from(sixteen[i]) * f64::from(sixteen[i]);
            }
        }
        rest.iter().enumerate().for_each(|(i, &x)| sums[i] += f64::from(x) * f64::from(x));
        for half in [8, 4, 2, 1] {
            for i in 0..half {
                sums[i] += sums[i + half];
            }
        }
        total += sums[0];
    }
    total
}

/// What AdamW and LAMB share.
#[derive(Clone, Copy)]
struct Adam {
    beta1: f32,
    rest1: f32,
    beta2: f32,
    rest2: f32,
    root_bias2: f32,
    epsilon: f32,
}

impl Adam {
    fn new(beta1: f64, beta2: f64, epsilon: f64, update: &Update) -> Adam {
        Adam {
            beta1: beta1 as f32,
            rest1: (1.0 - beta1) as f32,
            beta2: beta2 as f32,
            rest2: (1.0 - beta2) as f32,
            root_bias2: update.bias2.sqrt() as f32,
            epsilon: epsilon as f32,
        }
    }

    fn moments(&self, first: &mut f32, second: &mut f32, gradient: f32) {
        *first = self.beta1 * *first + self.rest1 * gradient;
        *second = self.beta2 * *second + self.rest2 * (gradient * gradient);
    }

    fn denominator(&self, second: f32) -> f32 {
        second.sqrt() / self.root_bias2 + self.epsilon
    }
}

struct AdamW<'a> {
    adam: Adam,
    scale: f32,
    shrink: f32,
    step: f32,
    weights: &'a mut [f32],
    first: &'a mut [f32],
    second: &'a mut [f32],
    gradient: &'a [f32],
}

impl Kernel for AdamW<'_> {
    type Output = ();

    #[inline(always)]
    fn run<V: Lanes>(self) {
        let Adam { beta1, rest1, beta2, rest2, root_bias2, epsilon } = self.adam;
        let [beta1, rest1, beta2, rest2, root_bias2, epsilon, scale, shrink, step] =
            [beta1, rest1, beta2, rest2, root_bias2, epsilon, self.scale, self.shrink, self.step]
                .map(V::splat);
        let moments = self.first.chunks_mut(LANES).zip(self.second.chunks_mut(LANES));
        let all = self.weights.chunks_mut(LANES).zip(moments).zip(self.gradient.chunks(LANES));
        for ((weights, (first, second)), gradient) in all {
            let g = V::load_some(gradient, 0.0).mul(scale);
            let m = beta1.mul(V::load_some(first, 0.0)).add(rest1.mul(g));
            let v = beta2.mul(V::load_some(second, 0.0)).add(rest2.mul(g.mul(g)));
            let w = V::load_some(weights, 0.0)
                .mul(shrink)
                .sub(step.mul(m.div(v.sqrt().div(root_bias2).add(epsilon))));
            m.store_some(first);
            v.store_some(second);
            w.store_some(weights);
        }
    }
}
