//! The folder while it is being built: what is planned, what is done, and who is at work.
//!
//! Beside the shards, which appear whole under their final names, `building/` holds the plan, and for each
//! finished shard a record of where in the inputs it ends. Records are written after their shards, and
//! `corpus.json` after everything: so whatever happens at whatever instant, what is recorded is there.

use std::fs::File;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::batches::Position;
use super::inputs::Input;
use super::{BUILDING, BuildError, Options, TokeniserChoice};
use crate::folder::{self, FolderError, LeftOut, MANIFEST, ShardEntry, TOKENISER};
use crate::shard::{self, Shard};

/// What a build was asked for: everything that the result depends on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Plan {
    version: u32,
    tokeniser: PlannedTokeniser,
    field: String,
    skip_bad: bool,
    shard_tokens: u64,
    inputs: Vec<Input>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum PlannedTokeniser {
    Bytes,
    File { hash: String, end_of_text: Option<String> },
    Train { vocabulary: usize, sample_bytes: usize, seed: u64 },
}

impl Plan {
    pub(super) fn new(options: &Options, inputs: &[Input]) -> Plan {
        let tokeniser = match &options.tokeniser {
            TokeniserChoice::Bytes => PlannedTokeniser::Bytes,
            TokeniserChoice::Json { json, end_of_text } => PlannedTokeniser::File {
                hash: blake3::hash(json.as_bytes()).to_hex().to_string(),
                end_of_text: end_of_text.clone(),
            },
            &TokeniserChoice::Train { vocabulary, sample_bytes, seed } => {
                PlannedTokeniser::Train { vocabulary, sample_bytes, seed }
            }
        };
        Plan {
            version: folder::FORMAT,
            tokeniser,
            field: options.field.clone(),
            skip_bad: options.skip_bad,
            shard_tokens: options.shard_tokens,
            inputs: inputs.to_vec(),
        }
    }

    /// What is not as it was in another plan.
    pub(super) fn difference(&self, other: &Plan) -> String {
        match self.inputs.iter().zip(&other.inputs).find(|(a, b)| a != b) {
            Some((a, b)) if a.path == b.path => format!("{} has changed", a.path.display()),
            _ if self.inputs != other.inputs => "other inputs".into(),
            _ if self.tokeniser != other.tokeniser => "another tokeniser".into(),
            _ => "other settings".into(),
        }
    }
}

/// A finished shard, and where the next one begins.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    pub(super) shard: ShardEntry,
    pub(super) left_out: LeftOut,
    pub(super) next: Position,
}

/// The folder, and the right to build in it.
pub(super) struct Site {
    folder: PathBuf,
    _lock: File,
}

impl Site {
    /// Takes the folder for this plan: a new one, or one in which the same plan was begun.
    pub(super) fn claim<Plan: Serialize + DeserializeOwned + PartialEq>(
        folder: &Path,
        plan: &Plan,
        difference: impl FnOnce(&Plan, &Plan) -> String,
        restart: bool,
    ) -> Result<Site, BuildError> {
        let building = folder.join(BUILDING);
        let begun = building.join("plan.json");
        let finished = folder.join(MANIFEST).exists();
        let ours = finished || building.exists();
        if !ours && folder.read_dir().is_ok_and(|mut entries| entries.next().is_some()) {
            return Err(BuildError::NotEmpty { path: folder.to_path_buf() });
        }
        if finished && !restart && !building.exists() {
            return Err(BuildError::Finished { path: folder.to_path_buf() });
        }
        std::fs::create_dir_all(&building).map_err(|error| FolderError::io("create", &building, error))?;
        let site = Site { _lock: lock(&building)?, folder: folder.to_path_buf() };
        if restart {
            site.clear()?;
        }
        if begun.exists() {
            // One that cannot be read is of another kind of build.
            let other: Option<Plan> = serde_json::from_str(&folder::read(&begun)?).ok();
            if other.as_ref() != Some(plan) {
                let difference =
                    other.map_or("another kind of input".into(), |other| difference(plan, &other));
                return Err(BuildError::OtherPlan { path: folder.to_path_buf(), difference });
            }
        } else {
            folder::write_whole(&begun, &to_json(plan))?;
        }
        shard::remove_partial(folder);
        Ok(site)
    }

    pub(super) fn path(&self) -> &Path {
        &self.folder
    }

    /// The tokeniser that was trained already.
    pub(super) fn trained(&self) -> Option<String> {
        std::fs::read_to_string(self.folder.join(TOKENISER)).ok()
    }

    pub(super) fn shard_path(&self, number: usize) -> PathBuf {
        self.folder.join(format!("{number:05}.shard"))
    }

    /// The shards that are finished, from the first on; each is opened, which checks it.
    pub(super) fn records(&self) -> Vec<Record> {
        let finished = |number: usize| -> Option<Record> {
            let record: Record = serde_json::from_str(&folder::read(&self.record_path(number)).ok()?).ok()?;
            let shard = Shard::open(&self.shard_path(number)).ok()?;
            (shard.content_hash().to_hex().as_str() == record.shard.hash).then_some(record)
        };
        (0..).map_while(finished).collect()
    }

    /// Records that a shard is finished.
    pub(super) fn record(&self, number: usize, record: &Record) -> Result<(), BuildError> {
        Ok(folder::write_whole(&self.record_path(number), &to_json(record))?)
    }

    /// Begins with the first shard again, whatever is finished: for what takes no longer than checking would.
    pub(super) fn forget_shards(&self) {
        let _ = std::fs::remove_file(self.record_path(0)); // without it, no later one counts
    }

    /// The corpus is complete: nothing of the building is needed any more.
    pub(super) fn leave(self) {
        let _ = std::fs::remove_dir_all(self.folder.join(BUILDING)); // what is left of it harms nobody
    }

    fn record_path(&self, number: usize) -> PathBuf {
        self.folder.join(BUILDING).join(format!("{number:05}.json"))
    }

    /// Removes what an earlier build made, `corpus.json` first.
    fn clear(&self) -> Result<(), BuildError> {
        let mut doomed = vec![self.folder.join(MANIFEST), self.folder.join(TOKENISER)];
        for folder in [self.folder.join(BUILDING), self.folder.clone()] {
            let entries = folder.read_dir().map_err(|error| FolderError::io("list", &folder, error))?;
            doomed.extend(entries.flatten().map(|entry| entry.path()).filter(|path| is_ours(path)));
        }
        for path in doomed {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(FolderError::io("remove", &path, error).into());
                }
                _ => {}
            }
        }
        Ok(())
    }
}

/// Whether a file is one of the shards, records and plans that a build makes.
fn is_ours(path: &Path) -> bool {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    let ending = path.extension().and_then(|ending| ending.to_str()).unwrap_or_default();
    let numbered = stem.len() == 5 && stem.bytes().all(|byte| byte.is_ascii_digit());
    matches!((numbered, ending), (true, "shard" | "json")) || (stem, ending) == ("plan", "json")
}

fn lock(building: &Path) -> Result<File, BuildError> {
    let path = building.join("lock");
    let file = File::create(&path).map_err(|error| FolderError::io("create", &path, error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(BuildError::Busy { path: building.to_path_buf() }),
        Err(std::fs::TryLockError::Error(_)) => Ok(file), // a file system without locks
    }
}

pub(super) fn to_json(value: &impl Serialize) -> Vec<u8> {
    let mut json = serde_json::to_vec_pretty(value).unwrap_or_default(); // plain numbers and strings
    json.push(b'\n');
    json
}
