//! Why a corpus could not be built.

use std::io;
use std::path::PathBuf;

use super::batches::LONGEST_LINE_BYTES;
use super::inputs::Input;
use super::records::Trouble;
use crate::folder::{FolderError, MANIFEST};
use crate::shard::ShardError;
use crate::tokeniser::TokeniserError;

/// Why a corpus could not be built. Shards that were finished before are kept, and used when the same build is
/// started again.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    /// Nothing was named.
    #[error("there is nothing to read; name files, folders or patterns such as 'data/*.jsonl.gz'")]
    NoInputs,
    /// A folder has nothing that can be read.
    #[error(
        "{} holds no file that can be read (.txt, .md, .jsonl, .ndjson, each also with .gz or .zst); name other \
         files, or say with --format what they are",
        path.display()
    )]
    EmptyFolder {
        /// Which folder.
        path: PathBuf,
    },
    /// A pattern means nothing.
    #[error("the pattern '{pattern}' cannot be used: {why}; check it, and put it in quotes")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Why.
        why: String,
    },
    /// A file could not be opened.
    #[error("could not read {}: {source}; check the path and its permissions", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A name says nothing of its contents.
    #[error(
        "{} has an ending that says nothing: known are .txt, .md, .jsonl and .ndjson, each also with .gz or .zst; \
         rename it, or say with --format text or --format jsonl what it is",
        path.display()
    )]
    UnknownEnding {
        /// Which file.
        path: PathBuf,
    },
    /// A file is damaged or cut short.
    #[error(
        "{} cannot be read to its end: {source}; it is damaged or was not copied whole, so get it again",
        path.display()
    )]
    Broken {
        /// Which file.
        path: PathBuf,
        /// What was found.
        source: io::Error,
    },
    /// A line of JSON is longer than can be meant.
    #[error(
        "{}, line {line}: it is longer than {} MiB; is this a file with one JSON object a line?",
        path.display(),
        LONGEST_LINE_BYTES >> 20
    )]
    LongLine {
        /// Which file.
        path: PathBuf,
        /// Which line.
        line: u64,
    },
    /// A document cannot be used.
    #[error("{}, line {line}: {trouble}; mend it, or leave such documents out with --skip-bad", path.display())]
    BadDocument {
        /// Which file.
        path: PathBuf,
        /// The line at which the document begins.
        line: u64,
        /// What is wrong with it.
        trouble: Trouble,
    },
    /// The inputs have no text.
    #[error("the inputs hold no document with text, so there is nothing to train on; name others")]
    Empty,
    /// The tokeniser cannot be used or made.
    #[error(transparent)]
    Tokeniser(#[from] TokeniserError),
    /// Another build was begun there.
    #[error(
        "{} holds an unfinished build of something else ({difference}); name another folder, or throw that build \
         away with --restart",
        path.display()
    )]
    OtherPlan {
        /// Which folder.
        path: PathBuf,
        /// What is not as it was.
        difference: String,
    },
    /// A corpus is there already.
    #[error(
        "{} holds a corpus already, and nothing was changed; name another folder, or build it anew with --restart",
        path.display()
    )]
    Finished {
        /// Which folder.
        path: PathBuf,
    },
    /// There is something else in the folder.
    #[error("{} is not empty and holds no corpus, so nothing was written there; name a new folder", path.display())]
    NotEmpty {
        /// Which folder.
        path: PathBuf,
    },
    /// Somebody else is at work.
    #[error("another process is building in {}; wait for it, or name another folder", path.display())]
    Busy {
        /// Where.
        path: PathBuf,
    },
    /// An input is not what it was at the start.
    #[error(
        "{} changed while it was being read, so {MANIFEST} was not written; start again with --restart when it \
         is complete",
        path.display()
    )]
    Changed {
        /// Which file.
        path: PathBuf,
    },
    /// A file of tokens cannot be imported.
    #[error("{} cannot be imported: {what}", path.display())]
    Import {
        /// Which file.
        path: PathBuf,
        /// What is wrong, and what to do.
        what: String,
    },
    /// Somebody asked to stop.
    #[error("stopped; what is finished is kept, and the same command goes on from there")]
    Interrupted,
    /// The folder cannot be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// A shard could not be written.
    #[error(transparent)]
    Shard(#[from] ShardError),
}

impl BuildError {
    /// An input whose contents cannot be unpacked.
    pub(super) fn broken(input: &Input, source: io::Error) -> BuildError {
        BuildError::Broken { path: input.path.clone(), source }
    }
}
