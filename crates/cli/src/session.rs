//! From a run to everything that is needed to train or ask it: corpus, sampler, stages.

use std::path::Path;

use anyhow::{Context, Result, bail};
use starling_corpus::{Corpus, Sampler, Tokeniser};
use starling_model::checkpoint::{Checkpoint, Progress};
use starling_model::reference::Reference;
use starling_model::run::{Definition, Run};
use starling_model::stage::Loss;

/// An opened run.
pub struct Session {
    pub reference: Reference,
    pub definition: Definition,
    pub tokeniser: Tokeniser,
    /// Steps whose update was skipped.
    pub skipped: u64,
}

impl Session {
    /// Opens the corpus (its shards are made in `cache` if need be) and builds the model at step 0.
    pub fn open(run: Run, cache: &Path) -> Result<Session> {
        let corpus = open_corpus(&run, cache)?;
        let tokeniser = corpus.tokeniser.clone();
        let definition = run.definition(tokeniser.vocabulary(), corpus.content_hash().to_hex().to_string());
        let sampler = Sampler::new(corpus, run.data.held_out, run.model.context, run.seed)
            .context("the corpus does not fit the run")?;
        let reference = Reference::new(run, tokeniser.vocabulary(), sampler)?;
        Ok(Session { reference, definition, tokeniser, skipped: 0 })
    }

    /// Puts a checkpoint of the same run into the model.
    pub fn restore(&mut self, checkpoint: &Checkpoint) -> Result<()> {
        let manifest = &checkpoint.manifest;
        let differences = manifest.definition.differences(&self.definition);
        if !differences.is_empty() {
            let list: Vec<String> =
                differences.iter().map(|(key, was, is)| format!("  {key}: {was} there, {is} here")).collect();
            bail!(
                "the checkpoint is of another training:\n{}\nset these back to go on, or start a new run with --out",
                list.join("\n")
            );
        }
        checkpoint.restore(self.reference.stages_mut())?;
        self.skipped = manifest.skipped;
        Ok(())
    }

    /// What a checkpoint says of this run.
    pub fn progress(&self) -> Progress {
        Progress {
            run: self.reference.run().clone(),
            definition: self.definition.clone(),
            tokeniser: self.tokeniser.clone(),
            skipped: self.skipped,
        }
    }

    /// Loss on `most` held-out windows at the most (0: all), and bits per byte of their text.
    pub fn held_out(&self, most: u64) -> Result<Option<(Loss, f64)>> {
        let sampler = self.reference.sampler();
        let windows = sampler.held_out_windows();
        if windows == 0 {
            return Ok(None);
        }
        let loss = self.reference.held_out_loss(most)?;
        let windows = if most == 0 { windows } else { windows.min(most) };
        let bytes_of = |index: u64| -> u64 {
            sampler.held_out(index).tokens[1..].iter().map(|&token| self.tokeniser.bytes_of(token)).sum()
        };
        let bytes: u64 = (0..windows).map(bytes_of).sum();
        Ok(Some((loss, bits_per_byte(loss, bytes))))
    }

    /// Numbers of weights.
    pub fn parameters(&self) -> u64 {
        let stages = self.reference.stages().iter();
        let parameters = stages.flat_map(|stage| stage.layout().entries());
        let sizes: std::collections::BTreeMap<&str, u64> =
            parameters.map(|(p, span)| (p.name.as_str(), span.len as u64)).collect();
        sizes.values().sum()
    }
}

/// A loss in nats over text of so many bytes, as bits per byte.
pub fn bits_per_byte(loss: Loss, bytes: u64) -> f64 {
    loss.sum / std::f64::consts::LN_2 / bytes.max(1) as f64
}

/// Opens what the run is trained on. The paths in a resolved run are absolute.
pub fn open_corpus(run: &Run, cache: &Path) -> Result<Corpus> {
    starling_corpus::open(&run.data, Path::new("."), cache).context("the corpus cannot be opened")
}
