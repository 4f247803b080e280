//! `kill -9` at any instant, then `--resume`: the weights after every step are the uninterrupted run's.
#![cfg(unix)]
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::process::Child;
use std::time::{Duration, Instant};

use process::Place;
use starling_model::random::uniform;

const KILLS: u64 = 20;

#[test]
fn twenty_kills_change_no_weight() {
    let place = Place::new();
    place.good("train small.toml --out whole --set train.steps=400");
    let expected = place.hashes("whole");
    assert_eq!(expected.len(), 400);

    let (mut kill, mut inside_a_write) = (0, 0);
    while kill < KILLS || (inside_a_write < 3 && kill < 3 * KILLS) {
        let mut child = place.start("train small.toml --out killed --resume --set train.steps=400");
        if kill % 2 == 0 {
            // Any instant, from before the first line of `main` to some steps on.
            wait(&mut child, Duration::from_secs_f64(0.12 * uniform(7, kill)), || false);
        } else {
            wait(&mut child, Duration::from_secs(20), || is_writing(&place));
        }
        assert!(child.try_wait().unwrap().is_none(), "the run ended before kill {kill}; give it more steps");
        child.kill().unwrap();
        child.wait().unwrap();
        inside_a_write += u32::from(is_writing(&place));
        kill += 1;
    }
    assert!(inside_a_write >= 3, "only {inside_a_write} kills came inside a checkpoint's write");

    let (_, told) = place.good("train small.toml --out killed --resume --set train.steps=400");
    assert!(told.contains("going on from step"), "{told}");
    assert_eq!(place.hashes("killed"), expected);
    place.good("checkpoint verify killed");
}

/// Whether there is a folder of a checkpoint that is not finished.
fn is_writing(place: &Place) -> bool {
    let Ok(entries) = std::fs::read_dir(place.path("killed/checkpoints")) else { return false };
    entries.flatten().any(|entry| entry.file_name().to_string_lossy().ends_with(".writing"))
}

/// Waits until something is seen, the process has ended, or the time is over.
fn wait(child: &mut Child, most: Duration, mut seen: impl FnMut() -> bool) {
    let start = Instant::now();
    while start.elapsed() < most && !seen() && child.try_wait().unwrap().is_none() {
        std::thread::yield_now();
    }
}

#[test]
fn an_orderly_stop_writes_a_checkpoint_and_says_how_to_go_on() {
    for signal in ["INT", "TERM"] {
        let place = Place::new();
        let long = "--set train.steps=100000 --set optimiser.decay_steps=120 --set checkpoint.every=0";
        let mut child = place.start(&format!("train small.toml --out stopped {long}"));
        wait(&mut child, Duration::from_secs(20), || {
            std::fs::read_to_string(place.path("stopped/events.jsonl"))
                .is_ok_and(|log| log.lines().count() > 3)
        });
        let status =
            std::process::Command::new("kill").args(["-s", signal, &child.id().to_string()]).status();
        assert!(status.unwrap().success());
        assert_eq!(child.wait().unwrap().code(), Some(130), "{signal}");
        place.good("checkpoint verify stopped");
        assert!(place.path("stopped/report.md").exists() && place.path("stopped/loss.svg").exists());
        place.good("train small.toml --out whole --set optimiser.decay_steps=120 --set checkpoint.every=0");
        place.good("train small.toml --out stopped --resume --set train.steps=120");
        let (stopped, whole) = (place.hashes("stopped"), place.hashes("whole"));
        assert_eq!(whole.len(), 120);
        // A loaded machine may have let it run past step 120 before the signal came.
        assert_eq!(stopped[..120], whole[..], "{signal}");
    }
}
