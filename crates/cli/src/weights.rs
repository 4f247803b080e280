//! Weights that somebody has trained before: a run's, or a folder that Hugging Face's transformers wrote.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use starling_corpus::{HuggingFace, Tokeniser};
use starling_exchange::Pretrained;
use starling_model::checkpoint::Checkpoint;
use starling_model::config::ModelConfig;
use starling_model::engine::Dtype;
use starling_model::pipeline::{self, Stages, weights_hash};
use starling_model::run::{Precision, Run};
use starling_model::stage::{Stage, State};

use crate::run_folder::checkpoint_at;

/// See the module's head.
pub struct Weights {
    /// What it is called in messages.
    pub name: String,
    /// A run that trained it, or one that has just its model.
    pub run: Run,
    /// Tokens that the model knows.
    pub vocabulary: usize,
    /// From text to tokens and back.
    pub tokeniser: Tokeniser,
    source: Source,
}

enum Source {
    Checkpoint(Box<Checkpoint>),
    Pretrained(Box<Pretrained>),
}

impl Weights {
    /// Those at a path: the folder of a run or a checkpoint, or one with a `config.json`.
    pub fn open(path: &Path) -> Result<Weights> {
        let name = path.display().to_string();
        if !path.join("config.json").is_file() {
            let path = checkpoint_at(path)?;
            let checkpoint = Checkpoint::open(&path)?;
            let manifest = &checkpoint.manifest;
            return Ok(Weights {
                name: format!("{}, step {}", path.display(), manifest.step),
                run: manifest.run.clone(),
                vocabulary: manifest.definition.vocabulary,
                tokeniser: manifest.tokeniser.clone(),
                source: Source::Checkpoint(Box::new(checkpoint)),
            });
        }
        let pretrained = Pretrained::open(path)?;
        let vocabulary = pretrained.vocabulary;
        let tokeniser = match &pretrained.tokeniser {
            Some(json) => Tokeniser::HuggingFace(
                HuggingFace::parse(json, None)
                    .with_context(|| format!("{} cannot be used", path.join("tokenizer.json").display()))?,
            ),
            None => Tokeniser::Ids { vocabulary: vocabulary as u32, end_of_text: vocabulary as u32 - 1 },
        };
        if tokeniser.vocabulary() > vocabulary {
            bail!(
                "{name}: its tokenizer.json has {} tokens, and its model knows {vocabulary}; they do not belong together",
                tokeniser.vocabulary()
            );
        }
        let run = Run { model: pretrained.model.clone(), ..Run::default() };
        Ok(Weights { name, run, vocabulary, tokeniser, source: Source::Pretrained(Box::new(pretrained)) })
    }

    /// A run of this model, with its weights in it.
    pub fn stages(&self, threads: usize) -> Result<Stages> {
        let Run { model, optimiser, mut train, seed, .. } = self.run.clone();
        train.threads = threads;
        let mut stages =
            pipeline::build(&model.architecture(self.vocabulary), optimiser.rule(), &train, seed)?;
        self.put_into(&mut stages)?;
        Ok(stages)
    }

    /// Puts them into stages of the same model, however that is cut.
    pub fn put_into(&self, stages: &mut [Box<dyn Stage>]) -> Result<()> {
        let checkpoint = match &self.source {
            Source::Pretrained(pretrained) => return Ok(pretrained.put_into(stages)?),
            Source::Checkpoint(checkpoint) => checkpoint,
        };
        let tensors = checkpoint.tensors()?;
        for stage in stages {
            if stage.dtype() != checkpoint.manifest.dtype {
                bail!("{} was trained with another train.precision; set it to that", self.name);
            }
            for (parameter, span) in stage.layout().entries().to_vec() {
                let (_, bytes) =
                    tensors.get(&parameter.name).context("the checkpoint is of another model")?;
                stage.write(State::Weights, span.start, bytes)?;
            }
        }
        Ok(())
    }

    /// The run begins with these: takes over the model, and says which weights they are. A run file may say of the model
    /// only what is not in the weights.
    pub fn resolve(&self, run: &mut Run) -> Result<()> {
        let (asked, default) = (run.model.clone(), ModelConfig::default());
        let theirs = &self.run.model;
        let is_said =
            asked.width != default.width || asked.layers != default.layers || asked.heads != default.heads;
        let differs = (asked.width, asked.layers, asked.heads) != (theirs.width, theirs.layers, theirs.heads);
        if is_said && differs {
            bail!(
                "the run file describes a model of width {}, {} layers and {} heads, and {} has {}, {} and {}; leave the \
                 sizes out of [model], or begin with other weights",
                asked.width,
                asked.layers,
                asked.heads,
                self.name,
                theirs.width,
                theirs.layers,
                theirs.heads
            );
        }
        run.model = ModelConfig {
            dropout: asked.dropout,
            embedding_dropout: asked.embedding_dropout,
            attention_dropout: asked.attention_dropout,
            ..theirs.clone()
        };
        let dtype = if run.train.precision == Precision::F32 { Dtype::F32 } else { Dtype::F64 };
        let hash = self.hash(dtype)?;
        let Some(initial) = &mut run.initial else { return Ok(()) };
        if !initial.weights.is_empty() && initial.weights != hash {
            bail!(
                "{} holds other weights than the run began with (hash {hash}, not {}); put the old ones back",
                self.name,
                initial.weights
            );
        }
        initial.weights = hash;
        Ok(())
    }

    fn hash(&self, dtype: Dtype) -> Result<String> {
        match &self.source {
            Source::Checkpoint(checkpoint) => Ok(checkpoint.manifest.weights_hash.clone()),
            Source::Pretrained(pretrained) => {
                let mut hashes = BTreeMap::new();
                for name in pretrained.parameters() {
                    hashes.insert(name.to_string(), *blake3::hash(&pretrained.read(name, dtype)?).as_bytes());
                }
                Ok(weights_hash(std::iter::once(hashes)))
            }
        }
    }
}

/// Opens what a run begins with, if it names weights, and takes over their model.
pub fn initial(run: &mut Run) -> Result<Option<Weights>> {
    let Some(initial) = &run.initial else { return Ok(None) };
    let weights = Weights::open(&initial.path).with_context(|| {
        format!("the weights that the run begins with (initial.path = {:?})", initial.path)
    })?;
    weights.resolve(run)?;
    Ok(Some(weights))
}
