//! What an endpoint tells its owner, and what it asks.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

use crate::identity::PublicKey;
use crate::letter::Letter;

/// What happened.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// Both connections with a peer stand. May come again for one that is connected already, if it dialed anew or
    /// both dialed at once: letters then go over the newest.
    Connected {
        /// With whom.
        with: PublicKey,
        /// What the other's gate answered, if we dialed.
        answer: Option<Vec<u8>>,
    },
    /// A letter arrived.
    Letter {
        /// From whom; proved by the handshake.
        from: PublicKey,
        /// What it says.
        letter: Letter,
    },
    /// The last connection with a peer ended. Letters that were queued or on their way to it are lost.
    Closed {
        /// With whom.
        with: PublicKey,
        /// Why.
        why: String,
    },
    /// A dial failed. Letters that waited for it are lost, unless the peer has connected to us meanwhile.
    Unreachable {
        /// Who was dialed.
        with: PublicKey,
        /// `refused: …` with the reason of the other's gate, or `no answer: …` with what each address gave.
        why: String,
    },
    /// We turned somebody away. At most [`MAX_REFUSED_PER_S`] are told, so that a flood is not passed on.
    Refused {
        /// The key, if it was proved.
        key: Option<PublicKey>,
        /// From where.
        at: SocketAddr,
        /// Why.
        why: String,
    },
}

/// How many refusals are told a second.
pub const MAX_REFUSED_PER_S: u32 = 20;

/// Who may come in.
pub trait Gate: Send + Sync {
    /// Who has proved to have `key` introduces itself with these bytes: our answer, or why not. Asked for each of
    /// the two connections of a pair; the first answer is passed on. It must not block.
    fn admit(&self, key: PublicKey, introduction: &[u8]) -> Result<Vec<u8>, String>;
}

/// A peer, and where it may be reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Contact {
    /// Its key. Nobody else is accepted at these addresses.
    pub key: PublicKey,
    /// Where it listens, as host:port; tried in order.
    pub addresses: Vec<String>,
}
