//! Documents into numbered shards, and at the end `corpus.json`.

use super::BuildError;
use super::batches::Position;
use super::site::{self, Record, Site};
use crate::folder::{self, FORMAT, LeftOut, MANIFEST, Manifest, ShardEntry, TOKENISER};
use crate::shard::ShardWriter;
use crate::tokeniser::Tokeniser;

/// The shards of a corpus that is being made.
pub(super) struct Output<'a> {
    site: Site,
    tokeniser: &'a Tokeniser,
    shard_tokens: u64,
    records: Vec<Record>,
    open: Option<OpenShard>,
}

/// The shard that is being written.
struct OpenShard {
    writer: ShardWriter,
    documents: u64,
    text_bytes: u64,
    left_out: LeftOut,
}

impl<'a> Output<'a> {
    /// Goes on behind the shards that are finished already.
    pub(super) fn resume(site: Site, tokeniser: &'a Tokeniser, shard_tokens: u64) -> Output<'a> {
        Output { records: site.records(), site, tokeniser, shard_tokens, open: None }
    }

    /// How many shards are finished.
    pub(super) fn finished(&self) -> usize {
        self.records.len()
    }

    /// Tokens of all shards so far.
    pub(super) fn tokens(&self) -> u64 {
        let finished = self.records.iter().map(|record| record.shard.tokens).sum::<u64>();
        finished + self.open.as_ref().map_or(0, |shard| shard.writer.tokens())
    }

    /// Where in the inputs the finished shards end.
    pub(super) fn position(&self) -> Position {
        self.records.last().map_or(Position::default(), |record| record.next)
    }

    /// Adds the documents of a batch: all of them stand in one shard, which ends behind them if it is full.
    pub(super) fn push<'d>(
        &mut self,
        documents: impl Iterator<Item = &'d [u32]>,
        text_bytes: u64,
        left_out: LeftOut,
        next: Position,
    ) -> Result<(), BuildError> {
        let mut shard = match self.open.take() {
            Some(shard) => shard,
            None => OpenShard {
                writer: ShardWriter::create(
                    &self.site.shard_path(self.records.len()),
                    self.tokeniser.vocabulary() as u32,
                )?,
                documents: 0,
                text_bytes: 0,
                left_out: LeftOut::default(),
            },
        };
        for document in documents {
            shard.writer.push(document)?;
            shard.documents += 1;
        }
        shard.text_bytes += text_bytes;
        shard.left_out.add(left_out);
        match shard.writer.tokens() >= self.shard_tokens {
            true => self.end(shard, next),
            false => {
                self.open = Some(shard);
                Ok(())
            }
        }
    }

    /// Ends the last shard. Nothing counts before [`Output::publish`].
    pub(super) fn finish(&mut self, next: Position) -> Result<(), BuildError> {
        self.open.take().map_or(Ok(()), |shard| self.end(shard, next))
    }

    fn end(&mut self, shard: OpenShard, next: Position) -> Result<(), BuildError> {
        let number = self.records.len();
        let file =
            self.site.shard_path(number).file_name().unwrap_or_default().to_string_lossy().into_owned();
        let written = shard.writer.finish()?;
        let entry = ShardEntry {
            file,
            documents: shard.documents,
            tokens: written.tokens(),
            text_bytes: shard.text_bytes,
            hash: written.content_hash().to_hex().to_string(),
        };
        let record = Record { shard: entry, left_out: shard.left_out, next };
        self.site.record(number, &record)?;
        self.records.push(record);
        Ok(())
    }

    /// Everything is there: says so in `corpus.json`.
    pub(super) fn publish(self) -> Result<Manifest, BuildError> {
        let Output { site, tokeniser, records, .. } = self;
        let sum = |of: fn(&ShardEntry) -> u64| records.iter().map(|record| of(&record.shard)).sum::<u64>();
        let mut left_out = LeftOut::default();
        records.iter().for_each(|record| left_out.add(record.left_out));
        let manifest = Manifest {
            format: FORMAT,
            tokeniser: folder::entry_of(tokeniser).ok_or(BuildError::Empty)?,
            vocabulary: tokeniser.vocabulary() as u32,
            documents: sum(|shard| shard.documents),
            tokens: sum(|shard| shard.tokens),
            text_bytes: sum(|shard| shard.text_bytes),
            left_out,
            shards: records.iter().map(|record| record.shard.clone()).collect(),
        };
        if manifest.documents == 0 {
            return Err(BuildError::Empty);
        }
        if let Tokeniser::HuggingFace(file) = tokeniser {
            folder::write_whole(&site.path().join(TOKENISER), file.json().as_bytes())?;
        }
        folder::write_whole(&site.path().join(MANIFEST), &site::to_json(&manifest))?;
        site.leave();
        Ok(manifest)
    }
}
