//! A folder that `transformers` wrote.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::SafeTensors;
use serde::Deserialize;
use starling_model::config::ModelConfig;
use starling_model::engine::Dtype;
use starling_model::stage::{Stage, StageError, State};

use crate::family;
use crate::numbers::to_model;

/// A `config.json` or an index is small; more than this is something else.
const MOST_JSON_BYTES: u64 = 256 << 20;

/// Tokens that end a text, at the most.
const MOST_ENDS: usize = 64;

/// A model in a folder that `transformers` wrote. Its weights stay in the files, which are mapped.
pub struct Pretrained {
    /// What it is.
    pub model: ModelConfig,
    /// Tokens that it knows.
    pub vocabulary: usize,
    /// The text of its `tokenizer.json`, if it has one.
    pub tokeniser: Option<String>,
    /// What its texts end with.
    pub ends: Vec<u32>,
    files: Vec<MappedFile>,
    /// The file of each parameter, and its name there.
    parameters: BTreeMap<String, (usize, String)>,
}

/// A file, and what it holds.
type MappedFile = (PathBuf, Mmap);

#[derive(Deserialize)]
struct Head {
    model_type: Option<String>,
    #[serde(default)]
    quantization_config: serde_json::Value,
    #[serde(default)]
    eos_token_id: serde_json::Value,
}

#[derive(Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Pretrained {
    /// Reads what the folder holds; of the weights only where they are.
    pub fn open(folder: &Path) -> Result<Pretrained, ImportError> {
        let path = folder.join("config.json");
        let text = read(&path)?;
        let trouble = |source| ImportError::Json { path: path.clone(), source };
        let head: Head = serde_json::from_str(&text).map_err(trouble)?;
        let refuse = |field: &str, value: String| ImportError::Field {
            path: path.clone(),
            field: field.into(),
            value,
        };
        if !head.quantization_config.is_null() {
            return Err(refuse("quantization_config", "a quantised model".into()));
        }
        let model_type = head.model_type.as_deref().unwrap_or("nothing");
        let resolved = family::resolve(model_type, &text);
        let resolved = resolved.ok_or_else(|| refuse("model_type", model_type.into()))?.map_err(trouble)?;
        let (model, vocabulary) = resolved.map_err(|(field, value)| refuse(field, value))?;
        if let Some(problem) = model.problems().into_iter().next() {
            return Err(refuse(&problem.key, problem.message));
        }
        if vocabulary == 0 {
            return Err(refuse("vocab_size", "0".into()));
        }
        let tokeniser = folder.join("tokenizer.json");
        let tokeniser = if tokeniser.exists() { Some(read(&tokeniser)?) } else { None };
        let (files, index) = map_files(folder)?;
        let parameters = places(&model, &files, index.as_ref())?;
        let ends = ends(&head.eos_token_id, vocabulary)
            .ok_or_else(|| refuse("eos_token_id", head.eos_token_id.to_string()))?;
        let pretrained = Pretrained { model, vocabulary, tokeniser, ends, files, parameters };
        pretrained.check()?;
        Ok(pretrained)
    }

    /// Puts its weights into stages of the same model, however they are cut. It may have less context: what is learnt of
    /// later positions is left out.
    pub fn put_into(&self, stages: &mut [Box<dyn Stage>]) -> Result<(), ImportError> {
        for stage in stages {
            for (parameter, span) in stage.layout().entries().to_vec() {
                let (shape, bytes) = self.tensor(&parameter.name, stage.dtype())?;
                let part = parameter.part_of(&shape, &bytes).ok_or_else(|| ImportError::Other {
                    name: parameter.name.clone(),
                    shape,
                    needed: parameter.shape.clone(),
                })?;
                stage.write(State::Weights, span.start, part)?;
            }
        }
        Ok(())
    }

    /// The names of its parameters.
    pub fn parameters(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// The little-endian elements of a parameter.
    pub fn read(&self, parameter: &str, dtype: Dtype) -> Result<Vec<u8>, ImportError> {
        Ok(self.tensor(parameter, dtype)?.1)
    }

    /// The same with its shape.
    fn tensor(&self, parameter: &str, dtype: Dtype) -> Result<(Vec<usize>, Vec<u8>), ImportError> {
        let (number, name) = self.place(parameter)?;
        let (path, file) = &self.files[number];
        let wrong = |why: String| ImportError::Tensor { path: path.clone(), name: name.into(), why };
        let tensors = tensors_of(path, file)?;
        let view = tensors.tensor(name).map_err(|error| wrong(error.to_string()))?;
        let bytes = to_model(view.data(), view.dtype(), dtype);
        let bytes = bytes.ok_or_else(|| wrong(format!("it holds {:?}", view.dtype())))?;
        Ok((view.shape().to_vec(), bytes))
    }

    fn place(&self, parameter: &str) -> Result<(usize, &str), ImportError> {
        let place = self.parameters.get(parameter);
        let (number, name) = place.ok_or_else(|| ImportError::Missing { name: parameter.into() })?;
        Ok((*number, name))
    }

    /// Every parameter is there in its shape, and nothing else is.
    fn check(&self) -> Result<(), ImportError> {
        let architecture = self.model.architecture(self.vocabulary);
        let mut unknown = self.parameters.clone();
        for parameter in architecture.units().into_iter().flat_map(|unit| architecture.parameters(unit)) {
            let (number, name) = self.place(&parameter.name)?;
            let (path, file) = &self.files[number];
            let wrong = |why: String| ImportError::Tensor { path: path.clone(), name: name.into(), why };
            let tensors = tensors_of(path, file)?;
            let view = tensors.tensor(name).map_err(|error| wrong(error.to_string()))?;
            if view.shape() != parameter.shape {
                return Err(wrong(format!(
                    "its shape is {:?}, and config.json makes it {:?}",
                    view.shape(),
                    parameter.shape
                )));
            }
            unknown.remove(&parameter.name);
        }
        match unknown.into_iter().next() {
            Some((_, (number, name))) => {
                let why = "the model that config.json describes has no such tensor".into();
                Err(ImportError::Tensor { path: self.files[number].0.clone(), name, why })
            }
            None => Ok(()),
        }
    }
}

/// The tokens that end a text: none, one or some; nothing if that cannot be.
fn ends(ids: &serde_json::Value, vocabulary: usize) -> Option<Vec<u32>> {
    let ids = match ids {
        serde_json::Value::Null => &[],
        serde_json::Value::Array(ids) => ids.as_slice(),
        id => std::slice::from_ref(id),
    };
    let known =
        |id: &serde_json::Value| u32::try_from(id.as_u64()?).ok().filter(|&id| (id as usize) < vocabulary);
    ids.iter().map(known).collect::<Option<Vec<u32>>>().filter(|ids| ids.len() <= MOST_ENDS)
}

/// The file of each parameter, and its name there. A parameter that stands twice, or elsewhere than the index says, is
/// refused: whichever of them were taken, somebody would have meant the other.
fn places(
    model: &ModelConfig,
    files: &[MappedFile],
    index: Option<&Index>,
) -> Result<BTreeMap<String, (usize, String)>, ImportError> {
    let mut places: BTreeMap<String, (usize, String)> = BTreeMap::new();
    for (number, (path, file)) in files.iter().enumerate() {
        for name in tensors_of(path, file)?.names() {
            let Some(parameter) = family::parameter_of(model.family, name, model.tied) else { continue };
            let wrong = |why: String| ImportError::Tensor { path: path.clone(), name: name.into(), why };
            if let Some((other, before)) = places.get(parameter) {
                let there = files[*other].0.display();
                return Err(wrong(format!(
                    "{before} in {there} is the same parameter, and nobody knows which of them counts; remove one of them"
                )));
            }
            places.insert(parameter.to_string(), (number, name.to_string()));
        }
    }
    let Some(Index { weight_map }) = index else { return Ok(places) };
    for (number, name) in places.values() {
        let path = &files[*number].0;
        let said = weight_map.get(name).map(String::as_str);
        if said.is_none() || said != path.file_name().and_then(|file| file.to_str()) {
            let said = said.unwrap_or("no file");
            let why =
                format!("the index says that {said} holds it; save the model again with save_pretrained");
            return Err(ImportError::Tensor { path: path.clone(), name: name.clone(), why });
        }
    }
    let is_missing = |name: &str| {
        let parameter = family::parameter_of(model.family, name, model.tied);
        parameter.is_some_and(|parameter| !places.contains_key(parameter))
    };
    if let Some((name, file)) = weight_map.iter().find(|(name, _)| is_missing(name)) {
        let path = files.iter().map(|(path, _)| path).find(|path| path.ends_with(file));
        let why = "the index says that it is there, and it is not; save the model again with save_pretrained";
        return Err(ImportError::Tensor {
            path: path.cloned().unwrap_or_default(),
            name: name.clone(),
            why: why.into(),
        });
    }
    Ok(places)
}

/// The files that hold weights, and the index that names them, if there is one. Beside a whole file an index counts for
/// nothing, as for `transformers`.
fn map_files(folder: &Path) -> Result<(Vec<MappedFile>, Option<Index>), ImportError> {
    let (whole, path) = (folder.join("model.safetensors"), folder.join("model.safetensors.index.json"));
    let mut index = None;
    let names: Vec<PathBuf> = if whole.exists() {
        vec![whole]
    } else if path.exists() {
        let Index { weight_map } = serde_json::from_str(&read(&path)?)
            .map_err(|source| ImportError::Json { path: path.clone(), source })?;
        let names: BTreeSet<String> = weight_map.values().cloned().collect();
        index = Some(Index { weight_map });
        // A name that leads out of the folder is none that `transformers` wrote.
        if let Some(name) = names.iter().find(|name| name.contains(['/', '\\'])) {
            return Err(ImportError::Outside { path, name: name.clone() });
        }
        names.into_iter().map(|name| folder.join(name)).collect()
    } else {
        return Err(ImportError::NoWeights { folder: folder.to_path_buf() });
    };
    let map = |path: PathBuf| {
        let trouble = |source| ImportError::Read { path: path.clone(), source };
        let file = File::open(&path).map_err(trouble)?;
        let map = map_file(&file).map_err(trouble)?;
        Ok((path, map))
    };
    let files = names.into_iter().map(map).collect::<Result<Vec<_>, ImportError>>()?;
    Ok((files, index))
}

#[allow(unsafe_code)]
fn map_file(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: whoever changes the file while it is read gets a model of nonsense, or ends this process; the same holds for
    // every program that maps it.
    unsafe { Mmap::map(file) }
}

fn tensors_of<'a>(path: &Path, file: &'a Mmap) -> Result<SafeTensors<'a>, ImportError> {
    SafeTensors::deserialize(file).map_err(|source| ImportError::Format { path: path.to_path_buf(), source })
}

fn read(path: &Path) -> Result<String, ImportError> {
    let trouble = |source| ImportError::Read { path: path.to_path_buf(), source };
    let bytes = std::fs::metadata(path).map_err(trouble)?.len();
    if bytes > MOST_JSON_BYTES {
        return Err(trouble(std::io::Error::other(format!("{bytes} bytes are too many for such a file"))));
    }
    std::fs::read_to_string(path).map_err(trouble)
}

/// Why a folder could not be read; nothing has changed then.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum ImportError {
    #[error("cannot read {}: {source}; name a folder that transformers' save_pretrained wrote", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is no JSON that transformers writes: {source}", path.display())]
    Json { path: PathBuf, source: serde_json::Error },
    #[error(
        "{} says {field} = {value}, which is not implemented; the model would compute something else, so it is refused",
        path.display()
    )]
    Field { path: PathBuf, field: String, value: String },
    #[error(
        "{} holds no model.safetensors; load the model with transformers and save it with \
         save_pretrained(FOLDER, safe_serialization=True)",
        folder.display()
    )]
    NoWeights { folder: PathBuf },
    #[error("{} names {name}, which is not in the same folder; refused", path.display())]
    Outside { path: PathBuf, name: String },
    #[error("{} is damaged, or no safetensors file: {source}", path.display())]
    Format { path: PathBuf, source: safetensors::SafeTensorError },
    #[error("the files have no tensor {name}, which the model that config.json describes needs")]
    Missing { name: String },
    #[error("the files are of another model: their {name} has shape {shape:?}, and {needed:?} is needed")]
    Other { name: String, shape: Vec<usize>, needed: Vec<usize> },
    #[error("tensor {name} in {} cannot be used: {why}", path.display())]
    Tensor { path: PathBuf, name: String, why: String },
    #[error(transparent)]
    Stage(#[from] StageError),
}
