//! Any sequence of messages and wake-ups, to a coordinator, a driver and a worker whose host does what it is told:
//! refused or contained, never a panic, never an endless journal, and always an answer to what is waited for.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_swarm::coordinator::{self, Coordinator};
use starling_swarm::driver::{self, Driver};
use starling_swarm::ids::*;
use starling_swarm::journal::JournalState;
use starling_swarm::lots::Lots;
use starling_swarm::message::{Capability, Envelope};
use starling_swarm::spec::{Reduce, Spec, Sync, Tuning};
use starling_swarm::time::Time;
use starling_swarm::worker::{self, Worker};

fuzz_target!(|bytes: &[u8]| {
    let Some((&first, mut rest)) = bytes.split_first() else { return };
    let spec = spec(first);
    let (mut now, mut records) = (Time(0), 0);
    let mut to_record = Vec::new();
    let mut coordinator = Coordinator::new(spec.clone(), JournalState::default(), 0, now, &mut to_record);
    let capability =
        Capability { site: SiteId(0), speed: 1.0, memory_bytes: 1, link_bytes_per_s: 1.0, class: "x".into() };
    let mut worker = Worker::new(PeerId(0), 1, capability, spec.clone(), now);
    let mut driver = Driver::new(DriverId(0), 1, SiteId(0), spec, now);
    while let Ok((envelope, after)) = postcard::take_from_bytes::<(u16, Envelope)>(rest) {
        (now, rest) = (Time(now.0 + u64::from(envelope.0) * 1000), after);
        let envelope = envelope.1;
        let _ = envelope.check();
        match envelope.to {
            Address::Coordinator => {
                coordinator.handle(coordinator::Input::Message(envelope), now, &mut to_record);
                coordinator.handle(coordinator::Input::Wake, now, &mut to_record);
            }
            Address::Worker(_) => {
                to_worker(&mut worker, worker::Input::Message(envelope), now, first & 16 == 0)
            }
            Address::Driver(_) => {
                driver.handle(driver::Input::Message(envelope), now, &mut Vec::new());
                driver.handle(driver::Input::Wake, now, &mut Vec::new());
            }
        }
        // The journal is quick; what the coordinator says after a record is safe may lead to another.
        while let Some(command) = to_record.pop() {
            let done = match command {
                coordinator::Command::Append(number, _) => {
                    records += 1;
                    assert!(records < 1 << 20, "the journal has no end");
                    coordinator::Input::Journaled(number)
                }
                coordinator::Command::Conclude(number, ..) => {
                    coordinator::Input::Concluded(number, (first & 8 == 0).then(Vec::new))
                }
                _ => continue,
            };
            coordinator.handle(done, now, &mut to_record);
        }
        assert!(!coordinator.why_waiting().is_empty());
    }
});

/// Hands an input to the worker, and does all that it wants done; its gradients may not be finite.
fn to_worker(worker: &mut Worker, input: worker::Input, now: Time, finite: bool) {
    use worker::{Command, Input};
    let mut commands = Vec::new();
    worker.handle(input, now, &mut commands);
    worker.handle(Input::Wake, now, &mut commands);
    for _ in 0..256 {
        let Some(command) = commands.pop() else { break };
        let done = match command {
            Command::Forward { microbatch: Microbatch(2), job, .. } if !finite => Input::Failed(job),
            Command::Forward { job, .. } => Input::ForwardDone(job, Payload::default()),
            Command::Backward(job, _) if finite => Input::BackwardDone(job, Payload::default()),
            Command::Backward(job, _) => Input::NotFinite(job),
            Command::Sum(number, due) => Input::Summed(number, due.part, Payload::default()),
            Command::Prepare(number) => Input::Prepared(number, [0; 32], Vec::new()),
            Command::Settle(number, round, _) => Input::Settled(number, round, [0; 32], Vec::new()),
            Command::Apply(of, _) => Input::Applied(of),
            Command::Load { of, .. } | Command::CatchUp { of, .. } => Input::Loaded(of),
            Command::Save(of) => Input::Saved(of),
            _ => continue,
        };
        worker.handle(done, now, &mut commands);
    }
}

fn spec(bits: u8) -> Spec {
    Spec {
        run: RunId(0),
        stages: 1 + u16::from(bits >> 2 & 1),
        costs: Vec::new(),
        lots: Lots { microbatches: 3, lots: 2 },
        sync: if bits & 1 == 0 { Sync::Step } else { Sync::Delayed },
        reduce: if bits & 2 == 0 { Reduce::Exact } else { Reduce::Fast },
        steps: Step(4),
        checkpoint_every: 1,
        elements: vec![4],
        shared: if bits & 8 == 0 { Vec::new() } else { vec![vec![StageId(0), StageId(1)]] },
        state_bytes: 10,
        memory_bytes: 0,
        tuning: Tuning { jobs: 3, ahead: 4, leases: 2, in_flight: 3, ..Tuning::default() },
    }
}
