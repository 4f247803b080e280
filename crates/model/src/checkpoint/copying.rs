//! A checkpoint that is copied from another machine, piece by piece: whoever has it answers [`read_piece`], whoever
//! wants it asks for what [`Copying::wants`] says. It appears under its name when every file has the hash that the
//! manifest says.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::{
    Checkpoint, FileEntry, MANIFEST, MOST_MANIFEST_BYTES, Manifest, SaveError, files, parse_manifest,
};

/// Bytes of a piece, at the most.
pub const PIECE_BYTES: u64 = 4 << 20;

/// A piece of a checkpoint's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Which of the manifest's files.
    pub file: u32,
    /// From which byte on.
    pub start: u64,
}

/// The manifest of the newest checkpoint in a folder, with its step: what a copy begins with.
pub fn newest_manifest(folder: &Path) -> Option<(u64, Vec<u8>)> {
    let (step, path) = files::list(folder).ok()?.pop()?;
    Some((step, files::read(&path.join(MANIFEST), MOST_MANIFEST_BYTES).ok()?))
}

/// Reads a piece of the checkpoint of a step; none if there is no such checkpoint (any more), or no such piece.
pub fn read_piece(folder: &Path, step: u64, piece: Piece) -> Option<Vec<u8>> {
    let path = folder.join(files::name(step));
    let manifest = parse_manifest(&files::read(&path.join(MANIFEST), MOST_MANIFEST_BYTES).ok()?).ok()?;
    let entry = manifest.files.get(piece.file as usize).filter(|entry| piece.start < entry.bytes)?;
    let mut file = File::open(path.join(&entry.name)).ok()?;
    file.seek(SeekFrom::Start(piece.start)).ok()?;
    let mut bytes = Vec::new();
    file.take(PIECE_BYTES).read_to_end(&mut bytes).ok()?;
    Some(bytes)
}

/// See the module's head. Dropped unpublished, what was copied is removed.
pub struct Copying {
    folder: PathBuf,
    json: Vec<u8>,
    manifest: Manifest,
    aside: files::Aside,
    /// Files that are whole.
    whole: usize,
    /// The one that is being written, with its hash so far and its length.
    open: Option<(File, blake3::Hasher, u64)>,
}

impl Copying {
    /// Begins a copy of the checkpoint that this manifest describes.
    pub fn new(folder: &Path, json: Vec<u8>) -> Result<Copying, CopyError> {
        let manifest = parse_manifest(&json).map_err(CopyError::Manifest)?;
        let aside = files::Aside::new(folder, manifest.step)?;
        Ok(Copying { folder: folder.to_path_buf(), json, manifest, aside, whole: 0, open: None })
    }

    /// What it is a copy of.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The piece to ask for next; none if all is there.
    pub fn wants(&self) -> Option<Piece> {
        self.entry()?;
        let start = self.open.as_ref().map_or(0, |(_, _, bytes)| *bytes);
        Some(Piece { file: self.whole as u32, start })
    }

    /// Takes the piece that was asked for; another is of no use, and ignored.
    pub fn put(&mut self, piece: Piece, bytes: &[u8]) -> Result<(), CopyError> {
        let Some(entry) = self.entry().filter(|_| self.wants() == Some(piece)).cloned() else {
            return Ok(());
        };
        if bytes.is_empty() && entry.bytes > 0 || bytes.len() as u64 > entry.bytes - piece.start {
            return Err(CopyError::Altered(entry.name));
        }
        let path = self.aside.path().join(&entry.name);
        let write = |source| SaveError::Write { path: path.clone(), source };
        let (mut file, mut hasher, before) = match self.open.take() {
            Some(open) => open,
            None => (File::create(&path).map_err(write)?, blake3::Hasher::new(), 0),
        };
        file.write_all(bytes).map_err(write)?;
        hasher.update(bytes);
        let so_far = before + bytes.len() as u64;
        if so_far < entry.bytes {
            self.open = Some((file, hasher, so_far));
            return Ok(());
        }
        if hasher.finalize().to_hex().as_str() != entry.blake3 {
            return Err(CopyError::Altered(entry.name));
        }
        file.sync_all().map_err(write)?;
        self.whole += 1;
        Ok(())
    }

    /// Makes the copy appear under its name, then removes what the run says is old.
    pub fn publish(self) -> Result<PathBuf, CopyError> {
        let Copying { folder, json, manifest, aside, .. } = self;
        aside.write(MANIFEST, &json)?;
        let target = folder.join(files::name(manifest.step));
        aside.publish(&target)?;
        // What is left over does no harm.
        let _ = super::prune(&folder, &manifest.run.checkpoint, manifest.step);
        Ok(target)
    }

    fn entry(&self) -> Option<&FileEntry> {
        self.manifest.files.get(self.whole)
    }
}

/// Copies a checkpoint that was opened into `folder`, where a run that goes on from it looks for it.
pub fn copy(from: &Checkpoint, folder: &Path) -> Result<PathBuf, CopyError> {
    let json = serde_json::to_vec_pretty(&from.manifest).map_err(SaveError::Manifest)?;
    let mut copying = Copying::new(folder, json)?;
    for (file, bytes) in (0..).zip(&from.files) {
        copying.put(Piece { file, start: 0 }, bytes)?;
    }
    copying.publish()
}

/// Why a checkpoint was not copied.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum CopyError {
    #[error("the manifest of the checkpoint that was to be copied cannot be used: {0}")]
    Manifest(String),
    #[error("the checkpoint of step {0} was removed before its copy was whole; the next one is tried")]
    Gone(u64),
    #[error("{0} of the copied checkpoint is not as its manifest says: it was damaged on its way or before")]
    Altered(String),
    #[error(transparent)]
    Save(#[from] SaveError),
}

#[cfg(test)]
mod tests {
    use starling_corpus::Tokeniser;

    use super::super::{Progress, save};
    use super::*;
    use crate::pipeline;
    use crate::run::Run;

    /// A folder with the checkpoint of step 0 of a small run.
    fn saved() -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let text = "model = { context = 8, width = 8, layers = 2, heads = 2 }\n\
                    data = { synthetic = { documents = 9 } }\ntrain = { stages = 2, threads = 1 }";
        let run = Run::parse(text, "small.toml", &[]).unwrap();
        let architecture = run.model.architecture(257);
        let build = |number| {
            pipeline::build_stage(&architecture, run.optimiser.rule(), &run.train, run.seed, number).unwrap()
        };
        let stages: Vec<_> = (0..2).map(build).collect();
        let definition = run.definition(257, "text".into());
        let progress = Progress { run, definition, tokeniser: Tokeniser::Bytes, skipped: 0 };
        let path = save(folder.path(), &progress, &stages).unwrap();
        (folder, path)
    }

    #[test]
    fn a_copy_is_made_of_pieces_and_is_the_same() {
        let (original, path) = saved();
        let target = tempfile::tempdir().unwrap();
        let (step, json) = newest_manifest(original.path()).unwrap();
        let mut copying = Copying::new(target.path(), json).unwrap();
        let mut pieces = 0;
        while let Some(piece) = copying.wants() {
            let bytes = read_piece(original.path(), step, piece).unwrap();
            // What was not asked for is no harm, and an answer may be short.
            copying.put(Piece { start: piece.start + 1, ..piece }, &bytes).unwrap();
            copying.put(piece, &bytes[..bytes.len().min(1000)]).unwrap();
            pieces += 1;
        }
        let copy = copying.publish().unwrap();
        assert!(pieces > 4, "{pieces} pieces");
        assert_eq!(Checkpoint::open(&copy).unwrap().manifest, Checkpoint::open(&path).unwrap().manifest);
        assert_eq!(read_piece(original.path(), step + 1, Piece { file: 0, start: 0 }), None);
        assert_eq!(read_piece(original.path(), step, Piece { file: 9, start: 0 }), None);
        assert_eq!(read_piece(original.path(), step, Piece { file: 0, start: u64::MAX }), None);
    }

    #[test]
    fn what_was_altered_on_its_way_is_no_copy_and_leaves_nothing() {
        let (original, _) = saved();
        let target = tempfile::tempdir().unwrap();
        let (step, json) = newest_manifest(original.path()).unwrap();
        let spoils: [fn(&mut Vec<u8>); 3] = [|bytes| bytes[500] ^= 1, |bytes| bytes.push(0), Vec::clear];
        for spoil in spoils {
            let mut copying = Copying::new(target.path(), json.clone()).unwrap();
            let piece = copying.wants().unwrap();
            let mut bytes = read_piece(original.path(), step, piece).unwrap();
            spoil(&mut bytes);
            assert!(matches!(copying.put(piece, &bytes), Err(CopyError::Altered(_))));
            drop(copying);
            assert_eq!(std::fs::read_dir(target.path()).unwrap().count(), 0);
        }
        assert!(matches!(Copying::new(target.path(), b"{}".to_vec()), Err(CopyError::Manifest(_))));
    }
}
