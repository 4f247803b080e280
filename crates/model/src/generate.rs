//! Text from a model, one token after another.

use std::ops::ControlFlow;

use crate::batch;
use crate::pipeline::proceed;
use crate::random;
use crate::stage::{Memory, Stage, StageError};

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// 0 always takes the likeliest; 1 draws from the model's own distribution.
    pub temperature: f64,
    /// Only so many of the likeliest are drawn from; 0 means all.
    pub top_k: usize,
    /// Only the likeliest that together have this probability are drawn from; 1 means all.
    pub top_p: f64,
    /// Seed of the draws.
    pub seed: u64,
}

impl Default for Choice {
    fn default() -> Self {
        Choice { temperature: 0.8, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// Continues `tokens` by up to `count` tokens, or to one of `ends`; `see` is shown each new token, and may end it.
///
/// Stages remember the keys and values of what was written, so a token costs one token. When a text has become longer than the
/// model's context, they begin again with the last half of that.
pub fn generate(
    stages: &[Box<dyn Stage>],
    context: usize,
    mut tokens: Vec<u32>,
    count: usize,
    choice: Choice,
    ends: &[u32],
    mut see: impl FnMut(u32) -> ControlFlow<()>,
) -> Result<Vec<u32>, StageError> {
    let room = context.min(tokens.len().saturating_add(count));
    let remember_nothing = || stages.iter().map(|stage| stage.memory(room)).collect::<Vec<Memory>>();
    let mut memories = remember_nothing();
    let mut first = tokens.len().saturating_sub(context);
    let mut known = 0;
    for draw in 0..count {
        if tokens.len() - first > context {
            first = tokens.len() - context.div_ceil(2);
            (memories, known) = (remember_nothing(), 0);
        }
        let next = &tokens[first + known..];
        let (input, meta) = batch::text(next, known);
        known += next.len();
        let logits = proceed(stages, &mut memories, input, &meta)?;
        let token = choose(&logits, choice, draw as u64);
        if ends.contains(&token) {
            break;
        }
        tokens.push(token);
        if see(token).is_break() {
            break;
        }
    }
    Ok(tokens)
}

fn choose(logits: &[f32], choice: Choice, draw: u64) -> u32 {
    let likelier = |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
    let mut words: Vec<usize> = (0..logits.len()).collect();
    let Some(likeliest) = words.iter().copied().min_by(likelier) else { return 0 };
    if choice.temperature <= 0.0 {
        return likeliest as u32;
    }
    if choice.top_k > 0 && choice.top_k < words.len() {
        words.select_nth_unstable_by(choice.top_k - 1, likelier);
        words.truncate(choice.top_k);
    }
    if choice.top_p < 1.0 {
        words.sort_unstable_by(likelier);
    }
    let best = f64::from(logits[likeliest]);
    let weight = |&word: &usize| libm::exp((f64::from(logits[word]) - best) / choice.temperature);
    let mut weights: Vec<f64> = words.iter().map(weight).collect();
    let mut total: f64 = weights.iter().sum();
    if choice.top_p < 1.0 {
        let (enough, mut sum) = (choice.top_p * total, 0.0);
        let reaches = |weight: &f64| {
            sum += weight;
            sum >= enough
        };
        weights.truncate(weights.iter().position(reaches).map_or(weights.len(), |last| last + 1));
        total = weights.iter().sum();
    }
    let mut left = random::uniform(choice.seed, draw) * total;
    for (&word, weight) in words.iter().zip(&weights) {
        left -= weight;
        if left < 0.0 {
            return word as u32;
        }
    }
    likeliest as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Family, ModelConfig};
    use crate::optimiser::OptimiserConfig;
    use crate::pipeline;
    use crate::run::TrainConfig;
    use crate::stage::{Output, Want};

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

    #[test]
    fn only_as_many_are_drawn_from_as_have_the_probability_that_is_asked_for() {
        // ½, ¼, ⅛, ⅛.
        let logits = [-3f32, -1.0, -3.0, -2.0].map(|exponent| exponent * 2f32.ln());
        let drawn = |top_p| {
            let choice = Choice { temperature: 1.0, top_p, ..Default::default() };
            let mut seen: Vec<u32> = (0..1000).map(|draw| choose(&logits, choice, draw)).collect();
            seen.sort_unstable();
            seen.dedup();
            seen
        };
        assert_eq!(drawn(0.4), [1]);
        assert_eq!(drawn(0.7), [1, 3]);
        assert_eq!(drawn(0.8), [0, 1, 3]);
        assert_eq!(drawn(1.0), [0, 1, 2, 3]);
    }

    /// What is remembered stands for what would be computed again, past the end of the context too.
    #[test]
    fn a_text_goes_on_as_if_all_of_it_were_read_again() {
        let context = 24;
        let gpt2 =
            || ModelConfig { context, width: 40, layers: 3, heads: 5, init_std: 0.3, ..Default::default() };
        let llama = || ModelConfig {
            family: Family::Llama,
            heads: 6,
            key_heads: Some(2),
            head_width: Some(10),
            ..gpt2()
        };
        for (model, device, stages) in [
            (gpt2(), "naive", 1),
            (gpt2(), "cpu", 1),
            (gpt2(), "cpu", 3),
            (llama(), "naive", 1),
            (llama(), "cpu", 3),
        ] {
            let train =
                TrainConfig { stages, device: device.parse().unwrap(), threads: 2, ..Default::default() };
            let rule = OptimiserConfig::default().rule();
            let stages = pipeline::build(&model.architecture(97), rule, &train, 3).unwrap();
            let cold = Choice { temperature: 0.0, ..Default::default() };
            let go_on = |_| ControlFlow::Continue(());
            let written = generate(&stages, context, vec![5, 6, 7], 40, cold, &[], go_on).unwrap();
            let mut first = 0;
            for len in 3..written.len() {
                if len - first > context {
                    first = len - context / 2;
                }
                let (input, meta) = batch::text(&written[first..len], 0);
                let whole = pipeline::infer(&stages, input, &meta, Want::NextToken).unwrap();
                let Output::Logits(logits) = whole else { panic!("no logits") };
                let best = logits.iter().copied().fold(f32::MIN, f32::max);
                assert!(best - logits[written[len] as usize] < 1e-3, "{device}, token {len}");
            }
            assert_eq!(written.len(), 43);
        }
    }
}
