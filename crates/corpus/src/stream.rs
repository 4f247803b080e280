//! The training documents, or the held-out ones, as one stream of tokens: what windows are cut from.
//!
//! A [`Stream`] remembers one position for every 256 documents and finds the rest.

use std::sync::Arc;

use crate::division::Division;
use crate::shards::Shards;

/// Documents between two remembered positions.
const BLOCK: u64 = 256;

/// The documents of one side of a [`Division`] in a row, each followed by end of text.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    division: Arc<Division>,
    held_out: bool,
    /// For every [`BLOCK`] documents: tokens of the stream before them.
    starts: Vec<u64>,
    tokens: u64,
}

impl Stream {
    /// Measures the stream of one side.
    pub(crate) fn new(shards: &Shards, division: &Arc<Division>, held_out: bool) -> Stream {
        let mut stream = Stream { division: Arc::clone(division), held_out, starts: Vec::new(), tokens: 0 };
        for document in 0..shards.documents() {
            if document % BLOCK == 0 {
                stream.starts.push(stream.tokens);
            }
            if let Some(range) = stream.member(shards, document) {
                stream.tokens += range.end - range.start + 1;
            }
        }
        stream
    }

    /// How many tokens the stream has, ends of text included.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// `count` tokens from `position` on, fewer at the end of the stream, each with the number of its
    /// document counted from the first one seen.
    pub(crate) fn read(&self, shards: &Shards, position: u64, count: usize, end_of_text: u32) -> Window {
        let mut window =
            Window { tokens: Vec::with_capacity(count + 1), documents: Vec::with_capacity(count) };
        let block = self.starts.partition_point(|&start| start <= position).saturating_sub(1);
        let mut skip = position - self.starts.get(block).copied().unwrap_or(0);
        let mut seen = 0;
        for document in block as u64 * BLOCK..shards.documents() {
            let Some(range) = self.member(shards, document) else { continue };
            let length = range.end - range.start + 1;
            if skip >= length {
                skip -= length;
                continue;
            }
            let wanted = (count - window.tokens.len()) as u64;
            shards.read(range.start + skip..range.end.min(range.start + skip + wanted), &mut window.tokens);
            window.tokens.push(end_of_text);
            window.tokens.truncate(count);
            window.documents.resize(window.tokens.len(), seen);
            if window.tokens.len() == count {
                break;
            }
            skip = 0;
            seen += 1;
        }
        window
    }

    fn member(&self, shards: &Shards, document: u64) -> Option<std::ops::Range<u64>> {
        (self.division.holds_out(document) == self.held_out).then(|| shards.document(document)).flatten()
    }
}

/// Some consecutive tokens of a stream: what a model is trained on or judged by.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Window {
    /// `context + 1` tokens: all but the last are inputs, all but the first are what is to be predicted.
    pub tokens: Vec<u32>,
    /// For each token, the number of its document within this window: 0, then one more after each end of
    /// text (which belongs to the document that it ends).
    pub documents: Vec<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::division::divide;
    use crate::random::Key;
    use crate::shard::ShardWriter;
    use proptest::prelude::*;

    const END: u32 = 99;

    fn shard_of(lengths: &[usize]) -> Shards {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = ShardWriter::create(&folder.path().join("a.shard"), 100).unwrap();
        for (index, &length) in lengths.iter().enumerate() {
            writer.push(&vec![index as u32 % 90; length]).unwrap();
        }
        writer.finish().unwrap().into()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn a_window_is_a_piece_of_the_whole_stream(
            seed: u64, lengths in prop::collection::vec(0usize..12, 1..700), start: prop::sample::Index, count in 1usize..40
        ) {
            let shard = shard_of(&lengths);
            let fraction = if lengths.windows(2).any(|pair| pair[0] != pair[1]) { 0.3 } else { 0.0 };
            let division = Arc::new(divide(&[&shard], Key::new(seed, "test"), fraction).unwrap().remove(0));
            for held_out in [false, true] {
                let stream = Stream::new(&shard, &division, held_out);
                let mut whole = Vec::new();
                for document in (0..shard.documents()).filter(|&document| division.holds_out(document) == held_out) {
                    shard.read(shard.document(document).unwrap(), &mut whole);
                    whole.push(END);
                }
                prop_assert_eq!(stream.tokens(), whole.len() as u64);
                let start = start.index(whole.len() + 1);
                let window = stream.read(&shard, start as u64, count, END);
                let expected = &whole[start..whole.len().min(start + count)];
                prop_assert_eq!(&window.tokens[..], expected);
                let ends = |before: usize| expected[..before].iter().filter(|&&token| token == END).count() as u32;
                let numbers: Vec<u32> = (0..expected.len()).map(ends).collect();
                prop_assert_eq!(window.documents, numbers);
            }
        }
    }
}
