//! A peer as a process: where the swarm's decisions meet the model.
//!
//! So far it holds the worker's host ([`host`]), which carries out what the state machine of a worker wants done with
//! a real stage, and the event log ([`events`]): one typed event a line, appended with one write, valid to the last
//! whole line after any crash. The loop that feeds the machines from a network will live here too.
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
pub mod disk;
pub mod driver;
pub mod events;
pub mod guests;
pub mod host;
pub mod journal;
pub mod links;
pub mod member;
pub mod operator;
pub mod post;
pub mod registry;
pub mod sabotage;
pub mod status;
pub mod tensor;
pub mod tensors;
pub mod worker;
