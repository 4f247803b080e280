//! Events on virtual time: the earliest first, and among those of one moment the one that was put in first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What is nearer than this stands in a heap of its own. Nearly all events are messages that arrive soon, and a small
/// heap in front of the timers and computations of thousands of peers is the faster one.
const NEAR_US: u64 = 10_000;

/// The queue of events. What is sorted is small; the events stay where they were put.
#[derive(Debug)]
pub struct Heap<E> {
    near: BinaryHeap<Reverse<Due>>,
    far: BinaryHeap<Reverse<Due>>,
    events: Vec<Option<E>>,
    free: Vec<u32>,
    next: u64,
    now_us: u64,
}

/// When, in which order it was put in, and where it is.
type Due = (u64, u64, u32);

impl<E> Default for Heap<E> {
    fn default() -> Self {
        let (near, far) = (BinaryHeap::new(), BinaryHeap::new());
        Heap { near, far, events: Vec::new(), free: Vec::new(), next: 0, now_us: 0 }
    }
}

impl<E> Heap<E> {
    /// Puts an event in.
    pub fn push(&mut self, at_us: u64, event: E) {
        let place = self.free.pop().unwrap_or_else(|| {
            self.events.push(None);
            u32::try_from(self.events.len() - 1).expect("fewer than four billion events at a time")
        });
        self.events[place as usize] = Some(event);
        let heap = if at_us < self.now_us + NEAR_US { &mut self.near } else { &mut self.far };
        heap.push(Reverse((at_us, self.next, place)));
        self.next += 1;
    }

    /// The next event, and when.
    pub fn pop(&mut self) -> Option<(u64, E)> {
        // The greater of two reversed ones is the earlier.
        let heap = if self.near.peek() > self.far.peek() { &mut self.near } else { &mut self.far };
        let Reverse((at_us, _, place)) = heap.pop()?;
        self.now_us = at_us;
        self.free.push(place);
        self.events[place as usize].take().map(|event| (at_us, event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_comes_first_and_of_one_moment_what_was_put_in_first() {
        let mut heap = Heap::default();
        for (number, at_us) in [40_000, 5, 40_000, 9_999, 10_000, 5].into_iter().enumerate() {
            heap.push(at_us, number);
        }
        let first: Vec<usize> = (0..4).filter_map(|_| heap.pop()).map(|(_, number)| number).collect();
        assert_eq!(first, [1, 5, 3, 4]);
        // Near now, and after what was far when it was put in.
        heap.push(40_000, 6);
        heap.push(11_000, 7);
        let rest: Vec<usize> = std::iter::from_fn(|| heap.pop()).map(|(_, number)| number).collect();
        assert_eq!(rest, [7, 0, 2, 6]);
    }
}
