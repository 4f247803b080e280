//! The reduced gradient of a step as it arrives, in pieces, beside the sums it was made from.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::stage::StageError;

/// The reduced gradient; `G` is a gradient, `B` a vector of the engine's.
pub struct Reduced<G, B> {
    /// The attempt that writes it.
    pub attempt: u32,
    /// With a slot for each use of a parameter.
    pub gradient: G,
    /// Sums over all uses of shared parameters.
    pub totals: BTreeMap<String, B>,
    len: usize,
    /// What has arrived: pieces apart from each other, in order.
    arrived: Vec<Range<usize>>,
}

impl<G, B> Reduced<G, B> {
    pub fn new(attempt: u32, gradient: G, len: usize) -> Reduced<G, B> {
        Reduced { attempt, gradient, totals: BTreeMap::new(), len, arrived: Vec::new() }
    }

    /// Notes that a piece has arrived.
    pub fn note(&mut self, piece: Range<usize>) {
        if piece.is_empty() {
            return;
        }
        self.arrived.push(piece);
        self.arrived.sort_by_key(|piece| piece.start);
        let mut joined: Vec<Range<usize>> = Vec::with_capacity(self.arrived.len());
        for piece in self.arrived.drain(..) {
            match joined.last_mut() {
                Some(last) if piece.start <= last.end => last.end = last.end.max(piece.end),
                _ => joined.push(piece),
            }
        }
        self.arrived = joined;
    }

    /// Refuses while elements are missing.
    pub fn complete(&self) -> Result<(), StageError> {
        let arrived: usize = self.arrived.iter().map(ExactSizeIterator::len).sum();
        if arrived == self.len { Ok(()) } else { Err(StageError::Incomplete { missing: self.len - arrived }) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_complete_when_every_element_has_arrived_in_any_order() {
        let mut reduced = Reduced::<(), ()>::new(0, (), 10);
        for (piece, missing) in [(7..10, 7), (0..2, 5), (1..4, 3), (1..2, 3)] {
            reduced.note(piece);
            assert!(matches!(reduced.complete(), Err(StageError::Incomplete { missing: m }) if m == missing));
        }
        reduced.note(4..7);
        assert!(reduced.complete().is_ok());
    }
}
