//! A member's side of the network: the way to the coordinator, which is tried again for ever, and the ways to other
//! members, whom the coordinator names.
//!
//! Letters may be lost here: when a connection ends, when a queue is full, when nobody can be reached. The machines
//! expect that, and ask again.

use std::collections::{BTreeMap, VecDeque};
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use starling_swarm::ids::{Address, DriverId, PeerId, SiteId};
use starling_swarm::message::Envelope;
use starling_transport::endpoint::{Contact, Endpoint, Event, Limits, StartError};
use starling_transport::identity::{Identity, PublicKey};
use starling_transport::letter::Letter;
use starling_transport::ticket::{Pass, Role, Ticket};
use tokio::sync::mpsc;

use crate::charter::Charter;
use crate::events::Event as LogEvent;
use crate::guests::{Guest, Guests};
use crate::links::{Links, WanSource};
use crate::post::{Admission, Credential, Introduction, Post, next_clock, tensor};
use crate::tensor::Tensor;

/// Events of the network that wait for the loop, at the most.
const MOST_EVENTS: usize = 256;
/// Letters that wait for the address of a member, at the most.
const MOST_WAITING: usize = 64;
/// Between two tries to reach the coordinator: from the first to the longest.
const REDIAL: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(2));

/// What somebody needs to join a run.
pub struct Joining {
    /// Its key.
    pub identity: Arc<Identity>,
    /// What lets it in.
    pub ticket: Ticket,
    /// Where it stands.
    pub site: String,
    /// What is emulated between sites.
    pub wan: WanSource,
    /// How long the coordinator may be out of reach at first.
    pub patience: Duration,
    /// How whoever runs it is told that the coordinator is lost, or back.
    pub tell: fn(&str),
}

/// See the module's head.
pub struct Member {
    endpoint: Endpoint,
    events: mpsc::Receiver<Event>,
    guests: Arc<Guests>,
    coordinator: PublicKey,
    introduction: Introduction,
    pass: Pass,
    site: SiteId,
    coordinator_site: String,
    links: Links,
    cards: BTreeMap<u32, Contact>,
    waiting: BTreeMap<u32, VecDeque<Letter>>,
    /// The logical clock: one more for every letter, and never behind one that came.
    clock: u64,
    redial_at: Option<Instant>,
    backoff: Duration,
    /// Since when the coordinator is out of reach.
    lost: Option<Instant>,
    tell: fn(&str),
}

/// What came from whom.
#[derive(Debug)]
pub enum Arrived {
    /// A machine's message.
    Swarm(Envelope, Option<Arc<Tensor>>),
    /// There is a coordinator again.
    Coordinator,
    /// The coordinator does not want us any more.
    Refused(String),
    /// The coordinator's host has something to say.
    Post(Post, Bytes),
    /// The host of the member of this number has.
    Member(u32, Post, Bytes),
}

impl Member {
    /// Joins the ticket's run: returns when the coordinator has let us in.
    pub async fn join(joining: Joining) -> Result<(Member, Charter), JoinError> {
        let Joining { identity, ticket, site, wan, patience, tell } = joining;
        let address = outward(&ticket.addresses)?;
        let addresses = ticket.addresses.clone();
        let guests = Arc::new(Guests::new(ticket.run, ticket.coordinator, addresses));
        let (sender, mut events) = mpsc::channel(MOST_EVENTS);
        let runtime = tokio::runtime::Handle::current();
        let endpoint =
            Endpoint::start(&runtime, identity, Some(address), guests.clone(), Limits::default(), sender)?;
        let contact = guests.coordinator_contact();
        let links = Links::new(&site, wan);
        let introduction = Introduction {
            version: env!("CARGO_PKG_VERSION").into(),
            credential: Credential::Ticket(ticket.to_string()),
            site,
            addresses: endpoint.address().iter().map(SocketAddr::to_string).collect(),
        };
        let admission = admitted(&endpoint, &mut events, &contact, &introduction, patience).await?;
        let charter: Charter = serde_json::from_str(&admission.charter)
            .map_err(|error| JoinError::Charter(error.to_string()))?;
        let Admission { pass, site, coordinator_site, .. } = admission;
        let mut member = Member {
            introduction: Introduction { credential: Credential::Pass(pass.clone()), ..introduction },
            endpoint,
            events,
            guests,
            coordinator: contact.key,
            pass,
            site,
            coordinator_site,
            links,
            cards: BTreeMap::new(),
            waiting: BTreeMap::new(),
            clock: 0,
            redial_at: None,
            backoff: REDIAL.0,
            lost: None,
            tell,
        };
        member.links.met(&member.endpoint, member.coordinator, &member.coordinator_site);
        Ok((member, charter))
    }

    /// Our number.
    pub fn number(&self) -> u32 {
        self.pass.number
    }

    /// What the ticket made us.
    pub fn role(&self) -> Role {
        self.pass.role
    }

    /// What the event log says of us.
    pub fn joined(&self) -> LogEvent {
        let Pass { number, role, site, .. } = self.pass.clone();
        LogEvent::Joined { number, role: role.to_string(), site }
    }

    /// Where we stand.
    pub fn site(&self) -> SiteId {
        self.site
    }

    /// The network, to be asked for its traffic.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// The logical clock.
    pub fn clock(&self) -> u64 {
        self.clock
    }

    /// How whoever runs it is told something.
    pub fn tell(&self) -> fn(&str) {
        self.tell
    }

    /// When it wants to be looked at, whatever happens.
    pub fn next_wake(&self) -> Option<Instant> {
        [self.redial_at, self.links.next_wake()].into_iter().flatten().min()
    }

    /// The next event of the network.
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Tries the coordinator again, or looks at the links, if it is time.
    pub fn wake(&mut self) {
        self.links.wake(&self.endpoint);
        if self.redial_at.take_if(|at| *at <= Instant::now()).is_some() {
            self.endpoint.dial(self.guests.coordinator_contact(), introduce(&self.introduction));
        }
    }

    /// Takes an event; returns what it brought for somebody else than us.
    pub fn on_event(&mut self, event: Event) -> Option<Arrived> {
        match event {
            Event::Letter { from, letter } => return self.on_letter(from, &letter),
            Event::Connected { with, answer } if with == self.coordinator => {
                self.backoff = REDIAL.0;
                if let Some(Ok(admission)) = answer.map(|answer| postcard::from_bytes::<Admission>(&answer)) {
                    self.pass = admission.pass;
                    self.introduction.credential = Credential::Pass(self.pass.clone());
                }
                self.links.met(&self.endpoint, with, &self.coordinator_site);
                if let Some(since) = self.lost.take() {
                    (self.tell)(&format!(
                        "the coordinator is back after {:.0} s",
                        since.elapsed().as_secs_f64()
                    ));
                }
                // What was asked while it was away is asked again.
                for number in self.waiting.keys().copied().collect::<Vec<_>>() {
                    self.tell_coordinator(Post::WhoIs(number), Vec::new());
                }
                return Some(Arrived::Coordinator);
            }
            Event::Connected { with, .. } => {
                if let Some(guest) = self.guests.get(with) {
                    self.links.met(&self.endpoint, with, &guest.site);
                }
            }
            Event::Unreachable { with, why } if with == self.coordinator && why.starts_with("refused: ") => {
                return Some(Arrived::Refused(why));
            }
            Event::Closed { with, .. } | Event::Unreachable { with, .. } if with == self.coordinator => {
                self.redial_at = Some(Instant::now() + self.backoff);
                if self.lost.is_none() {
                    self.lost = Some(Instant::now());
                    (self.tell)(
                        "the coordinator does not answer; trying again until it does, or this process is ended",
                    );
                }
                self.backoff = (self.backoff * 2).min(REDIAL.1);
            }
            // Its address may have changed: the coordinator is asked when there is something to send.
            Event::Closed { with, .. } | Event::Unreachable { with, .. } => {
                self.cards.retain(|_, contact| contact.key != with);
            }
            Event::Refused { .. } => {}
        }
        None
    }

    /// Sends a machine's message.
    pub fn send(&mut self, envelope: Envelope, tensor: Option<&Arc<Tensor>>) {
        let to = envelope.to;
        let (post, body) = Post::of(envelope, tensor);
        let Some(letter) = self.seal(post, body) else { return };
        match to {
            Address::Coordinator => drop(self.endpoint.send(self.coordinator, letter)),
            Address::Worker(peer) => self.send_to(peer.0, letter),
            Address::Driver(driver) => self.send_to(driver.0, letter),
        }
    }

    /// Writes to the coordinator's host.
    pub fn tell_coordinator(&mut self, post: Post, body: Vec<Bytes>) {
        if let Some(letter) = self.seal(post, body) {
            // Lost if it is out of reach; whoever waits for an answer asks again.
            let _ = self.endpoint.send(self.coordinator, letter);
        }
    }

    /// Writes to the host of the member of this number.
    pub fn tell_member(&mut self, number: u32, post: Post, body: Vec<Bytes>) {
        if let Some(letter) = self.seal(post, body) {
            self.send_to(number, letter);
        }
    }

    /// Ends all connections in good order.
    pub async fn close(&mut self) {
        close(&self.endpoint, &mut self.events).await;
    }

    fn seal(&mut self, post: Post, body: Vec<Bytes>) -> Option<Letter> {
        self.clock += 1;
        post.seal(self.clock, body)
    }

    fn send_to(&mut self, number: u32, letter: Letter) {
        let Some(contact) = self.cards.get(&number) else {
            let waiting = self.waiting.entry(number).or_default();
            waiting.push_back(letter);
            if waiting.len() > MOST_WAITING {
                waiting.pop_front();
            }
            return self.tell_coordinator(Post::WhoIs(number), Vec::new());
        };
        if !self.endpoint.is_connected(contact.key) {
            self.endpoint.dial(contact.clone(), introduce(&self.introduction));
        }
        let _ = self.endpoint.send(contact.key, letter);
    }

    fn on_letter(&mut self, from: PublicKey, letter: &Letter) -> Option<Arrived> {
        let (clock, post, body) = Post::open(letter).ok()?;
        self.clock = next_clock(self.clock, clock);
        let sender = match from == self.coordinator {
            true => Address::Coordinator,
            false => self.guests.get(from)?.address()?,
        };
        match post {
            // Nobody speaks in another's name.
            Post::Swarm(envelope, _) if envelope.from != sender => None,
            // What names a tensor comes with one, and nothing else does.
            Post::Swarm(envelope, head) if envelope.payload().is_some() != head.is_some() => None,
            Post::Swarm(envelope, head) => Some(Arrived::Swarm(envelope, tensor(head, &body).ok()?)),
            post if post.is_between_members() => match sender {
                Address::Worker(PeerId(number)) | Address::Driver(DriverId(number)) => {
                    Some(Arrived::Member(number, post, body))
                }
                Address::Coordinator => None,
            },
            _ if sender != Address::Coordinator => None,
            Post::ThisIs(number, card) => {
                let letters = self.waiting.remove(&number).unwrap_or_default();
                let card = card?;
                let guest = Guest { number, role: card.role, site: card.site };
                self.guests.remember(card.contact.key, guest);
                self.cards.insert(number, card.contact);
                letters.into_iter().for_each(|letter| self.send_to(number, letter));
                None
            }
            post => Some(Arrived::Post(post, body)),
        }
    }
}

/// Waits until the coordinator has let us in, or says why not.
pub(crate) async fn admitted(
    endpoint: &Endpoint,
    events: &mut mpsc::Receiver<Event>,
    coordinator: &Contact,
    introduction: &Introduction,
    patience: Duration,
) -> Result<Admission, JoinError> {
    let until = Instant::now() + patience;
    let mut backoff = REDIAL.0;
    loop {
        endpoint.dial(coordinator.clone(), introduce(introduction));
        let why = loop {
            match events.recv().await {
                Some(Event::Connected { with, answer: Some(answer) }) if with == coordinator.key => {
                    return postcard::from_bytes(&answer)
                        .map_err(|error| JoinError::Charter(error.to_string()));
                }
                Some(Event::Unreachable { with, why }) if with == coordinator.key => {
                    match why.strip_prefix("refused: ") {
                        Some(reason) => return Err(JoinError::Refused(reason.into())),
                        None => break why,
                    }
                }
                Some(_) => {}
                None => return Err(JoinError::Unreachable("the network has stopped".into())),
            }
        };
        if Instant::now() >= until {
            return Err(JoinError::Unreachable(why));
        }
        tokio::time::sleep(backoff).await;
        backoff = (backoff * 2).min(REDIAL.1);
    }
}

/// Ends all connections in good order: what still comes meanwhile is of no interest.
pub(crate) async fn close(endpoint: &Endpoint, events: &mut mpsc::Receiver<Event>) {
    endpoint.close();
    tokio::select! {
        () = endpoint.closed() => {}
        () = async { while events.recv().await.is_some() {} } => {}
    }
}

/// A number that no earlier life of this peer had, unless its clock was put back to the very nanosecond.
pub fn new_life() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64)
}

fn introduce(introduction: &Introduction) -> Vec<u8> {
    postcard::to_stdvec(introduction).unwrap_or_default()
}

/// Our own address on the way to the coordinator, with any free port.
fn outward(addresses: &[String]) -> Result<SocketAddr, JoinError> {
    let mut why = String::from("the ticket names no address");
    for address in addresses {
        let local = address.to_socket_addrs().and_then(|mut found| {
            let to = found.next().ok_or_else(|| std::io::Error::other("it has no address"))?;
            let any: SocketAddr = if to.is_ipv4() { ([0; 4], 0).into() } else { ([0u16; 8], 0).into() };
            // Nothing is sent: the system only says by which way it would go.
            let socket = UdpSocket::bind(any)?;
            socket.connect(to)?;
            socket.local_addr()
        });
        match local {
            Ok(local) => return Ok(SocketAddr::new(local.ip(), 0)),
            Err(error) => why = format!("{address}: {error}"),
        }
    }
    Err(JoinError::Unreachable(why))
}

/// Why a run was not joined; nothing has changed then.
#[derive(Debug, thiserror::Error)]
pub enum JoinError {
    /// The coordinator does not want us.
    #[error("the coordinator refused: {0}")]
    Refused(String),
    /// The coordinator does not answer.
    #[error("the coordinator cannot be reached: {0}. Is it running, and is the ticket's address right?")]
    Unreachable(String),
    /// The coordinator's answer makes no sense.
    #[error("the coordinator's answer cannot be read ({0}); it is of another version")]
    Charter(String),
    /// The network could not be started.
    #[error(transparent)]
    Start(#[from] StartError),
}
