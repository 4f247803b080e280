//! Frames put together to letters again, from whatever pieces a socket gives.
//!
//! Nothing that a peer claims is believed before it is checked, and memory grows with what has arrived, never by
//! what was announced. Any bytes at all end in letters or in an error, never in a panic.

use std::sync::Arc;

use bytes::Bytes;

use crate::frame::{FrameError, HEADER_BYTES, Header, LENGTHS_BYTES};
use crate::letter::{Lane, Letter, MAX_HEAD_BYTES};
use crate::spares::Spares;

/// What is set aside at once for a body that was announced; further space doubles as it fills.
const FIRST_GROWTH_BYTES: usize = 1 << 20;

/// Puts frames together: one letter a lane at a time.
pub struct Assembler {
    lanes: &'static [Lane],
    body_limit: u64,
    spares: Arc<Spares>,
    header: [u8; HEADER_BYTES],
    header_have: usize,
    frame: Option<OpenFrame>,
    letters: [Option<Partial>; 4],
}

/// A frame of which the payload has not all come.
struct OpenFrame {
    header: Header,
    left: usize,
    crc: crc32fast::Hasher,
}

impl Assembler {
    /// For a connection that carries these lanes, and bodies of at most so many bytes.
    pub fn new(lanes: &'static [Lane], body_limit: u64) -> Assembler {
        Assembler::with_spares(lanes, body_limit, Arc::default())
    }

    /// The same, with bodies in buffers that others have used before.
    pub(crate) fn with_spares(lanes: &'static [Lane], body_limit: u64, spares: Arc<Spares>) -> Assembler {
        let letters = [const { None }; 4];
        Assembler {
            lanes,
            body_limit,
            spares,
            header: [0; HEADER_BYTES],
            header_have: 0,
            frame: None,
            letters,
        }
    }

    /// Takes the next bytes of the stream, and gives the letters that they complete. After an error the stream is
    /// lost: close the connection.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<Vec<Letter>, FrameError> {
        let mut complete = Vec::new();
        while !bytes.is_empty() {
            let Some(frame) = &mut self.frame else {
                self.feed_header(&mut bytes)?;
                continue;
            };
            let piece = take(&mut bytes, frame.left);
            frame.left -= piece.len();
            frame.crc.update(piece);
            let (lane, done) = (frame.header.lane, frame.left == 0);
            if let Some(letter) = &mut self.letters[lane.index()] {
                letter.feed(piece, self.body_limit, &self.spares)?;
            }
            if done && let Some(frame) = self.frame.take() {
                complete.extend(self.end_frame(frame)?);
            }
        }
        Ok(complete)
    }

    fn feed_header(&mut self, bytes: &mut &[u8]) -> Result<(), FrameError> {
        let piece = take(bytes, HEADER_BYTES - self.header_have);
        self.header[self.header_have..][..piece.len()].copy_from_slice(piece);
        self.header_have += piece.len();
        if self.header_have < HEADER_BYTES {
            return Ok(());
        }
        self.header_have = 0;
        let header = Header::decode(&self.header)?;
        let lane = header.lane;
        if !self.lanes.contains(&lane) {
            return Err(FrameError::Unknown { lane: lane as u8, flags: self.header[1] });
        }
        let letter = &mut self.letters[lane.index()];
        match (header.first, letter.is_some()) {
            (true, true) => {
                return Err(FrameError::Order { lane, what: "begins a letter before the last has ended" });
            }
            (false, false) => {
                return Err(FrameError::Order { lane, what: "continues a letter that never began" });
            }
            (true, false) => *letter = Some(Partial::default()),
            (false, true) => {}
        }
        self.frame = Some(OpenFrame { header, left: header.length, crc: crc32fast::Hasher::new() });
        Ok(())
    }

    fn end_frame(&mut self, frame: OpenFrame) -> Result<Option<Letter>, FrameError> {
        let lane = frame.header.lane;
        if frame.crc.finalize() != frame.header.crc {
            return Err(FrameError::Checksum);
        }
        let letter = &mut self.letters[lane.index()];
        let whole = letter.as_ref().is_some_and(Partial::is_whole);
        match (frame.header.last, whole) {
            (true, false) => Err(FrameError::Order { lane, what: "ends a letter before all of it has come" }),
            (false, true) => Err(FrameError::Order { lane, what: "does not end a letter that is complete" }),
            (true, true) => Ok(letter.take().map(|letter| letter.seal(lane, &self.spares))),
            (false, false) => Ok(None),
        }
    }
}

/// A letter of which not all has come.
#[derive(Default)]
struct Partial {
    lengths: [u8; LENGTHS_BYTES],
    lengths_have: usize,
    head: Vec<u8>,
    head_bytes: usize,
    body: Vec<u8>,
    body_bytes: usize,
}

impl Partial {
    fn feed(&mut self, mut bytes: &[u8], body_limit: u64, spares: &Spares) -> Result<(), FrameError> {
        if self.lengths_have < LENGTHS_BYTES {
            let piece = take(&mut bytes, LENGTHS_BYTES - self.lengths_have);
            self.lengths[self.lengths_have..][..piece.len()].copy_from_slice(piece);
            self.lengths_have += piece.len();
            if self.lengths_have < LENGTHS_BYTES {
                return Ok(());
            }
            self.check_lengths(body_limit)?;
            self.body = spares.take(self.body_bytes);
        }
        let piece = take(&mut bytes, self.head_bytes - self.head.len());
        append(&mut self.head, piece, self.head_bytes);
        let piece = take(&mut bytes, self.body_bytes - self.body.len());
        append(&mut self.body, piece, self.body_bytes);
        match bytes.len() as u64 {
            0 => Ok(()),
            more => {
                let limit = (self.head_bytes + self.body_bytes) as u64;
                Err(FrameError::TooLong { what: "content", got: limit + more, limit })
            }
        }
    }

    fn check_lengths(&mut self, body_limit: u64) -> Result<(), FrameError> {
        let [h0, h1, h2, h3, body @ ..] = self.lengths;
        let head = u64::from(u32::from_le_bytes([h0, h1, h2, h3]));
        let body = u64::from_le_bytes(body);
        let body_limit = body_limit.min(isize::MAX as u64 / 2); // what this machine can address
        for (what, got, limit) in [("head", head, MAX_HEAD_BYTES as u64), ("body", body, body_limit)] {
            if got > limit {
                return Err(FrameError::TooLong { what, got, limit });
            }
        }
        (self.head_bytes, self.body_bytes) = (head as usize, body as usize);
        Ok(())
    }

    fn is_whole(&self) -> bool {
        let rest = (self.head_bytes - self.head.len()) + (self.body_bytes - self.body.len());
        self.lengths_have == LENGTHS_BYTES && rest == 0
    }

    fn seal(self, lane: Lane, spares: &Arc<Spares>) -> Letter {
        let body = if self.body.is_empty() { Vec::new() } else { vec![spares.lend(self.body)] };
        Letter { lane, head: Bytes::from(self.head), body }
    }
}

/// Appends to a buffer that will hold `total` bytes if all comes. Growing by doubling moves pages, not bytes.
fn append(buffer: &mut Vec<u8>, piece: &[u8], total: usize) {
    if buffer.capacity() - buffer.len() < piece.len() {
        let growth = buffer.len().max(FIRST_GROWTH_BYTES).max(piece.len());
        buffer.reserve_exact(growth.min(total - buffer.len()));
    }
    buffer.extend_from_slice(piece);
}

/// The first `most` bytes, or fewer if there are fewer.
fn take<'a>(bytes: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (piece, rest) = bytes.split_at(most.min(bytes.len()));
    *bytes = rest;
    piece
}

#[cfg(test)]
#[path = "assembler_tests.rs"]
mod tests;
