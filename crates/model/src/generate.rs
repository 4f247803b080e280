//! Text from a model, one token after another.

use crate::batch;
use crate::pipeline::infer;
use crate::random;
use crate::stage::{Output, Stage, StageError, Want};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// 0 always takes the likeliest; 1 draws from the model's own distribution.
    pub temperature: f64,
    /// Only so many of the likeliest are drawn from; 0 means all.
    pub top_k: usize,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for Choice {
    fn default() -> Self {
        Choice { temperature: 0.8, top_k: 0, seed: 0 }
    }
}

/// Continues `tokens` by up to `count` tokens, or to `stop`; `see` is shown each new token.
///
/// Every token is computed from the whole window again: plain, and slow for long ones.
pub fn generate(
    stages: &[Box<dyn Stage>],
    context: usize,
    mut tokens: Vec<u32>,
    count: usize,
    choice: Choice,
    stop: Option<u32>,
    mut see: impl FnMut(u32),
) -> Result<Vec<u32>, StageError> {
    for draw in 0..count {
        let window = &tokens[tokens.len().saturating_sub(context)..];
        let (input, meta) = batch::prompt(window);
        let Output::Logits(logits) = infer(stages, input, &meta, Want::NextToken)? else { break };
        let next = choose(&logits, choice, draw as u64);
        if Some(next) == stop {
            break;
        }
        tokens.push(next);
        see(next);
    }
    Ok(tokens)
}

fn choose(logits: &[f32], choice: Choice, draw: u64) -> u32 {
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
    if choice.top_k > 0 {
        order.truncate(choice.top_k);
    }
    if choice.temperature <= 0.0 {
        return order[0] as u32;
    }
    let best = f64::from(logits[order[0]]);
    let weight = |&word: &usize| libm::exp((f64::from(logits[word]) - best) / choice.temperature);
    let weights: Vec<f64> = order.iter().map(weight).collect();
    let mut left = random::uniform(choice.seed, draw) * weights.iter().sum::<f64>();
    for (&word, weight) in order.iter().zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return word as u32;
        }
    }
    order[0] as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cold_takes_the_likeliest_and_warm_draws_in_proportion() {
        let logits = [0.0, 2f32.ln(), f32::NEG_INFINITY];
        let cold = Choice { temperature: 0.0, ..Default::default() };
        assert_eq!(choose(&logits, cold, 0), 1);
        let warm = Choice { temperature: 1.0, ..Default::default() };
        let ones = (0..30_000).filter(|&draw| choose(&logits, warm, draw) == 1).count();
        assert!((19_500..20_500).contains(&ones), "{ones}");
        let best = Choice { top_k: 1, ..warm };
        assert!((0..100).all(|draw| choose(&logits, best, draw) == 1));
    }
}
