//! Any bytes as a message between machines: refused, or one that is within its bounds and says the same again.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_swarm::message::Envelope;

fuzz_target!(|bytes: &[u8]| {
    let Ok(envelope) = serde_json::from_slice::<Envelope>(bytes) else { return };
    if envelope.check().is_ok() {
        let written = serde_json::to_vec(&envelope).expect("a message can be written");
        let read: Envelope = serde_json::from_slice(&written).expect("what was written can be read");
        assert_eq!(serde_json::to_vec(&read).expect("and written again"), written);
    }
});
