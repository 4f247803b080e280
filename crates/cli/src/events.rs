//! `events.jsonl`: what happened in a run, one typed event a line, only ever appended to.
//!
//! Each line is written with one call. A crash may leave half a line at the end; opening the log again cuts it
//! off, so that every line is valid.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Longest line that can be ours: a sample of text is the longest thing in an event.
const MOST_LINE_BYTES: u64 = 1 << 20;

/// One event with its time.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Milliseconds since 1970, by this machine's clock.
    pub time_ms: u64,
    #[serde(flatten)]
    pub event: Event,
}

/// What can happen in a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// A process began, or went on, at `step`; later lines of steps from there on replace earlier ones.
    Started { version: String, identity: String, step: u64, steps: u64, parameters: u64, stages: usize },
    /// A step was done.
    Step {
        step: u64,
        loss: f64,
        tokens: u64,
        lr: f64,
        norm: f64,
        seconds: f64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        weights: Option<String>,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        skipped: bool,
    },
    /// The model was tried on held-out text.
    Evaluated { step: u64, loss: f64, tokens: u64, bits_per_byte: f64 },
    /// The model wrote.
    Sample { step: u64, text: String },
    /// A checkpoint was written.
    Checkpoint { step: u64 },
    /// Somebody asked for an orderly end.
    Interrupted { step: u64 },
    /// The last step was done.
    Finished { step: u64, weights: String },
}

/// The log of a run, open for appending.
pub struct EventLog {
    path: PathBuf,
    file: File,
}

impl EventLog {
    /// Opens or makes the log; half a line at its end is cut off.
    pub fn open(path: &Path) -> Result<EventLog> {
        let trouble = || format!("cannot open the event log {}", path.display());
        let mut file =
            OpenOptions::new().read(true).append(true).create(true).open(path).with_context(trouble)?;
        let whole = whole_lines(&mut file).with_context(trouble)?;
        if whole < file.metadata().with_context(trouble)?.len() {
            file.set_len(whole).with_context(trouble)?;
        }
        Ok(EventLog { path: path.to_path_buf(), file })
    }

    /// Appends an event.
    pub fn append(&mut self, event: Event) -> Result<()> {
        let time_ms = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
        let mut line = serde_json::to_vec(&Line { time_ms, event })?;
        line.push(b'\n');
        self.file.write_all(&line).with_context(|| {
            format!("cannot write to {}; the training stops rather than go on unrecorded. Make room, then go on with --resume", self.path.display())
        })
    }
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

/// Reads a log; lines that are no events (of another version, or damaged) are passed over and counted.
pub fn read(path: &Path) -> Result<(Vec<Line>, usize)> {
    let trouble = || format!("cannot read the event log {}", path.display());
    Ok(parse(BufReader::new(File::open(path).with_context(trouble)?)).with_context(trouble)?)
}

fn parse(mut reader: impl BufRead) -> std::io::Result<(Vec<Line>, usize)> {
    let (mut lines, mut strange) = (Vec::new(), 0);
    loop {
        let mut bytes = Vec::new();
        if (&mut reader).take(MOST_LINE_BYTES).read_until(b'\n', &mut bytes)? == 0 {
            return Ok((lines, strange));
        }
        match serde_json::from_slice(&bytes) {
            Ok(line) => lines.push(line),
            Err(_) => strange += 1,
        }
    }
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
        let (lines, strange) = read(&path).unwrap();
        let events: Vec<Event> = lines.into_iter().map(|line| line.event).collect();
        assert_eq!(events, [Event::Checkpoint { step: 1 }, Event::Checkpoint { step: 2 }]);
        assert_eq!(strange, 0);
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
            let (lines, strange) = read(&path).unwrap();
            prop_assert_eq!(strange, 0);
            prop_assert_eq!(lines.len(), whole[..cut].iter().filter(|&&b| b == b'\n').count());
        }
    }
}
