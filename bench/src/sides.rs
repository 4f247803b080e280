//! Two processes that take turns, so that neither is measured in another minute than the other: on a machine that others use
//! too, only the ratios of neighbouring turns mean something.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde::de::DeserializeOwned;

/// Turns that each side gets.
pub const PAIRS: usize = 10;
/// Student's t for a one-sided bound of 95 % from ten pairs.
const STUDENT: f64 = 1.833;

/// One side's process: it reads how much to do in its turn, and answers with a line of JSON.
pub struct Side {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Side {
    pub fn start(command: &mut Command) -> Result<Side> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdin = child.stdin.take().context("a child with a pipe has it")?;
        let stdout = BufReader::new(child.stdout.take().context("a child with a pipe has it")?);
        Ok(Side { child, stdin, stdout })
    }

    pub fn turn<T: DeserializeOwned>(&mut self, amount: u64) -> Result<T> {
        writeln!(self.stdin, "{amount}")?;
        self.stdin.flush()?;
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        ensure!(!line.is_empty(), "one side has ended before its time");
        Ok(serde_json::from_str(&line)?)
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The mean, and what it lies above with a probability of 95 %.
pub fn mean_and_bound(values: &[f64]) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (count - 1.0);
    (mean, mean - STUDENT * (variance / count).sqrt())
}
