//! Buffers of bodies that were read and dropped, kept for the next ones.
//!
//! The system gives fresh memory page by page, and clears it: for a body of 100 MB that took longer than to
//! decipher it. A buffer that is used again costs nothing.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;

/// Most bytes that are kept, for an endpoint.
const MAX_KEPT_BYTES: usize = 32 << 20;
/// Smaller ones are left to the allocator, which keeps them itself.
const MIN_BYTES: usize = 1 << 20;

#[derive(Default)]
pub(crate) struct Spares(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    buffers: Vec<Vec<u8>>,
    bytes: usize,
}

impl Spares {
    /// An empty buffer for a body of so many bytes: the smallest that holds it without much waste, or a new one
    /// without any memory yet.
    pub(crate) fn take(&self, bytes: usize) -> Vec<u8> {
        let mut kept = self.kept();
        let fits = |buffer: &Vec<u8>| (bytes..=bytes.saturating_mul(2)).contains(&buffer.capacity());
        let best = (0..kept.buffers.len())
            .filter(|index| fits(&kept.buffers[*index]))
            .min_by_key(|index| kept.buffers[*index].capacity());
        let Some(best) = best else { return Vec::new() };
        let buffer = kept.buffers.swap_remove(best);
        kept.bytes -= buffer.capacity();
        buffer
    }

    /// The bytes of a buffer, which comes back when they are dropped.
    pub(crate) fn lend(self: &Arc<Spares>, buffer: Vec<u8>) -> Bytes {
        if buffer.capacity() < MIN_BYTES {
            return Bytes::from(buffer);
        }
        Bytes::from_owner(Lent { buffer, spares: self.clone() })
    }

    fn give_back(&self, mut buffer: Vec<u8>) {
        let mut kept = self.kept();
        if kept.bytes + buffer.capacity() <= MAX_KEPT_BYTES {
            buffer.clear();
            kept.bytes += buffer.capacity();
            kept.buffers.push(buffer);
        }
    }

    fn kept(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Lent {
    buffer: Vec<u8>,
    spares: Arc<Spares>,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        &self.buffer
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.spares.give_back(std::mem::take(&mut self.buffer));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_when_its_last_user_drops_it() {
        let spares = Arc::new(Spares::default());
        let body = spares.lend(vec![7; 3 << 20]);
        let part = body.slice(10..20);
        drop(body);
        assert_eq!(spares.take(3 << 20).capacity(), 0, "a part is still in use");
        assert_eq!(part, vec![7; 10]);
        drop(part);
        assert_eq!(spares.take(1 << 20).capacity(), 0, "too much would be wasted");
        let again = spares.take(2 << 20);
        assert!(again.is_empty() && again.capacity() == 3 << 20);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let spares = Arc::new(Spares::default());
        for _ in 0..10 {
            spares.give_back(Vec::with_capacity(12 << 20));
        }
        assert_eq!(spares.kept().buffers.len(), 2);
    }
}
