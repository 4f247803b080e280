//! What nodes send each other: letters of opaque bytes, in four lanes.

use std::fmt;

use bytes::Bytes;
use serde::{Deserialize, Serialize};

pub use crate::assembler::Assembler;
pub use crate::frame::{Cutter, Frame, FrameError, MAX_FRAME_BYTES};

/// Most bytes of a letter's head.
pub const MAX_HEAD_BYTES: usize = 4 << 20;

/// How urgent a letter is. Lanes do not wait for each other; letters of one lane keep their order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Lane {
    /// Small, and decides something. Has a connection of its own.
    Control,
    /// A tensor that a device waits for.
    Work,
    /// A part of a gradient that a stage waits for.
    Sum,
    /// What one joiner waits for.
    State,
}

impl Lane {
    /// All, the most urgent first.
    pub const ALL: [Lane; 4] = [Lane::Control, Lane::Work, Lane::Sum, Lane::State];
    /// What the first connection between two nodes carries.
    pub const OF_CONTROL: &'static [Lane] = &[Lane::Control];
    /// What the second connection between two nodes carries.
    pub const OF_BULK: &'static [Lane] = &[Lane::Work, Lane::Sum, Lane::State];

    /// Its place in tables of lanes, and its number on the wire.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The lane of this number.
    pub(crate) fn from_index(index: u8) -> Option<Lane> {
        Lane::ALL.get(usize::from(index)).copied()
    }
}

impl fmt::Display for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(["control", "work", "sum", "state"][self.index()])
    }
}

/// What one node sends another: a small head that says what it is, and a body of any size.
#[derive(Clone, PartialEq, Eq)]
pub struct Letter {
    /// How urgent it is.
    pub lane: Lane,
    /// What it is; at most [`MAX_HEAD_BYTES`].
    pub head: Bytes,
    /// The rest, segment after segment, written without a copy. A received letter has none or one.
    pub body: Vec<Bytes>,
}

impl Letter {
    /// Bytes of head and body.
    pub fn bytes(&self) -> u64 {
        self.head.len() as u64 + self.body_bytes()
    }

    /// Bytes of the body.
    pub fn body_bytes(&self) -> u64 {
        self.body.iter().map(|segment| segment.len() as u64).sum()
    }
}

impl fmt::Debug for Letter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Letter({}, {} + {} bytes)", self.lane, self.head.len(), self.body_bytes())
    }
}
