//! Events on virtual time: the earliest first, and among those of one moment the one that was put in first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The queue of events.
#[derive(Debug)]
pub struct Heap<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    next: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at_us: u64,
    number: u64,
    event: E,
}

impl<E> Default for Heap<E> {
    fn default() -> Self {
        Heap { heap: BinaryHeap::new(), next: 0 }
    }
}

impl<E> Heap<E> {
    /// Puts an event in.
    pub fn push(&mut self, at_us: u64, event: E) {
        self.heap.push(Reverse(Entry { at_us, number: self.next, event }));
        self.next += 1;
    }

    /// The next event, and when.
    pub fn pop(&mut self) -> Option<(u64, E)> {
        self.heap.pop().map(|Reverse(entry)| (entry.at_us, entry.event))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at_us, self.number).cmp(&(other.at_us, other.number))
    }
}
