//! A node's connections to others: TCP and TLS 1.3, keys for names, letters in four lanes.
//!
//! It knows nothing of training. A node has an [`Identity`](identity::Identity), whose public half is its name;
//! it [dials](endpoint::Endpoint::dial) others by name and address, asks its [`Gate`](endpoint::Gate) who may
//! come in, and sends [letters](letter::Letter) of opaque bytes. All that happens comes out of one channel.
//!
//! ```
//! use std::sync::Arc;
//! use bytes::Bytes;
//! use starling_transport::endpoint::{Contact, Endpoint, Event, Gate, Limits};
//! use starling_transport::identity::{Identity, PublicKey};
//! use starling_transport::letter::{Lane, Letter};
//!
//! struct Everybody;
//! impl Gate for Everybody {
//!     fn admit(&self, _: PublicKey, introduction: &[u8]) -> Result<Vec<u8>, String> {
//!         Ok([b"welcome, ", introduction].concat())
//!     }
//! }
//!
//! let runtime = tokio::runtime::Runtime::new()?;
//! let start = |listen| {
//!     let (events, happened) = tokio::sync::mpsc::channel(64);
//!     let identity = Arc::new(Identity::generate());
//!     let key = identity.public();
//!     let gate = Arc::new(Everybody);
//!     let endpoint = Endpoint::start(runtime.handle(), identity, listen, gate, Limits::default(), events)?;
//!     Ok::<_, Box<dyn std::error::Error>>((endpoint, key, happened))
//! };
//! let (paris, paris_key, mut in_paris) = start(Some("127.0.0.1:0".parse()?))?;
//! let (oslo, _, mut in_oslo) = start(None)?;
//!
//! let address = paris.address().ok_or("it listens")?.to_string();
//! oslo.dial(Contact { key: paris_key, addresses: vec![address] }, b"oslo".to_vec());
//! oslo.send(paris_key, Letter { lane: Lane::Work, head: Bytes::from("hello"), body: vec![] })?;
//!
//! let answer = Some(b"welcome, oslo".to_vec());
//! assert_eq!(in_oslo.blocking_recv(), Some(Event::Connected { with: paris_key, answer }));
//! assert!(matches!(in_paris.blocking_recv(), Some(Event::Connected { .. })));
//! assert!(matches!(in_paris.blocking_recv(), Some(Event::Letter { letter, .. }) if letter.head == "hello"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Concepts
//! - **A key is a name.** A handshake proves it on both sides, with raw ed25519 keys and no certificates. Nothing of
//!   a handshake can be used again: no resumption, no early data.
//! - **A gate decides.** Who proved a key introduces itself, with a [`Ticket`](ticket::Ticket) or a
//!   [`Pass`](ticket::Pass) for instance, and is answered or told why not.
//! - **Two connections a pair of nodes**: one for the control lane, so that a decision is never stuck behind tensors in
//!   a socket's buffer, one for the other three lanes. They stand and fall together.
//! - **Lanes overtake.** Letters are cut into frames, and between two frames the most urgent lane goes first.
//! - **Everything is bounded** by [`Limits`](endpoint::Limits). [`send`](endpoint::Endpoint::send) never blocks: a full
//!   lane says so. An owner that does not take its events slows its peers down, and loses nothing.
//! - **A WAN can be emulated** ([`wan`]): rate and latency per link, and cuts, in one process or many.
//!
//! # Who does what
//! ```text
//!  Endpoint ── Hub ─┬─ accept::listen ── greet, one a connection ─┐
//!                   └─ dial::run, one a dial ────────────────────┴─ pair::run ─┬─ control: reader, writer
//!                                                                              └─ bulk: reader, writer
//!  send → Outbox (a peer) → Writer → [Link] → SecureWriter → TCP → SecureReader → Assembler → Event
//! ```

pub mod endpoint;
pub mod identity;
pub mod letter;
pub mod preamble;
pub mod ticket;
pub mod wan;

mod accept;
mod assembler;
mod dial;
mod event;
mod frame;
mod hub;
mod keyfile;
mod limits;
mod link;
mod outbox;
mod pair;
mod peers;
mod secure;
mod socket;
mod spares;
mod ticket_text;
mod tls;
mod traffic;
mod writer;
