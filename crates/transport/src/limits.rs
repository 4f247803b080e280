//! The bounds of an endpoint.

use std::time::Duration;

/// What an endpoint bears. Whatever is over is refused, and the reason says which limit it was.
#[derive(Clone, Debug, PartialEq)]
pub struct Limits {
    /// Most bytes of one letter's body, in either direction.
    pub body_bytes: u64,
    /// Most bytes that wait to be sent, for each peer and lane.
    pub queued_bytes: u64,
    /// Most letters that wait to be sent, for each peer and lane.
    pub queued_letters: usize,
    /// Most pairs of connections, dialed and accepted.
    pub connections: usize,
    /// Most connections that come in and have not yet been admitted, at a time.
    pub handshakes: usize,
    /// How long one may take until it is admitted; and how long one address may take to answer a dial.
    pub handshake: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            body_bytes: 4 << 30,
            queued_bytes: 1 << 30,
            queued_letters: 4096,
            connections: 4096,
            handshakes: 256,
            handshake: Duration::from_secs(10),
        }
    }
}
