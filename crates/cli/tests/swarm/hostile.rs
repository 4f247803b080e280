//! Who has no business here, and who lies: refused or quarantined by name, and the run goes on.

use std::io::Read;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use starling_model::random::uniform;
use starling_node::events::Event;
use starling_node::guests::now_s;
use starling_node::post::{Credential, Introduction, Post};
use starling_swarm::ids::*;
use starling_swarm::message::{Body, Envelope, Fence, PROTOCOL};
use starling_transport::endpoint::{Contact, Endpoint, Event as NetworkEvent, Gate, Limits};
use starling_transport::identity::{Identity, PublicKey};
use starling_transport::letter::{Lane, Letter};
use starling_transport::ticket::{Role, Ticket};

use crate::flock::Flock;

#[test]
fn nobody_gets_in_without_a_good_ticket() {
    let mut flock = Flock::with_workers("", "aaa");
    flock.go_on_for(2);
    let authority = Identity::load(&flock.place.path("run/run.key")).unwrap();
    let good: Ticket = flock.worker_ticket().parse().unwrap();
    let Ticket { run, addresses, .. } = good.clone();
    let issue = |by: &Identity, run, role, site: Option<&str>, expires_s| {
        Ticket::issue(by, run, addresses.clone(), role, site.map(Into::into), expires_s, 0)
    };
    let later = now_s() + 1000;
    let mut forged = issue(&Identity::generate(), run, Role::Worker, None, later);
    forged.coordinator = authority.public();
    for (ticket, site, complaint) in [
        (issue(&authority, run, Role::Worker, None, now_s() - 10), "a", "expired"),
        (issue(&authority, run, Role::Worker, Some("b"), later), "a", "for site"),
        (issue(&authority, run, Role::Operator, None, later), "a", "for looking at the run"),
        (issue(&authority, [7; 32], Role::Worker, None, later), "a", "another run"),
        (issue(&Identity::generate(), run, Role::Worker, None, later), "a", "cannot be reached"),
        (forged, "a", "not the coordinator's"),
    ] {
        let told = flock.place.bad(&format!("join {ticket} --site {site} --patience 1"));
        assert!(told.contains(complaint), "{complaint}: {told}");
    }
    let torn = &flock.worker_ticket()[..60];
    assert!(flock.place.bad(&format!("join {torn}")).contains("ticket"));
    // Who only seems to compute would spoil the training.
    let emulated = format!("join {} --site a --device emulated:1", flock.worker_ticket());
    assert!(flock.place.bad(&emulated).contains("cannot train together"));
    // A worker's ticket gives no orders.
    assert!(flock.place.bad(&format!("run stop {}", flock.worker_ticket())).contains("operator"));
    let refused = flock.events().into_iter().filter(|event| matches!(event, Event::Refused { .. })).count();
    assert!(refused >= 4, "refusals are written down");
    flock.go_on_for(2);
    flock.finish_as_one_process();
}

#[test]
fn a_support_file_tells_what_happened_and_no_secret() {
    let mut flock = Flock::with_workers("", "aaa");
    flock.go_on_for(3);
    flock.place.good("support run --out bug.tar.gz");
    assert!(flock.place.bad("support run --out bug.tar.gz").contains("bug.tar.gz"), "nothing is overwritten");
    let file = std::fs::File::open(flock.place.path("bug.tar.gz")).unwrap();
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(file));
    let (mut names, mut all) = (Vec::new(), Vec::new());
    for entry in archive.entries().unwrap() {
        let mut entry = entry.unwrap();
        names.push(entry.path().unwrap().display().to_string());
        entry.read_to_end(&mut all).unwrap();
    }
    for name in ["versions.txt", "run.toml", "journal", "events.jsonl", "peers/2/events.jsonl"] {
        assert!(names.contains(&format!("starling-support/{name}")), "{name}: {names:?}");
    }
    let holds = |text: &[u8]| all.windows(text.len()).any(|window| window == text);
    assert!(holds(b"folded") && holds(b"\"event\":\"step\""));
    for secret in ["run/run.key", "run/operator.ticket"] {
        let secret = std::fs::read_to_string(flock.place.path(secret)).unwrap();
        let longest = secret.split_whitespace().max_by_key(|word| word.len()).unwrap();
        assert!(longest.len() > 20 && !holds(longest.as_bytes()));
    }
    flock.finish_as_one_process();
}

struct Nobody;

impl Gate for Nobody {
    fn admit(&self, _: PublicKey, _: &[u8]) -> Result<Vec<u8>, String> {
        Err("closed".into())
    }
}

/// A member that was let in, and sends garbage and lies as fast as it can.
#[test]
fn a_member_that_sends_garbage_and_lies_changes_nothing() {
    let mut flock = Flock::with_workers("", "aaab");
    flock.go_on_for(3);
    let ticket: Ticket = flock.worker_ticket().parse().unwrap();
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let (sender, mut events) = tokio::sync::mpsc::channel(64);
        let identity = Arc::new(Identity::generate());
        let endpoint =
            Endpoint::start(runtime.handle(), identity, None, Arc::new(Nobody), Limits::default(), sender)
                .unwrap();
        let introduction = Introduction {
            version: env!("CARGO_PKG_VERSION").into(),
            credential: Credential::Ticket(ticket.to_string()),
            site: "a".into(),
            addresses: vec!["127.0.0.1:9".into()],
        };
        let to = Contact { key: ticket.coordinator, addresses: ticket.addresses.clone() };
        endpoint.dial(to, postcard::to_stdvec(&introduction).unwrap());
        let first = tokio::time::timeout(Duration::from_secs(20), events.recv()).await.unwrap();
        assert!(matches!(first, Some(NetworkEvent::Connected { .. })), "{first:?}");
        for number in 0..2000 {
            let letter = match number % 3 {
                0 => garbage(number),
                1 => lie(number, run_id(&ticket)),
                _ => Letter { lane: Lane::State, head: Bytes::new(), body: vec![Bytes::from(vec![7; 5000])] },
            };
            let _ = endpoint.send(ticket.coordinator, letter);
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    });
    flock.go_on_for(5);
    flock.finish_as_one_process();
}

fn garbage(number: u64) -> Letter {
    let length = (uniform(5, number) * 200.0) as u64;
    let bytes: Vec<u8> = (0..length).map(|i| (256.0 * uniform(number, i)) as u8).collect();
    Letter { lane: Lane::Control, head: bytes.into(), body: Vec::new() }
}

/// In another's name, of another time, about what it does not hold.
fn lie(number: u64, run: RunId) -> Letter {
    let fence = Fence {
        run,
        term: Term(number % 3),
        epoch: Epoch(number % 2),
        step: Step(number % 50),
        attempt: Attempt((number % 5) as u32),
    };
    let body = match number % 4 {
        0 => Body::Leaving { member: MemberNo(number) },
        1 => Body::Saved { stage: StageId((number % 5) as u16), version: fence.step },
        2 => Body::Lost {
            stage: StageId(0),
            lots: vec![LotOf { step: fence.step, lot: Lot((number % 9) as u32) }],
        },
        _ => Body::Prepared { stage: StageId(1), digest: [9; 32], summary: vec![b'{'; 40] },
    };
    let from = Address::Worker(PeerId((number % 7) as u32));
    let envelope = Envelope { protocol: PROTOCOL, from, to: Address::Coordinator, fence, body };
    Post::Swarm(envelope, None).seal(u64::MAX / 2, Vec::new()).unwrap()
}

fn run_id(ticket: &Ticket) -> RunId {
    let [a, b, c, d, e, f, g, h, ..] = ticket.run;
    RunId(u64::from_le_bytes([a, b, c, d, e, f, g, h]))
}

#[test]
fn a_worker_whose_device_gives_no_numbers_is_quarantined_by_name() {
    let mut flock = Flock::new("", 6);
    flock.start_driver("a");
    for _ in 0..5 {
        flock.start_worker("a");
    }
    flock.start_saboteur("a", "nan");
    until_quarantined(&mut flock);
}

#[test]
fn a_worker_that_tells_garbage_of_its_sums_is_quarantined_by_name() {
    let mut flock = Flock::with_workers("", "aaab");
    flock.start_saboteur("a", "garble");
    until_quarantined(&mut flock);
    assert!(flock.log("coordinator").contains("what a stage told of its gradient cannot be read"));
}

/// Sooner or later a saboteur is given work; without it, the run goes on.
fn until_quarantined(flock: &mut Flock) {
    while !flock.log("coordinator").contains("quarantined") {
        flock.go_on_for(5);
        assert!(flock.step() < 2000, "it was never found: {}", flock.log("coordinator"));
    }
    flock.go_on_for(5);
    flock.finish_as_one_process();
}
