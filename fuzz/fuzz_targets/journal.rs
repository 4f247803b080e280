//! Any bytes as a journal: refused, or records that can be replayed.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_swarm::journal::{JournalState, Record};

fuzz_target!(|bytes: &[u8]| {
    if let Ok((records, whole)) = starling_node::journal::read::<Record>(bytes) {
        assert!(whole <= bytes.len());
        let _ = JournalState::replay(&records);
    }
});
