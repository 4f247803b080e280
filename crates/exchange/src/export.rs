//! A folder that `transformers` loads.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use starling_model::checkpoint::{Checkpoint, RestoreError};

use crate::family;
use crate::numbers::{Format, to_file};

/// Bytes of one file of weights, as `transformers` cuts them.
const SHARD_BYTES: usize = 5 << 30;

/// What is to be written besides the weights.
pub struct Export<'a> {
    /// How numbers are stored.
    pub format: Format,
    /// The text of a `tokenizer.json`, and what it calls the end of a text.
    pub tokeniser: Option<(&'a str, &'a str)>,
    /// The token that ends a text.
    pub end_of_text: u32,
}

/// Writes the model of a checkpoint as a new folder. It appears whole, or not at all. What comes back are keys of `[model]` that
/// its `config.json` cannot say, and their values: they matter to whoever goes on training there.
pub fn export(
    checkpoint: &Checkpoint,
    what: &Export<'_>,
    folder: &Path,
) -> Result<Vec<(&'static str, String)>, ExportError> {
    if folder.exists() {
        return Err(ExportError::Exists(folder.to_path_buf()));
    }
    let manifest = &checkpoint.manifest;
    let architecture = manifest.run.model.architecture(manifest.definition.vocabulary);
    let config = family::config(&architecture, what.end_of_text, what.format.name());
    let config = config.ok_or_else(|| ExportError::Activation(format!("{:?}", architecture.activation)))?;
    let mut name = folder.as_os_str().to_os_string();
    name.push(".writing");
    let aside = PathBuf::from(name);
    let _ = fs::remove_dir_all(&aside); // What a crash has left.
    let trouble = |source| ExportError::Write { path: aside.clone(), source };
    fs::create_dir_all(&aside).map_err(trouble)?;
    let written = write_all(checkpoint, what, &family::tensors(&architecture), &config, &aside)
        .and_then(|()| fs::rename(&aside, folder).map_err(trouble));
    if written.is_err() {
        let _ = fs::remove_dir_all(&aside);
    }
    written.map(|()| family::unsaid(&architecture))
}

/// A tensor: its name, shape and bytes.
type Named<'a> = (&'a str, Vec<usize>, Vec<u8>);

fn write_all(
    checkpoint: &Checkpoint,
    what: &Export<'_>,
    names: &[(String, String)],
    config: &Value,
    folder: &Path,
) -> Result<(), ExportError> {
    let (tensors, dtype) = (checkpoint.tensors()?, checkpoint.manifest.dtype);
    let mut shards: Vec<Vec<Named<'_>>> = vec![Vec::new()];
    let mut room = SHARD_BYTES;
    for (name, parameter) in names {
        let missing = || RestoreError::Missing { name: parameter.clone() };
        let (shape, bytes) = tensors.get(parameter).ok_or_else(missing)?;
        let bytes = to_file(bytes, dtype, what.format);
        if bytes.len() > room && !shards.last().is_none_or(Vec::is_empty) {
            shards.push(Vec::new());
            room = SHARD_BYTES;
        }
        room = room.saturating_sub(bytes.len());
        if let Some(shard) = shards.last_mut() {
            shard.push((name, shape.clone(), bytes));
        }
    }
    let mut places = BTreeMap::new();
    let (count, mut total) = (shards.len(), 0);
    for (number, shard) in shards.into_iter().enumerate() {
        let file = match count {
            1 => "model.safetensors".to_string(),
            _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
        };
        let mut views = Vec::new();
        for (name, shape, bytes) in &shard {
            places.insert(name.to_string(), file.clone());
            total += bytes.len();
            views.push((*name, TensorView::new(what.format.dtype(), shape.clone(), bytes)?));
        }
        // Without this, transformers takes the file for another framework's.
        let about = std::collections::HashMap::from([("format".to_string(), "pt".to_string())]);
        write(folder, &file, &safetensors::serialize(views, Some(about))?)?;
    }
    if count > 1 {
        let index = json!({ "metadata": { "total_size": total }, "weight_map": places });
        write_json(folder, "model.safetensors.index.json", &index)?;
    }
    write_json(folder, "config.json", config)?;
    let end = what.end_of_text;
    write_json(folder, "generation_config.json", &json!({ "bos_token_id": end, "eos_token_id": end }))?;
    if let Some((text, end)) = what.tokeniser {
        write(folder, "tokenizer.json", text.as_bytes())?;
        let context = checkpoint.manifest.run.model.context;
        let config = json!({
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": end, "eos_token": end, "unk_token": end,
            "model_max_length": context, "clean_up_tokenization_spaces": false,
        });
        write_json(folder, "tokenizer_config.json", &config)?;
    }
    Ok(())
}

fn write_json(folder: &Path, name: &str, value: &Value) -> Result<(), ExportError> {
    write(folder, name, format!("{value:#}\n").as_bytes())
}

fn write(folder: &Path, name: &str, bytes: &[u8]) -> Result<(), ExportError> {
    let path = folder.join(name);
    let written = File::create(&path).and_then(|mut file| {
        file.write_all(bytes)?;
        file.sync_all()
    });
    written.map_err(|source| ExportError::Write { path, source })
}

/// Why a model could not be written; nothing is left of the try.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// There is something already.
    #[error("{} exists already; name another folder, nothing was changed", .0.display())]
    Exists(PathBuf),
    /// No model of that kind.
    #[error("transformers has no GPT-2 with the activation {0}; the model cannot be exported")]
    Activation(String),
    /// The checkpoint does not hold what its manifest says.
    #[error(transparent)]
    Checkpoint(#[from] RestoreError),
    /// A file could not be made.
    #[error(transparent)]
    Format(#[from] safetensors::SafeTensorError),
    /// A file could not be written.
    #[error("cannot write {}: {source}; nothing is left of it", path.display())]
    Write {
        /// Which.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}
