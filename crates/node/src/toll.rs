//! What is on its way out of what may take its time: the sums of a gradient are read from the device piece by piece, as
//! the ones before have left, or a worker would hold a second copy of all of it.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use tokio::sync::Notify;

/// Bytes on their way, beyond which nothing more is read.
const MOST_BYTES: usize = 32 << 20;

/// See the module's head. Clones share one count.
#[derive(Clone, Debug, Default)]
pub struct Toll(Arc<Count>);

#[derive(Debug, Default)]
struct Count {
    bytes: AtomicUsize,
    less: Notify,
}

/// Bytes that are counted until the last who holds them drops them.
struct Counted {
    bytes: Bytes,
    count: Arc<Count>,
}

impl Toll {
    /// Whether more may be read.
    pub fn has_room(&self) -> bool {
        self.0.bytes.load(Ordering::Acquire) < MOST_BYTES
    }

    /// The same bytes, counted as long as anybody holds them.
    pub fn count(&self, bytes: Bytes) -> Bytes {
        self.0.bytes.fetch_add(bytes.len(), Ordering::AcqRel);
        Bytes::from_owner(Counted { bytes, count: self.0.clone() })
    }

    /// Returns when there may be room again.
    pub async fn less(&self) {
        self.0.less.notified().await;
    }
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.count.bytes.fetch_sub(self.bytes.len(), Ordering::AcqRel);
        self.count.less.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bytes_count_until_the_last_holder_drops_them() {
        let toll = Toll::default();
        let counted = toll.count(vec![7; MOST_BYTES].into());
        let part = counted.slice(3..5);
        drop(counted);
        assert!(!toll.has_room(), "a part is held");
        assert_eq!(part, vec![7, 7]);
        drop(part);
        toll.less().await;
        assert!(toll.has_room());
    }
}
