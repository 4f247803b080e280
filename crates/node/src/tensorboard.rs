//! Curves for TensorBoard: its event files, written along with the log (`tensorboard --logdir runs`).
//!
//! A file is a row of records: length, check sum of that, a message in protocol buffers (`Event`), check sum of it. We write five
//! of its fields, by hand; a compiler for protocol buffers would be more than this file.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::events::Event;

/// An event file, open for appending.
pub struct Board(File);

impl Board {
    /// A new file in this folder; TensorBoard puts those of one folder together.
    pub fn open(folder: &Path) -> io::Result<Board> {
        std::fs::create_dir_all(folder)?;
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        let name = |number: u32| {
            format!("events.out.tfevents.{seconds:010}.starling.{}.{number}", std::process::id())
        };
        let make = |number| OpenOptions::new().append(true).create_new(true).open(folder.join(name(number)));
        let made = (0..100).map(make).find(|made| !is_taken(made));
        let mut file = made.unwrap_or_else(|| Err(io::ErrorKind::AlreadyExists.into()))?;
        file.write_all(&record(&Message::at(seconds as f64, 0).text(3, "brain.Event:2")))?;
        Ok(Board(file))
    }

    /// Writes what of an event is a point of a curve.
    pub fn note(&mut self, time_ms: u64, event: &Event) -> io::Result<()> {
        let seconds = time_ms as f64 / 1e3;
        let message = match *event {
            // What was written of steps from here on is void.
            Event::Started { step, .. } | Event::WentBack { to: step, .. } => {
                Message::at(seconds, step).message(7, Message::default().number(1, 1))
            }
            Event::Step { step, loss, tokens, lr, norm, seconds: took, .. } => {
                let points = [
                    ("loss/training", loss),
                    ("optimiser/learning_rate", lr),
                    ("optimiser/gradient_norm", norm),
                    ("speed/tokens_per_second", tokens as f64 / took.max(1e-9)),
                ];
                Message::at(seconds, step + 1).message(5, points.into_iter().fold(Message::default(), point))
            }
            Event::Evaluated { step, loss, bits_per_byte, .. } => {
                let points = [("loss/held_out", loss), ("loss/held_out_bits_per_byte", bits_per_byte)];
                Message::at(seconds, step).message(5, points.into_iter().fold(Message::default(), point))
            }
            _ => return Ok(()),
        };
        self.0.write_all(&record(&message))
    }
}

fn is_taken(made: &io::Result<File>) -> bool {
    made.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::AlreadyExists)
}

/// A summary with one more value: its tag, and a float.
fn point(summary: Message, (tag, value): (&str, f64)) -> Message {
    summary.message(1, Message::default().text(1, tag).float(2, value as f32))
}

/// A message in protocol buffers.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    /// An event: its time, and the step it belongs to.
    fn at(seconds: f64, step: u64) -> Message {
        let mut event = Message::default();
        event.0.push(1 << 3 | 1);
        event.0.extend(seconds.to_le_bytes());
        event.number(2, step)
    }

    fn number(mut self, field: u8, value: u64) -> Message {
        self.0.push(field << 3);
        self.varint(value);
        self
    }

    fn float(mut self, field: u8, value: f32) -> Message {
        self.0.push(field << 3 | 5);
        self.0.extend(value.to_le_bytes());
        self
    }

    fn text(self, field: u8, text: &str) -> Message {
        self.message(field, Message(text.as_bytes().to_vec()))
    }

    fn message(mut self, field: u8, inner: Message) -> Message {
        self.0.push(field << 3 | 2);
        self.varint(inner.0.len() as u64);
        self.0.extend(inner.0);
        self
    }

    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

fn record(message: &Message) -> Vec<u8> {
    let length = (message.0.len() as u64).to_le_bytes();
    let sums = [masked(crc32c(&length)), masked(crc32c(&message.0))].map(u32::to_le_bytes);
    [&length[..], &sums[0], &message.0, &sums[1]].concat()
}

fn masked(sum: u32) -> u32 {
    sum.rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32 with Castagnoli's polynomial, bit by bit: a step is two hundred bytes.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0, |sum: u32, &byte| {
        (0..8).fold(sum ^ u32::from(byte), |sum, _| (sum >> 1) ^ (0x82f6_3b78 * (sum & 1)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_sums_are_those_of_the_standard() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn a_file_is_whole_records_with_what_was_noted() {
        let folder = tempfile::tempdir().unwrap();
        let mut board = Board::open(folder.path()).unwrap();
        let step = Event::Step {
            step: 6,
            loss: 1.5,
            tokens: 100,
            lr: 1e-3,
            norm: f64::NAN,
            seconds: 0.5,
            weights: None,
            skipped: false,
        };
        board.note(1_700_000_000_500, &step).unwrap();
        board.note(1_700_000_000_500, &Event::Checkpoint { step: 6 }).unwrap();
        let path = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
        let bytes = std::fs::read(&path).unwrap();
        let mut rest = &bytes[..];
        let mut messages = Vec::new();
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            assert_eq!(masked(crc32c(&rest[..8])).to_le_bytes(), rest[8..12]);
            let message = &rest[12..12 + length];
            assert_eq!(masked(crc32c(message)).to_le_bytes(), rest[12 + length..16 + length]);
            messages.push(message.to_vec());
            rest = &rest[16 + length..];
        }
        assert_eq!(messages.len(), 2);
        assert!(messages[0].ends_with(b"\x1a\x0dbrain.Event:2"), "{:?}", messages[0]);
        let mut start = vec![9];
        start.extend(1_700_000_000.5f64.to_le_bytes());
        start.extend([16, 7]);
        assert!(messages[1].starts_with(&start));
        let loss = [b"\x0a\x0dloss/training\x15".as_slice(), &1.5f32.to_le_bytes()].concat();
        assert!(messages[1].windows(loss.len()).any(|part| part == loss));
    }
}
