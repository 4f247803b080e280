//! A gradient: one flat vector to everybody else, here a part for each unit.
//!
//! Backward makes the parts as it comes to their units, where what those had kept is not needed any more: so the two
//! are never in memory both at once.

use std::ops::Range;
use std::sync::Arc;

use crate::engine::{Engine, Span};

/// Where each unit's part begins in the flat vector, and where the last one ends.
pub type Bounds = Arc<[usize]>;

/// See the module's head.
pub struct Gradient<E: Engine> {
    bounds: Bounds,
    parts: Vec<E::Buffer>,
}

impl<E: Engine> Gradient<E> {
    /// From all units' parts.
    pub fn new(bounds: &Bounds, parts: Vec<E::Buffer>) -> Gradient<E> {
        debug_assert_eq!(bounds.len(), parts.len() + 1);
        Gradient { bounds: bounds.clone(), parts }
    }

    pub fn zeros(engine: &E, bounds: &Bounds) -> Gradient<E> {
        let parts = bounds.windows(2).map(|part| engine.zeros(part[1] - part[0])).collect();
        Gradient::new(bounds, parts)
    }

    pub fn add(&mut self, engine: &E, other: &Gradient<E>) {
        for (into, from) in self.parts.iter_mut().zip(&other.parts) {
            let all = Span { start: 0, len: engine.len(from) };
            engine.add(into, all, from, all);
        }
    }

    /// A parameter's slot, in its unit's part.
    pub fn slot(&self, slot: Span) -> (&E::Buffer, Span) {
        let part = self.part_at(slot.start);
        (&self.parts[part], Span { start: slot.start - self.bounds[part], len: slot.len })
    }

    /// Little-endian bytes of a piece.
    pub fn read(&self, engine: &E, piece: Range<usize>) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(piece.len() * engine.dtype().size());
        for (part, span) in self.spans(piece) {
            bytes.extend_from_slice(&engine.read(&self.parts[part], span));
        }
        bytes
    }

    /// Overwrites from element `start` on with little-endian bytes.
    pub fn write(&mut self, engine: &E, start: usize, mut bytes: &[u8]) {
        let size = engine.dtype().size();
        let spans: Vec<(usize, Span)> = self.spans(start..start + bytes.len() / size).collect();
        for (part, span) in spans {
            let here;
            (here, bytes) = bytes.split_at(span.len * size);
            engine.write(&mut self.parts[part], span.start, here);
        }
    }

    /// The parts in which a piece lies, and where.
    fn spans(&self, piece: Range<usize>) -> impl Iterator<Item = (usize, Span)> {
        let first = self.part_at(piece.start);
        let bounds = self.bounds[first..].windows(2).take_while(move |part| part[0] < piece.end);
        bounds.enumerate().map(move |(number, part)| {
            let (start, end) = (piece.start.max(part[0]), piece.end.min(part[1]));
            (first + number, Span { start: start - part[0], len: end - start })
        })
    }

    fn part_at(&self, element: usize) -> usize {
        self.bounds[..self.parts.len()].partition_point(|&start| start <= element).saturating_sub(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::naive::Naive;

    #[test]
    fn pieces_across_parts_are_as_in_one_vector() {
        let engine = Naive::<f64>::new(1).unwrap();
        let mut gradient = Gradient::zeros(&engine, &[0, 3, 7, 12].into());
        let all: Vec<u8> = (0..12).flat_map(|x| f64::from(x).to_le_bytes()).collect();
        for range in [0..5, 5..6, 6..12] {
            gradient.write(&engine, range.start, &all[8 * range.start..8 * range.end]);
        }
        for start in 0..12 {
            for end in start..=12 {
                assert_eq!(gradient.read(&engine, start..end), all[8 * start..8 * end], "{start}..{end}");
            }
        }
        let (part, span) = gradient.slot(Span { start: 8, len: 2 });
        assert_eq!((part[span.range()].to_vec(), span.start), (vec![8.0, 9.0], 1));
    }
}
