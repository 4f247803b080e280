//! The inputs as a sequence of batches: some documents each, cut at the same places whoever asks.
//!
//! A batch ends when it holds enough text, or with its file. So where batches end depends on the inputs
//! alone, and a build that goes on at the end of one makes the same batches as one that never stopped.

use std::io::BufRead;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use serde::{Deserialize, Serialize};

use super::BuildError;
use super::inputs::{Form, Input};
use super::streams;
use crate::text::{Found, Splitter};

/// Text of a batch, about: large enough that handing it over costs nothing, small enough that many are in flight.
const BATCH_BYTES: usize = 1 << 18;
/// A text document that is longer is cut, between lines if it has any: memory is bounded.
pub(super) const LONGEST_TEXT_BYTES: usize = 1 << 20;
/// A line of JSON that is longer is refused: cutting it would leave two that are none.
pub(super) const LONGEST_LINE_BYTES: usize = 256 << 20;

/// A place in the inputs: everything before it has been read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Position {
    /// Which input.
    pub(super) input: usize,
    /// Which byte of its unpacked contents.
    pub(super) byte: u64,
}

/// Some documents of one input, as they stand there.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) input: usize,
    bytes: Vec<u8>,
    /// For each document, where it ends in `bytes`, and where it begins in the input.
    documents: Vec<(usize, u64)>,
    /// Where the documents that follow are found.
    pub(super) next: Position,
}

impl Batch {
    /// Each document and the byte of the input at which it begins.
    pub(super) fn documents(&self) -> impl Iterator<Item = (&[u8], u64)> {
        let mut start = 0;
        self.documents.iter().map(move |&(end, byte)| {
            let document = &self.bytes[start..end];
            start = end;
            (document, byte)
        })
    }

    fn starting_at(position: Position) -> Batch {
        Batch { input: position.input, bytes: Vec::new(), documents: Vec::new(), next: position }
    }
}

/// Nobody wants any more batches.
pub(super) struct Enough;

/// Hands over the batches from a position on, and counts the bytes of the files that were read.
pub(super) fn read(
    inputs: &[Input],
    from: Position,
    count: &Arc<AtomicU64>,
    mut take: impl FnMut(Result<Batch, BuildError>) -> Result<(), Enough>,
) -> Result<(), Enough> {
    for (index, input) in inputs.iter().enumerate().skip(from.input) {
        let start = if index == from.input { from.byte } else { 0 };
        match read_one(input, Position { input: index, byte: start }, count, &mut take) {
            Ok(()) => {}
            Err(Stop::Enough) => return Err(Enough),
            Err(Stop::Error(error)) => return take(Err(error)),
        }
    }
    Ok(())
}

enum Stop {
    Enough,
    Error(BuildError),
}

fn read_one(
    input: &Input,
    from: Position,
    count: &Arc<AtomicU64>,
    take: &mut impl FnMut(Result<Batch, BuildError>) -> Result<(), Enough>,
) -> Result<(), Stop> {
    let unreadable = |source| Stop::Error(BuildError::Unreadable { path: input.path.clone(), source });
    let mut stream = streams::open_counted(input, from.byte, count).map_err(unreadable)?;
    let mut batch = Batch::starting_at(from);
    let (split, longest) = match input.form {
        Form::Text => (input.split, LONGEST_TEXT_BYTES),
        Form::Jsonl => (crate::text::Split::Line, LONGEST_LINE_BYTES),
    };
    let mut splitter = Splitter::new(split, longest, from.byte, |found: Found<'_>| {
        if input.form == Form::Jsonl && found.bytes.len() + 3 >= longest {
            return Err(Stop::Error(BuildError::LongLine {
                path: input.path.clone(),
                line: streams::line_of(input, found.start).unwrap_or(0),
            }));
        }
        batch.bytes.extend_from_slice(found.bytes);
        batch.documents.push((batch.bytes.len(), found.start));
        batch.next.byte = found.next;
        if batch.bytes.len() >= BATCH_BYTES {
            let next = Batch::starting_at(batch.next);
            take(Ok(std::mem::replace(&mut batch, next))).map_err(|Enough| Stop::Enough)?;
        }
        Ok(())
    });
    loop {
        let bytes = match stream.fill_buf() {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(Stop::Error(BuildError::broken(input, error))),
        };
        if bytes.is_empty() {
            break;
        }
        splitter.push(bytes)?;
        let length = bytes.len();
        stream.consume(length);
    }
    splitter.finish()?;
    if !batch.documents.is_empty() {
        batch.next = Position { input: from.input + 1, byte: 0 };
        take(Ok(batch)).map_err(|Enough| Stop::Enough)?;
    }
    Ok(())
}
