//! Sample number → window of tokens, as a pure function: what makes a microbatch the same whoever asks.
//!
//! Each source's training documents form one virtual stream, every document followed by end of text, cut
//! into windows of `context + 1` tokens at stride `context`, so that no token is predicted twice an epoch, and
//! every one is once, but for the very first and a tail of fewer than `context` that fills no window. An
//! epoch is a keyed permutation of the windows without replacement; sources take turns as `mixture.rs` says,
//! each running through epochs of its own.

use std::sync::Arc;

use crate::corpus::Corpus;
use crate::division::{self, Division, Reason, Undivided};
use crate::mixture::{self, Mixture};
use crate::permutation::Permutation;
use crate::random::Key;
use crate::shards::Shards;
use crate::stream::Stream;
pub use crate::stream::Window;

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
    /// `held_out` is the fraction of documents (0 ≤ fraction < 1) that is never trained on: if it is not 0, at
    /// least one of every source, and never all. Which ones depends on the seed and on what they say, so
    /// that equal documents are on the same side in all sources; a source whose documents are all equal is
    /// refused, unless nothing is to be held out. The order of the samples depends on the seed, too.
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
        let counts = counts(&corpus)?;
        let shards: Vec<&Shards> = corpus.sources.iter().map(|(shards, _)| shards).collect();
        let sources = division::divide(&shards, Key::new(seed, "held out"), held_out)
            .map_err(|undivided| SamplerError::undivided(undivided, &corpus))?
            .into_iter()
            .enumerate()
            .map(|(index, division)| Source::new(&corpus, index, division, context))
            .collect::<Result<_, _>>()?;
        let mixture = Mixture::new(Key::new(seed, "mixture"), counts);
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

    /// How many training windows all sources have together: after so many samples, every window of a corpus
    /// of one source has been seen exactly once.
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

/// How many samples of a block each source gives.
fn counts(corpus: &Corpus) -> Result<Vec<u64>, SamplerError> {
    let weights: Vec<f64> = corpus.sources.iter().map(|(_, weight)| *weight).collect();
    let refused = |source: usize| SamplerError::Weight {
        name: SourceName::of(corpus, source),
        weight: weights[source],
    };
    if let Some(source) = weights.iter().position(|weight| !mixture::is_weight(*weight)) {
        return Err(refused(source));
    }
    let counts = mixture::apportion(&weights).ok_or(SamplerError::WeightSum)?;
    match counts.iter().position(|&count| count == 0) {
        Some(source) => Err(refused(source)),
        None => Ok(counts),
    }
}

/// One source as the sampler sees it.
#[derive(Debug)]
struct Source {
    division: Arc<Division>,
    training: Stream,
    held_out: Stream,
    training_windows: u64,
    held_out_windows: u64,
}

impl Source {
    fn new(
        corpus: &Corpus,
        index: usize,
        division: Division,
        context: usize,
    ) -> Result<Source, SamplerError> {
        let shards = &corpus.sources[index].0;
        let division = Arc::new(division);
        let training = Stream::new(shards, &division, false);
        let held_out = Stream::new(shards, &division, true);
        let whole_windows = |stream: &Stream| stream.tokens().saturating_sub(1) / context as u64;
        let training_windows = whole_windows(&training);
        if training_windows == 0 {
            let tokens = training.tokens();
            return Err(SamplerError::TooShort { name: SourceName::of(corpus, index), tokens, context });
        }
        let held_out_windows = whole_windows(&held_out).max(u64::from(held_out.tokens() >= 2));
        Ok(Source { division, training, held_out, training_windows, held_out_windows })
    }
}

/// A source as the run file names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceName {
    /// The entry of `data.sources` with this number, counted from 0.
    Listed(usize),
    /// What `data.synthetic` generates.
    Generated,
}

impl SourceName {
    fn of(corpus: &Corpus, source: usize) -> SourceName {
        if corpus.synthetic.is_some() { SourceName::Generated } else { SourceName::Listed(source) }
    }

    fn how_to_get_more(self) -> &'static str {
        match self {
            SourceName::Listed(_) => "give it more text",
            SourceName::Generated => "raise data.synthetic.documents",
        }
    }
}

impl std::fmt::Display for SourceName {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SourceName::Listed(number) => write!(out, "data.sources[{number}]"),
            SourceName::Generated => out.write_str("the generated corpus"),
        }
    }
}

/// Why a corpus cannot be sampled.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum SamplerError {
    /// The context is 0.
    #[error("a context of 0 tokens leaves nothing to train on; set model.context to at least 1")]
    NoContext,
    /// The corpus has no source.
    #[error("the corpus has no source, so there is nothing to train on; name one in data.sources")]
    NoSource,
    /// The held-out fraction is not one.
    #[error(
        "data.held_out = {fraction} is not a fraction that leaves documents to train on; \
         it must be at least 0 and below 1, such as data.held_out = 0.05"
    )]
    HeldOut {
        /// What was asked for.
        fraction: f64,
    },
    /// A weight is no weight, or so small that the source would never be seen.
    #[error(
        "{name} has weight {weight} and would never be sampled: weights must be finite, above 0, and at \
         least 1/{} of their sum; raise {name}.weight, or leave the source out",
        mixture::BLOCK
    )]
    Weight {
        /// Which source.
        name: SourceName,
        /// Its weight.
        weight: f64,
    },
    /// Each weight is fine, but not their sum.
    #[error(
        "the weights of data.sources add up to more than a number can hold, so the sources' shares are \
         unknown; only their ratios matter, so divide every weight by the largest"
    )]
    WeightSum,
    /// A source has no two different documents, and some were to be held out.
    #[error("{}, so none can be held out of training; {}", all_equal(*documents, *name), other_documents(*documents, *name))]
    AllEqual {
        /// Which source.
        name: SourceName,
        /// How often it has its one document.
        documents: u64,
    },
    /// The documents of some tiny sources overlap so that no division was found.
    #[error(
        "all documents of {name} also stand in other sources of two or three documents, and equal documents \
         are held out together, so this source cannot have one held out and one to train on; \
         join these sources into one file, or set data.held_out = 0"
    )]
    Entangled {
        /// The first source for which nothing is left.
        name: SourceName,
    },
    /// A source does not fill one window.
    #[error(
        "{name} has {tokens} training tokens, fewer than the context + 1 = {} of one window; {}, or lower \
         model.context",
        context + 1,
        name.how_to_get_more()
    )]
    TooShort {
        /// Which source.
        name: SourceName,
        /// Its training tokens.
        tokens: u64,
        /// The context asked for.
        context: usize,
    },
}

impl SamplerError {
    fn undivided(undivided: Undivided, corpus: &Corpus) -> SamplerError {
        let name = SourceName::of(corpus, undivided.source);
        match undivided.reason {
            Reason::AllEqual => {
                SamplerError::AllEqual { name, documents: corpus.sources[undivided.source].0.documents() }
            }
            Reason::Entangled => SamplerError::Entangled { name },
        }
    }
}

fn all_equal(documents: u64, name: SourceName) -> String {
    match documents {
        1 => format!("{name} has only one document"),
        documents => format!("all {documents} documents of {name} are equal, and copies stay together"),
    }
}

fn other_documents(documents: u64, name: SourceName) -> String {
    let remedy = format!("set data.held_out = 0, or {}", name.how_to_get_more());
    match name {
        SourceName::Listed(_) if documents == 1 => {
            format!("{remedy}, or, if every line is a document, set {name}.split = \"line\"")
        }
        _ => remedy,
    }
}

#[cfg(test)]
mod tests;
