//! Vectors of the engine's that are used again: a step takes all of its memory from the shelf, and puts it back.
//!
//! Memory fresh from the system is the slowest there is: every page of it is filled with zeros at first touch.
#![allow(unsafe_code, reason = "cache lines are looked at as floats")]

use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, PoisonError};

/// A cache line: what vectors of floats are aligned to.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// Memory that is not in use, by its number of lines.
#[derive(Default)]
pub struct Shelf(Mutex<BTreeMap<usize, Vec<Vec<Line>>>>);

impl Shelf {
    /// A buffer of this length, with whatever is in it.
    pub fn take(self: &Arc<Self>, len: usize) -> Buffer {
        let lines = len.div_ceil(16);
        let old = self.0.lock().unwrap_or_else(PoisonError::into_inner).get_mut(&lines).and_then(Vec::pop);
        let lines = old.unwrap_or_else(|| vec![Line([0.0; 16]); lines]);
        Buffer { lines, len, shelf: Some(self.clone()) }
    }

    /// A buffer of zeros.
    pub fn zeros(self: &Arc<Self>, len: usize) -> Buffer {
        let mut buffer = self.take(len);
        buffer.fill(0.0);
        buffer
    }

    fn put(&self, lines: Vec<Line>) {
        let mut shelf = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        shelf.entry(lines.len()).or_default().push(lines);
    }
}

/// A vector of floats, aligned to cache lines; goes back to its shelf when it is dropped.
#[derive(Default)]
pub struct Buffer {
    lines: Vec<Line>,
    len: usize,
    shelf: Option<Arc<Shelf>>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(shelf) = self.shelf.take() {
            shelf.put(std::mem::take(&mut self.lines));
        }
    }
}

impl Deref for Buffer {
    type Target = [f32];

    fn deref(&self) -> &[f32] {
        // SAFETY: a line is sixteen floats without padding, and `len` is at most sixteen times the number of lines.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [f32] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_dropped_is_taken_again() {
        let shelf = Arc::new(Shelf::default());
        let mut first = shelf.zeros(100);
        first[99] = 7.0;
        let at = first.as_ptr();
        drop(first);
        let again = shelf.take(97);
        assert_eq!((again.as_ptr(), again.len()), (at, 97));
        assert!(shelf.zeros(100).iter().all(|&x| x == 0.0));
        assert_eq!(at.align_offset(64), 0);
    }
}
