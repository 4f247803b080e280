//! Minutes of chaos: whatever can happen to processes and links happens, again and again.
//!
//! `STARLING_CHAOS_MINUTES` says for how long; `cargo xtask soak` for hours.

use std::time::{Duration, Instant};

use starling_model::random::uniform;

use crate::draw;
use crate::flock::Flock;

const SEED: u64 = 9;
/// Between two disturbances, on average, in a run of minutes and in one of hours.
const EVERY_S: (f64, f64) = (3.0, 15.0);
/// What a process may grow by after the first minute.
const MOST_GROWTH_MB: u64 = 64;

#[test]
fn minutes_of_chaos_change_no_weight_and_no_process_grows() {
    let minutes: f64 =
        std::env::var("STARLING_CHAOS_MINUTES").ok().and_then(|m| m.parse().ok()).unwrap_or(3.0);
    let every = if minutes > 30.0 { EVERY_S.1 } else { EVERY_S.0 };
    let (start, length) = (Instant::now(), Duration::from_secs_f64(60.0 * minutes));
    let mut flock =
        Flock::with_workers("--set checkpoint.every=100 --set swarm.deposit_every_s=0.2", "aaabbb");
    flock.go_on_for(20);
    let before = flock.coordinator_mb();
    let mut round = 0;
    while start.elapsed() < length {
        disturb(&mut flock, round);
        std::thread::sleep(Duration::from_secs_f64(2.0 * every * uniform(SEED + 1, round)));
        flock.go_on_for(1);
        round += 1;
    }
    assert!(round as f64 > length.as_secs_f64() / every / 4.0, "only {round} disturbances");
    flock.go_on_for(5);
    let after = flock.coordinator_mb();
    assert!(after < before + MOST_GROWTH_MB, "the coordinator grew from {before} to {after} MB");
    for (peer, mb) in flock.peers_mb() {
        assert!(mb < 4 * MOST_GROWTH_MB, "peer {peer} has {mb} MB");
    }
    println!("{round} disturbances in {} steps", flock.finish_as_one_process());
}

fn disturb(flock: &mut Flock, round: u64) {
    let peer = draw(SEED, round, flock.peers().len());
    match draw(SEED + 2, round, 10) {
        0..=4 => {
            flock.kill(peer);
            flock.replace(peer);
        }
        5 => {
            // Half of all workers at once.
            let half: Vec<usize> = flock.peers().filter(|other| other % 2 == peer % 2).collect();
            half.iter().for_each(|&peer| flock.kill(peer));
            half.iter().for_each(|&peer| flock.replace(peer));
        }
        6 => {
            flock.signal(peer, "STOP");
            std::thread::sleep(Duration::from_secs_f64(7.0 * uniform(SEED + 3, round)));
            flock.signal(peer, "CONT");
        }
        7 => {
            flock.links("a-b=cut");
            std::thread::sleep(Duration::from_secs_f64(7.0 * uniform(SEED + 4, round)));
            flock.links("");
        }
        8 => flock.restart_coordinator(),
        _ => {
            flock.signal(peer, "TERM");
            flock.ended(peer);
            flock.replace(peer);
        }
    }
}
