//! Any bytes as a text: the shard made from it holds every byte that is not a separator.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_corpus::{Split, shard_from_text};

fuzz_target!(|bytes: &[u8]| {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let text = folder.path().join("text.txt");
    std::fs::write(&text, bytes).expect("a small file");
    for split in [Split::BlankLine, Split::Line] {
        if let Ok(shard) = shard_from_text(&text, split, &folder.path().join("out.shard")) {
            assert!(shard.tokens() <= bytes.len() as u64 && shard.documents() > 0);
        }
    }
});
