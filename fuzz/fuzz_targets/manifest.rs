//! Any bytes as a checkpoint's manifest: refused, or one that says the same when it is written again. The checksum
//! is mended first, so that the rest of the reader is reached.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_model::checkpoint::{Manifest, parse_manifest};

fuzz_target!(|bytes: &[u8]| {
    let _ = parse_manifest(bytes);
    let Ok(mut manifest) = serde_json::from_slice::<Manifest>(bytes) else { return };
    manifest.checksum = manifest.computed_checksum();
    let written = serde_json::to_vec(&manifest).expect("plain numbers and strings");
    if let Ok(read) = parse_manifest(&written) {
        assert_eq!(serde_json::to_vec(&read).expect("plain numbers and strings"), written);
    }
});
