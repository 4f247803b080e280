//! What waits to be sent to one peer: a bounded queue a lane.
//!
//! It belongs to the peer, not to a connection: letters may wait for a dial to succeed, and when several pairs of
//! connections stand, only the newest begins new letters.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::letter::{Lane, Letter};
use crate::limits::Limits;

/// Numbers the pairs of connections of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PairNo(pub(crate) u64);

pub(crate) struct Outbox {
    queues: Mutex<Queues>,
    changed: Notify,
}

struct Queues {
    lanes: [Queue; 4],
    sender: Option<PairNo>,
}

#[derive(Default)]
struct Queue {
    letters: VecDeque<Letter>,
    bytes: u64,
}

impl Outbox {
    pub(crate) fn new() -> Outbox {
        let queues = Queues { lanes: Default::default(), sender: None };
        Outbox { queues: Mutex::new(queues), changed: Notify::new() }
    }

    /// Queues a letter, unless its lane is full. A letter larger than the whole queue goes when that is empty.
    pub(crate) fn push(&self, letter: Letter, limits: &Limits) -> bool {
        let mut queues = self.queues();
        let queue = &mut queues.lanes[letter.lane.index()];
        let bytes = queue.bytes.saturating_add(letter.bytes());
        let too_long = bytes > limits.queued_bytes && !queue.letters.is_empty();
        if too_long || queue.letters.len() >= limits.queued_letters {
            return false;
        }
        queue.bytes = bytes;
        queue.letters.push_back(letter);
        drop(queues);
        self.changed.notify_waiters();
        true
    }

    /// The next letter of a lane, for the pair whose turn it is.
    pub(crate) fn pop(&self, lane: Lane, pair: PairNo) -> Option<Letter> {
        let mut queues = self.queues();
        if queues.sender != Some(pair) {
            return None;
        }
        let queue = &mut queues.lanes[lane.index()];
        let letter = queue.letters.pop_front()?;
        queue.bytes -= letter.bytes();
        Some(letter)
    }

    /// From now on this pair begins letters.
    pub(crate) fn hand_to(&self, pair: PairNo) {
        self.queues().sender = Some(pair);
        self.wake();
    }

    /// Drops all that waits; how many letters that were.
    pub(crate) fn clear(&self) -> usize {
        let lanes = std::mem::take(&mut self.queues().lanes);
        lanes.iter().map(|queue| queue.letters.len()).sum()
    }

    /// Has all writers look again.
    pub(crate) fn wake(&self) {
        self.changed.notify_waiters();
    }

    /// Until something has changed after the returned future was first polled or enabled.
    pub(crate) fn changed(&self) -> Notified<'_> {
        self.changed.notified()
    }

    fn queues(&self) -> MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    fn letter(bytes: usize) -> Letter {
        Letter { lane: Lane::Work, head: Bytes::new(), body: vec![Bytes::from(vec![0; bytes])] }
    }

    #[test]
    fn a_lane_is_full_by_bytes_or_by_letters_and_others_are_not() {
        let limits = Limits { queued_bytes: 100, queued_letters: 3, ..Limits::default() };
        let outbox = Outbox::new();
        outbox.hand_to(PairNo(1));
        assert!(outbox.push(letter(500), &limits), "into an empty queue anything goes");
        assert!(!outbox.push(letter(1), &limits));
        assert!(outbox.push(Letter { lane: Lane::Sum, ..letter(1) }, &limits));
        assert!(outbox.pop(Lane::Work, PairNo(1)).is_some());
        assert_eq!((0..5).filter(|_| outbox.push(letter(1), &limits)).count(), 3);
        assert_eq!(outbox.clear(), 4);
        assert!(outbox.push(letter(100), &limits));
    }

    #[test]
    fn only_the_newest_pair_begins_letters() {
        let outbox = Outbox::new();
        assert!(outbox.push(letter(1), &Limits::default()));
        outbox.hand_to(PairNo(1));
        outbox.hand_to(PairNo(2));
        assert!(outbox.pop(Lane::Work, PairNo(1)).is_none());
        assert!(outbox.pop(Lane::Work, PairNo(2)).is_some());
    }
}
