//! Nodes for tests.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use starling_transport::endpoint::{Contact, Endpoint, Event, Gate, Limits, Traffic};
use starling_transport::identity::{Identity, PublicKey};
use starling_transport::letter::{Lane, Letter};
use tokio::runtime::Handle;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// Longer than anything takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Lets everybody in but those who introduce themselves as `mallory`, and counts who asked.
#[derive(Default)]
pub struct Doorman {
    pub asked: AtomicUsize,
}

impl Gate for Doorman {
    fn admit(&self, _: PublicKey, introduction: &[u8]) -> Result<Vec<u8>, String> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match introduction {
            b"mallory" => Err("mallory is not on the list".to_owned()),
            name => Ok([b"welcome, ", name].concat()),
        }
    }
}

pub struct Node {
    pub endpoint: Endpoint,
    pub key: PublicKey,
    pub doorman: Arc<Doorman>,
    events: mpsc::Receiver<Event>,
}

impl Node {
    pub fn new() -> Node {
        Node::with(Limits::default())
    }

    pub fn with(limits: Limits) -> Node {
        let (sender, events) = mpsc::channel(1024);
        let (identity, doorman) = (Arc::new(Identity::generate()), Arc::new(Doorman::default()));
        let key = identity.public();
        let listen = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let endpoint =
            Endpoint::start(&Handle::current(), identity, listen, doorman.clone(), limits, sender).unwrap();
        Node { endpoint, key, doorman, events }
    }

    pub fn address(&self) -> SocketAddr {
        self.endpoint.address().unwrap()
    }

    pub fn contact(&self) -> Contact {
        Contact { key: self.key, addresses: vec![self.address().to_string()] }
    }

    pub fn dial(&self, to: &Node) {
        self.endpoint.dial(to.contact(), b"alice".to_vec());
    }

    /// What happens next.
    pub async fn next(&mut self) -> Event {
        timeout(PATIENCE, self.events.recv()).await.expect("something happens in time").expect("it lives")
    }

    /// The next letter; other events are passed over, but not the end of a connection.
    pub async fn letter(&mut self) -> Letter {
        loop {
            match self.next().await {
                Event::Letter { letter, .. } => return letter,
                Event::Closed { why, .. } => panic!("closed: {why}"),
                _ => {}
            }
        }
    }

    /// Why the connection ended; letters are passed over.
    pub async fn closed(&mut self) -> String {
        loop {
            if let Event::Closed { why, .. } = self.next().await {
                return why;
            }
        }
    }

    /// Why somebody was turned away; everything else is passed over.
    pub async fn refused(&mut self) -> (Option<PublicKey>, String) {
        loop {
            if let Event::Refused { key, why, .. } = self.next().await {
                return (key, why);
            }
        }
    }

    /// Why a dial failed.
    pub async fn unreachable(&mut self) -> String {
        match self.next().await {
            Event::Unreachable { why, .. } => why,
            other => panic!("expected Unreachable, got {other:?}"),
        }
    }

    /// Passes over events until a peer is connected.
    pub async fn connected(&mut self) -> (PublicKey, Option<Vec<u8>>) {
        loop {
            match self.next().await {
                Event::Connected { with, answer } => return (with, answer),
                Event::Refused { .. } => {}
                other => panic!("expected Connected, got {other:?}"),
            }
        }
    }

    pub fn send(&self, to: &Node, lane: Lane, head: &str) {
        self.endpoint.send(to.key, letter(lane, head, 0)).unwrap();
    }

    /// Waits until the endpoint's traffic is as wanted.
    pub async fn until(&self, what: &str, wanted: impl Fn(&Traffic) -> bool) {
        let waiting = async {
            while !wanted(&self.endpoint.traffic()) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        timeout(PATIENCE, waiting).await.unwrap_or_else(|_| panic!("waited in vain: {what}"));
    }
}

/// Two nodes, the first of which has dialed the second.
pub async fn two() -> (Node, Node) {
    two_with(Limits::default(), Limits::default()).await
}

pub async fn two_with(of_first: Limits, of_second: Limits) -> (Node, Node) {
    let (mut a, mut b) = (Node::with(of_first), Node::with(of_second));
    a.dial(&b);
    a.connected().await;
    b.connected().await;
    (a, b)
}

pub fn letter(lane: Lane, head: &str, body_bytes: usize) -> Letter {
    let body = if body_bytes == 0 { vec![] } else { vec![Bytes::from(vec![7; body_bytes])] };
    Letter { lane, head: Bytes::copy_from_slice(head.as_bytes()), body }
}
