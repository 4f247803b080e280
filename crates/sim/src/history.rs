//! The hash of everything that happened, in order: two runs of one scenario must agree on it.

use std::hash::{Hash, Hasher};

use starling_swarm::ids::Address;
use starling_swarm::message::Envelope;

use crate::rng::mix2;

/// A hash that grows with every event; the same on every machine, unlike the standard library's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct History(u64);

impl History {
    /// A message arrives.
    pub fn message(&mut self, at_us: u64, envelope: &Envelope) {
        at_us.hash(self);
        (envelope.from, envelope.to).hash(self);
        let fence = envelope.fence;
        (fence.term, fence.epoch, fence.step, fence.attempt, envelope.payload_bytes()).hash(self);
        std::mem::discriminant(&envelope.body).hash(self);
    }

    /// Something else happens at a place.
    pub fn event(&mut self, at_us: u64, place: Address, kind: u64) {
        (at_us, place, kind).hash(self);
    }

    /// The hash so far.
    pub fn value(&self) -> u64 {
        self.0
    }
}

impl Hasher for History {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write_u64(&mut self, word: u64) {
        self.0 = mix2(self.0, word);
    }

    fn write_u32(&mut self, word: u32) {
        self.write_u64(word.into());
    }

    fn write_isize(&mut self, word: isize) {
        self.write_u64(word as u64);
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 = mix2(self.0, u64::from_le_bytes(word));
        }
    }
}
