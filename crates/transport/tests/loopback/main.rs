//! Endpoints on loopback: real sockets, no sleeping and hoping. Every wait is for an event, and has a bound.

mod faults;
mod hostile;
mod letters;
mod world;
