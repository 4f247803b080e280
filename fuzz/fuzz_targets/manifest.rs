//! Any bytes as a checkpoint's manifest: refused, or one whose run has no problems.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_model::checkpoint::parse_manifest;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(manifest) = parse_manifest(bytes) {
        assert!(manifest.run.problems().is_empty());
    }
});
