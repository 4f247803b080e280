//! The shards of one source, read as if they were one.
//!
//! A large corpus is cut into files so that it can be built, resumed and copied piece by piece. That is
//! nobody else's affair: documents and tokens are numbered through, and no document lies in two files.

use std::ops::Range;

use crate::shard::Shard;

/// One or more shards in a row.
#[derive(Debug)]
pub struct Shards {
    shards: Vec<Shard>,
    /// For every shard, documents and tokens of it and those before it.
    ends: Vec<(u64, u64)>,
}

impl Shards {
    /// Puts shards of one vocabulary in a row.
    pub fn new(shards: Vec<Shard>) -> Shards {
        let mut end = (0, 0);
        let ends = shards.iter().map(|shard| {
            end = (end.0 + shard.documents(), end.1 + shard.tokens());
            end
        });
        Shards { ends: ends.collect(), shards }
    }

    /// How many tokens all documents have together.
    pub fn tokens(&self) -> u64 {
        self.ends.last().map_or(0, |end| end.1)
    }

    /// How many documents there are.
    pub fn documents(&self) -> u64 {
        self.ends.last().map_or(0, |end| end.0)
    }

    /// Where the tokens of a document stand.
    pub fn document(&self, index: u64) -> Option<Range<u64>> {
        let shard = self.ends.partition_point(|end| end.0 <= index);
        let (documents, tokens) = self.before(shard);
        let range = self.shards.get(shard)?.document(index - documents)?;
        Some(range.start + tokens..range.end + tokens)
    }

    /// Appends the tokens of a range; what lies beyond the end is left out.
    pub fn read(&self, range: Range<u64>, into: &mut Vec<u32>) {
        let first = self.ends.partition_point(|end| end.1 <= range.start);
        for (index, shard) in self.shards.iter().enumerate().skip(first) {
            let before = self.before(index).1;
            if before >= range.end {
                break;
            }
            shard.read(range.start.saturating_sub(before)..range.end - before, into);
        }
    }

    /// The stored bytes of a document: the same for the same tokens of the same vocabulary.
    pub(crate) fn bytes_of(&self, document: u64) -> &[u8] {
        let shard = self.ends.partition_point(|end| end.0 <= document);
        let documents = self.before(shard).0;
        let found =
            self.shards.get(shard).and_then(|shard| Some((shard, shard.document(document - documents)?)));
        found.map_or(&[], |(shard, range)| shard.bytes_of(range))
    }

    /// The hash of what the shards say. That of one shard is its own.
    pub fn content_hash(&self) -> blake3::Hash {
        if let [shard] = &self.shards[..] {
            return shard.content_hash();
        }
        let mut hasher = blake3::Hasher::new_derive_key("starling 2026 shards in a row");
        for shard in &self.shards {
            hasher.update(shard.content_hash().as_bytes());
        }
        hasher.finalize()
    }

    fn before(&self, shard: usize) -> (u64, u64) {
        shard.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or((0, 0))
    }
}

impl From<Shard> for Shards {
    fn from(shard: Shard) -> Shards {
        Shards::new(vec![shard])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shard::ShardWriter;

    fn shard_of(documents: &[&[u32]]) -> Shard {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = ShardWriter::create(&folder.path().join("a.shard"), 100).unwrap();
        documents.iter().for_each(|document| writer.push(document).unwrap());
        writer.finish().unwrap()
    }

    #[test]
    fn several_shards_read_as_one() {
        let documents: [&[u32]; 5] = [&[1, 2], &[3], &[], &[4, 5, 6], &[7]];
        let whole = Shards::from(shard_of(&documents));
        let cut = Shards::new(vec![
            shard_of(&documents[..2]),
            shard_of(&[]),
            shard_of(&documents[2..3]),
            shard_of(&documents[3..]),
        ]);
        assert_eq!((cut.documents(), cut.tokens()), (whole.documents(), whole.tokens()));
        for index in 0..6 {
            assert_eq!(cut.document(index), whole.document(index));
            assert_eq!(cut.bytes_of(index), whole.bytes_of(index));
        }
        for start in 0..9 {
            for end in start..10 {
                let (mut left, mut right) = (Vec::new(), Vec::new());
                cut.read(start..end, &mut left);
                whole.read(start..end, &mut right);
                assert_eq!(left, right, "{start}..{end}");
            }
        }
        assert_ne!(cut.content_hash(), whole.content_hash());
        assert_eq!(whole.content_hash(), shard_of(&documents).content_hash());
    }
}
