//! A peer as a process: what happens in it, written down.
//!
//! So far this crate holds the event log ([`events`]): one typed event a line, appended with one write, valid
//! to the last whole line after any crash. The driver of the swarm's state machines will live here too.
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

pub mod events;
pub mod host;
