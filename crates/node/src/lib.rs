//! A peer as a process: where the swarm's decisions meet the model.
//!
//! | process | its loop | its machine |
//! |---|---|---|
//! | coordinator | [`coordinator`]: network, [`journal`] and checkpoints ([`disk`]) | `swarm::coordinator` |
//! | worker | [`worker`]: network and the thread that computes ([`compute`]), which carries out with a real stage what the machine wants ([`host`]) | `swarm::worker` |
//! | driver | [`driver`]: network and corpus | `swarm::driver` |
//!
//! A joiner is handed a stage's state, or what it missed of it, in a [`parcel`], which others give ([`giving`]) and it takes
//! ([`taking`]) chunk by chunk.
//!
//! Held-out text is tried across the pipeline between two steps ([`trial`]).
//!
//! Workers and drivers reach the coordinator and each other through [`member`]; what they write is in [`post`]. Who may
//! talk to whom is decided by [`registry`] (at the coordinator) and [`guests`] (everywhere else). Every process keeps an
//! event log ([`events`]): one typed event a line, appended with one write, valid to the last whole line after any
//! crash; [`audit`] proves from them that every sample was counted once.
//!
//! ```
//! use starling_node::events::{self, Event, EventLog};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let path = std::env::temp_dir().join(format!("starling-events-{}.jsonl", std::process::id()));
//! let mut log = EventLog::open(&path)?;
//! log.append(Event::Checkpoint { step: 100 })?;
//!
//! let history = events::read(&path)?;
//! assert_eq!(history.lines[0].event, Event::Checkpoint { step: 100 });
//! # std::fs::remove_file(&path)?;
//! # Ok(())
//! # }
//! ```

pub mod audit;
pub mod charter;
pub mod closing;
pub mod compute;
pub mod coordinator;
pub mod copies;
pub mod disk;
pub mod driver;
pub mod events;
pub mod giving;
pub mod guests;
pub mod host;
pub mod journal;
pub mod links;
pub mod member;
pub mod operator;
pub mod parcel;
pub mod post;
pub mod registry;
pub mod sabotage;
pub mod status;
pub mod taking;
pub mod tensor;
pub mod tensorboard;
pub mod tensors;
pub mod toll;
pub mod trial;
pub mod worker;
