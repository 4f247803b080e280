//! How fast letters go between two endpoints on loopback, each with a runtime of its own:
//! `cargo run --release -p starling-transport --example throughput [MB a letter] [letters] [threads]`.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use starling_transport::endpoint::{Contact, Endpoint, Event, Gate, Limits};
use starling_transport::identity::{Identity, PublicKey};
use starling_transport::letter::{Lane, Letter};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{Receiver, channel};

struct Everybody;

impl Gate for Everybody {
    fn admit(&self, _: PublicKey, _: &[u8]) -> Result<Vec<u8>, String> {
        Ok(Vec::new())
    }
}

struct Node {
    endpoint: Endpoint,
    key: PublicKey,
    events: Receiver<Event>,
    _runtime: Runtime,
}

/// So many letters are on their way at a time, so that neither end waits for the other.
const AHEAD: usize = 2;

type Failure = Box<dyn std::error::Error>;

fn node(threads: usize) -> Result<Node, Failure> {
    let runtime = Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let (sender, events) = channel(64);
    let identity = Arc::new(Identity::generate());
    let key = identity.public();
    let listen = Some("127.0.0.1:0".parse()?);
    let gate = Arc::new(Everybody);
    let endpoint = Endpoint::start(runtime.handle(), identity, listen, gate, Limits::default(), sender)?;
    Ok(Node { endpoint, key, events, _runtime: runtime })
}

fn letters_of(node: &mut Node, count: usize) -> Result<(), Failure> {
    let mut left = count;
    while left > 0 {
        match node.events.blocking_recv() {
            Some(Event::Letter { .. }) => left -= 1,
            Some(Event::Connected { .. }) => {}
            other => return Err(format!("unexpected: {other:?}").into()),
        }
    }
    Ok(())
}

/// Seconds of processor time of this process.
fn processor_s() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or("").split_whitespace().collect();
    let ticks = |index: usize| fields.get(index).and_then(|field| field.parse::<f64>().ok()).unwrap_or(0.0);
    (ticks(11) + ticks(12)) / 100.0
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1).map(|argument| argument.parse::<usize>());
    let megabytes = arguments.next().transpose()?.unwrap_or(100);
    let count = arguments.next().transpose()?.unwrap_or(20);
    let threads = arguments.next().transpose()?.unwrap_or(1);

    let (mut a, mut b) = (node(threads)?, node(threads)?);
    let address = b.endpoint.address().ok_or("it listens")?.to_string();
    a.endpoint.dial(Contact { key: b.key, addresses: vec![address] }, Vec::new());
    a.events.blocking_recv().ok_or("connected")?;
    b.events.blocking_recv().ok_or("connected")?;
    let letter = Letter {
        lane: Lane::Sum,
        head: Bytes::new(),
        body: vec![Bytes::from(vec![7; megabytes * 1_000_000])],
    };

    for both in [false, true] {
        let (begun, processor) = (Instant::now(), processor_s());
        for number in 0..count + AHEAD {
            if number < count {
                a.endpoint.send(b.key, letter.clone())?;
                if both {
                    b.endpoint.send(a.key, letter.clone())?;
                }
            }
            if number >= AHEAD {
                letters_of(&mut b, 1)?;
                letters_of(&mut a, if both { 1 } else { 0 })?;
            }
        }
        let (wall_s, processor_s) = (begun.elapsed().as_secs_f64(), processor_s() - processor);
        let directions = if both { 2 } else { 1 };
        let total = (megabytes * count * directions) as f64;
        println!(
            "{} direction(s): {:.0} MB/s, {:.2} s of processor a GB (both ends), {:.1} processors busy",
            directions,
            total / wall_s,
            processor_s / total * 1000.0,
            processor_s / wall_s
        );
    }
    let begun = Instant::now();
    for _ in 0..1000 {
        a.endpoint.send(b.key, Letter { lane: Lane::Control, head: Bytes::new(), body: vec![] })?;
        letters_of(&mut b, 1)?;
    }
    println!("a control letter takes {:.0} µs one way", begun.elapsed().as_secs_f64() * 1000.0);
    Ok(())
}
