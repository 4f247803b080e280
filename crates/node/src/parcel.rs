//! What one worker hands to another whole: the state of a stage, or the updates that the other one missed. It is cut into
//! chunks, each with its hash, so that it can come from several workers, in any order, and go on after a connection ends.

use std::ops::Range;

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use starling_swarm::ids::{Address, Payload, PeerId, Step};
use starling_swarm::message::{Body, Envelope, Fence, PROTOCOL};
use starling_swarm::worker::io::StateOf;

/// Bytes of a chunk; the last one of a vector may be shorter.
pub const CHUNK_BYTES: u64 = 1 << 20;

/// A parcel's name: the hash of what it holds.
pub type ParcelId = [u8; 32];

/// What a parcel holds, and how it is cut.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outline {
    /// The state that the receiver has when it has put this in place.
    pub of: StateOf,
    /// What its vectors are.
    pub contents: Contents,
    /// Bytes of each vector.
    pub vectors: Vec<u64>,
    /// BLAKE3 of each chunk: those of the first vector, then those of the next.
    pub hashes: Vec<[u8; 32]>,
}

/// What the vectors of a parcel are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Contents {
    /// The weights, then the optimiser's moments.
    State,
    /// Updates, one a step, that make the state of an earlier version this one.
    Updates(Vec<Update>),
}

/// An update that was missed. Unless it was skipped, its vectors are the reduced gradient, then the sum over all uses of each
/// parameter that is shared.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Update {
    /// The step that it closed.
    pub step: u64,
    /// The constants of its commit; none if it was skipped.
    pub constants: Option<Vec<u8>>,
    /// The parameters that are shared.
    pub shared: Vec<String>,
}

/// An outline, and all chunks.
#[derive(Clone, Debug, PartialEq)]
pub struct Parcel {
    /// What it holds.
    pub outline: Outline,
    /// Its chunks, in order.
    pub chunks: Vec<Bytes>,
}

impl Outline {
    /// The parcel's name.
    pub fn id(&self) -> ParcelId {
        let text = postcard::to_stdvec(self).unwrap_or_default();
        *blake3::hash(&text).as_bytes()
    }

    /// Whether it is a whole state.
    pub fn is_state(&self) -> bool {
        self.contents == Contents::State
    }

    /// Bytes of every chunk.
    pub fn chunk_lengths(&self) -> impl Iterator<Item = usize> {
        places(&self.vectors).map(|(_, range)| (range.end - range.start) as usize)
    }

    /// The version onto which it is put; none if it is a whole state.
    pub fn onto(&self) -> Option<Step> {
        match &self.contents {
            Contents::State => None,
            Contents::Updates(updates) => {
                Some(updates.first().map_or(self.of.version, |first| Step(first.step)))
            }
        }
    }

    /// The message that tells of it.
    pub fn message(&self, from: PeerId, to: PeerId, fence: Fence) -> Envelope {
        let payload = Payload { handle: 0, bytes: self.bytes().unwrap_or(u64::MAX) };
        let body = Body::State { stage: self.of.stage, payload, onto: self.onto() };
        let fence = Fence { step: self.of.version, ..fence };
        Envelope { protocol: PROTOCOL, from: Address::Worker(from), to: Address::Worker(to), fence, body }
    }

    /// Bytes of all vectors; none if that is no number.
    pub fn bytes(&self) -> Option<u64> {
        self.vectors.iter().try_fold(0u64, |sum, &bytes| sum.checked_add(bytes))
    }

    /// Whether there is a hash for every chunk, and no more than so many bytes in all.
    pub fn is_sound(&self, most_bytes: u64) -> bool {
        let bytes = self.bytes().is_some_and(|bytes| bytes <= most_bytes);
        bytes && places(&self.vectors).count() == self.hashes.len()
    }
}

impl Parcel {
    /// Cuts vectors into chunks; `read` gives a range of bytes of one of them.
    pub fn pack<E>(
        of: StateOf,
        contents: Contents,
        vectors: Vec<u64>,
        mut read: impl FnMut(usize, Range<u64>) -> Result<Bytes, E>,
    ) -> Result<Parcel, E> {
        let chunks: Vec<Bytes> =
            places(&vectors).map(|(vector, range)| read(vector, range)).collect::<Result<_, E>>()?;
        let hashes = chunks.iter().map(|chunk| *blake3::hash(chunk).as_bytes()).collect();
        Ok(Parcel { outline: Outline { of, contents, vectors, hashes }, chunks })
    }

    /// Its chunks, each with the vector that it is of and the place of its first byte there.
    pub fn pieces(&self) -> impl Iterator<Item = (usize, u64, &Bytes)> {
        places(&self.outline.vectors)
            .zip(&self.chunks)
            .map(|((vector, range), chunk)| (vector, range.start, chunk))
    }
}

/// Where chunks lie: which vector, which of its bytes.
fn places(vectors: &[u64]) -> impl Iterator<Item = (usize, Range<u64>)> {
    vectors.iter().enumerate().flat_map(|(vector, &bytes)| {
        (0..bytes.div_ceil(CHUNK_BYTES)).map(move |chunk| {
            let start = chunk * CHUNK_BYTES;
            (vector, start..bytes.min(start + CHUNK_BYTES))
        })
    })
}

#[cfg(test)]
pub(crate) mod tests {
    use std::convert::Infallible;

    use starling_swarm::ids::{Epoch, StageId, Step};

    use super::*;

    /// A parcel of two vectors, the first of which is `bytes` long.
    pub(crate) fn parcel(version: u64, bytes: u64) -> Parcel {
        let of = StateOf { stage: StageId(1), epoch: Epoch(1), version: Step(version) };
        let read = |vector: usize, range: Range<u64>| {
            let byte = |at: u64| (at / 1000 + vector as u64 + version) as u8;
            Ok::<Bytes, Infallible>(range.map(byte).collect::<Vec<u8>>().into())
        };
        Parcel::pack(of, Contents::State, vec![bytes, 5], read).unwrap()
    }

    #[test]
    fn chunks_do_not_cross_vectors_and_fill_them() {
        let parcel = parcel(3, 2 * CHUNK_BYTES + 7);
        let pieces: Vec<(usize, u64, usize)> =
            parcel.pieces().map(|(vector, start, chunk)| (vector, start, chunk.len())).collect();
        let chunk = CHUNK_BYTES as usize;
        assert_eq!(pieces, [(0, 0, chunk), (0, CHUNK_BYTES, chunk), (0, 2 * CHUNK_BYTES, 7), (1, 0, 5)]);
        assert!(parcel.outline.is_sound(2 * CHUNK_BYTES + 12));
        assert!(!parcel.outline.is_sound(2 * CHUNK_BYTES + 11), "too large");
    }

    #[test]
    fn an_outline_that_makes_no_sense_is_seen() {
        let sound = parcel(3, 100).outline;
        let short = Outline { hashes: sound.hashes[..1].to_vec(), ..sound.clone() };
        let huge = Outline { vectors: vec![u64::MAX, u64::MAX], ..sound.clone() };
        assert!(sound.is_sound(1000) && !short.is_sound(1000) && !huge.is_sound(u64::MAX));
        assert_ne!(sound.id(), parcel(4, 100).outline.id());
        assert_eq!(sound.id(), parcel(3, 100).outline.id());
    }
}
