//! Events on virtual time: the earliest first, and among those of one moment the one that was put in first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// The queue of events. What is sorted is small; the events stay where they were put.
#[derive(Debug)]
pub struct Heap<E> {
    /// When, in which order it was put in, and where it is.
    order: BinaryHeap<Reverse<(u64, u64, u32)>>,
    events: Vec<Option<E>>,
    free: Vec<u32>,
    next: u64,
}

impl<E> Default for Heap<E> {
    fn default() -> Self {
        Heap { order: BinaryHeap::new(), events: Vec::new(), free: Vec::new(), next: 0 }
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
        self.order.push(Reverse((at_us, self.next, place)));
        self.next += 1;
    }

    /// The next event, and when.
    pub fn pop(&mut self) -> Option<(u64, E)> {
        let Reverse((at_us, _, place)) = self.order.pop()?;
        self.free.push(place);
        self.events[place as usize].take().map(|event| (at_us, event))
    }
}
