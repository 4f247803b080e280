//! An engine's memory. What a step has taken it gives back, and the next takes the same again.
//!
//! Memory fresh from the system is slow, for every page of it is filled with zeros at first touch. So it stays here, and what
//! becomes free joins its neighbours: the gradient of a block stands where its activations have been, whatever the sizes.
#![allow(unsafe_code, reason = "pieces of mapped memory are handed out as numbers")]

use std::alloc::{Layout, handle_alloc_error};
use std::collections::{BTreeMap, BTreeSet};
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};

use memmap2::{MmapMut, MmapRaw};

/// Elements of which pieces are whole numbers: a cache line, or two.
const LINE: usize = 16;
/// Elements that are asked of the system at a time, or more if somebody needs more: 64 MiB of floats. What of it is never
/// written to takes no memory.
const CHUNK: usize = (64 << 20) / size_of::<f32>();

/// Bytes of the smallest page that any system has.
const PAGE: usize = 4096;

/// Elements at the beginning of a buffer that are no numbers in builds for development.
const POISONED: usize = 4096;

/// What buffers hold.
///
/// # Safety
/// Any bytes are a value of the type; it has a size, and is not aligned to more than a page.
pub unsafe trait Plain: Copy + Send + Sync + 'static {
    /// 0.
    const ZERO: Self;
    /// No number.
    const NAN: Self;
}

// SAFETY: floats are any bits.
unsafe impl Plain for f32 {
    const ZERO: f32 = 0.0;
    const NAN: f32 = f32::NAN;
}

// SAFETY: as above.
unsafe impl Plain for f64 {
    const ZERO: f64 = 0.0;
    const NAN: f64 = f64::NAN;
}

/// All memory of an engine.
pub struct Heap<T>(Mutex<Chunks<T>>);

struct Chunks<T> {
    /// They are never given back while the heap is there: buffers point into them. Nobody looks at one as a whole.
    maps: Vec<MmapRaw>,
    of: PhantomData<T>,
    /// Free pieces: chunk and start, to length.
    by_place: BTreeMap<(usize, usize), usize>,
    /// The same: length, chunk and start.
    by_len: BTreeSet<(usize, usize, usize)>,
}

/// A piece of a chunk, in elements.
#[derive(Clone, Copy)]
struct Piece {
    chunk: usize,
    start: usize,
    len: usize,
}

impl<T: Plain> Heap<T> {
    pub fn new() -> Arc<Heap<T>> {
        let (maps, by_place, by_len) = (Vec::new(), BTreeMap::new(), BTreeSet::new());
        Arc::new(Heap(Mutex::new(Chunks { maps, of: PhantomData, by_place, by_len })))
    }

    /// A buffer of this length, with whatever is in it.
    pub fn take(self: &Arc<Self>, len: usize) -> Buffer<T> {
        let whole_lines = len.next_multiple_of(LINE).max(LINE);
        let (piece, start) = self.0.lock().unwrap_or_else(PoisonError::into_inner).take(whole_lines);
        let mut buffer = Buffer { piece, start, len, heap: self.clone() };
        if cfg!(debug_assertions) {
            // Who reads what it has not written is found out; a part will do, for small models take large buffers too.
            let part = len.min(POISONED);
            buffer[..part].fill(T::NAN);
        }
        buffer
    }

    /// Takes so many elements from the system now, so that there is room for as many in all.
    pub fn reserve(&self, len: usize) {
        let mut chunks = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let have = chunks.maps.iter().map(|map| map.len() / size_of::<T>()).sum();
        let more = len.saturating_sub(have).next_multiple_of(LINE);
        // If it cannot be had, whoever needs it will find out.
        if more > 0
            && let Ok(mut map) = MmapMut::map_anon(more * size_of::<T>())
        {
            // Page by page: were the system asked to do it at once, the whole process would stand still meanwhile.
            map.iter_mut().step_by(PAGE).for_each(|byte| *byte = 0);
            chunks.add(map);
        }
    }

    /// A buffer of zeros.
    pub fn zeros(self: &Arc<Self>, len: usize) -> Buffer<T> {
        let mut buffer = self.take(len);
        buffer.fill(T::ZERO);
        buffer
    }

    /// A buffer with these in it.
    pub fn copy(self: &Arc<Self>, elements: &[T]) -> Buffer<T> {
        let mut buffer = self.take(elements.len());
        buffer.copy_from_slice(elements);
        buffer
    }
}

impl<T> Chunks<T> {
    /// The smallest free piece that is large enough, or the part of it that is needed.
    fn take(&mut self, len: usize) -> (Piece, NonNull<T>) {
        let fits = self.by_len.range((len, 0, 0)..).next().copied();
        let (free, chunk, start) = fits.unwrap_or_else(|| self.grow(len));
        self.by_len.remove(&(free, chunk, start));
        self.by_place.remove(&(chunk, start));
        if free > len {
            self.insert(Piece { chunk, start: start + len, len: free - len });
        }
        let first = self.maps[chunk].as_mut_ptr().cast::<T>();
        // SAFETY: the piece lies in its chunk, and what is mapped does not begin at null; it is aligned to pages.
        (Piece { chunk, start, len }, unsafe { NonNull::new_unchecked(first.add(start)) })
    }

    /// A new chunk.
    fn grow(&mut self, len: usize) -> (usize, usize, usize) {
        let len = len.max(CHUNK);
        let Ok(map) = MmapMut::map_anon(len * size_of::<T>()) else {
            handle_alloc_error(Layout::array::<T>(len).unwrap_or(Layout::new::<T>()))
        };
        self.add(map)
    }

    fn add(&mut self, map: MmapMut) -> (usize, usize, usize) {
        let piece = Piece { chunk: self.maps.len(), start: 0, len: map.len() / size_of::<T>() };
        self.maps.push(map.into());
        self.insert(piece);
        (piece.len, piece.chunk, piece.start)
    }

    /// Gives a piece back; it joins what is free beside it.
    fn put(&mut self, mut piece: Piece) {
        let after = (piece.chunk, piece.start + piece.len);
        if let Some(len) = self.by_place.remove(&after) {
            self.by_len.remove(&(len, after.0, after.1));
            piece.len += len;
        }
        let before = self.by_place.range(..(piece.chunk, piece.start)).next_back();
        if let Some((&(chunk, start), &len)) = before
            && (chunk, start + len) == (piece.chunk, piece.start)
        {
            self.by_place.remove(&(chunk, start));
            self.by_len.remove(&(len, chunk, start));
            piece = Piece { chunk, start, len: len + piece.len };
        }
        self.insert(piece);
    }

    fn insert(&mut self, Piece { chunk, start, len }: Piece) {
        self.by_place.insert((chunk, start), len);
        self.by_len.insert((len, chunk, start));
    }
}

/// A vector of numbers, aligned to cache lines; goes back to its heap when it is dropped.
pub struct Buffer<T> {
    piece: Piece,
    start: NonNull<T>,
    len: usize,
    heap: Arc<Heap<T>>,
}

// SAFETY: nobody else has its piece of the heap, and what is in it are numbers.
unsafe impl<T: Plain> Send for Buffer<T> {}
// SAFETY: as above; shared, it can only be read.
unsafe impl<T: Plain> Sync for Buffer<T> {}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        self.heap.0.lock().unwrap_or_else(PoisonError::into_inner).put(self.piece);
    }
}

impl<T> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: the piece is at least that long, was mapped as zeros, and is ours; the heap keeps its chunk.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::uniform;

    #[test]
    fn buffers_never_overlap_and_what_they_leave_becomes_one_again() {
        let heap = Heap::<f32>::new();
        let mut held: Vec<(f32, Buffer<f32>)> = Vec::new();
        for turn in 0..3000 {
            let draw = |what| uniform(what, turn);
            if draw(1) < 0.5 && !held.is_empty() {
                let (mark, buffer) = held.swap_remove((draw(2) * held.len() as f64) as usize);
                assert!(buffer.iter().all(|&x| x == mark));
            } else {
                let mut buffer = heap.take((draw(3).powi(4) * 1e6) as usize);
                assert_eq!(buffer.as_ptr().align_offset(64), 0);
                buffer.fill(turn as f32);
                held.push((turn as f32, buffer));
            }
        }
        held.clear();
        let chunks = heap.0.lock().unwrap();
        assert_eq!((chunks.by_place.len(), chunks.by_len.len()), (chunks.maps.len(), chunks.maps.len()));
    }

    #[test]
    fn what_is_dropped_is_taken_again() {
        let heap = Heap::<f32>::new();
        let (mut first, second) = (heap.zeros(100), heap.zeros(200));
        first[99] = 7.0;
        let at = first.as_ptr();
        drop((first, second));
        let both = heap.zeros(300);
        assert_eq!((both.as_ptr(), both.len()), (at, 300));
        assert!(both.iter().all(|&x| x == 0.0));
    }

    #[test]
    fn what_was_reserved_is_taken_before_more_is_asked_for() {
        let heap = Heap::<f32>::new();
        heap.reserve(3 * CHUNK);
        heap.reserve(2 * CHUNK);
        let _all: Vec<Buffer<f32>> = (0..3).map(|_| heap.take(CHUNK)).collect();
        assert_eq!(heap.0.lock().unwrap().maps.len(), 1);
        let _more = heap.take(1);
        assert_eq!(heap.0.lock().unwrap().maps.len(), 2);
    }

    #[test]
    fn more_than_a_chunk_can_be_had() {
        let heap = Heap::<f32>::new();
        let mut large = heap.take(CHUNK + 1);
        large[CHUNK] = 1.0;
        assert_eq!(heap.0.lock().unwrap().maps.len(), 1);
    }
}
