//! Letters cut into frames: the unit in which lanes take turns.
//!
//! ```text
//! frame   = lane u8, flags u8, length u32, crc32 of the payload u32, payload
//! letter  = frame+ of one lane, the first with FIRST, the last with LAST
//! payload = of the first frame: head length u32, body length u64; then head and body, cut anywhere
//! ```
//! All numbers are little-endian. Frames of other lanes may stand between those of one letter.

use bytes::Bytes;

use crate::letter::{Lane, Letter};

/// Most bytes of a frame's payload: 2 ms of a gigabit link, so that nothing urgent waits longer.
pub const MAX_FRAME_BYTES: usize = 256 << 10;

/// Bytes before a frame's payload.
pub(crate) const HEADER_BYTES: usize = 10;
/// Bytes before a letter's head.
pub(crate) const LENGTHS_BYTES: usize = 12;

const FIRST: u8 = 1;
const LAST: u8 = 2;

/// Why a frame is refused. The connection is closed: what follows cannot be trusted to be in step.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum FrameError {
    #[error(
        "lane {lane} with flags {flags:#x} does not belong on this connection; the peer is broken or hostile"
    )]
    Unknown { lane: u8, flags: u8 },
    #[error("a frame of {got} bytes, allowed are 1 to {MAX_FRAME_BYTES}; the peer is broken or hostile")]
    Length { got: u32 },
    #[error("a frame's checksum is wrong: memory or a program at one of the two nodes is broken")]
    Checksum,
    #[error(
        "a letter's {what} of {got} bytes is over the limit of {limit}; raise the limit here if it is meant"
    )]
    TooLong { what: &'static str, got: u64, limit: u64 },
    #[error("a frame in lane {lane} {what}; the peer is broken or hostile")]
    Order { lane: Lane, what: &'static str },
}

/// What stands before a frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) lane: Lane,
    pub(crate) first: bool,
    pub(crate) last: bool,
    pub(crate) length: usize,
    pub(crate) crc: u32,
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        bytes[0] = self.lane as u8;
        bytes[1] = if self.first { FIRST } else { 0 } | if self.last { LAST } else { 0 };
        bytes[2..6].copy_from_slice(&(self.length as u32).to_le_bytes());
        bytes[6..].copy_from_slice(&self.crc.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, FrameError> {
        let [lane, flags, l0, l1, l2, l3, c0, c1, c2, c3] = *bytes;
        let known = Lane::from_index(lane).filter(|_| flags & !(FIRST | LAST) == 0);
        let lane = known.ok_or(FrameError::Unknown { lane, flags })?;
        let length = u32::from_le_bytes([l0, l1, l2, l3]);
        if length == 0 || length as usize > MAX_FRAME_BYTES {
            return Err(FrameError::Length { got: length });
        }
        let crc = u32::from_le_bytes([c0, c1, c2, c3]);
        Ok(Header { lane, first: flags & FIRST != 0, last: flags & LAST != 0, length: length as usize, crc })
    }
}

/// One frame, ready to be written: slices of the letter, not copies.
#[derive(Clone, Debug)]
pub struct Frame {
    /// Its lane.
    pub lane: Lane,
    /// Whether the letter ends with it.
    pub last: bool,
    start: [u8; HEADER_BYTES + LENGTHS_BYTES],
    start_bytes: usize,
    payload: Vec<Bytes>,
    bytes: usize,
}

impl Frame {
    /// Its bytes on the wire, piece by piece.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&self.start[..self.start_bytes]).chain(self.payload.iter().map(|piece| &piece[..]))
    }

    /// How many bytes they are.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

/// Cuts one letter into frames.
#[derive(Debug)]
pub struct Cutter {
    lane: Lane,
    lengths: Option<[u8; LENGTHS_BYTES]>, // until the first frame is cut
    rest: std::vec::IntoIter<Bytes>,
    piece: Bytes,
    left: u64,
}

impl Cutter {
    /// Begins with a letter, whose head must be at most [`MAX_HEAD_BYTES`](crate::letter::MAX_HEAD_BYTES).
    pub fn new(letter: Letter) -> Cutter {
        let mut lengths = [0; LENGTHS_BYTES];
        lengths[..4].copy_from_slice(&(letter.head.len() as u32).to_le_bytes());
        lengths[4..].copy_from_slice(&letter.body_bytes().to_le_bytes());
        let left = letter.bytes();
        Cutter {
            lane: letter.lane,
            lengths: Some(lengths),
            rest: letter.body.into_iter(),
            piece: letter.head,
            left,
        }
    }

    /// The next frame, with a payload of at most so many bytes (and [`MAX_FRAME_BYTES`]); `None` after the last.
    pub fn next_frame(&mut self, most_bytes: usize) -> Option<Frame> {
        let lengths = self.lengths.take();
        if lengths.is_none() && self.left == 0 {
            return None;
        }
        let mut crc = crc32fast::Hasher::new();
        let mut start = [0; HEADER_BYTES + LENGTHS_BYTES];
        let mut start_bytes = HEADER_BYTES;
        if let Some(lengths) = lengths {
            crc.update(&lengths);
            start[HEADER_BYTES..].copy_from_slice(&lengths);
            start_bytes += LENGTHS_BYTES;
        }
        let mut length = start_bytes - HEADER_BYTES;
        let most = most_bytes.clamp(LENGTHS_BYTES + 1, MAX_FRAME_BYTES);
        let mut payload = Vec::with_capacity(2);
        while length < most && self.left > 0 {
            let piece = self.next_piece(most - length);
            crc.update(&piece);
            length += piece.len();
            payload.push(piece);
        }
        let last = self.left == 0;
        let header = Header { lane: self.lane, first: lengths.is_some(), last, length, crc: crc.finalize() };
        start[..HEADER_BYTES].copy_from_slice(&header.encode());
        Some(Frame { lane: self.lane, last, start, start_bytes, payload, bytes: HEADER_BYTES + length })
    }

    /// At most so many bytes of what is left; not none while something is left.
    fn next_piece(&mut self, most: usize) -> Bytes {
        while self.piece.is_empty() {
            self.piece = self.rest.next().unwrap_or_default();
        }
        let piece = self.piece.split_to(most.min(self.piece.len()));
        self.left -= piece.len() as u64;
        piece
    }
}
