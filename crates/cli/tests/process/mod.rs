//! The real binary in a folder of its own.
#![allow(dead_code, reason = "every test binary includes this module, and uses a part of it")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use starling_node::events::{self, Event};

/// A run that takes a few milliseconds a step and writes a checkpoint after each.
pub const RUN: &str = r#"
name = "small"
seed = 3
model = { context = 16, width = 16, layers = 2, heads = 2, dropout = 0.1, share_every = 2 }
data = { synthetic = { documents = 200 } }
train = { steps = 120, batch = 6, microbatch = 2, lots = 2, stages = 2, threads = 1 }
evaluate = { every = 0, sample_tokens = 0 }
checkpoint = { every = 1 }
"#;

/// A folder with `small.toml` in it, where `starling` is started.
pub struct Place {
    folder: tempfile::TempDir,
}

impl Place {
    pub fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("small.toml"), RUN).unwrap();
        Place { folder }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    pub fn command(&self, arguments: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_starling"));
        command.args(arguments.split_whitespace()).current_dir(self.folder.path());
        command
    }

    /// Runs to the end.
    pub fn run(&self, arguments: &str) -> Output {
        self.command(arguments).output().unwrap()
    }

    /// Runs to the end, which must be good; returns standard output and standard error.
    pub fn good(&self, arguments: &str) -> (String, String) {
        let output = self.run(arguments);
        let (out, err) = texts(&output);
        assert!(output.status.success(), "starling {arguments}: {err}{out}");
        (out, err)
    }

    /// Runs to the end, which must be an error; returns what it says.
    pub fn bad(&self, arguments: &str) -> String {
        let output = self.run(arguments);
        let (_, err) = texts(&output);
        assert_eq!(output.status.code(), Some(1), "starling {arguments}: {err}");
        assert!(err.lines().any(|line| line.starts_with("error: ")) && !err.contains("panicked"), "{err}");
        err
    }

    /// Starts, and does not wait.
    pub fn start(&self, arguments: &str) -> Child {
        self.command(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    }

    /// Starts with standard output and standard error closed at the other end.
    pub fn start_deaf(&self, arguments: &str) -> Child {
        let mut child =
            self.command(arguments).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop((child.stdout.take(), child.stderr.take()));
        child
    }

    /// The hash of the weights after each step, as the log of a run has it.
    pub fn hashes(&self, run: &str) -> Vec<String> {
        step_hashes(&self.path(run).join("events.jsonl"))
    }

    /// The loss of every step in a folder.
    pub fn losses(&self, run: &str) -> BTreeMap<u64, f64> {
        let lines = events::read(&self.path(run).join("events.jsonl")).unwrap().lines;
        let losses = lines.into_iter().filter_map(|line| match line.event {
            Event::Step { step, loss, .. } => Some((step, loss)),
            _ => None,
        });
        losses.collect()
    }
}

pub fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

fn step_hashes(log: &Path) -> Vec<String> {
    let history = events::read(log).unwrap();
    assert_eq!(history.strange, 0, "every line of the log is an event");
    let mut hashes = BTreeMap::new();
    for line in history.lines {
        if let Event::Step { step, weights: Some(weights), .. } = line.event {
            hashes.insert(step, weights);
        }
    }
    assert!(hashes.keys().copied().eq(0..hashes.len() as u64), "no step is missing");
    hashes.into_values().collect()
}
