//! Tokens as they lie in other programs' files: little-endian integers in a row.

use std::fs::File;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::build::BuildError;

/// The integer that a token is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Width {
    /// One byte.
    U8,
    /// Two bytes: what nanoGPT and most programs write for vocabularies up to 65 536.
    U16,
    /// Two bytes, signed.
    I16,
    /// Four bytes.
    U32,
    /// Four bytes, signed.
    I32,
    /// Eight bytes, signed.
    I64,
}

impl Width {
    /// Bytes of one token.
    pub fn bytes(self) -> usize {
        match self {
            Width::U8 => 1,
            Width::U16 | Width::I16 => 2,
            Width::U32 | Width::I32 => 4,
            Width::I64 => 8,
        }
    }

    /// The tokens in some bytes; what does not fill a whole one at the end is left out.
    pub(super) fn read(self, bytes: &[u8]) -> impl Iterator<Item = i64> {
        bytes.chunks_exact(self.bytes()).map(move |stored| {
            let mut wide = [0; 8];
            wide[..stored.len()].copy_from_slice(stored);
            let number = i64::from_le_bytes(wide);
            match self {
                Width::I16 => i64::from(number as i16),
                Width::I32 => i64::from(number as i32),
                _ => number,
            }
        })
    }
}

/// The contents of a file.
pub(super) fn map(path: &Path) -> Result<crate::shard::Bytes, BuildError> {
    let unreadable = |source| BuildError::Unreadable { path: path.to_path_buf(), source };
    if !File::open(path).and_then(|file| file.metadata()).map_err(unreadable)?.is_file() {
        return Err(BuildError::Import { path: path.to_path_buf(), what: "it is not a file".into() });
    }
    crate::shard::map(path).map_err(unreadable)
}
