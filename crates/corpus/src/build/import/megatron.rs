//! Megatron's `.idx`: where in the `.bin` the sequences lie, and which of them make a document.
//!
//! | bytes             | what                                                              |
//! |-------------------|-------------------------------------------------------------------|
//! | 0..9              | magic `MMIDIDX\0\0`                                               |
//! | 9..17             | version 1                                                         |
//! | 17                | the kind of integer a token is                                    |
//! | 18..26            | sequences                                                         |
//! | 26..34            | document bounds: one more than documents                          |
//! | 34..              | the length of every sequence in tokens, as i32                    |
//! | then              | the byte of the `.bin` at which every sequence begins, as i64     |
//! | then              | the first sequence of every document, and their number, as i64    |
//!
//! All numbers are little-endian. What follows (the mode of every sequence, in some versions) is not read.

use std::ops::Range;

use super::Width;

const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
const HEADER_BYTES: usize = 34;

/// A checked index: every sequence lies within the `.bin`, every document within the sequences.
#[derive(Debug)]
pub struct Index {
    width: Width,
    /// Where each sequence lies, in bytes.
    sequences: Vec<Range<usize>>,
    /// The first sequence of every document, and the end of the last.
    bounds: Vec<usize>,
}

impl Index {
    /// Reads the contents of an `.idx` that belongs to a `.bin` of this length.
    pub fn parse(bytes: &[u8], tokens_bytes: u64) -> Result<Index, IndexError> {
        let header = bytes.first_chunk::<HEADER_BYTES>().ok_or(IndexError::Short)?;
        if !header.starts_with(MAGIC) {
            return Err(IndexError::NotAnIndex);
        }
        let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| header[at + index]));
        if number(9) != 1 {
            return Err(IndexError::Version(number(9)));
        }
        let width = width_of(header[17]).ok_or(IndexError::Kind(header[17]))?;
        let mut rest = &bytes[HEADER_BYTES..];
        let mut section = |count: u64, wide: usize| -> Result<&[u8], IndexError> {
            let length = usize::try_from(count).ok().and_then(|count| count.checked_mul(wide));
            let length = length.filter(|length| *length <= rest.len()).ok_or(IndexError::Short)?;
            let (section, after) = rest.split_at(length);
            rest = after;
            Ok(section)
        };
        let lengths =
            section(number(18), 4)?.as_chunks::<4>().0.iter().map(|&length| i32::from_le_bytes(length));
        let starts =
            section(number(18), 8)?.as_chunks::<8>().0.iter().map(|&start| i64::from_le_bytes(start));
        let bounds =
            section(number(26), 8)?.as_chunks::<8>().0.iter().map(|&bound| i64::from_le_bytes(bound));
        let sequences: Vec<Range<usize>> = starts
            .zip(lengths)
            .map(|(start, length)| sequence(start, length, width, tokens_bytes))
            .collect::<Option<_>>()
            .ok_or(IndexError::SequenceOutside)?;
        let bounds: Vec<usize> = bounds
            .map(|bound| usize::try_from(bound).ok().filter(|bound| *bound <= sequences.len()))
            .collect::<Option<_>>()
            .ok_or(IndexError::DocumentOutside)?;
        let covers =
            bounds.first() == Some(&0) && bounds.last() == Some(&sequences.len()) && bounds.is_sorted();
        if !covers {
            return Err(IndexError::DocumentOutside);
        }
        Ok(Index { width, sequences, bounds })
    }

    /// The kind of integer that a token is.
    pub fn width(&self) -> Width {
        self.width
    }

    /// The sequences of every document.
    pub fn documents(&self) -> impl Iterator<Item = Range<usize>> {
        self.bounds.windows(2).map(|bounds| bounds[0]..bounds[1])
    }

    /// Where some sequences lie in the `.bin`, in bytes.
    pub fn sequences(&self, range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        self.sequences[range].iter().cloned()
    }
}

/// Where a sequence lies, if it lies within the file.
fn sequence(start: i64, length: i32, width: Width, tokens_bytes: u64) -> Option<Range<usize>> {
    let start = usize::try_from(start).ok()?;
    let end = usize::try_from(length).ok()?.checked_mul(width.bytes())?.checked_add(start)?;
    (end as u64 <= tokens_bytes).then_some(start..end)
}

fn width_of(code: u8) -> Option<Width> {
    match code {
        1 => Some(Width::U8),
        3 => Some(Width::I16),
        4 => Some(Width::I32),
        5 => Some(Width::I64),
        8 => Some(Width::U16),
        _ => None,
    }
}

/// Why an `.idx` cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IndexError {
    /// It is not one.
    #[error("it is not an index of Megatron's; move it away if the .bin is nanoGPT's")]
    NotAnIndex,
    /// It ends too early.
    #[error("it ends before what its counts say; copy it again")]
    Short,
    /// Another version.
    #[error("it has version {0}, and only version 1 can be read; preprocess the text again")]
    Version(u64),
    /// Tokens that are not integers.
    #[error("it says that tokens are of kind {0}, which is no kind of integer")]
    Kind(u8),
    /// A sequence does not lie in the `.bin`.
    #[error("a sequence lies outside the .bin; the two files do not belong together, or one is cut short")]
    SequenceOutside,
    /// Documents are not made of the sequences, each once and in order.
    #[error("its documents are not the sequences in order; preprocess the text again")]
    DocumentOutside,
}
