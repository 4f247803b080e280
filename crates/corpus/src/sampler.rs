//! Sample number → window of tokens, as a pure function: what makes a microbatch the same whoever asks.
//!
//! Each source's training documents form one virtual stream, every document followed by end of text, cut
//! into windows of `context + 1` tokens at stride `context`, so that every token but the first is predicted
//! once an epoch. An epoch is a keyed permutation of the windows without replacement; sources take turns as
//! `mixture.rs` says, each running through epochs of its own.

use std::sync::Arc;

use crate::corpus::Corpus;
pub use crate::held_out::Window;
use crate::held_out::{Division, Stream};
use crate::mixture::{self, Mixture};
use crate::permutation::Permutation;
use crate::random::Key;

/// Draws training and held-out windows from a corpus.
#[derive(Debug)]
pub struct Sampler {
    corpus: Arc<Corpus>,
    context: usize,
    seed: u64,
    mixture: Mixture,
    sources: Vec<Source>,
}

impl Sampler {
    /// Divides every source's documents into training and held-out, and measures them.
    ///
    /// `held_out` is the fraction of documents (0 ≤ fraction < 1) that is never trained on. The division
    /// depends on the seed, and so does the order of the samples.
    pub fn new(
        corpus: impl Into<Arc<Corpus>>,
        held_out: f64,
        context: usize,
        seed: u64,
    ) -> Result<Sampler, SamplerError> {
        let corpus = corpus.into();
        if context == 0 {
            return Err(SamplerError::NoContext);
        }
        if !(0.0..1.0).contains(&held_out) {
            return Err(SamplerError::HeldOut { fraction: held_out });
        }
        if corpus.sources.is_empty() {
            return Err(SamplerError::NoSource);
        }
        let weights: Vec<f64> = corpus.sources.iter().map(|(_, weight)| *weight).collect();
        let usable = weights.iter().all(|weight| weight.is_finite() && *weight > 0.0);
        if let Some(source) = mixture::apportion(&weights).iter().position(|&count| count == 0 || !usable) {
            return Err(SamplerError::Weight { source_number: source, weight: weights[source] });
        }
        let sources = (0..corpus.sources.len())
            .map(|index| Source::new(&corpus, index, held_out, context, seed))
            .collect::<Result<_, _>>()?;
        let mixture = Mixture::new(Key::new(seed, "mixture"), &weights);
        Ok(Sampler { corpus, context, seed, mixture, sources })
    }

    /// The corpus that is sampled.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// The training window of a global sample number: always `context + 1` tokens.
    pub fn window(&self, sample: u64) -> Window {
        let (index, number) = self.mixture.place(sample);
        let source = &self.sources[index];
        let (epoch, position) = (number / source.training_windows, number % source.training_windows);
        let key = Key::new(self.seed, "epoch").with(index as u64).with(epoch);
        let window = Permutation::new(key, source.training_windows).apply(position);
        self.read(index, &source.training, window)
    }

    /// How many training windows all sources have together: after so many samples, a corpus of one source
    /// has been seen exactly once.
    pub fn windows_per_epoch(&self) -> u64 {
        self.sources.iter().map(|source| source.training_windows).sum()
    }

    /// How many windows the held-out documents make; 0 if nothing is held out.
    pub fn held_out_windows(&self) -> u64 {
        self.sources.iter().map(|source| source.held_out_windows).sum()
    }

    /// A held-out window: source after source, in order, no token predicted twice.
    ///
    /// A source's last window is left out if it would be short; only where it is the source's *only* one is
    /// it kept, and then it has fewer than `context + 1` tokens (at least 2). Beyond
    /// [`Sampler::held_out_windows`] a window is empty.
    pub fn held_out(&self, index: u64) -> Window {
        let mut window = index;
        for (source_index, source) in self.sources.iter().enumerate() {
            if window < source.held_out_windows {
                return self.read(source_index, &source.held_out, window);
            }
            window -= source.held_out_windows;
        }
        Window { tokens: Vec::new(), documents: Vec::new() }
    }

    /// The documents of a source that are held out, in order: for judging something other than windows, as
    /// an n-gram model or the entropy bound of the synthetic languages. `None` if there is no such source.
    pub fn held_out_documents(&self, source: usize) -> Option<impl Iterator<Item = u64> + '_> {
        self.documents(source, true)
    }

    /// The documents of a source that are trained on, in order. `None` if there is no such source.
    pub fn training_documents(&self, source: usize) -> Option<impl Iterator<Item = u64> + '_> {
        self.documents(source, false)
    }

    fn documents(&self, source: usize, held_out: bool) -> Option<impl Iterator<Item = u64> + '_> {
        let division = &self.sources.get(source)?.division;
        let documents = 0..self.corpus.sources.get(source)?.0.documents();
        Some(documents.filter(move |&document| division.holds_out(document) == held_out))
    }

    fn read(&self, source: usize, stream: &Stream, window: u64) -> Window {
        let position = window * self.context as u64;
        let end_of_text = self.corpus.tokeniser.end_of_text();
        stream.read(&self.corpus.sources[source].0, position, self.context + 1, end_of_text)
    }
}

/// One source as the sampler sees it.
#[derive(Debug)]
struct Source {
    division: Division,
    training: Stream,
    held_out: Stream,
    training_windows: u64,
    held_out_windows: u64,
}

impl Source {
    fn new(
        corpus: &Corpus,
        index: usize,
        held_out: f64,
        context: usize,
        seed: u64,
    ) -> Result<Source, SamplerError> {
        let shard = &corpus.sources[index].0;
        if held_out > 0.0 && shard.documents() == 1 {
            return Err(SamplerError::OneDocument { source_number: index });
        }
        let key = Key::new(seed, "held out").with(index as u64);
        let division = Division::new(key, shard.documents(), held_out);
        let training = Stream::new(shard, &division, false);
        let held_out = Stream::new(shard, &division, true);
        let whole_windows = |stream: &Stream| stream.tokens().saturating_sub(1) / context as u64;
        let training_windows = whole_windows(&training);
        if training_windows == 0 {
            let tokens = training.tokens();
            return Err(SamplerError::TooShort { source_number: index, tokens, context });
        }
        let held_out_windows = whole_windows(&held_out).max(u64::from(held_out.tokens() >= 2));
        Ok(Source { division, training, held_out, training_windows, held_out_windows })
    }
}

/// Why a corpus cannot be sampled. Sources are counted from 0, as in `data.sources[0]`.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// The context is 0.
    #[error("a context of 0 tokens leaves nothing to train on; set the model's context to at least 1")]
    NoContext,
    /// The corpus has no source.
    #[error("the corpus has no source, so there is nothing to train on; name one in `data.sources`")]
    NoSource,
    /// The held-out fraction is not one.
    #[error("held_out is {fraction}, which leaves nothing to train on; it must be at least 0 and below 1")]
    HeldOut {
        /// What was asked for.
        fraction: f64,
    },
    /// A weight is no weight, or so small that the source would never be seen.
    #[error(
        "data source {source_number} has weight {weight} and would never be sampled: weights must be \
         finite, above 0, and at least 1/4096 of their sum; raise it, or leave the source out"
    )]
    Weight {
        /// Which source.
        source_number: usize,
        /// Its weight.
        weight: f64,
    },
    /// A source has one document, and some were to be held out.
    #[error(
        "data source {source_number} has only one document, so none can be held out of training; \
         set data.held_out = 0, give more text, or split it by line (split = \"line\")"
    )]
    OneDocument {
        /// Which source.
        source_number: usize,
    },
    /// A source does not fill one window.
    #[error(
        "data source {source_number} has {tokens} training tokens, fewer than one window of context + 1 = \
         {} needs; give more text, or a smaller context",
        context + 1
    )]
    TooShort {
        /// Which source.
        source_number: usize,
        /// Its training tokens.
        tokens: u64,
        /// The context asked for.
        context: usize,
    },
}

#[cfg(test)]
mod tests;
