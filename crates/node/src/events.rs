//! `events.jsonl`: what happened in a run, one typed event a line, only ever appended to.
//!
//! Each line is written with one call. A crash may leave half a line at the end; opening the log again cuts it
//! off, so that every line is valid.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};
use starling_model::guard::{Guard, GuardConfig};

use crate::tensorboard::Board;

/// Longest line that can be ours: a sample of text is the longest thing in an event.
const MOST_LINE_BYTES: u64 = 1 << 20;

/// One event with its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Milliseconds since 1970, by this machine's clock.
    pub time_ms: u64,
    /// The logical clock of the process: whatever this is a consequence of has a smaller one, on whatever machine.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub clock: u64,
    /// What happened.
    #[serde(flatten)]
    pub event: Event,
}

fn is_zero(clock: &u64) -> bool {
    *clock == 0
}

/// What can happen in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[allow(missing_docs, reason = "the fields are named as in the reports that they come from")]
pub enum Event {
    /// A process began, or went on, at `step`; later lines of steps from there on replace earlier ones.
    Started { version: String, identity: String, step: u64, steps: u64, parameters: u64, stages: usize },
    /// A step was done. A loss or norm that is not finite is written as `null`.
    Step {
        step: u64,
        #[serde(with = "number")]
        loss: f64,
        tokens: u64,
        lr: f64,
        #[serde(with = "number")]
        norm: f64,
        seconds: f64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        weights: Option<String>,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        skipped: bool,
    },
    /// The weights after a step had this hash.
    Weights { step: u64, weights: String },
    /// A stage lost all its holders, or a loss was a spike: the steps from `to` on are done again.
    WentBack { from: u64, to: u64 },
    /// The loss of step `last` was a spike: the updates from step `first` on to its are left out.
    LeftOut {
        first: u64,
        last: u64,
        #[serde(with = "number")]
        loss: f64,
    },
    /// The model was tried on held-out text.
    Evaluated {
        step: u64,
        #[serde(with = "number")]
        loss: f64,
        tokens: u64,
        #[serde(with = "number")]
        bits_per_byte: f64,
    },
    /// The model wrote.
    Sample { step: u64, text: String },
    /// A checkpoint was written.
    Checkpoint { step: u64 },
    /// Somebody asked for an orderly end.
    Interrupted { step: u64 },
    /// The last step was done.
    Finished { step: u64, weights: String },
    /// A coordinator is about to close a step: which lots of which peers are in the sum of each stage.
    Counted { epoch: u64, step: u64, stages: Vec<Vec<(u32, Vec<u32>)>> },
    /// A process took part in a run, under this number.
    Joined { number: u32, role: String, site: String },
    /// A worker added the gradient of a microbatch, which holds these samples, to its lot.
    Folded { stage: u16, epoch: u64, step: u64, lot: u32, microbatch: u32, first_sample: u64, samples: u64 },
    /// A worker dropped lots, whole.
    Dropped { step: u64, lots: Vec<u32> },
    /// A worker dropped all that it had.
    Voided,
    /// A worker gave its sums of these lots to a reduction.
    Gave { stage: u16, epoch: u64, step: u64, lots: Vec<u32> },
    /// A worker read its sums of these lots, to leave a copy with another.
    Deposited { stage: u16, epoch: u64, step: u64, lots: Vec<u32> },
    /// The sums that another worker had left with a worker are its own from now on.
    Inherited { stage: u16, epoch: u64, step: u64, from: u32, lots: Vec<u32> },
    /// A worker has this version of a stage: by an update, or loaded.
    Holds { stage: u16, epoch: u64, version: u64, loaded: bool },
    /// A worker has got a state from others, or the updates that it missed since it got one: chunks, by worker.
    Took { stage: u16, epoch: u64, version: u64, onto: Option<u64>, chunks: Vec<(u32, u32)> },
    /// A worker could not do something; whoever waits for it asks again, or has it done elsewhere.
    Trouble { why: String },
    /// The coordinator decided or noticed something.
    News { text: String },
    /// A process refused something that came from a peer.
    Refused { who: String, why: String },
}

/// Numbers that may be none: JSON has no NaN.
mod number {
    use serde::{Deserialize, Deserializer, Serializer};

    pub fn serialize<S: Serializer>(value: &f64, to: S) -> Result<S::Ok, S::Error> {
        if value.is_finite() { to.serialize_f64(*value) } else { to.serialize_none() }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
    }
}

/// The log of a run, open for appending.
pub struct EventLog {
    path: PathBuf,
    file: File,
    board: Option<Board>,
}

impl EventLog {
    /// Opens or makes the log; half a line at its end is cut off.
    pub fn open(path: &Path) -> Result<EventLog, LogError> {
        let trouble = |source| LogError::Open { path: path.to_path_buf(), source };
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(path).map_err(trouble)?;
        let whole = whole_lines(&mut file).map_err(trouble)?;
        if whole < file.metadata().map_err(trouble)?.len() {
            file.set_len(whole).map_err(trouble)?;
        }
        Ok(EventLog { path: path.to_path_buf(), file, board: None })
    }

    /// Writes curves for TensorBoard into this folder, too.
    pub fn with_curves(self, folder: &Path) -> Result<EventLog, LogError> {
        let trouble = |source| LogError::Open { path: folder.to_path_buf(), source };
        Ok(EventLog { board: Some(Board::open(folder).map_err(trouble)?), ..self })
    }

    /// Appends an event of a process that has no logical clock.
    pub fn append(&mut self, event: Event) -> Result<(), LogError> {
        self.append_at(0, event)
    }

    /// Appends an event.
    pub fn append_at(&mut self, clock: u64, event: Event) -> Result<(), LogError> {
        let trouble = |source| LogError::Append { path: self.path.clone(), source };
        let time_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
        let line = Line { time_ms, clock, event };
        let mut bytes = serde_json::to_vec(&line).map_err(|error| trouble(error.into()))?;
        bytes.push(b'\n');
        self.file.write_all(&bytes).map_err(trouble)?;
        self.board.as_mut().map_or(Ok(()), |board| board.note(time_ms, &line.event)).map_err(trouble)
    }
}

/// Writes an event down if there is a log.
pub trait Note {
    /// See [`EventLog::append_at`].
    fn note(&mut self, clock: u64, event: Event) -> Result<(), LogError>;
}

impl Note for Option<EventLog> {
    fn note(&mut self, clock: u64, event: Event) -> Result<(), LogError> {
        self.as_mut().map_or(Ok(()), |log| log.append_at(clock, event))
    }
}

/// Why the log could not be used.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// It could not be opened or read.
    #[error("cannot open the event log {path}: {source}")]
    Open {
        /// The log.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// It could not be appended to.
    #[error(
        "cannot write to {path}: {source}. The training stops rather than go on unrecorded; make room, then go on with --resume"
    )]
    Append {
        /// The log.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
}

/// Bytes up to the end of the last whole line.
fn whole_lines(file: &mut File) -> std::io::Result<u64> {
    let mut end = file.seek(SeekFrom::End(0))?;
    let mut block = vec![0; 4096];
    while end > 0 {
        let size = end.min(4096);
        file.seek(SeekFrom::Start(end - size))?;
        file.read_exact(&mut block[..size as usize])?;
        if let Some(newline) = block[..size as usize].iter().rposition(|&b| b == b'\n') {
            return Ok(end - size + newline as u64 + 1);
        }
        end -= size;
    }
    Ok(0)
}

/// What a log says.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct History {
    /// Its events.
    pub lines: Vec<Line>,
    /// Lines that are no events: of another version, or damaged. They are passed over.
    pub strange: usize,
}

/// Reads a log.
pub fn read(path: &Path) -> Result<History, LogError> {
    let trouble = |source| LogError::Open { path: path.to_path_buf(), source };
    parse(BufReader::new(File::open(path).map_err(trouble)?)).map_err(trouble)
}

/// Reads events, one a line; a line too long to be ours counts as strange, piece by piece.
pub fn parse(mut reader: impl BufRead) -> std::io::Result<History> {
    let mut history = History::default();
    loop {
        let mut bytes = Vec::new();
        if (&mut reader).take(MOST_LINE_BYTES).read_until(b'\n', &mut bytes)? == 0 {
            return Ok(history);
        }
        match serde_json::from_slice(&bytes) {
            Ok(line) => history.lines.push(line),
            Err(_) => history.strange += 1,
        }
    }
}

/// What the guard of a run has seen, and the steps whose updates are left out.
pub fn guarded(config: &GuardConfig, history: &History) -> (Guard, BTreeSet<u64>) {
    let (mut guard, mut left_out) = (Guard::new(config), BTreeSet::new());
    for line in &history.lines {
        match line.event {
            Event::LeftOut { first, last, .. } => {
                left_out.extend(first..=last);
                guard.forget_from(first);
            }
            Event::Step { step, loss, .. } if !left_out.contains(&step) => drop(guard.is_spike(step, loss)),
            _ => {}
        }
    }
    (guard, left_out)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn half_a_line_left_by_a_crash_is_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("events.jsonl");
        EventLog::open(&path).unwrap().append(Event::Checkpoint { step: 1 }).unwrap();
        OpenOptions::new().append(true).open(&path).unwrap().write_all(b"{\"time_ms\":12,\"ev").unwrap();
        EventLog::open(&path).unwrap().append(Event::Checkpoint { step: 2 }).unwrap();
        let History { lines, strange } = read(&path).unwrap();
        let events: Vec<Event> = lines.into_iter().map(|line| line.event).collect();
        assert_eq!(events, [Event::Checkpoint { step: 1 }, Event::Checkpoint { step: 2 }]);
        assert_eq!(strange, 0);
    }

    #[test]
    fn a_loss_that_is_no_number_stays_a_valid_line() {
        let step = |loss| Event::Step {
            step: 3,
            loss,
            tokens: 1,
            lr: 0.1,
            norm: f64::INFINITY,
            seconds: 0.5,
            weights: None,
            skipped: true,
        };
        let text = serde_json::to_string(&Line { time_ms: 1, clock: 0, event: step(f64::NAN) }).unwrap();
        let line: Line = serde_json::from_str(&text).unwrap();
        assert!(
            matches!(line.event, Event::Step { loss, norm, .. } if loss.is_nan() && norm.is_nan()),
            "{text}"
        );
    }

    proptest! {
        #[test]
        fn any_bytes_can_be_read(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            prop_assert!(parse(&bytes[..]).is_ok());
        }

        #[test]
        fn a_log_cut_anywhere_keeps_its_whole_lines(cut in 0usize..200) {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("events.jsonl");
            let mut log = EventLog::open(&path).unwrap();
            (0..4).for_each(|step| log.append(Event::Checkpoint { step }).unwrap());
            let whole = std::fs::read(&path).unwrap();
            let cut = cut.min(whole.len());
            std::fs::write(&path, &whole[..cut]).unwrap();
            EventLog::open(&path).unwrap();
            let History { lines, strange } = read(&path).unwrap();
            prop_assert_eq!(strange, 0);
            prop_assert_eq!(lines.len(), whole[..cut].iter().filter(|&&b| b == b'\n').count());
        }
    }
}
