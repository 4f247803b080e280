//! What is on its way to each peer of what may take its time: the sums of a gradient are read from the device piece by
//! piece, as the ones before have left, or a worker would hold a second copy of all of it. Each peer has a count of its
//! own: one that takes nothing holds up nobody else.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use starling_swarm::ids::PeerId;
use tokio::sync::Notify;

/// Bytes on their way to a peer, beyond which nothing more is read for it.
const MOST_BYTES: u64 = 16 << 20;

/// See the module's head.
#[derive(Debug, Default)]
pub struct Toll(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    bytes: Mutex<BTreeMap<PeerId, u64>>,
    less: Notify,
}

/// Some bytes for a peer, counted until this is dropped.
#[derive(Debug)]
pub struct Passage {
    to: PeerId,
    bytes: u64,
    counts: Arc<Counts>,
}

struct Carried {
    bytes: Bytes,
    _passage: Arc<Passage>,
}

impl Toll {
    /// Whether more may be read for a peer.
    pub fn has_room(&self, to: PeerId) -> bool {
        self.0.bytes().get(&to).is_none_or(|bytes| *bytes < MOST_BYTES)
    }

    /// Counts bytes that are going to be read for a peer.
    pub fn count(&self, to: PeerId, bytes: u64) -> Passage {
        *self.0.bytes().entry(to).or_default() += bytes;
        Passage { to, bytes, counts: self.0.clone() }
    }

    /// Returns when there may be room again.
    pub async fn less(&self) {
        self.0.less.notified().await;
    }
}

impl Passage {
    /// The same bytes; the passage ends when nobody holds them any more, nor others that it carries.
    pub fn carry(self: &Arc<Passage>, bytes: Bytes) -> Bytes {
        Bytes::from_owner(Carried { bytes, _passage: self.clone() })
    }
}

impl Counts {
    fn bytes(&self) -> MutexGuard<'_, BTreeMap<PeerId, u64>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsRef<[u8]> for Carried {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        let mut counts = self.counts.bytes();
        let left = counts.remove(&self.to).unwrap_or_default().saturating_sub(self.bytes);
        if left > 0 {
            counts.insert(self.to, left);
        }
        drop(counts);
        self.counts.less.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn bytes_count_until_the_last_holder_drops_them_and_for_their_peer_alone() {
        let (toll, slow, other) = (Toll::default(), PeerId(1), PeerId(2));
        let passage = Arc::new(toll.count(slow, MOST_BYTES));
        let carried = passage.carry(vec![7; 100].into());
        drop(passage);
        let part = carried.slice(3..5);
        drop(carried);
        assert!(!toll.has_room(slow), "a part is held");
        assert!(toll.has_room(other));
        assert_eq!(part, vec![7, 7]);
        drop(part);
        toll.less().await;
        assert!(toll.has_room(slow));
    }
}
