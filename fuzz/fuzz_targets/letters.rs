//! Any bytes on a connection: refused, or letters within their bounds, whose heads and tensors are read or refused.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_node::post::{Post, tensor};
use starling_transport::letter::{Assembler, Lane, Letter};

fuzz_target!(|bytes: &[u8]| {
    if let Ok(letters) = Assembler::new(&[Lane::Work, Lane::Sum, Lane::State], 1 << 20).feed(bytes) {
        letters.iter().for_each(open);
    }
    // And as the head of a letter that arrived whole, with the rest for its body.
    let (head, body) = bytes.split_at(bytes.len() / 2);
    let lane = Lane::Work;
    open(&Letter { lane, head: head.to_vec().into(), body: vec![body.to_vec().into()] });
    open(&Letter { lane, head: bytes.to_vec().into(), body: Vec::new() });
});

fn open(letter: &Letter) {
    if let Ok((_, Post::Swarm(envelope, head), body)) = Post::open(letter) {
        let _ = envelope.check();
        let _ = tensor(head, &body);
    }
}
