//! A corpus as a folder: token shards, the tokeniser that made them, and `corpus.json`, which says so.
//!
//! ```text
//! corpus.json      what is in the folder; written last, so a folder without it is not a corpus (yet)
//! tokenizer.json   what the ids stand for, unless they are bytes
//! 00000.shard …    the tokens
//! ```

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::shard::{Shard, ShardError};
use crate::shards::Shards;
use crate::tokeniser::{HuggingFace, Tokeniser, TokeniserError};

/// The file that makes a folder a corpus.
pub const MANIFEST: &str = "corpus.json";
/// The tokeniser of a corpus.
pub const TOKENISER: &str = "tokenizer.json";
/// The version of the layout above.
pub const FORMAT: u32 = 1;

/// What `corpus.json` says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// The version of the layout.
    pub format: u32,
    /// What the ids stand for.
    pub tokeniser: TokeniserEntry,
    /// How many ids there are.
    pub vocabulary: u32,
    /// Documents of all shards.
    pub documents: u64,
    /// Tokens of all shards, without ends of text.
    pub tokens: u64,
    /// Bytes of the text that they were made from; 0 if that is not known.
    pub text_bytes: u64,
    /// What of the inputs is not in the shards.
    pub left_out: LeftOut,
    /// The shards, in order.
    pub shards: Vec<ShardEntry>,
}

/// What `corpus.json` says of the tokeniser.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum TokeniserEntry {
    /// Tokens are bytes.
    Bytes,
    /// It is in `tokenizer.json`.
    HuggingFace {
        /// The BLAKE3 hash of that file.
        hash: String,
        /// The token that stands between documents.
        end_of_text: String,
    },
    /// Nobody said what the ids stand for.
    Ids {
        /// The one that stands between documents.
        end_of_text: u32,
    },
}

/// What `corpus.json` says of a shard.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardEntry {
    /// Its name in the folder.
    pub file: String,
    /// Its documents.
    pub documents: u64,
    /// Its tokens.
    pub tokens: u64,
    /// Bytes of the text that it was made from.
    pub text_bytes: u64,
    /// The hash of what it says.
    pub hash: String,
}

/// How much of the inputs was left out, and why.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LeftOut {
    /// Documents without text.
    pub empty: u64,
    /// Documents that are not UTF-8.
    pub not_utf8: u64,
    /// Lines that are not JSON objects.
    pub not_json: u64,
    /// Records without the field, or with something else than text in it.
    pub no_text: u64,
    /// Documents for which the tokeniser has no ids.
    pub unencodable: u64,
}

impl LeftOut {
    /// Documents that should not have been there.
    pub fn bad(&self) -> u64 {
        self.not_utf8 + self.not_json + self.no_text + self.unencodable
    }

    pub(crate) fn add(&mut self, other: LeftOut) {
        self.empty += other.empty;
        self.not_utf8 += other.not_utf8;
        self.not_json += other.not_json;
        self.no_text += other.no_text;
        self.unencodable += other.unencodable;
    }
}

/// An opened corpus folder: what it says of itself, and its tokeniser. Shards are opened when asked for.
#[derive(Debug)]
pub struct CorpusFolder {
    path: PathBuf,
    /// What `corpus.json` says.
    pub manifest: Manifest,
    /// What the ids stand for.
    pub tokeniser: Tokeniser,
}

impl CorpusFolder {
    /// Whether a folder is a corpus, whole or damaged.
    pub fn is_one(path: &Path) -> bool {
        path.join(MANIFEST).is_file()
    }

    /// Reads `corpus.json` and the tokeniser.
    pub fn open(path: &Path) -> Result<CorpusFolder, FolderError> {
        let refused = |what: String| FolderError::Damaged { path: path.to_path_buf(), what };
        if !path.join(MANIFEST).exists() {
            let begun = path.join(crate::build::BUILDING).exists();
            return Err(FolderError::NotACorpus { path: path.to_path_buf(), begun });
        }
        let manifest: Manifest = serde_json::from_str(&read(&path.join(MANIFEST))?)
            .map_err(|error| refused(format!("{MANIFEST} cannot be read: {error}")))?;
        if manifest.format != FORMAT {
            return Err(refused(format!(
                "it has format {}, and this binary reads {FORMAT}",
                manifest.format
            )));
        }
        let tokeniser = match &manifest.tokeniser {
            TokeniserEntry::Bytes => Tokeniser::Bytes,
            TokeniserEntry::Ids { end_of_text } => {
                Tokeniser::Ids { vocabulary: manifest.vocabulary, end_of_text: *end_of_text }
            }
            TokeniserEntry::HuggingFace { hash, end_of_text } => {
                let file = path.join(TOKENISER);
                let json = read(&file)?;
                if blake3::hash(json.as_bytes()).to_hex().as_str() != hash {
                    return Err(refused(format!("{TOKENISER} is not the one that it was built with")));
                }
                let tokeniser = HuggingFace::parse(&json, Some(end_of_text));
                Tokeniser::HuggingFace(
                    tokeniser.map_err(|error| FolderError::Tokeniser { path: file, error })?,
                )
            }
        };
        if tokeniser.vocabulary() != manifest.vocabulary as usize
            || tokeniser.end_of_text() >= manifest.vocabulary
        {
            return Err(refused("its vocabulary is not its tokeniser's".into()));
        }
        Ok(CorpusFolder { path: path.to_path_buf(), manifest, tokeniser })
    }

    /// Opens and checks every shard.
    pub fn shards(&self) -> Result<Shards, FolderError> {
        let refused = |what: String| FolderError::Damaged { path: self.path.clone(), what };
        let mut shards = Vec::new();
        for entry in &self.manifest.shards {
            if entry.file.contains(['/', '\\']) {
                return Err(refused(format!("the shard {:?} is not in the folder", entry.file)));
            }
            let shard = Shard::open(&self.path.join(&entry.file))?;
            if shard.content_hash().to_hex().as_str() != entry.hash {
                return Err(refused(format!("{} is not the shard that {MANIFEST} names", entry.file)));
            }
            if shard.vocabulary() != self.manifest.vocabulary {
                return Err(refused(format!("{} has another vocabulary", entry.file)));
            }
            shards.push(shard);
        }
        Ok(Shards::new(shards))
    }
}

/// How a tokeniser is named in `corpus.json`; only those that a folder can carry.
pub(crate) fn entry_of(tokeniser: &Tokeniser) -> Option<TokeniserEntry> {
    match tokeniser {
        Tokeniser::Bytes => Some(TokeniserEntry::Bytes),
        Tokeniser::Words { .. } => None,
        Tokeniser::Ids { end_of_text, .. } => Some(TokeniserEntry::Ids { end_of_text: *end_of_text }),
        Tokeniser::HuggingFace(file) => Some(TokeniserEntry::HuggingFace {
            hash: blake3::hash(file.json().as_bytes()).to_hex().to_string(),
            end_of_text: file.end_of_text_name(),
        }),
    }
}

/// Writes a file that is there whole or not at all, whatever happens.
pub(crate) fn write_whole(path: &Path, contents: &[u8]) -> Result<(), FolderError> {
    let mut aside = path.as_os_str().to_os_string();
    aside.push(".writing");
    let written = || -> io::Result<()> {
        let mut file = std::fs::File::create(&aside)?;
        file.write_all(contents)?;
        file.sync_all()?;
        std::fs::rename(&aside, path)?;
        crate::shard::sync_folder_of(path)
    };
    written().map_err(|source| FolderError::io("write", path, source))
}

pub(crate) fn read(path: &Path) -> Result<String, FolderError> {
    std::fs::read_to_string(path).map_err(|source| FolderError::io("read", path, source))
}

/// Why a corpus folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// The operating system refused.
    #[error("could not {action} {}: {source}; check that the path exists, is permitted and has room", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// It has no `corpus.json`.
    #[error(
        "{} is a folder, and not a corpus: it has no {MANIFEST}; {}",
        path.display(),
        if *begun { "its build was interrupted, give the same `starling corpus build` again to go on" }
        else { "make one with `starling corpus build`, or name a file" }
    )]
    NotACorpus {
        /// Which folder.
        path: PathBuf,
        /// Whether a build has begun there.
        begun: bool,
    },
    /// It does not hold what it says.
    #[error("the corpus {} is damaged: {what}; nothing was read from it, build it again", path.display())]
    Damaged {
        /// Which folder.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Its tokeniser cannot be used.
    #[error("{}: {error}", path.display())]
    Tokeniser {
        /// Which file.
        path: PathBuf,
        /// Why.
        error: TokeniserError,
    },
    /// A shard cannot be used.
    #[error(transparent)]
    Shard(#[from] ShardError),
}

impl FolderError {
    pub(crate) fn io(action: &'static str, path: &Path, source: io::Error) -> FolderError {
        FolderError::Io { action, path: path.to_path_buf(), source }
    }
}
