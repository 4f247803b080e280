//! The coordinator's journal as a file: one record a line, each with its checksum, safe before anything follows from it.
//!
//! A crash may leave half a line at the end: nothing followed from that, and it is cut off. Damage anywhere else is
//! refused, because what it said may have been promised to somebody.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A file of records of one kind, open for appending.
pub struct Journal {
    path: PathBuf,
    file: File,
    /// Bytes of whole lines.
    length: u64,
}

/// Why a journal cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JournalError {
    /// The system refused.
    #[error(
        "the journal {path} cannot be used: {source}. Nothing further is promised; mend it and start again"
    )]
    File {
        /// The journal.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A line is damaged.
    #[error(
        "line {line} of the journal {path} is damaged ({why}). What it said may have been promised to somebody, so it \
         is not passed over: put a copy of the journal in its place, or start the run again from its last checkpoint"
    )]
    Damaged {
        /// The journal.
        path: PathBuf,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        why: String,
    },
}

impl Journal {
    /// Opens or makes the journal; returns what is in it.
    pub fn open<T: DeserializeOwned>(path: &Path) -> Result<(Journal, Vec<T>), JournalError> {
        let trouble = |source| JournalError::File { path: path.to_path_buf(), source };
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(trouble)?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(trouble)?;
        let (records, whole) = read(&bytes).map_err(|(line, why)| JournalError::Damaged {
            path: path.to_path_buf(),
            line,
            why,
        })?;
        if whole < bytes.len() {
            file.set_len(whole as u64).and_then(|()| file.sync_all()).map_err(trouble)?;
        }
        if let Some(folder) = path.parent().filter(|folder| cfg!(unix) && folder.is_dir()) {
            File::open(folder).and_then(|folder| folder.sync_all()).map_err(trouble)?;
        }
        Ok((Journal { path: path.to_path_buf(), file, length: whole as u64 }, records))
    }

    /// Appends records, and returns when they are safe.
    pub fn append<'a, T: Serialize + 'a>(
        &mut self,
        records: impl IntoIterator<Item = &'a T>,
    ) -> Result<(), JournalError> {
        let trouble = |source| JournalError::File { path: self.path.clone(), source };
        let mut lines = Vec::new();
        for record in records {
            let json = serde_json::to_vec(record).map_err(|error| trouble(error.into()))?;
            lines.extend_from_slice(format!("{:08x} ", crc32fast::hash(&json)).as_bytes());
            lines.extend_from_slice(&json);
            lines.push(b'\n');
        }
        match self.file.write_all(&lines).and_then(|()| self.file.sync_data()) {
            Ok(()) => {
                self.length += lines.len() as u64;
                Ok(())
            }
            Err(error) => {
                // Half a line must not stand before what is written later.
                let _ = self.file.set_len(self.length);
                Err(trouble(error))
            }
        }
    }
}

/// The records of whole lines, and how many bytes those are; or which line is damaged.
pub fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<(Vec<T>, usize), (usize, String)> {
    let whole = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
    let mut records = Vec::new();
    for (index, line) in bytes[..whole].split_inclusive(|&byte| byte == b'\n').enumerate() {
        let damaged = |why: &str| (index + 1, why.to_string());
        let line = &line[..line.len() - 1];
        let Some((sum, json)) = line.split_at_checked(9) else { return Err(damaged("it is too short")) };
        if sum != format!("{:08x} ", crc32fast::hash(json)).as_bytes() {
            return Err(damaged("its checksum is wrong"));
        }
        records.push(serde_json::from_slice(json).map_err(|error| (index + 1, error.to_string()))?);
    }
    Ok((records, whole))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn journal_of(count: u64) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("journal");
        let (mut journal, old) = Journal::open::<u64>(&path).unwrap();
        assert!(old.is_empty());
        (0..count).for_each(|record| journal.append([&record]).unwrap());
        (folder, path)
    }

    #[test]
    fn half_a_line_at_the_end_is_cut_off_and_damage_before_it_is_refused() {
        let (_folder, path) = journal_of(3);
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 4]).unwrap();
        let (mut journal, records) = Journal::open::<u64>(&path).unwrap();
        assert_eq!(records, [0, 1]);
        journal.append([&7u64, &8]).unwrap();
        assert_eq!(Journal::open::<u64>(&path).unwrap().1, [0, 1, 7, 8]);

        let mut bytes = std::fs::read(&path).unwrap();
        bytes[10] ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let error = Journal::open::<u64>(&path).err().unwrap().to_string();
        assert!(error.contains("line 1"), "{error}");
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = read::<u64>(&bytes);
        }

        #[test]
        fn a_journal_cut_anywhere_keeps_its_whole_lines(cut in 0usize..60) {
            let (_folder, path) = journal_of(5);
            let whole = std::fs::read(&path).unwrap();
            let cut = cut.min(whole.len());
            let lines = whole[..cut].iter().filter(|&&byte| byte == b'\n').count();
            prop_assert_eq!(read::<u64>(&whole[..cut]).unwrap().0.len(), lines);
        }
    }
}
