//! An operator's side: asks a coordinator how its run stands, and gives it orders.

use std::sync::Arc;
use std::time::Duration;

use starling_swarm::coordinator::Order;
use starling_transport::endpoint::{Contact, Endpoint, Event, Gate, Limits};
use starling_transport::identity::{Identity, PublicKey};
use starling_transport::ticket::Ticket;
use tokio::sync::mpsc;

use crate::member::{JoinError, admitted};
use crate::post::{Credential, Introduction, Post};
use crate::status::Status;

/// How long a coordinator may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// See the module's head.
pub struct Operator {
    endpoint: Endpoint,
    events: mpsc::Receiver<Event>,
    coordinator: PublicKey,
}

/// An operator lets nobody in.
struct Closed;

impl Gate for Closed {
    fn admit(&self, _: PublicKey, _: &[u8]) -> Result<Vec<u8>, String> {
        Err("this is an operator's terminal".into())
    }
}

impl Operator {
    /// Connects to the coordinator of the ticket's run.
    pub async fn connect(ticket: &Ticket) -> Result<Operator, JoinError> {
        let (sender, mut events) = mpsc::channel(16);
        let runtime = tokio::runtime::Handle::current();
        let identity = Arc::new(Identity::generate());
        let endpoint =
            Endpoint::start(&runtime, identity, None, Arc::new(Closed), Limits::default(), sender)?;
        let coordinator = Contact { key: ticket.coordinator, addresses: ticket.addresses.clone() };
        let introduction = Introduction {
            version: env!("CARGO_PKG_VERSION").into(),
            credential: Credential::Ticket(ticket.to_string()),
            site: ticket.site.clone().unwrap_or_else(|| "operator".into()),
            addresses: Vec::new(),
        };
        admitted(&endpoint, &mut events, &coordinator, &introduction, Duration::ZERO).await?;
        Ok(Operator { endpoint, events, coordinator: coordinator.key })
    }

    /// How the run stands.
    pub async fn status(&mut self) -> Result<Status, JoinError> {
        self.ask(Post::Ask).await
    }

    /// Gives an order; returns how the run stands when the coordinator has heard it.
    pub async fn order(&mut self, order: Order) -> Result<Status, JoinError> {
        self.ask(Post::Order(order)).await
    }

    async fn ask(&mut self, post: Post) -> Result<Status, JoinError> {
        let gone = |why: &str| JoinError::Unreachable(why.into());
        let letter = post.seal(0, Vec::new()).ok_or_else(|| gone("the order is too long"))?;
        self.endpoint.send(self.coordinator, letter).map_err(|error| gone(&error.to_string()))?;
        let until = tokio::time::Instant::now() + PATIENCE;
        loop {
            match tokio::time::timeout_at(until, self.events.recv()).await {
                Ok(Some(Event::Letter { letter, .. })) => {
                    if let Ok((_, Post::Told(status), _)) = Post::open(&letter) {
                        return Ok(*status);
                    }
                }
                Ok(Some(Event::Closed { why, .. })) => return Err(gone(&why)),
                Ok(Some(_)) => {}
                Ok(None) | Err(_) => return Err(gone("it does not answer")),
            }
        }
    }
}
