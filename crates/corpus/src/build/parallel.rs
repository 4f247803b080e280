//! Batches to tokens on many threads, in order and in bounded memory.
//!
//! ```text
//! reader ──batches, in turn──► worker 0 ──► in turn ──► the caller
//!                          └─► worker 1 ──┘
//! ```
//!
//! Batch n goes to worker n mod N and is taken from there, so the order is that of the inputs without
//! anything being put in order, and nobody is ahead by more than the channels hold.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::sync_channel;

use super::BuildError;
use super::batches::{self, Batch, Enough, Position};
use super::inputs::Input;
use super::records::{Trouble, text_of};
use super::streams;
use crate::folder::LeftOut;
use crate::tokeniser::{Encoder, Tokeniser};

/// Batches that wait before, and results that wait behind, each worker.
const WAITING: usize = 4;

/// What is to be done with every document.
#[derive(Clone, Copy)]
pub(super) struct Job<'a> {
    pub(super) inputs: &'a [Input],
    pub(super) field: &'a str,
    pub(super) skip_bad: bool,
    pub(super) tokeniser: &'a Tokeniser,
    pub(super) threads: usize,
}

/// The tokens of a batch.
#[derive(Debug)]
pub(super) struct Tokenised {
    tokens: Vec<u32>,
    /// Where each document ends in `tokens`.
    ends: Vec<usize>,
    pub(super) text_bytes: u64,
    pub(super) left_out: LeftOut,
    /// Where the next batch begins.
    pub(super) next: Position,
}

impl Tokenised {
    pub(super) fn documents(&self) -> impl Iterator<Item = &[u32]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, &end)| &self.tokens[start..end])
    }
}

impl Job<'_> {
    /// Hands over the tokens of the inputs from a position on, batch by batch, until all are done or something
    /// goes wrong: then with what went wrong first in the order of the inputs.
    pub(super) fn run(
        self,
        from: Position,
        count: &Arc<AtomicU64>,
        mut take: impl FnMut(Tokenised) -> Result<(), BuildError>,
    ) -> Result<(), BuildError> {
        std::thread::scope(|scope| {
            let (mut to_workers, mut from_workers) = (Vec::new(), Vec::new());
            for _ in 0..self.threads.max(1) {
                let (to_worker, work) = sync_channel::<Result<Batch, BuildError>>(WAITING);
                let (answer, from_worker) = sync_channel(WAITING);
                scope.spawn(move || {
                    let mut encoder = self.tokeniser.encoder();
                    for batch in work {
                        let tokens = batch.and_then(|batch| self.tokenise(&batch, &mut encoder));
                        if answer.send(tokens).is_err() {
                            break; // nobody wants any more
                        }
                    }
                });
                to_workers.push(to_worker);
                from_workers.push(from_worker);
            }
            scope.spawn(move || {
                let mut turns = to_workers.iter().cycle();
                let _ = batches::read(self.inputs, from, count, |batch| {
                    turns.next().and_then(|worker| worker.send(batch).ok()).ok_or(Enough)
                });
            });
            for worker in from_workers.iter().cycle() {
                let Ok(tokens) = worker.recv() else { break };
                take(tokens?)?;
            }
            Ok(())
        })
    }

    fn tokenise(&self, batch: &Batch, encoder: &mut Encoder<'_>) -> Result<Tokenised, BuildError> {
        let mut tokenised = Tokenised {
            tokens: Vec::new(),
            ends: Vec::new(),
            text_bytes: 0,
            left_out: LeftOut::default(),
            next: batch.next,
        };
        let input = &self.inputs[batch.input];
        for (document, byte) in batch.documents() {
            let start = tokenised.tokens.len();
            match self.tokenise_one(document, input, encoder, &mut tokenised.tokens) {
                Ok(0) => tokenised.left_out.empty += 1,
                Ok(bytes) => {
                    tokenised.text_bytes += bytes as u64;
                    tokenised.ends.push(tokenised.tokens.len());
                }
                Err(trouble) if self.skip_bad => {
                    tokenised.tokens.truncate(start);
                    tokenised.left_out.add(trouble.counted());
                }
                Err(trouble) => return Err(bad_document(input, byte, trouble)),
            }
        }
        Ok(tokenised)
    }

    /// Appends the tokens of a document; how many bytes its text has, 0 if there is nothing to read in it.
    fn tokenise_one(
        &self,
        document: &[u8],
        input: &Input,
        encoder: &mut Encoder<'_>,
        into: &mut Vec<u32>,
    ) -> Result<usize, Trouble> {
        let text = text_of(document, input.form, self.field)?;
        if text.trim().is_empty() {
            return Ok(0);
        }
        let start = into.len();
        encoder.encode(&text, into).map_err(Trouble::Unencodable)?;
        Ok(if into.len() == start { 0 } else { text.len() })
    }
}

/// The error for a document that begins at this byte: looks the line up, which happens once.
pub(super) fn bad_document(input: &Input, byte: u64, trouble: Trouble) -> BuildError {
    let line = streams::line_of(input, byte).unwrap_or(0);
    BuildError::BadDocument { path: input.path.clone(), line, trouble }
}
