//! Models as other tools write and read them: folders that Hugging Face's `transformers` saves and loads.
//!
//! [`Pretrained::open`] reads such a folder, and puts its weights into stages; [`export()`] writes one. What a config says that
//! changes the mathematics and is not implemented is refused by name; what is only about how it is run is passed over.
//!
//! A family is a file of its own (`gpt2`, `llama`): which fields of `config.json` mean what. `family` has what they share.
//!
//! ```no_run
//! use starling_exchange::Pretrained;
//! use starling_model::{pipeline, run::Run};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let pretrained = Pretrained::open("models/gpt2".as_ref())?;
//! let run = Run { model: pretrained.model.clone(), ..Run::default() };
//! let architecture = run.model.architecture(pretrained.vocabulary);
//! let mut stages = pipeline::build(&architecture, run.optimiser.rule(), &run.train, run.seed)?;
//! pretrained.put_into(&mut stages)?;
//! # Ok(())
//! # }
//! ```
//!
//! Nothing here knows of training or the network.

mod bytes;
mod export;
mod family;
mod gpt2;
mod import;
mod llama;
mod numbers;

pub use bytes::{END_OF_TEXT, byte_tokeniser};
pub use export::{Export, ExportError, export};
pub use import::{ImportError, Pretrained};
pub use numbers::Format;
