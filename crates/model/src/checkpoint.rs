//! Checkpoints: one safetensors file a stage and a manifest, in a folder that appears whole or not at all.
//!
//! A checkpoint is written aside, synced, and renamed: a crash at any instant leaves the older ones and perhaps
//! a `.writing` folder that the next one sweeps away. Parameters carry the model's names, so a checkpoint can be
//! read with another number of stages; the optimiser's moments stand beside them as `optimiser.N.NAME`.

mod copying;
mod files;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use safetensors::tensor::TensorView;
use safetensors::{SafeTensors, serialize};
use serde::{Deserialize, Serialize};
use starling_corpus::Tokeniser;

pub use copying::{CopyError, Copying, PIECE_BYTES, Piece, copy, newest_manifest, read_piece};
pub use files::{list, set_aside, sweep};

use crate::engine::Dtype;
use crate::pipeline::weights_hash;
use crate::run::{CheckpointConfig, Definition, Run};
use crate::stage::{Stage, StageError, State};

/// The version of the format that this binary writes and reads.
pub const FORMAT: u32 = 1;
const MANIFEST: &str = "manifest.json";
/// Begins the names of tensors that are not the model's.
const MOMENTS: &str = "optimiser.";
/// A manifest lists files and settings; more than this is none of ours.
const MOST_MANIFEST_BYTES: u64 = 64 << 20;

/// What a checkpoint is, in its `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`].
    pub format: u32,
    /// The run's identity.
    pub identity: String,
    /// What the identity is the hash of.
    pub definition: Definition,
    /// The run as it was resolved when this was written.
    pub run: Run,
    /// From text to tokens and back.
    pub tokeniser: Tokeniser,
    /// Steps done.
    pub step: u64,
    /// The sampler's position: the number of the next sample.
    pub next_sample: u64,
    /// Steps whose update was skipped: the gradient was not finite, or was left out.
    pub skipped: u64,
    /// Learning rate of the next step, as the schedule has it.
    pub next_lr: f64,
    /// How elements are stored.
    pub dtype: Dtype,
    /// Whose arithmetic made it.
    pub class: String,
    /// Vectors that the optimiser keeps for each parameter.
    pub moments: usize,
    /// Hash of all weights.
    pub weights_hash: String,
    /// The files, in the order of stages.
    pub files: Vec<FileEntry>,
    /// BLAKE3 of all of the above.
    pub checksum: String,
}

impl Manifest {
    /// What `checksum` should be.
    pub fn computed_checksum(&self) -> String {
        let blank = Manifest { checksum: String::new(), ..self.clone() };
        let json = serde_json::to_vec(&blank).expect("a manifest is plain numbers and strings");
        blake3::hash(&json).to_hex().to_string()
    }
}

/// One file of a checkpoint.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name in the folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// BLAKE3 of its contents, in hexadecimal.
    pub blake3: String,
}

/// What a checkpoint says of a run besides the stages' state.
#[derive(Clone, Debug)]
pub struct Progress {
    /// The run.
    pub run: Run,
    /// What defines its training.
    pub definition: Definition,
    /// From text to tokens and back.
    pub tokeniser: Tokeniser,
    /// Steps whose update was skipped.
    pub skipped: u64,
}

/// Writes the state of all stages as `folder/step-N`, then removes what `keep` says is old.
pub fn save(folder: &Path, progress: &Progress, stages: &[Box<dyn Stage>]) -> Result<PathBuf, SaveError> {
    let step = stages.first().map_or(0, |stage| stage.version());
    sweep(folder)?;
    let mut draft = Draft::new(folder, step)?;
    let mut written = BTreeSet::new();
    for (number, stage) in stages.iter().enumerate() {
        draft.put(number, Part::of(&**stage, &written)?)?;
        written.extend(stage.layout().entries().iter().map(|(parameter, _)| parameter.name.clone()));
    }
    let path = draft.publish(progress, stages.len())?;
    prune(folder, &progress.run.checkpoint, step)?;
    Ok(path)
}

/// Removes checkpoints that are old by what the run keeps, but that of `newest`.
pub fn prune(folder: &Path, keep: &CheckpointConfig, newest: u64) -> Result<(), SaveError> {
    files::prune(folder, newest, keep.keep, keep.keep_every)
}

/// The state of one stage, as it stands in a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub struct Part {
    /// What its numbers mean.
    pub head: PartHead,
    /// A safetensors file.
    pub file: Vec<u8>,
}

/// What must be known of a part besides its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartHead {
    /// How elements are stored.
    pub dtype: Dtype,
    /// Whose arithmetic made it.
    pub class: String,
    /// Vectors that the optimiser keeps for each parameter.
    pub moments: usize,
    /// BLAKE3 of each parameter's weights.
    pub hashes: BTreeMap<String, [u8; 32]>,
}

impl Part {
    /// The state of a stage, but parameters that stand elsewhere in the checkpoint.
    pub fn of(stage: &dyn Stage, elsewhere: &BTreeSet<String>) -> Result<Part, SaveError> {
        let mut tensors: Vec<(String, Vec<usize>, Vec<u8>)> = Vec::new();
        for (parameter, span) in stage.layout().entries() {
            if elsewhere.contains(&parameter.name) {
                continue;
            }
            for (prefix, state) in states(stage.moments()) {
                let bytes = stage.read(stage.version(), state, span.range())?;
                tensors.push((format!("{prefix}{}", parameter.name), parameter.shape.clone(), bytes));
            }
        }
        let (dtype, class, moments) = (stage.dtype(), stage.class(), stage.moments());
        let head = PartHead { dtype, class, moments, hashes: stage.weight_hashes() };
        let views =
            tensors.iter().map(|(name, shape, bytes)| (name.as_str(), shape.clone(), bytes.as_slice()));
        Ok(Part { head, file: pack(dtype, views)? })
    }

    /// Puts a state into one stage, from a file that has at least its tensors.
    pub fn restore(file: &[u8], stage: &mut dyn Stage, step: u64) -> Result<(), RestoreError> {
        let dtype = stage.dtype();
        let tensors = read_tensors([file], dtype)?;
        for (state, start, bytes) in writes_for(stage, &tensors)? {
            stage.write(state, start, bytes)?;
        }
        stage.restore(step);
        Ok(())
    }
}

/// A safetensors file of these.
fn pack<'a>(
    dtype: Dtype,
    tensors: impl Iterator<Item = (&'a str, Vec<usize>, &'a [u8])>,
) -> Result<Vec<u8>, SaveError> {
    let mut views = Vec::new();
    for (name, shape, bytes) in tensors {
        views.push((name, TensorView::new(tensor_dtype(dtype), shape, bytes)?));
    }
    Ok(serialize(views, None)?)
}

/// A checkpoint that is being written: its parts may come in any order, and each is safe when [`Draft::put`] returns.
/// Dropped unpublished, it is removed.
pub struct Draft {
    folder: PathBuf,
    step: u64,
    aside: files::Aside,
    parts: BTreeMap<usize, (PartHead, FileEntry)>,
}

impl Draft {
    /// Starts the checkpoint of a step in `folder`.
    pub fn new(folder: &Path, step: u64) -> Result<Draft, SaveError> {
        let aside = files::Aside::new(folder, step)?;
        Ok(Draft { folder: folder.to_path_buf(), step, aside, parts: BTreeMap::new() })
    }

    /// Whose checkpoint it is.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Whether the part of the stage of this number is there.
    pub fn has(&self, number: usize) -> bool {
        self.parts.contains_key(&number)
    }

    /// Whether the parts of all stages are there.
    pub fn is_whole(&self, stages: usize) -> bool {
        self.parts.keys().copied().eq(0..stages)
    }

    /// Writes the part of the stage of this number.
    pub fn put(&mut self, number: usize, part: Part) -> Result<(), SaveError> {
        let name = format!("stage-{number}.safetensors");
        self.aside.write(&name, &part.file)?;
        let blake3 = blake3::hash(&part.file).to_hex().to_string();
        let entry = FileEntry { name, bytes: part.file.len() as u64, blake3 };
        self.parts.insert(number, (part.head, entry));
        Ok(())
    }

    /// Makes it appear under its name, if the parts of all stages are there.
    pub fn publish(self, progress: &Progress, stages: usize) -> Result<PathBuf, SaveError> {
        if !self.is_whole(stages) {
            return Err(SaveError::Parts { step: self.step, have: self.parts.len(), want: stages });
        }
        let Draft { folder, step, aside, parts } = self;
        let Progress { run, definition, tokeniser, skipped } = progress;
        let (heads, files): (Vec<PartHead>, Vec<FileEntry>) = parts.into_values().unzip();
        let first = heads.first();
        let manifest = Manifest {
            format: FORMAT,
            identity: definition.identity(),
            definition: definition.clone(),
            run: run.clone(),
            tokeniser: tokeniser.clone(),
            step,
            next_sample: step * u64::from(run.train.batch),
            skipped: *skipped,
            next_lr: run.optimiser.lr_at(step, run.train.steps),
            dtype: first.map_or(Dtype::F32, |head| head.dtype),
            class: first.map(|head| head.class.clone()).unwrap_or_default(),
            moments: first.map_or(0, |head| head.moments),
            weights_hash: weights_hash(heads.into_iter().map(|head| head.hashes)),
            files,
            checksum: String::new(),
        };
        let manifest = Manifest { checksum: manifest.computed_checksum(), ..manifest };
        let json = serde_json::to_vec_pretty(&manifest).map_err(SaveError::Manifest)?;
        aside.write(MANIFEST, &json)?;
        let target = folder.join(files::name(step));
        aside.publish(&target)?;
        Ok(target)
    }
}

/// Shapes and bytes of tensors, by name.
pub type Tensors<'a> = BTreeMap<String, (Vec<usize>, &'a [u8])>;

/// A checkpoint that was read and checked, byte by byte.
pub struct Checkpoint {
    /// What it is.
    pub manifest: Manifest,
    files: Vec<Vec<u8>>,
}

impl Checkpoint {
    /// Opens the checkpoint in `folder`, and checks the hash of every file.
    pub fn open(folder: &Path) -> Result<Checkpoint, OpenError> {
        let path = folder.join(MANIFEST);
        let manifest = parse_manifest(&files::read(&path, MOST_MANIFEST_BYTES)?)
            .map_err(|why| OpenError::Manifest { path: path.clone(), why })?;
        if folder.file_name().is_some_and(|name| name.to_string_lossy() != files::name(manifest.step)) {
            let why = format!("it is the manifest of step {}, in another step's folder", manifest.step);
            return Err(OpenError::Manifest { path, why });
        }
        let read = |entry: &FileEntry| files::read(&folder.join(&entry.name), entry.bytes);
        let files = manifest.files.iter().map(read).collect::<Result<_, _>>()?;
        Checkpoint::new(manifest, files)
            .map_err(|(name, why)| OpenError::Altered { path: folder.join(name), why })
    }

    /// From a manifest and the contents of its files, in order; says which file is not as the manifest says.
    pub fn new(manifest: Manifest, files: Vec<Vec<u8>>) -> Result<Checkpoint, (String, String)> {
        let mut total = 0;
        for (i, entry) in manifest.files.iter().enumerate() {
            let bytes = files.get(i).map(Vec::as_slice).unwrap_or_default();
            total += bytes.len() as u128;
            if bytes.len() as u64 != entry.bytes {
                let why = format!("it has {} bytes instead of {}", bytes.len(), entry.bytes);
                return Err((entry.name.clone(), why));
            }
            if blake3::hash(bytes).to_hex().as_str() != entry.blake3 {
                return Err((entry.name.clone(), "its hash is not the one in the manifest".into()));
            }
        }
        let manifest_is_wrong = |why: &str| Err((MANIFEST.to_string(), why.to_string()));
        // Before anything is allocated for the model: its parameters must all be in the files.
        let elements = manifest.run.model.architecture(manifest.definition.vocabulary).elements();
        let vectors = 1 + manifest.moments as u128;
        if elements.saturating_mul(vectors * manifest.dtype.size() as u128) > total {
            return manifest_is_wrong("the model it describes is larger than its files");
        }
        let checkpoint = Checkpoint { manifest, files };
        match checkpoint.tensors() {
            Err(error) => manifest_is_wrong(&error.to_string()),
            Ok(tensors) => {
                let weights = tensors.iter().filter(|(name, _)| !name.starts_with(MOMENTS));
                let hashes =
                    weights.map(|(name, (_, bytes))| (name.clone(), *blake3::hash(bytes).as_bytes()));
                if weights_hash(std::iter::once(hashes.collect())) != checkpoint.manifest.weights_hash {
                    return manifest_is_wrong("the weights do not have the hash that it names");
                }
                Ok(checkpoint)
            }
        }
    }

    /// Puts the state into stages, however they are cut. All is checked before the first stage changes.
    pub fn restore(&self, stages: &mut [Box<dyn Stage>]) -> Result<(), RestoreError> {
        let tensors = self.tensors()?;
        let mut found: Vec<Writes<'_>> = Vec::new();
        for stage in stages.iter() {
            if stage.dtype() != self.manifest.dtype {
                return Err(RestoreError::Dtype { have: self.manifest.dtype, want: stage.dtype() });
            }
            found.push(writes_for(&**stage, &tensors)?);
        }
        for (stage, writes) in stages.iter_mut().zip(found) {
            for (state, start, bytes) in writes {
                stage.write(state, start, bytes)?;
            }
            stage.restore(self.manifest.step);
        }
        Ok(())
    }

    /// A safetensors file of these parameters and what the optimiser keeps of them, for [`Part::restore`].
    pub fn extract(&self, parameters: &[String]) -> Result<Vec<u8>, RestoreError> {
        let tensors = self.tensors()?;
        let mut wanted = Vec::new();
        for parameter in parameters {
            for (prefix, _) in states(self.manifest.moments) {
                let name = format!("{prefix}{parameter}");
                let Some((name, (shape, bytes))) = tensors.get_key_value(&name) else {
                    return Err(RestoreError::Missing { name });
                };
                wanted.push((name.as_str(), shape.clone(), *bytes));
            }
        }
        pack(self.manifest.dtype, wanted.into_iter()).map_err(|error| RestoreError::Format(error.to_string()))
    }

    /// Names, shapes and bytes of all tensors.
    pub fn tensors(&self) -> Result<Tensors<'_>, RestoreError> {
        read_tensors(self.files.iter().map(Vec::as_slice), self.manifest.dtype)
    }
}

fn read_tensors<'a>(
    files: impl IntoIterator<Item = &'a [u8]>,
    dtype: Dtype,
) -> Result<Tensors<'a>, RestoreError> {
    let mut tensors = BTreeMap::new();
    for bytes in files {
        for (name, view) in SafeTensors::deserialize(bytes)?.tensors() {
            if view.dtype() != tensor_dtype(dtype) {
                return Err(RestoreError::Format(format!("{name} is {:?}", view.dtype())));
            }
            tensors.insert(name, (view.shape().to_vec(), view.data()));
        }
    }
    Ok(tensors)
}

/// What is to be written where in a stage.
type Writes<'a> = Vec<(State, usize, &'a [u8])>;

fn writes_for<'a>(stage: &dyn Stage, tensors: &Tensors<'a>) -> Result<Writes<'a>, RestoreError> {
    let mut writes = Vec::new();
    for (parameter, span) in stage.layout().entries() {
        for (prefix, state) in states(stage.moments()) {
            let name = format!("{prefix}{}", parameter.name);
            let (shape, bytes) =
                tensors.get(&name).ok_or_else(|| RestoreError::Missing { name: name.clone() })?;
            if *shape != parameter.shape {
                let (have, want) = (shape.clone(), parameter.shape.clone());
                return Err(RestoreError::Shape { name, have, want });
            }
            writes.push((state, span.start, *bytes));
        }
    }
    Ok(writes)
}

/// Reads a manifest; what it says is checked as far as it can be without the files.
pub fn parse_manifest(bytes: &[u8]) -> Result<Manifest, String> {
    #[derive(Deserialize)]
    struct Head {
        format: u32,
    }
    let head: Head = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if head.format != FORMAT {
        return Err(format!("it is of format {}, and this binary reads format {FORMAT}", head.format));
    }
    let manifest: Manifest = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if manifest.checksum != manifest.computed_checksum() {
        return Err("it was damaged or altered: its checksum is wrong".into());
    }
    if manifest.identity != manifest.definition.identity() {
        return Err("its identity is not the hash of its definition".into());
    }
    if let Some(problem) = manifest.run.problems().first() {
        return Err(format!("{}: {}", problem.key, problem.message));
    }
    let Definition { vocabulary, corpus, .. } = &manifest.definition;
    if manifest.run.definition(*vocabulary, corpus.clone()) != manifest.definition {
        return Err("its run is not the one that its definition defines".into());
    }
    if manifest.skipped > manifest.step {
        return Err("it says that more steps were skipped than were done".into());
    }
    if Some(manifest.next_sample) != manifest.step.checked_mul(manifest.run.train.batch.into()) {
        return Err("its sampler's position does not belong to its step".into());
    }
    // A name with a path in it could lead anywhere.
    if let Some(entry) =
        manifest.files.iter().find(|entry| entry.name.contains(['/', '\\']) || entry.name.starts_with('.'))
    {
        return Err(format!("{:?} is no name of a checkpoint's file", entry.name));
    }
    Ok(manifest)
}

/// The vectors of a stage, each with the prefix of its tensors' names.
fn states(moments: usize) -> impl Iterator<Item = (String, State)> {
    let moments = (0..moments).map(|i| (format!("{MOMENTS}{i}."), State::Moment(i)));
    std::iter::once((String::new(), State::Weights)).chain(moments)
}

fn tensor_dtype(dtype: Dtype) -> safetensors::Dtype {
    match dtype {
        Dtype::F32 => safetensors::Dtype::F32,
        Dtype::F64 => safetensors::Dtype::F64,
    }
}

/// Why a checkpoint was not written; older ones stand as they were.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum SaveError {
    #[error(
        "the checkpoint could not be written to {path}: {source}. Older checkpoints, if any, are untouched; make room or mend the permissions, then go on with --resume"
    )]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{have} of {want} stages of step {step} are saved; what is not whole is not kept")]
    Parts { step: u64, have: usize, want: usize },
    #[error("the checkpoint's manifest could not be made: {0}")]
    Manifest(serde_json::Error),
    #[error(transparent)]
    Stage(#[from] StageError),
    #[error("the checkpoint's tensors could not be laid out: {0}")]
    Layout(#[from] safetensors::SafeTensorError),
}

/// Why a checkpoint was not opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum OpenError {
    #[error("{path} could not be read: {source}")]
    Read { path: PathBuf, source: std::io::Error },
    #[error(
        "{path} is longer than the {most} bytes that it should have at the most: it is damaged or no file of a checkpoint"
    )]
    Long { path: PathBuf, most: u64 },
    #[error("{path} is not a checkpoint's manifest that can be used: {why}")]
    Manifest { path: PathBuf, why: String },
    #[error("{path} was damaged or altered: {why}. Use an older checkpoint")]
    Altered { path: PathBuf, why: String },
}

/// Why a checkpoint was not put into the stages.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum RestoreError {
    #[error(
        "the checkpoint holds {have:?} and the run computes in {want:?}; set train.precision to what the checkpoint has"
    )]
    Dtype { have: Dtype, want: Dtype },
    #[error("the checkpoint has no {name}; it is of another model or optimiser")]
    Missing { name: String },
    #[error("{name} is {have:?} in the checkpoint and {want:?} in the run; it is of another model")]
    Shape { name: String, have: Vec<usize>, want: Vec<usize> },
    #[error("the checkpoint's tensors cannot be read: {0}")]
    Format(String),
    #[error(transparent)]
    Stage(#[from] StageError),
}

impl From<safetensors::SafeTensorError> for RestoreError {
    fn from(error: safetensors::SafeTensorError) -> Self {
        RestoreError::Format(error.to_string())
    }
}
