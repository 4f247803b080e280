//! Any text as a ticket: refused, or one that says the same again and that nobody's key has signed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_transport::identity::PublicKey;
use starling_transport::ticket::Ticket;

fuzz_target!(|text: &str| {
    let Ok(ticket) = text.parse::<Ticket>() else { return };
    assert!(ticket.check(PublicKey([7; 32]), ticket.run, 0).is_err());
    let again: Ticket = ticket.to_string().parse().expect("what was written can be read");
    assert_eq!(again.to_string(), ticket.to_string());
});
