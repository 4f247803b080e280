//! A loss that is a spike: the run goes back, and the same updates are left out in one process and in a swarm.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use process::Place;
use starling_node::events::{self, Event};

/// Learns too fast, and every loss a little above the usual is a spike.
const GUARD: &str = "--set guard.spike=1 --set guard.window=8 --set guard.leave_out=2 --set checkpoint.every=5 \
                     --set train.steps=40 --set optimiser.lr=0.1";

fn left_out(place: &Place, run: &str) -> Vec<(u64, u64)> {
    let lines = events::read(&place.path(run).join("events.jsonl")).unwrap().lines;
    let left_out =
        |event| if let Event::LeftOut { first, last, .. } = event { Some((first, last)) } else { None };
    lines.into_iter().filter_map(|line| left_out(line.event)).collect()
}

#[test]
fn a_spike_is_left_out_alike_in_one_process_and_in_a_swarm() {
    let place = Place::new();
    let (_, told) = place.good(&format!("train small.toml --out one {GUARD}"));
    let spikes = left_out(&place, "one");
    assert!(!spikes.is_empty() && told.contains("a spike; back to the last checkpoint"), "{told}");
    place.good(&format!("up small.toml --out many --peers 3 --sites 1 --compare 40 {GUARD}"));
    assert_eq!(left_out(&place, "many"), spikes);
    assert_eq!(place.losses("many"), place.losses("one"));
    let report = std::fs::read_to_string(place.path("many/report.md")).unwrap();
    assert!(report.contains("the same, bit for bit"), "{report}");
    place.good("run audit many");
    // Without the guard it is another training.
    place.good(
        "train small.toml --out free --set checkpoint.every=5 --set train.steps=40 --set optimiser.lr=0.1",
    );
    assert_ne!(place.losses("free"), place.losses("one"));
}

#[test]
fn who_goes_on_with_a_run_knows_what_was_left_out() {
    let place = Place::new();
    place.good(&format!("train small.toml --out whole {GUARD}"));
    let (first, last) = left_out(&place, "whole")[0];
    assert!(first <= last);
    // Ends before the checkpoint that comes after the spike, and goes on from the one before it.
    let until = last / 5 * 5 + 4;
    let steps = format!("--set train.steps={until} --set optimiser.decay_steps=40");
    place.good(&format!("train small.toml --out parts {GUARD} {steps}"));
    let end = place.path(&format!("parts/checkpoints/step-{until:08}"));
    std::fs::remove_dir_all(end).unwrap();
    place.good(&format!("train small.toml --out parts --resume {GUARD} --set optimiser.decay_steps=40"));
    assert_eq!(place.losses("parts"), place.losses("whole"));
}
