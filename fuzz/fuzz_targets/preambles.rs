//! Any bytes as the first words of a connection, and as their answer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_transport::preamble::{Answer, Preamble};

fuzz_target!(|bytes: &[u8]| {
    let _ = Preamble::decode(bytes);
    let _ = Answer::decode(bytes);
    let _ = starling_node::guests::read(bytes);
});
