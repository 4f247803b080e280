//! Whom an endpoint is connected with, or dials: the table, and nothing that waits.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::identity::PublicKey;
use crate::outbox::{Outbox, PairNo};

/// Most pairs of connections with one peer. Two stand when both dial at once; more only when old ones hang.
const MAX_PAIRS_PER_PEER: usize = 4;

/// How it stands with a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// Neither connected nor dialing: letters are refused.
    Away,
    /// A dial is under way: letters wait.
    Dialing,
    /// Connected.
    Connected,
}

#[derive(Default)]
pub(crate) struct Peers(Mutex<Table>);

#[derive(Default)]
struct Table {
    peers: HashMap<PublicKey, Peer>,
    next_pair: u64,
}

struct Peer {
    outbox: Arc<Outbox>,
    dialing: bool,
    /// The newest last.
    pairs: Vec<Pair>,
}

struct Pair {
    no: PairNo,
    replaced: Arc<Notify>,
}

/// What a pair of connections needs of the table.
pub(crate) struct Place {
    pub(crate) no: PairNo,
    pub(crate) outbox: Arc<Outbox>,
    /// Too many newer ones stand.
    pub(crate) replaced: Arc<Notify>,
}

impl Peers {
    pub(crate) fn standing(&self, key: PublicKey) -> Standing {
        match self.table().peers.get(&key) {
            Some(peer) if !peer.pairs.is_empty() => Standing::Connected,
            Some(_) => Standing::Dialing,
            None => Standing::Away,
        }
    }

    /// Where letters for this peer go, if it is connected or dialed.
    pub(crate) fn outbox(&self, key: PublicKey) -> Option<Arc<Outbox>> {
        self.table().peers.get(&key).map(|peer| peer.outbox.clone())
    }

    /// Whether a dial may begin: there is neither a connection nor another dial.
    pub(crate) fn begin_dial(&self, key: PublicKey) -> bool {
        let mut table = self.table();
        if table.peers.contains_key(&key) {
            return false;
        }
        table.peers.insert(key, Peer { outbox: Arc::new(Outbox::new()), dialing: true, pairs: Vec::new() });
        true
    }

    /// The dial failed: what waited for it is dropped, unless the peer came to us meanwhile.
    pub(crate) fn dial_failed(&self, key: PublicKey) {
        let mut table = self.table();
        if let Some(peer) = table.peers.get_mut(&key) {
            peer.dialing = false;
            if peer.pairs.is_empty() {
                table.peers.remove(&key);
            }
        }
    }

    /// A new pair stands, and sends from now on.
    pub(crate) fn add(&self, key: PublicKey, dialed: bool) -> Place {
        let mut table = self.table();
        let no = PairNo(table.next_pair);
        table.next_pair += 1;
        let peer = table.peers.entry(key).or_insert_with(|| Peer {
            outbox: Arc::new(Outbox::new()),
            dialing: false,
            pairs: Vec::new(),
        });
        peer.dialing &= !dialed;
        if peer.pairs.len() >= MAX_PAIRS_PER_PEER {
            peer.pairs.remove(0).replaced.notify_one();
        }
        let replaced = Arc::new(Notify::new());
        peer.pairs.push(Pair { no, replaced: replaced.clone() });
        peer.outbox.hand_to(no);
        Place { no, outbox: peer.outbox.clone(), replaced }
    }

    /// A pair has ended: whether it was the last with this peer.
    pub(crate) fn remove(&self, key: PublicKey, no: PairNo) -> bool {
        let mut table = self.table();
        let Some(peer) = table.peers.get_mut(&key) else { return false };
        let before = peer.pairs.len();
        peer.pairs.retain(|pair| pair.no != no);
        if let Some(newest) = peer.pairs.last() {
            peer.outbox.hand_to(newest.no);
            return false;
        }
        if !peer.dialing {
            table.peers.remove(&key);
        }
        before > 0
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: PublicKey = PublicKey([1; 32]);

    #[test]
    fn one_dial_at_a_time_and_none_while_connected() {
        let peers = Peers::default();
        assert!(peers.begin_dial(KEY));
        assert!(!peers.begin_dial(KEY));
        assert_eq!(peers.standing(KEY), Standing::Dialing);
        let place = peers.add(KEY, true);
        assert_eq!(peers.standing(KEY), Standing::Connected);
        assert!(!peers.begin_dial(KEY));
        assert!(peers.remove(KEY, place.no));
        assert_eq!(peers.standing(KEY), Standing::Away);
    }

    #[test]
    fn only_the_last_of_several_pairs_closes() {
        let peers = Peers::default();
        let (old, new) = (peers.add(KEY, false), peers.add(KEY, true));
        assert!(!peers.remove(KEY, old.no));
        assert!(peers.remove(KEY, new.no));
        assert!(!peers.remove(KEY, new.no), "and only once");
    }

    #[test]
    fn letters_that_wait_for_a_dial_go_over_a_connection_that_comes_in() {
        let peers = Peers::default();
        assert!(peers.begin_dial(KEY));
        let waiting = peers.outbox(KEY).unwrap();
        let place = peers.add(KEY, false);
        assert!(Arc::ptr_eq(&waiting, &place.outbox));
        peers.dial_failed(KEY);
        assert_eq!(peers.standing(KEY), Standing::Connected);
    }
}
