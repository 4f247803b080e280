//! Any bytes as an event log: read, line by line, without a panic.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_node::events::parse;

fuzz_target!(|bytes: &[u8]| {
    let history = parse(bytes).expect("memory can be read");
    let lines = bytes.split(|&b| b == b'\n').count();
    assert!(history.lines.len() + history.strange <= lines);
});
