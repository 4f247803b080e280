//! Writing a shard: streaming, in bounded memory, and all or nothing.
//!
//! Tokens go to `<path>.<process>-<n>.partial`, document bounds to a second such file that is appended at
//! the end; then the header is filled in, the file synced, renamed and its folder synced. The process id
//! in the name lets several processes build the same shard at once (all peers of one machine share a
//! cache): the last rename wins, and all of them carry the same contents.
//!
//! A writer locks its partial files. The system drops the lock with the process, however that ends, so a
//! partial file that nobody has locked is abandoned. Looking the process id up was rejected: ids are used
//! again, and those of another container or machine that shares the folder are not to be seen.

use std::fs::File;
use std::io::{BufWriter, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::header::{HEADER_BYTES, Header, padding, token_bytes};
use super::{Shard, ShardError};

/// Makes one shard file, document by document. Dropped before [`ShardWriter::finish`], it leaves nothing.
#[derive(Debug)]
pub struct ShardWriter {
    path: PathBuf,
    vocabulary: u32,
    token_count: u64,
    documents: u64,
    tokens: Section,
    bounds: Section,
    stored: Vec<u8>,
}

impl ShardWriter {
    /// Starts a shard that will appear at `path`.
    pub fn create(path: &Path, vocabulary: u32) -> Result<ShardWriter, ShardError> {
        let mut tokens = Section::create(path, "partial")?;
        let bounds = Section::create(path, "bounds.partial")?;
        tokens.write_unhashed(&[0; HEADER_BYTES as usize])?;
        let path = path.to_path_buf();
        Ok(ShardWriter { path, vocabulary, token_count: 0, documents: 0, tokens, bounds, stored: Vec::new() })
    }

    /// Adds a document (without end of text). One with a token outside the vocabulary is not added.
    pub fn push(&mut self, document: &[u32]) -> Result<(), ShardError> {
        if let Some(&token) = document.iter().find(|&&token| token >= self.vocabulary) {
            let vocabulary = self.vocabulary;
            return Err(ShardError::TokenOutside { token, document: self.documents, vocabulary });
        }
        self.stored.clear(); // as it will stand in the file: written and hashed at once, not token by token
        if token_bytes(self.vocabulary) == 2 {
            self.stored.extend(document.iter().flat_map(|&token| (token as u16).to_le_bytes()));
        } else {
            self.stored.extend(document.iter().flat_map(|token| token.to_le_bytes()));
        }
        self.tokens.write(&self.stored)?;
        self.token_count += document.len() as u64;
        self.documents += 1;
        self.bounds.write(&self.token_count.to_le_bytes())
    }

    /// How many tokens were added so far.
    pub fn tokens(&self) -> u64 {
        self.token_count
    }

    /// Completes the file, gives it its name, and opens it (which checks it once more).
    pub fn finish(mut self) -> Result<Shard, ShardError> {
        let written = self.token_count * u64::from(token_bytes(self.vocabulary));
        self.tokens.write(&vec![0; padding(written) as usize])?;
        let header = Header {
            vocabulary: self.vocabulary,
            tokens: self.token_count,
            documents: self.documents,
            tokens_hash: self.tokens.hasher.finalize(),
            bounds_hash: self.bounds.hasher.finalize(),
        };
        self.tokens.append(&mut self.bounds)?;
        self.tokens.publish(&header.to_bytes(), &self.path)?;
        Shard::open(&self.path)
    }
}

/// A younger partial file is left alone: its writer may not have come to lock it.
const SURELY_LOCKED_AFTER: Duration = Duration::from_secs(60);

/// Removes the partial files in a folder whose writers are gone. What cannot be opened, locked or removed is
/// left for another time: it only takes room.
pub(crate) fn remove_abandoned(folder: &Path) {
    remove_idle(folder, SURELY_LOCKED_AFTER);
}

/// The same in a folder in which nobody else may write: however young they are.
pub(crate) fn remove_partial(folder: &Path) {
    remove_idle(folder, Duration::ZERO);
}

fn remove_idle(folder: &Path, least: Duration) {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    for entry in entries.filter(|entry| entry.file_name().to_str().is_some_and(is_partial)) {
        let path = entry.path();
        let Ok(file) = File::options().read(true).write(true).open(&path) else { continue };
        let idle = file.metadata().and_then(|metadata| metadata.modified()).map(|time| time.elapsed());
        if matches!(idle, Ok(Ok(idle)) if idle >= least) && file.try_lock().is_ok() {
            let _ = std::fs::remove_file(&path); // another process may have been faster
        }
    }
}

/// Whether a name is one that [`Section::create`] gives to a part of a `.shard`: a folder may hold other
/// people's `.partial` files.
fn is_partial(name: &str) -> bool {
    let number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    name.strip_suffix(".partial")
        .map(|name| name.strip_suffix(".bounds").unwrap_or(name))
        .and_then(|name| name.rsplit_once(".shard."))
        .and_then(|(_, numbers)| numbers.split_once('-'))
        .is_some_and(|(process, count)| number(process) && number(count))
}

/// A file being written, hashed on the way, and removed again when dropped.
#[derive(Debug)]
struct Section {
    path: PathBuf,
    file: BufWriter<File>,
    hasher: blake3::Hasher,
    published: bool,
}

impl Section {
    /// A new file beside `path`; leftovers of a killed process keep their names and are stepped over.
    fn create(path: &Path, ending: &str) -> Result<Section, ShardError> {
        const NAMES: u32 = 10_000;
        let mut number = 0;
        loop {
            let mut name = path.as_os_str().to_os_string();
            name.push(format!(".{}-{number}.{ending}", std::process::id()));
            let aside = PathBuf::from(name);
            match File::options().read(true).write(true).create_new(true).open(&aside) {
                Ok(file) => {
                    let _ = file.try_lock(); // where files cannot be locked, nothing is ever cleared away
                    let file = BufWriter::with_capacity(1 << 16, file);
                    return Ok(Section {
                        path: aside,
                        file,
                        hasher: blake3::Hasher::new(),
                        published: false,
                    });
                }
                Err(error) if error.kind() == ErrorKind::AlreadyExists && number < NAMES => number += 1,
                Err(error) => return Err(ShardError::io("create", &aside, error)),
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> Result<(), ShardError> {
        self.hasher.update(bytes);
        self.write_unhashed(bytes)
    }

    fn write_unhashed(&mut self, bytes: &[u8]) -> Result<(), ShardError> {
        self.file.write_all(bytes).map_err(|error| ShardError::io("write", &self.path, error))
    }

    /// Copies all of `other` to the end of this file.
    fn append(&mut self, other: &mut Section) -> Result<(), ShardError> {
        let copied = other.rewound().and_then(|reader| std::io::copy(reader, &mut self.file));
        copied.map(|_| ()).map_err(|error| ShardError::io("append the document bounds to", &self.path, error))
    }

    fn rewound(&mut self) -> std::io::Result<&mut impl Read> {
        self.file.seek(SeekFrom::Start(0))?; // flushes first
        Ok(self.file.get_mut())
    }

    /// Writes the header over the start, syncs, and renames to the final name.
    fn publish(&mut self, header: &[u8], path: &Path) -> Result<(), ShardError> {
        let mut published = || -> std::io::Result<()> {
            self.file.seek(SeekFrom::Start(0))?;
            self.file.write_all(header)?;
            self.file.flush()?;
            self.file.get_ref().sync_all()?;
            std::fs::rename(&self.path, path)?;
            self.published = true;
            let _ = self.file.get_ref().unlock(); // Windows would let nobody read it
            sync_folder_of(path)
        };
        published().map_err(|error| ShardError::io("complete", path, error))
    }
}

impl Drop for Section {
    fn drop(&mut self) {
        // After the rename the name is free, and may already be another process's.
        if !self.published {
            let _ = std::fs::remove_file(&self.path); // there is nobody left to tell
        }
    }
}

/// Makes the rename itself durable. Only Unix lets a folder be opened and synced.
pub(crate) fn sync_folder_of(path: &Path) -> std::io::Result<()> {
    if cfg!(unix) {
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()?;
    }
    Ok(())
}
