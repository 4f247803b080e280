//! What went over an endpoint, counted.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::frame::Frame;
use crate::letter::{Lane, Letter};

/// Bytes and letters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Count {
    /// Bytes; of what was sent with the frames' headers, without TLS.
    pub bytes: u64,
    /// Letters.
    pub letters: u64,
}

/// What went over an endpoint since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Sent, lane by lane ([`Lane::index`]).
    pub sent: [Count; 4],
    /// Received, lane by lane.
    pub received: [Count; 4],
    /// Bytes sent over emulated links.
    pub shaped_bytes: u64,
    /// Letters that were not sent because a queue was full.
    pub dropped_full: u64,
    /// Letters that were dropped on a way that is cut, in either direction.
    pub dropped_cut: u64,
}

impl Traffic {
    /// Sent, in all lanes.
    pub fn sent_total(&self) -> Count {
        total(&self.sent)
    }

    /// Received, in all lanes.
    pub fn received_total(&self) -> Count {
        total(&self.received)
    }
}

fn total(lanes: &[Count; 4]) -> Count {
    lanes.iter().fold(Count::default(), |sum, lane| Count {
        bytes: sum.bytes + lane.bytes,
        letters: sum.letters + lane.letters,
    })
}

/// The counters behind it. Each is right; together they are of no one moment.
#[derive(Default)]
pub(crate) struct Counters {
    sent: [Counter; 4],
    received: [Counter; 4],
    shaped_bytes: AtomicU64,
    dropped_full: AtomicU64,
    dropped_cut: AtomicU64,
}

#[derive(Default)]
struct Counter {
    bytes: AtomicU64,
    letters: AtomicU64,
}

impl Counters {
    pub(crate) fn sent(&self, frame: &Frame, shaped: bool) {
        let lane = &self.sent[frame.lane.index()];
        add(&lane.bytes, frame.bytes() as u64);
        add(&lane.letters, u64::from(frame.last));
        if shaped {
            add(&self.shaped_bytes, frame.bytes() as u64);
        }
    }

    pub(crate) fn received(&self, letter: &Letter) {
        let lane = &self.received[letter.lane.index()];
        add(&lane.bytes, letter.bytes());
        add(&lane.letters, 1);
    }

    pub(crate) fn dropped_full(&self) {
        add(&self.dropped_full, 1);
    }

    pub(crate) fn dropped_cut(&self, letters: usize) {
        add(&self.dropped_cut, letters as u64);
    }

    pub(crate) fn traffic(&self) -> Traffic {
        let lanes = |counters: &[Counter; 4]| {
            Lane::ALL.map(|lane| {
                let Counter { bytes, letters } = &counters[lane.index()];
                Count { bytes: read(bytes), letters: read(letters) }
            })
        };
        Traffic {
            sent: lanes(&self.sent),
            received: lanes(&self.received),
            shaped_bytes: read(&self.shaped_bytes),
            dropped_full: read(&self.dropped_full),
            dropped_cut: read(&self.dropped_cut),
        }
    }
}

fn add(counter: &AtomicU64, number: u64) {
    counter.fetch_add(number, Ordering::Relaxed);
}

fn read(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}
