//! Text → tokens → memory-mapped shards → samples; and languages that are generated instead of collected.
//!
//! This crate answers one question for the rest of Starling: *what does sample number 48 213 of this run
//! contain?* The answer is a pure function of the corpus, the seed and the number, so any peer can give it,
//! in any order, again after a failure, and it is always the same.
//!
//! ```
//! use starling_corpus::{DataConfig, Sampler, SyntheticConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = std::env::temp_dir().join(format!("starling-corpus-doctest-{}", std::process::id()));
//! // The `[data]` section of a run file; here 200 documents in three generated languages.
//! let synthetic = SyntheticConfig { documents: 200, ..SyntheticConfig::default() };
//! let data = DataConfig { synthetic: Some(synthetic), ..DataConfig::default() };
//! assert!(data.problems().is_empty());
//!
//! // Paths are relative to the first folder, shards are built in the second one.
//! let corpus = starling_corpus::open(&data, &folder, &folder.join("cache"))?;
//! let sampler = Sampler::new(corpus, data.held_out, 64, 7)?;
//!
//! let window = sampler.window(48_213);
//! assert_eq!(window.tokens.len(), 65); // context + 1
//! println!("{}", sampler.corpus().tokeniser.decode(&window.tokens));
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Concepts
//! - A **document** is a piece of text that is held out or trained on as a whole, and so is every copy of it
//!   in any source. Documents are stored without end of text; the sampler puts it after each.
//! - A **shard** ([`Shard`]) is a file of tokens and document bounds, checked whole when it is opened.
//! - A **corpus folder** ([`CorpusFolder`]) is what [`build`] makes of text files: shards, and the tokeniser
//!   that made them.
//! - A **corpus** ([`Corpus`]) is one vocabulary ([`Tokeniser`]) and some shards with weights. Its
//!   [`Corpus::content_hash`] is part of a run's identity.
//! - A **window** ([`Window`]) is `context + 1` consecutive tokens: inputs, and what they should predict.
//! - A **world** ([`World`]) generates languages and knows the true probability of every text in them: the
//!   bound that no model beats on average. [`NGram`] is the yardstick from the other side.
//!
//! # Modules, in reading order
//! [`tokeniser`], [`shard`], [`text`] (plain text to a shard), [`config`] (the `[data]` section), [`corpus`]
//! (opens what it names), [`build`] and [`folder`] (text files of any size to a corpus folder), [`sampler`], [`synthetic`], [`ngram`].
//!
//! Nothing here knows of the network, the clock, or unseeded chance.

pub mod build;
pub mod config;
pub mod corpus;
mod division;
pub mod folder;
mod mixture;
pub mod ngram;
mod permutation;
mod random;
pub mod sampler;
pub mod shard;
pub mod shards;
mod stream;
pub mod synthetic;
pub mod text;
pub mod tokeniser;

pub use config::{DataConfig, Problem, SourceConfig};
pub use corpus::{Corpus, CorpusError, open, open_as};
pub use folder::{CorpusFolder, FolderError};
pub use ngram::NGram;
pub use sampler::{Sampler, SamplerError, SourceName, Window};
pub use shard::{Shard, ShardError, ShardWriter};
pub use shards::Shards;
pub use synthetic::{ScoreError, SyntheticConfig, World};
pub use text::{Split, TextError, shard_from_text};
pub use tokeniser::{EncodeError, HuggingFace, Tokeniser, TokeniserError};
