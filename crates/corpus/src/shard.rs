//! Token shards: the tokens of many documents in one file, memory-mapped.
//!
//! A shard is checked whole when it is opened (counts against the file's length, checksums, every
//! document bound, every token), so that reading it afterwards cannot fail. [`ShardWriter`] makes one in
//! bounded memory and never leaves half of one under its final name. The bytes are described in
//! `header.rs`.

mod header;
mod writer;

use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

pub(crate) use header::VERSION;
use header::{BOUND_BYTES, HEADER_BYTES, Header, token_bytes};
pub use writer::ShardWriter;
pub(crate) use writer::{remove_abandoned, remove_partial, sync_folder_of};

/// The tokens and document bounds of one shard file, verified.
#[derive(Debug)]
pub struct Shard {
    header: Header,
    bounds_start: usize,
    bytes: Bytes,
}

impl Shard {
    /// Maps a shard file and checks all of it (one pass over the file).
    ///
    /// The file must not be changed while it is mapped: another process that truncates it ends this one
    /// with a bus error. [`ShardWriter`] never does; it replaces files by renaming.
    pub fn open(path: &Path) -> Result<Shard, ShardError> {
        Shard::check(map(path).map_err(|source| ShardError::io("read", path, source))?)
            .map_err(|error| error.of_file(path))
    }

    /// The same checks on a shard that is in memory already.
    pub fn parse(bytes: Vec<u8>) -> Result<Shard, ShardError> {
        Shard::check(Bytes::Owned(bytes))
    }

    /// The size of the vocabulary that the tokens belong to; every token is below it.
    pub fn vocabulary(&self) -> u32 {
        self.header.vocabulary
    }

    /// How many tokens all documents have together.
    pub fn tokens(&self) -> u64 {
        self.header.tokens
    }

    /// How many documents there are.
    pub fn documents(&self) -> u64 {
        self.header.documents
    }

    /// Where the tokens of a document stand.
    pub fn document(&self, index: u64) -> Option<Range<u64>> {
        if index >= self.documents() {
            return None;
        }
        let start = if index == 0 { 0 } else { self.bound(index - 1) };
        Some(start..self.bound(index))
    }

    /// Appends the tokens of a range; what lies beyond the end is left out.
    pub fn read(&self, range: Range<u64>, into: &mut Vec<u32>) {
        let bytes = self.bytes_of(range);
        if token_bytes(self.header.vocabulary) == 2 {
            into.extend(bytes.as_chunks::<2>().0.iter().map(|&token| u32::from(u16::from_le_bytes(token))));
        } else {
            into.extend(bytes.as_chunks::<4>().0.iter().map(|&token| u32::from_le_bytes(token)));
        }
    }

    /// The stored bytes of a range of tokens: the same for the same tokens of the same vocabulary.
    pub(crate) fn bytes_of(&self, range: Range<u64>) -> &[u8] {
        let width = token_bytes(self.header.vocabulary) as usize;
        let at = |token: u64| HEADER_BYTES as usize + token.min(self.tokens()) as usize * width;
        &self.bytes[at(range.start.min(range.end))..at(range.end)]
    }

    /// The hash of what the shard says: vocabulary size, tokens and bounds. Independent of where it lies.
    pub fn content_hash(&self) -> blake3::Hash {
        blake3::Hasher::new_derive_key("starling 2026 shard contents")
            .update(&self.header.vocabulary.to_le_bytes())
            .update(&self.header.tokens.to_le_bytes())
            .update(self.header.tokens_hash.as_bytes())
            .update(self.header.bounds_hash.as_bytes())
            .finalize()
    }

    fn check(bytes: Bytes) -> Result<Shard, ShardError> {
        let header = Header::from_bytes(&bytes)?;
        let layout = header.layout().filter(|layout| layout.file_bytes == bytes.len() as u64);
        let Some(layout) = layout else {
            return Err(ShardError::damaged("its length does not match its counts; it may be cut short"));
        };
        let bounds_start = layout.bounds_start as usize; // at most the length of a slice
        if blake3::hash(&bytes[HEADER_BYTES as usize..bounds_start]) != header.tokens_hash {
            return Err(ShardError::damaged("its tokens do not match their checksum"));
        }
        if blake3::hash(&bytes[bounds_start..]) != header.bounds_hash {
            return Err(ShardError::damaged("its document bounds do not match their checksum"));
        }
        let shard = Shard { header, bounds_start, bytes };
        shard.check_bounds()?;
        shard.check_tokens()?;
        Ok(shard)
    }

    fn check_bounds(&self) -> Result<(), ShardError> {
        let mut end = 0;
        for index in 0..self.documents() {
            let next = self.bound(index);
            if next < end {
                return Err(ShardError::damaged("a document ends before it starts"));
            }
            end = next;
        }
        if end != self.tokens() {
            return Err(ShardError::damaged("its documents do not add up to its tokens"));
        }
        Ok(())
    }

    fn check_tokens(&self) -> Result<(), ShardError> {
        const AT_ONCE: u64 = 1 << 16;
        let mut tokens = Vec::with_capacity(AT_ONCE.min(self.tokens()) as usize);
        for start in (0..self.tokens()).step_by(AT_ONCE as usize) {
            tokens.clear();
            self.read(start..start.saturating_add(AT_ONCE), &mut tokens);
            if tokens.iter().any(|&token| token >= self.vocabulary()) {
                return Err(ShardError::damaged("a token lies outside its vocabulary"));
            }
        }
        let used = self.tokens() as usize * token_bytes(self.vocabulary()) as usize;
        if self.bytes[HEADER_BYTES as usize + used..self.bounds_start].iter().any(|&byte| byte != 0) {
            return Err(ShardError::damaged("there are bytes between its sections"));
        }
        Ok(())
    }

    /// The position after the last token of a document that exists.
    fn bound(&self, document: u64) -> u64 {
        let at = self.bounds_start + (document * BOUND_BYTES) as usize;
        u64::from_le_bytes(std::array::from_fn(|index| self.bytes[at + index]))
    }
}

/// Why a shard could not be opened or written.
#[derive(Debug, thiserror::Error)]
pub enum ShardError {
    /// The operating system refused.
    #[error("could not {action} {}: {source}; check that the path exists, is permitted and has room", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On which file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// The file does not start as shards do.
    #[error(
        "this is not a token shard; if it is plain text, give its name another ending and it will be tokenised"
    )]
    NotAShard,
    /// The file was written by another version.
    #[error(
        "this shard has format version {found}, and this binary reads version {readable}; \
         build it again from its text, or use the binary that wrote it"
    )]
    Version {
        /// The file's version.
        found: u32,
        /// The version that this binary reads.
        readable: u32,
    },
    /// A check failed.
    #[error("this shard is damaged: {what}; nothing was read from it, build it again from its text")]
    Damaged {
        /// Which check.
        what: &'static str,
    },
    /// One of the errors above, with the file that it is about.
    #[error("{}: {error}", path.display())]
    File {
        /// Which file.
        path: PathBuf,
        /// What is wrong with it.
        error: Box<ShardError>,
    },
    /// A document to be written holds an id that its vocabulary does not have.
    #[error(
        "token {token} of document {document} is outside the vocabulary of {vocabulary}, so the document \
         was not written; tokenise it with the vocabulary that the shard was created for"
    )]
    TokenOutside {
        /// The id.
        token: u32,
        /// Which document, counted from 0.
        document: u64,
        /// The size of the vocabulary.
        vocabulary: u32,
    },
}

impl ShardError {
    fn damaged(what: &'static str) -> ShardError {
        ShardError::Damaged { what }
    }

    fn io(action: &'static str, path: &Path, source: std::io::Error) -> ShardError {
        ShardError::Io { action, path: path.to_path_buf(), source }
    }

    fn of_file(self, path: &Path) -> ShardError {
        ShardError::File { path: path.to_path_buf(), error: Box::new(self) }
    }
}

/// A shard's bytes, wherever they are.
pub(crate) enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
        }
    }
}

impl std::fmt::Debug for Bytes {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{} bytes", self.len())
    }
}

pub(crate) fn map(path: &Path) -> std::io::Result<Bytes> {
    let file = std::fs::File::open(path)?;
    if file.metadata()?.len() == 0 {
        return Ok(Bytes::Owned(Vec::new())); // an empty file cannot be mapped everywhere
    }
    // SAFETY: the map is read-only. Undefined behaviour needs another process that writes into the file
    // while it is mapped; `open` documents that this must not be done, and our writer only renames.
    #[allow(unsafe_code)]
    let map = unsafe { memmap2::Mmap::map(&file)? };
    Ok(Bytes::Mapped(map))
}

#[cfg(test)]
mod tests;
