//! Tokens that another program made: nanoGPT's `.bin` and Megatron's `.bin` with its `.idx`.
//!
//! Both hold tokens with end of text between documents. Shards hold documents without it, so it is taken out
//! here, and the sampler puts it back.

mod megatron;
mod stored;

use std::ops::ControlFlow;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub use megatron::{Index, IndexError};
pub use stored::Width;

use super::batches::Position;
use super::output::Output;
use super::site::Site;
use super::{BuildError, Phase, Progress, told};
use crate::folder::{LeftOut, Manifest};
use crate::tokeniser::Tokeniser;

/// A longer document is cut: a file without any end of text would be one, and nothing could be held out of it.
pub const LONGEST_DOCUMENT_TOKENS: usize = 1 << 16;

/// What is to be imported.
#[derive(Clone, Debug)]
pub struct Options {
    /// The `.bin` file; with an `.idx` of the same name beside it, it is Megatron's.
    pub input: PathBuf,
    /// How wide a token of nanoGPT's is; Megatron's index says it itself.
    pub width: Width,
    /// What the ids stand for.
    pub tokeniser: Tokeniser,
    /// The corpus folder.
    pub out: PathBuf,
    /// A shard ends when it has so many tokens.
    pub shard_tokens: u64,
    /// Whether what an earlier build left in the folder is thrown away.
    pub restart: bool,
}

/// Makes a corpus folder of a file of tokens. It is written anew after an interruption: that takes as long as
/// copying a file.
pub fn import(
    options: &Options,
    watch: &mut dyn FnMut(Progress) -> ControlFlow<()>,
) -> Result<Manifest, BuildError> {
    let refused = |what: String| BuildError::Import { path: options.input.clone(), what };
    let tokens = stored::map(&options.input)?;
    let index_path = options.input.with_extension("idx");
    let index = match index_path.exists() {
        true => {
            let bytes = stored::map(&index_path)?;
            let index = Index::parse(&bytes, tokens.len() as u64);
            Some(index.map_err(|error| BuildError::Import { path: index_path, what: error.to_string() })?)
        }
        false => None,
    };
    let width = index.as_ref().map_or(options.width, Index::width);
    if tokens.is_empty() || tokens.len() % width.bytes() != 0 {
        let wide = width.bytes();
        return Err(refused(format!(
            "its {} bytes are not whole tokens of {wide} bytes each; is --width right?",
            tokens.len()
        )));
    }
    let plan = Plan::of(options, tokens.len() as u64);
    let site = Site::claim(&options.out, &plan, |_, _| "another import".into(), options.restart)?;
    site.forget_shards();
    let mut output = Output::resume(site, &options.tokeniser, options.shard_tokens);
    let mut taking = Taking {
        options,
        output: &mut output,
        documents: Vec::new(),
        tokens: Vec::new(),
        total_bytes: tokens.len() as u64,
        watch,
    };
    match &index {
        None => taking.take(&tokens, 0, width)?,
        Some(index) => {
            for range in index.documents() {
                for sequence in index.sequences(range) {
                    let first = sequence.start / width.bytes();
                    taking.take(&tokens[sequence], first as u64, width)?;
                }
                taking.end_document();
            }
        }
    }
    taking.end_document();
    taking.hand_over(tokens.len() as u64)?;
    output.finish(Position::default())?;
    output.publish()
}

/// What makes two imports the same.
#[derive(PartialEq, Serialize, Deserialize)]
struct Plan {
    import: PathBuf,
    bytes: u64,
    width: Width,
    vocabulary: usize,
    shard_tokens: u64,
}

impl Plan {
    fn of(options: &Options, bytes: u64) -> Plan {
        Plan {
            import: options.input.clone(),
            bytes,
            width: options.width,
            vocabulary: options.tokeniser.vocabulary(),
            shard_tokens: options.shard_tokens,
        }
    }
}

/// Documents on their way into the shards.
struct Taking<'a, 'o> {
    options: &'a Options,
    output: &'a mut Output<'o>,
    tokens: Vec<u32>,
    /// Where documents end in `tokens`.
    documents: Vec<usize>,
    total_bytes: u64,
    watch: &'a mut dyn FnMut(Progress) -> ControlFlow<()>,
}

impl Taking<'_, '_> {
    /// Takes stored tokens, the first of which has this number in the file.
    fn take(&mut self, stored: &[u8], first: u64, width: Width) -> Result<(), BuildError> {
        const AT_ONCE: usize = 1 << 19;
        let tokeniser = &self.options.tokeniser;
        let (vocabulary, end_of_text) = (tokeniser.vocabulary(), tokeniser.end_of_text());
        let mut number = first;
        for piece in stored.chunks(AT_ONCE * width.bytes()) {
            for token in width.read(piece) {
                let Some(id) = u32::try_from(token).ok().filter(|id| (*id as usize) < vocabulary) else {
                    return Err(BuildError::Import {
                        path: self.options.input.clone(),
                        what: format!(
                            "token {number} is {token}, outside the vocabulary of {vocabulary}; give the tokeniser \
                             that made it, or the right --vocabulary and --width"
                        ),
                    });
                };
                if id == end_of_text || self.length() == LONGEST_DOCUMENT_TOKENS {
                    self.end_document();
                }
                if id != end_of_text {
                    self.tokens.push(id);
                }
                number += 1;
            }
            self.hand_over(number * width.bytes() as u64)?;
        }
        Ok(())
    }

    /// Tokens of the document that is not whole yet.
    fn length(&self) -> usize {
        self.tokens.len() - self.documents.last().copied().unwrap_or(0)
    }

    fn end_document(&mut self) {
        if self.length() > 0 {
            self.documents.push(self.tokens.len());
        }
    }

    /// Writes the documents that are whole.
    fn hand_over(&mut self, read_bytes: u64) -> Result<(), BuildError> {
        let starts = std::iter::once(0).chain(self.documents.iter().copied());
        let documents = starts.zip(&self.documents).map(|(start, &end)| &self.tokens[start..end]);
        self.output.push(documents, 0, LeftOut::default(), Position::default())?;
        self.tokens.drain(..self.documents.last().copied().unwrap_or(0));
        self.documents.clear();
        told(
            self.watch,
            Progress {
                phase: Phase::Tokenising,
                read_bytes,
                total_bytes: self.total_bytes,
                text_bytes: 0,
                tokens: self.output.tokens(),
            },
        )
    }
}

#[cfg(test)]
mod tests;
