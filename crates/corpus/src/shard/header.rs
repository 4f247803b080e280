//! The head of a shard file: what each byte means, and whether it can be true.
//!
//! All numbers are little-endian. Section positions are *derived* from the counts, never stored, so a
//! hostile file has fewer things to lie about.
//!
//! | bytes      | what                                                                    |
//! |------------|-------------------------------------------------------------------------|
//! | 0..8       | magic `STARSHRD`                                                        |
//! | 8..12      | format version                                                          |
//! | 12..16     | bytes a token: 2 if the vocabulary fits, otherwise 4                    |
//! | 16..20     | vocabulary size                                                         |
//! | 20..24     | zero                                                                    |
//! | 24..32     | tokens                                                                  |
//! | 32..40     | documents                                                               |
//! | 40..72     | BLAKE3 of the token section, its padding included                       |
//! | 72..104    | BLAKE3 of the bounds section                                            |
//! | 104..136   | BLAKE3 of bytes 0..104                                                  |
//! | 136..192   | zero                                                                    |
//! | 192..      | the tokens of all documents in a row, zero-padded to a multiple of 64   |
//! | then       | for each document, the position after its last token, as u64            |

use super::ShardError;

/// The version of the format that this crate writes, and the only one that it reads.
pub(crate) const VERSION: u32 = 1;
/// Bytes before the first token.
pub(super) const HEADER_BYTES: u64 = 192;
/// Every section starts at a multiple of this.
const ALIGNMENT: u64 = 64;
/// Bytes of one document bound.
pub(super) const BOUND_BYTES: u64 = 8;

const MAGIC: &[u8; 8] = b"STARSHRD";
const HASHED_BYTES: usize = 104;

/// Counts and hashes of a shard.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Header {
    pub vocabulary: u32,
    pub tokens: u64,
    pub documents: u64,
    pub tokens_hash: blake3::Hash,
    pub bounds_hash: blake3::Hash,
}

/// Where the sections lie: byte positions in the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Layout {
    /// Where the document bounds start; the tokens and their padding end here.
    pub bounds_start: u64,
    /// Length of the file.
    pub file_bytes: u64,
}

/// Bytes of one token for a vocabulary: the smallest width that fits.
pub(super) fn token_bytes(vocabulary: u32) -> u32 {
    if vocabulary <= 1 << 16 { 2 } else { 4 }
}

/// Zero bytes that follow `bytes` bytes to reach the alignment.
pub(super) fn padding(bytes: u64) -> u64 {
    bytes.wrapping_neg() % ALIGNMENT
}

impl Header {
    /// The header as it stands in the file.
    pub(super) fn to_bytes(&self) -> [u8; HEADER_BYTES as usize] {
        let mut bytes = [0; HEADER_BYTES as usize];
        bytes[0..8].copy_from_slice(MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12..16].copy_from_slice(&token_bytes(self.vocabulary).to_le_bytes());
        bytes[16..20].copy_from_slice(&self.vocabulary.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.tokens.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.documents.to_le_bytes());
        bytes[40..72].copy_from_slice(self.tokens_hash.as_bytes());
        bytes[72..104].copy_from_slice(self.bounds_hash.as_bytes());
        let hash = blake3::hash(&bytes[..HASHED_BYTES]);
        bytes[104..136].copy_from_slice(hash.as_bytes());
        bytes
    }

    /// Reads the header of a file of which `file` are the contents.
    pub(super) fn from_bytes(file: &[u8]) -> Result<Header, ShardError> {
        if !file.starts_with(MAGIC) {
            return Err(ShardError::NotAShard);
        }
        let Some(bytes) = file.first_chunk::<{ HEADER_BYTES as usize }>() else {
            return Err(ShardError::damaged("it ends inside its header"));
        };
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(ShardError::Version { found: version, readable: VERSION });
        }
        let header = Header {
            vocabulary: u32_at(bytes, 16),
            tokens: u64_at(bytes, 24),
            documents: u64_at(bytes, 32),
            tokens_hash: hash_at(bytes, 40),
            bounds_hash: hash_at(bytes, 72),
        };
        // Writing is canonical, so one comparison covers the width, the reserved bytes and the hash.
        if header.to_bytes() != *bytes {
            return Err(ShardError::damaged("its header does not match its checksum"));
        }
        Ok(header)
    }

    /// Where the sections lie, if the counts are possible at all.
    pub(super) fn layout(&self) -> Option<Layout> {
        let token_bytes = self.tokens.checked_mul(u64::from(token_bytes(self.vocabulary)))?;
        let tokens_end = token_bytes.checked_add(padding(token_bytes))?.checked_add(HEADER_BYTES)?;
        let file_bytes = self.documents.checked_mul(BOUND_BYTES)?.checked_add(tokens_end)?;
        Some(Layout { bounds_start: tokens_end, file_bytes })
    }
}

fn u32_at(bytes: &[u8; HEADER_BYTES as usize], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

fn u64_at(bytes: &[u8; HEADER_BYTES as usize], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]))
}

fn hash_at(bytes: &[u8; HEADER_BYTES as usize], at: usize) -> blake3::Hash {
    blake3::Hash::from_bytes(std::array::from_fn(|index| bytes[at + index]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header() -> Header {
        let hash = blake3::hash(b"x");
        Header { vocabulary: 257, tokens: 33, documents: 2, tokens_hash: hash, bounds_hash: hash }
    }

    #[test]
    fn sections_are_aligned_and_follow_each_other() {
        let layout = header().layout().unwrap();
        assert_eq!(layout, Layout { bounds_start: 192 + 128, file_bytes: 192 + 128 + 16 });
    }

    #[test]
    fn counts_that_no_file_can_hold_have_no_layout() {
        assert_eq!(Header { tokens: u64::MAX / 2, ..header() }.layout(), None);
        assert_eq!(Header { tokens: u64::MAX / 2 - 100, ..header() }.layout(), None);
        assert_eq!(Header { documents: u64::MAX / 8, ..header() }.layout(), None);
    }

    #[test]
    fn the_width_is_the_smallest_that_fits() {
        assert_eq!([1, 65_536, 65_537, u32::MAX].map(token_bytes), [2, 2, 4, 4]);
    }

    #[test]
    fn what_was_written_is_read_and_nothing_else() {
        let bytes = header().to_bytes();
        assert_eq!(Header::from_bytes(&bytes).unwrap(), header());
        for at in 0..bytes.len() {
            let mut altered = bytes;
            altered[at] ^= 1;
            assert!(Header::from_bytes(&altered).is_err(), "byte {at} is not covered");
        }
    }
}
