//! Endpoints on loopback: real sockets, no sleeping and hoping. Every wait is for an event, and has a bound.

#![allow(clippy::unwrap_used, reason = "a test says what went wrong by panicking, in its fixtures too")]

mod faults;
mod hostile;
mod letters;
mod world;
