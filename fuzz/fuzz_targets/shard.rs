//! Any bytes as a token shard: refused, or every token and document can be read.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_corpus::Shard;

fuzz_target!(|bytes: &[u8]| {
    let Ok(shard) = Shard::parse(bytes.to_vec()) else { return };
    let mut tokens = Vec::new();
    for document in 0..shard.documents() {
        shard.read(shard.document(document).expect("it has so many documents"), &mut tokens);
    }
    assert_eq!(tokens.len() as u64, shard.tokens());
    assert!(tokens.iter().all(|&token| token < shard.vocabulary()));
});
