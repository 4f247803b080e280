//! Weights that somebody has trained before: a run's, or a folder that Hugging Face's transformers wrote.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use starling_corpus::{HuggingFace, Tokeniser};
use starling_exchange::Pretrained;
use starling_model::checkpoint::Checkpoint;
use starling_model::config::ModelConfig;
use starling_model::engine::Dtype;
use starling_model::optimiser::Rule;
use starling_model::pipeline::{self, Stages, weights_hash};
use starling_model::run::{Run, TrainConfig};
use starling_model::stage::{Stage, State};

use crate::run_folder::checkpoint_at;

/// What a run may say of the model that it begins with: it is not in the weights, or a part of them will do.
const FREE: [&str; 4] = ["context", "dropout", "embedding_dropout", "attention_dropout"];

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
    /// What its texts begin with.
    pub begin: u32,
    /// What they end with.
    pub ends: Vec<u32>,
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
            // Documents follow one another in training, with this between them.
            let end = manifest.tokeniser.end_of_text();
            return Ok(Weights {
                name: format!("{}, step {}", path.display(), manifest.step),
                run: manifest.run.clone(),
                vocabulary: manifest.definition.vocabulary,
                tokeniser: manifest.tokeniser.clone(),
                begin: end,
                ends: vec![end],
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
        let end = tokeniser.end_of_text();
        let begin = tokeniser.begin_of_text();
        let ends = pretrained.ends.iter().copied().chain([end]).collect();
        let source = Source::Pretrained(Box::new(pretrained));
        Ok(Weights { name, run, vocabulary, tokeniser, begin, ends, source })
    }

    /// The model with its weights in it, to be asked about texts of up to `context` tokens.
    pub fn stages(&self, context: usize, threads: usize) -> Result<Stages> {
        let model = ModelConfig { context, ..self.run.model.clone() };
        let train = TrainConfig { threads, stages: 1, batch: 1, microbatch: 1, ..self.run.train.clone() };
        let architecture = model.architecture(self.vocabulary);
        let mut stages = pipeline::build(&architecture, Rule::Fixed, &train, self.run.seed)?;
        self.put_into(&mut stages)?;
        Ok(stages)
    }

    /// Puts them into stages of the same model, however that is cut. It may have less context: what is learnt of later
    /// positions is left out.
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
                let tensor = tensors.get(&parameter.name);
                let part = tensor.and_then(|(shape, bytes)| parameter.part_of(shape, bytes));
                let part = part.with_context(|| {
                    format!("{} has no {} of shape {:?}", self.name, parameter.name, parameter.shape)
                })?;
                stage.write(State::Weights, span.start, part)?;
            }
        }
        Ok(())
    }

    /// The run begins with these: takes over the model, and says which weights they are. A run file may say of the model
    /// only what is [`FREE`].
    pub fn resolve(&self, run: &mut Run) -> Result<()> {
        let Some(initial) = run.initial.as_ref() else { return Ok(()) };
        let (asked, theirs) = (toml::Table::try_from(&run.model)?, &self.run.model);
        // One that was not read from a file has been resolved before, and says everything.
        let said: Vec<&String> = match &initial.said {
            Some(said) => said.iter().collect(),
            None => asked.keys().collect(),
        };
        for key in said.iter().map(|key| key.as_str()).filter(|key| !FREE.contains(key)) {
            let mut changed = toml::Table::try_from(theirs)?;
            // What is not written is as usual.
            let (is, wanted) = (changed.remove(key), asked.get(key).cloned());
            changed.extend(wanted.clone().map(|value| (key.to_string(), value)));
            let changed: ModelConfig = changed.try_into()?;
            if changed.architecture(self.vocabulary) != theirs.architecture(self.vocabulary) {
                let shown =
                    |value: Option<toml::Value>| value.map_or("as usual".into(), |value| value.to_string());
                bail!(
                    "the run file says model.{key} = {}, and in {} it is {}; leave it out of [model], or begin with other \
                     weights",
                    shown(wanted),
                    self.name,
                    shown(is)
                );
            }
        }
        let context = match said.iter().any(|key| key.as_str() == "context") {
            true => run.model.context,
            false => theirs.context,
        };
        if context > theirs.context {
            bail!(
                "the run file says model.context = {context}, and {} knows {} positions; use as many at the most",
                self.name,
                theirs.context
            );
        }
        run.model = ModelConfig {
            context,
            dropout: run.model.dropout,
            embedding_dropout: run.model.embedding_dropout,
            attention_dropout: run.model.attention_dropout,
            ..theirs.clone()
        };
        let dtype = run.train.precision.dtype();
        let hash = self.hash(dtype)?;
        let Some(initial) = run.initial.as_mut() else { return Ok(()) };
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
