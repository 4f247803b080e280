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

/// Memory that is not in use. It never holds more than was ever in use at a time, whatever sizes are asked for: a model that
/// writes asks for others with every token.
#[derive(Default)]
pub struct Shelf(Mutex<Idle>);

#[derive(Default)]
struct Idle {
    /// By the number of lines; each with the time when it was put back, oldest first.
    by_lines: BTreeMap<usize, Vec<(u64, Vec<Line>)>>,
    time: u64,
    /// Lines that lie here, that are in use, and that ever were at a time.
    idle: usize,
    used: usize,
    most_used: usize,
}

impl Shelf {
    /// A buffer of this length, with whatever is in it.
    pub fn take(self: &Arc<Self>, len: usize) -> Buffer {
        let lines = len.div_ceil(16);
        let old = self.0.lock().unwrap_or_else(PoisonError::into_inner).take(lines);
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
        let too_much = self.0.lock().unwrap_or_else(PoisonError::into_inner).put(lines);
        drop(too_much); // Not while others wait for the shelf.
    }
}

impl Idle {
    fn take(&mut self, lines: usize) -> Option<Vec<Line>> {
        self.used += lines;
        self.most_used = self.most_used.max(self.used);
        let (_, old) = self.by_lines.get_mut(&lines)?.pop()?;
        self.idle -= lines;
        Some(old)
    }

    /// Puts memory back; returns what has lain here longest, if that makes it too much.
    fn put(&mut self, lines: Vec<Line>) -> Vec<Vec<Line>> {
        self.time += 1;
        self.used -= lines.len();
        self.idle += lines.len();
        self.by_lines.entry(lines.len()).or_default().push((self.time, lines));
        let mut too_much = Vec::new();
        while self.idle > self.most_used {
            let first = |(&lines, idle): (&usize, &Vec<(u64, Vec<Line>)>)| Some((idle.first()?.0, lines));
            let Some((_, lines)) = self.by_lines.iter().filter_map(first).min() else { break };
            if let Some(idle) = self.by_lines.get_mut(&lines) {
                too_much.push(idle.remove(0).1);
                if idle.is_empty() {
                    self.by_lines.remove(&lines);
                }
            }
            self.idle -= lines;
        }
        too_much
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
    fn it_holds_no_more_than_was_in_use_at_a_time_whatever_sizes_are_asked_for() {
        let shelf = Arc::new(Shelf::default());
        drop((shelf.take(1600), shelf.take(1600)));
        for len in 1..3000 {
            drop(shelf.take(len));
            let idle = shelf.0.lock().unwrap();
            assert!(idle.idle <= 200 && idle.used == 0, "{} lines after {len}", idle.idle);
            let lies: usize = idle.by_lines.iter().map(|(lines, idle)| lines * idle.len()).sum();
            assert_eq!(lies, idle.idle);
        }
    }

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
