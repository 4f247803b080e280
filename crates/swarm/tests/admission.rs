//! Who may take part, and who is told that it cannot.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use starling_swarm::coordinator::{Command, Coordinator, Input};
use starling_swarm::ids::*;
use starling_swarm::journal::JournalState;
use starling_swarm::lots::Lots;
use starling_swarm::message::*;
use starling_swarm::spec::{Reduce, Spec, Sync, Tuning};
use starling_swarm::time::Time;

fn spec(reduce: Reduce) -> Spec {
    Spec {
        run: RunId(1),
        stages: 1,
        costs: Vec::new(),
        lots: Lots { microbatches: 1, lots: 1 },
        sync: Sync::Step,
        reduce,
        steps: Step(4),
        checkpoint_every: 0,
        elements: vec![4],
        shared: Vec::new(),
        state_bytes: 10,
        memory_bytes: 100,
        tuning: Tuning { quorum: 9, ..Tuning::default() },
    }
}

/// What the coordinator answers to workers of these classes and memories, who say hello one after another.
fn answers(reduce: Reduce, hellos: &[(&str, u64)]) -> Vec<Body> {
    let (spec, mut out) = (spec(reduce), Vec::new());
    let mut coordinator = Coordinator::new(spec.clone(), JournalState::default(), 0, Time(0), &mut out);
    coordinator.handle(Input::Journaled(0), Time(1), &mut out);
    let mut answers = Vec::new();
    for (&(class, memory_bytes), peer) in hellos.iter().zip(0..) {
        let (site, class) = (SiteId(0), class.into());
        let capability = Capability { site, speed: 1.0, memory_bytes, link_bytes_per_s: 1.0, class };
        let fence = Fence { run: spec.run, ..Fence::default() };
        let body = Body::Hello(Hello::Worker { incarnation: 1, capability });
        let (from, to) = (Address::Worker(PeerId(peer)), Address::Coordinator);
        let mut out = Vec::new();
        let hello = Envelope { protocol: PROTOCOL, from, to, fence, body };
        coordinator.handle(Input::Message(hello), Time(2), &mut out);
        answers.extend(out.into_iter().filter_map(|command| match command {
            Command::Send(Envelope { to, body, .. }) if to == from => Some(body),
            _ => None,
        }));
    }
    answers
}

#[test]
fn peers_whose_arithmetic_does_not_agree_are_not_mixed_where_bits_are_promised() {
    let hellos = [("x", 100), ("x", 100), ("y", 100)];
    let exact = answers(Reduce::Exact, &hellos);
    assert!(
        matches!(&exact[..], [Body::Welcome { .. }, Body::Welcome { .. }, Body::Unfit { why }]
        if why.contains("(y)") && why.contains("(x)") && why.contains("fast")),
        "{exact:?}"
    );
    let fast = answers(Reduce::Fast, &hellos);
    assert!(fast.iter().all(|body| matches!(body, Body::Welcome { .. })) && fast.len() == 3, "{fast:?}");
}

#[test]
fn a_peer_that_cannot_hold_a_stage_is_told_so() {
    let told = answers(Reduce::Exact, &[("x", 99), ("x", 100)]);
    assert!(
        matches!(&told[..], [Body::Unfit { why }, Body::Welcome { .. }] if why.contains("99")),
        "{told:?}"
    );
}
