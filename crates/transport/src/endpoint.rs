//! A node's connections to all others.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;

use tokio::runtime::Handle;
use tokio::sync::mpsc;

pub use crate::event::{Contact, Event, Gate, MAX_REFUSED_PER_S};
use crate::hub::{Hub, Phase};
use crate::identity::{Identity, PublicKey};
use crate::letter::{Letter, MAX_HEAD_BYTES};
pub use crate::limits::Limits;
pub use crate::peers::Standing;
use crate::tls::Tls;
pub use crate::traffic::{Count, Traffic};
use crate::wan::Link;
use crate::{accept, dial};

/// A node's connections to all others. Clones are the same endpoint; when the last is dropped, all connections
/// break off. [`close`](Endpoint::close) ends them in order.
#[derive(Clone)]
pub struct Endpoint(Arc<Owner>);

struct Owner {
    hub: Arc<Hub>,
    address: Option<SocketAddr>,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.hub.phase.send_replace(Phase::Gone);
    }
}

/// Why an endpoint cannot start.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum StartError {
    #[error("cannot listen on {at}: {source}; choose another address or port, or stop what listens there")]
    Listen { at: SocketAddr, source: std::io::Error },
    #[error("the key cannot be used for TLS: {0}; make a new key")]
    Key(rustls::Error),
}

/// Why a letter was not sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NotSent {
    /// There is neither a connection nor a dial.
    #[error("there is no connection with this peer; dial it first")]
    NotConnected,
    /// Its lane is full.
    #[error("too much waits in this lane already; the peer or the link is slower than what is sent")]
    Full,
    /// It is larger than any letter may be.
    #[error("the letter's head is over 4 MiB or its body over the limit; cut it into several")]
    TooLong,
}

impl Endpoint {
    /// Starts on this runtime; with `listen`, others may come in. The runtime needs its I/O and time drivers.
    pub fn start(
        runtime: &Handle,
        identity: Arc<Identity>,
        listen: Option<SocketAddr>,
        gate: Arc<dyn Gate>,
        limits: Limits,
        events: mpsc::Sender<Event>,
    ) -> Result<Endpoint, StartError> {
        let tls = Tls::new(&identity).map_err(StartError::Key)?;
        let _context = runtime.enter();
        let listener =
            listen.map(|at| bind(at).map_err(|source| StartError::Listen { at, source })).transpose()?;
        let hub = Arc::new(Hub::new(runtime.clone(), identity.public(), tls, gate, limits, events));
        let address = listener.as_ref().and_then(|listener| listener.local_addr().ok());
        if let Some(listener) = listener {
            hub.spawn(accept::listen(hub.clone(), listener));
        }
        Ok(Endpoint(Arc::new(Owner { hub, address })))
    }

    /// Where it listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.0.address
    }

    /// One attempt over all addresses; ends in [`Event::Connected`] or [`Event::Unreachable`]. Letters that are
    /// sent meanwhile wait. While one is under way or a connection stands, it does nothing.
    pub fn dial(&self, to: Contact, introduction: Vec<u8>) {
        let hub = &self.0.hub;
        if self.is_open() && hub.peers.begin_dial(to.key) {
            hub.spawn(dial::run(hub.clone(), to, introduction));
        }
    }

    /// How it stands with a peer.
    pub fn standing(&self, with: PublicKey) -> Standing {
        self.0.hub.peers.standing(with)
    }

    /// Whether a connection stands.
    pub fn is_connected(&self, with: PublicKey) -> bool {
        self.standing(with) == Standing::Connected
    }

    /// Queues a letter; never blocks. That it was queued does not mean that it arrives: a connection may end.
    pub fn send(&self, to: PublicKey, letter: Letter) -> Result<(), NotSent> {
        let hub = &self.0.hub;
        if letter.head.len() > MAX_HEAD_BYTES || letter.body_bytes() > hub.limits.body_bytes {
            return Err(NotSent::TooLong);
        }
        let outbox = hub.peers.outbox(to).filter(|_| self.is_open()).ok_or(NotSent::NotConnected)?;
        if hub.ways.to(to).is_cut() {
            hub.counters.dropped_cut(1);
            return Ok(());
        }
        if outbox.push(letter, &hub.limits) {
            return Ok(());
        }
        hub.counters.dropped_full();
        Err(NotSent::Full)
    }

    /// From now on all that we send to this peer takes this named link; `None`: it is not shaped. All peers on
    /// one name share its rate. Holds across connections; the other direction is the peer's to shape.
    pub fn shape(&self, peer: PublicKey, link: Option<(String, Link)>) {
        let hub = &self.0.hub;
        hub.ways.shape(peer, link);
        if let Some(outbox) = hub.peers.outbox(peer) {
            outbox.wake();
        }
    }

    /// Drops everything to and from this peer from now on, without closing; or heals that. A letter of which a
    /// part was sent already stalls, as it would in TCP, and goes on after the cut.
    pub fn cut(&self, peer: PublicKey, cut: bool) {
        let hub = &self.0.hub;
        hub.ways.cut(peer, cut);
        if let Some(outbox) = hub.peers.outbox(peer) {
            if cut {
                hub.counters.dropped_cut(outbox.clear());
            }
            outbox.wake();
        }
    }

    /// What went over it so far.
    pub fn traffic(&self) -> Traffic {
        self.0.hub.counters.traffic()
    }

    /// Closes in order: nobody comes in any more, what is queued in the control lane is sent within a second, and
    /// the peers hear a goodbye. Returns at once; [`closed`](Endpoint::closed) waits for the end.
    pub fn close(&self) {
        self.0.hub.phase.send_if_modified(|phase| {
            let open = *phase == Phase::Open;
            if open {
                *phase = Phase::Closing;
            }
            open
        });
    }

    /// Until all is closed, after [`close`](Endpoint::close). Events must still be received meanwhile.
    pub async fn closed(&self) {
        self.0.hub.phase.closed().await;
    }

    fn is_open(&self) -> bool {
        *self.0.hub.phase.borrow() == Phase::Open
    }
}

impl std::fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Endpoint({:?} at {:?})", self.0.hub.own, self.0.address)
    }
}

fn bind(at: SocketAddr) -> std::io::Result<tokio::net::TcpListener> {
    let listener = TcpListener::bind(at)?;
    listener.set_nonblocking(true)?;
    tokio::net::TcpListener::from_std(listener)
}
