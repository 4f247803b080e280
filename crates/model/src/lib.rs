//! Models in training: layers, stages, losses, optimisers, checkpoints; and the one-process loop that is the
//! truth for everything distributed.
//!
//! ```
//! use starling_corpus::{DataConfig, Sampler, SyntheticConfig};
//! use starling_model::config::ModelConfig;
//! use starling_model::reference::Reference;
//! use starling_model::run::{Run, TrainConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = std::env::temp_dir().join(format!("starling-model-doctest-{}", std::process::id()));
//! let run = Run {
//!     model: ModelConfig { context: 16, width: 16, layers: 2, heads: 2, ..Default::default() },
//!     data: DataConfig {
//!         synthetic: Some(SyntheticConfig { documents: 50, ..Default::default() }),
//!         ..Default::default()
//!     },
//!     train: TrainConfig { batch: 4, microbatch: 2, stages: 3, lots: 2, ..Default::default() },
//!     ..Default::default()
//! };
//! let corpus = starling_corpus::open(&run.data, &folder, &folder)?;
//! let vocabulary = corpus.tokeniser.vocabulary();
//! let sampler = Sampler::new(corpus, run.data.held_out, run.model.context, run.seed)?;
//!
//! let mut reference = Reference::new(run, vocabulary, sampler)?;
//! let report = reference.step()?;
//! println!("loss {:.3}, weights {}", report.loss.mean(), reference.weights_hash());
//! # std::fs::remove_dir_all(&folder)?;
//! # Ok(())
//! # }
//! ```
//!
//! # Concepts
//! - A model is a list of **units**: embedding, blocks, head ([`transformer`]). A **stage** ([`stage::Stage`]) is a
//!   contiguous run of them, with its own weights in a flat, named [`layout`].
//! - An **engine** ([`engine::Engine`]) computes about ten fused operations, forward and backward; models are
//!   written once on these, and engines know no model. [`engine::naive`] is obvious, and judges the others.
//! - A step's microbatches form **lots** ([`lots`]); within a lot the gradients are summed in order, over lots in
//!   a fixed tree, over several uses of one parameter in the order of units. So the bits of the sum do not depend
//!   on who computed what, nor on where the model is cut.
//! - A **commit** ([`stage::Commit`]) carries the constants of an update; applying it is deterministic.
//!
//! # Modules, in reading order
//! [`mod@reference`] (the loop), [`stage`] (what a stage promises), [`local`] (how it is kept), [`transformer`], [`engine`],
//! [`lots`] and [`reduce`], [`optimiser`], [`random`] (counter-based), [`run`] (the run file), [`config`],
//! [`checkpoint`], and the small ones: [`pipeline`], [`batch`], [`cut`], [`layout`], [`generate`], [`memory`].
//!
//! Nothing here knows of the network or the clock; `starling-swarm` and this crate never see each other.

pub mod batch;
pub mod checkpoint;
pub mod config;
pub mod cut;
pub mod device;
pub mod engine;
pub mod generate;
pub mod guard;
pub mod holding;
pub mod layout;
pub mod local;
pub mod lots;
pub mod memory;
pub mod optimiser;
pub mod pipeline;
pub mod random;
pub mod reduce;
pub mod reference;
pub mod run;
pub mod stage;
pub mod transformer;

#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct Readme;
