//! What all tasks of an endpoint share.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::event::{Event, Gate, MAX_REFUSED_PER_S};
use crate::identity::PublicKey;
use crate::limits::Limits;
use crate::link::Ways;
use crate::outbox::PairNo;
use crate::peers::{Peers, Place};
use crate::spares::Spares;
use crate::tls::Tls;
use crate::traffic::Counters;

/// The life of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// It works.
    Open,
    /// Connections are closed in order.
    Closing,
    /// Nobody has it any more: all tasks end where they are.
    Gone,
}

/// A connection after its handshake and its answer.
pub(crate) type Admitted = (TcpStream, rustls::Connection);

/// Who dialed, and the number that both its connections name.
pub(crate) type HalfId = (PublicKey, [u8; 16]);

pub(crate) struct Hub {
    pub(crate) runtime: Handle,
    pub(crate) own: PublicKey,
    pub(crate) tls: Tls,
    pub(crate) gate: Arc<dyn Gate>,
    pub(crate) limits: Limits,
    pub(crate) events: mpsc::Sender<Event>,
    pub(crate) peers: Peers,
    pub(crate) ways: Ways,
    pub(crate) counters: Counters,
    /// A permit for each pair of connections.
    pub(crate) room: Arc<Semaphore>,
    pub(crate) phase: watch::Sender<Phase>,
    /// Control connections that wait for their other half. Each has a permit of `room`, which bounds them.
    pub(crate) halves: Mutex<HashMap<HalfId, oneshot::Sender<Admitted>>>,
    pub(crate) spares: Arc<Spares>,
    /// Held while the table changes and that is told, so that events have the order of what happened.
    telling: tokio::sync::Mutex<()>,
    refusals: Mutex<(Instant, u32)>,
}

impl Hub {
    pub(crate) fn new(
        runtime: Handle,
        own: PublicKey,
        tls: Tls,
        gate: Arc<dyn Gate>,
        limits: Limits,
        events: mpsc::Sender<Event>,
    ) -> Hub {
        Hub {
            runtime,
            own,
            tls,
            gate,
            events,
            peers: Peers::default(),
            ways: Ways::default(),
            counters: Counters::default(),
            room: Arc::new(Semaphore::new(limits.connections.min(Semaphore::MAX_PERMITS))),
            phase: watch::Sender::new(Phase::Open),
            halves: Mutex::default(),
            spares: Arc::default(),
            telling: tokio::sync::Mutex::default(),
            refusals: Mutex::new((Instant::now(), 0)),
            limits,
        }
    }

    /// Runs a task until it ends, or nobody has the endpoint any more.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut phase = self.phase.subscribe();
        self.runtime.spawn(async move {
            tokio::select! {
                _ = phase.wait_for(|phase| *phase == Phase::Gone) => {}
                () = task => {}
            }
        });
    }

    /// Until the endpoint is closed.
    pub(crate) async fn closing(&self) {
        let _ = self.phase.subscribe().wait_for(|phase| *phase != Phase::Open).await;
    }

    /// A pair of connections stands.
    pub(crate) async fn connected(&self, with: PublicKey, answer: Option<Vec<u8>>) -> Place {
        let _order = self.telling.lock().await;
        let place = self.peers.add(with, answer.is_some());
        self.tell(Event::Connected { with, answer }).await;
        place
    }

    /// A pair of connections has ended.
    pub(crate) async fn disconnected(&self, with: PublicKey, no: PairNo, why: String) {
        let _order = self.telling.lock().await;
        if self.peers.remove(with, no) {
            self.tell(Event::Closed { with, why }).await;
        }
    }

    /// A dial has failed.
    pub(crate) async fn unreachable(&self, with: PublicKey, why: String) {
        let _order = self.telling.lock().await;
        self.peers.dial_failed(with);
        self.tell(Event::Unreachable { with, why }).await;
    }

    /// Somebody was turned away. Never waits: strangers cannot hold us up.
    pub(crate) fn refused(&self, key: Option<PublicKey>, at: SocketAddr, why: String) {
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if now - refusals.0 >= Duration::from_secs(1) {
            *refusals = (now, 0);
        }
        refusals.1 = refusals.1.saturating_add(1);
        if refusals.1 <= MAX_REFUSED_PER_S {
            let _ = self.events.try_send(Event::Refused { key, at, why });
        }
    }

    /// An owner that no longer listens is about to drop the endpoint.
    async fn tell(&self, event: Event) {
        let _ = self.events.send(event).await;
    }
}
