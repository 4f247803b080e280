//! Synthetic languages: a corpus that needs no download and whose every probability is known.
//!
//! Some sister languages speak of one small [`World`] of facts. They share roots, and differ in sounds, word
//! order, and the side on which adjectives and adpositions stand; adjective, auxiliary and pronoun agree with
//! the class of the subject, the auxiliary also with the time, and animals take a case ending as objects.
//! What a sentence does to what depends on its subject, which stands at least five tokens back, sometimes a
//! sentence or more: n-gram models are blind to it, attention is not.
//!
//! The generator knows the natural logarithm of the probability of each token of a text, so the entropy
//! bound of a corpus is computed, not estimated: no model can be better on average.

mod facts;
mod grammar;
mod lexicon;
mod pairs;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::config::Problem;
use crate::random::{Draws, Key};
use crate::tokeniser::Tokeniser;
use facts::Facts;
use grammar::{Choice, Grammar, MOST_LANGUAGES, State};
pub use pairs::{Inference, Label, Translation};

/// Changes whenever the same configuration would give other documents.
pub(crate) const GRAMMAR_VERSION: u32 = 2;

/// More documents than this are not generated: 370 million tokens, 0.8 GB, and minutes before the first step.
const MOST_DOCUMENTS: u32 = 10_000_000;

/// Which languages to generate, and how much of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct SyntheticConfig {
    /// The seed of the world: its facts, its words, its documents.
    pub seed: u64,
    /// How many sister languages there are, 1 to 6.
    #[schemars(range(min = 1, max = 6))]
    pub languages: u32,
    /// How many documents to generate, 2 to 10 million; each has about 37 tokens.
    #[schemars(range(min = 2, max = MOST_DOCUMENTS))]
    pub documents: u32,
}

impl Default for SyntheticConfig {
    fn default() -> SyntheticConfig {
        SyntheticConfig { seed: 1, languages: 3, documents: 20_000 }
    }
}

impl SyntheticConfig {
    pub(crate) fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        if !(1..=u32::from(MOST_LANGUAGES)).contains(&self.languages) {
            problems.push(Problem::new(
                "data.synthetic.languages",
                format!("there is no world with {} languages", self.languages),
                format!("give a number from 1 to {MOST_LANGUAGES}"),
            ));
        }
        if self.documents < 2 {
            problems.push(Problem::new(
                "data.synthetic.documents",
                format!("{} documents cannot be divided into training and held-out", self.documents),
                format!("give at least 2; the default is {}", SyntheticConfig::default().documents),
            ));
        }
        if self.documents > MOST_DOCUMENTS {
            problems.push(Problem::new(
                "data.synthetic.documents",
                format!("{} documents would take very long to generate and fill the disk", self.documents),
                format!(
                    "give at most {MOST_DOCUMENTS}; the default is {}",
                    SyntheticConfig::default().documents
                ),
            ));
        }
        problems
    }
}

/// A world of facts and the languages that speak of it.
#[derive(Clone, Debug)]
pub struct World {
    seed: u64,
    grammar: Grammar,
    words: Vec<String>,
}

impl World {
    /// The world of a configuration. A number of languages outside 1 to 6 is taken as the nearest inside.
    pub fn new(config: &SyntheticConfig) -> World {
        let languages = config.languages.clamp(1, u32::from(MOST_LANGUAGES)) as u8;
        World {
            seed: config.seed,
            grammar: Grammar { facts: Facts::new(config.seed), languages },
            words: lexicon::words(config.seed, languages),
        }
    }

    /// The words of all languages.
    pub fn tokeniser(&self) -> Tokeniser {
        Tokeniser::Words { words: self.words.clone() }
    }

    /// How many languages there are.
    pub fn languages(&self) -> u32 {
        u32::from(self.grammar.languages)
    }

    /// A document in one language, without end of text: a function of the seed and the index alone.
    pub fn document(&self, index: u64) -> Vec<u32> {
        self.draw(&mut Key::new(self.seed, "document").with(index).draws())
    }

    /// The natural logarithm of the true probability of every token given those before it, and of end of
    /// text as one entry more. Their sum is the logarithm of the document's probability.
    pub fn score(&self, document: &[u32]) -> Result<Vec<f64>, ScoreError> {
        let mut state = State::default();
        let mut scores = Vec::with_capacity(document.len() + 1);
        for (position, &token) in document.iter().chain([&lexicon::END]).enumerate() {
            let (choice, score) = self.step(&state, token).ok_or(ScoreError { position, token })?;
            scores.push(score);
            state = choice.next;
        }
        Ok(scores)
    }

    /// Everything that can follow a beginning of a document, with its probability: they add up to 1. Nothing
    /// follows end of text.
    pub fn next(&self, beginning: &[u32]) -> Result<Vec<(u32, f64)>, ScoreError> {
        let choices = self.grammar.choices(&self.walk(beginning)?);
        let total = total(&choices);
        Ok(choices.iter().map(|choice| (choice.token, choice.weight as f64 / total as f64)).collect())
    }

    fn draw(&self, draws: &mut Draws) -> Vec<u32> {
        let mut state = State::default();
        let mut tokens = Vec::new();
        while let Some(choice) = self.pick(&state, draws) {
            state = choice.next;
            tokens.push(choice.token);
        }
        tokens.pop(); // end of text
        tokens
    }

    fn pick(&self, state: &State, draws: &mut Draws) -> Option<Choice> {
        let choices = self.grammar.choices(state);
        let mut left = draws.below(total(&choices).max(1));
        choices.into_iter().find(|choice| {
            let chosen = left < choice.weight;
            left = left.saturating_sub(choice.weight);
            chosen
        })
    }

    fn walk(&self, tokens: &[u32]) -> Result<State, ScoreError> {
        let mut state = State::default();
        for (position, &token) in tokens.iter().enumerate() {
            state = self.step(&state, token).ok_or(ScoreError { position, token })?.0.next;
        }
        Ok(state)
    }

    /// The choice that a token is, and the logarithm of its probability.
    fn step(&self, state: &State, token: u32) -> Option<(Choice, f64)> {
        let choices = self.grammar.choices(state);
        let choice = *choices.iter().find(|choice| choice.token == token)?;
        Some((choice, libm::log(choice.weight as f64 / total(&choices) as f64)))
    }
}

/// A text that the grammar does not produce.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "token {token} at position {position} cannot follow what stands before it in these languages, so the text \
     has no probability; score only whole documents of the same world (seed and number of languages)"
)]
pub struct ScoreError {
    /// Where; one past the last token means that the document ends too early.
    pub position: usize,
    /// The token that cannot stand there; end of text if the document ends too early.
    pub token: u32,
}

fn total(choices: &[Choice]) -> u64 {
    choices.iter().map(|choice| choice.weight).sum()
}

#[cfg(test)]
mod tests;
