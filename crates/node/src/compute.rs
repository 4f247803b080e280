//! The thread that computes: it carries out what the worker's machine wants done, in order, and the loop never waits
//! for it. It also writes down what was done, before the loop hears of it: a disk may hold up who writes for seconds, and
//! a loop that is held up looks dead to the others.

use std::collections::VecDeque;

use tokio::sync::mpsc::{self, error::TrySendError};

use crate::events::{Event, EventLog, LogError, Note};
use crate::host::{Done, Host, Task};

/// Tasks that are on their way to the thread, at the most. More wait in the loop, where the machine's own bounds
/// hold.
const MOST_TASKS: usize = 256;

/// See the module's head. Dropped, it ends the thread after what is being computed.
pub struct Compute {
    tasks: mpsc::Sender<Order>,
    backlog: VecDeque<Order>,
    outcomes: mpsc::Receiver<Result<Vec<Done>, LogError>>,
}

/// A task, and the logical clock when it was given.
type Order = (Task, u64);

impl Compute {
    /// Starts the thread, with the log that it writes.
    pub fn start(mut host: Host, mut log: Option<EventLog>) -> std::io::Result<Compute> {
        let (tasks, mut orders) = mpsc::channel(MOST_TASKS);
        // Every task has one outcome, so that sending one never waits.
        let (sender, outcomes) = mpsc::channel(MOST_TASKS + 1);
        std::thread::Builder::new().name("compute".into()).spawn(move || {
            while let Some((task, clock)) = orders.blocking_recv() {
                let mut done = Vec::new();
                if let Err(error) = host.do_task(task, &mut done) {
                    done.push(Done::Note(Event::Trouble { why: error.to_string() }));
                }
                let outcome = note_all(&mut log, clock, done);
                if sender.blocking_send(outcome).is_err() {
                    return;
                }
            }
        })?;
        Ok(Compute { tasks, backlog: VecDeque::new(), outcomes })
    }

    /// Has a task done after all before it.
    pub fn carry_out(&mut self, task: Task, clock: u64) {
        self.backlog.push_back((task, clock));
        self.flush();
    }

    /// What is to be told and sent after the next task; none if the thread has died.
    pub async fn next(&mut self) -> Option<Result<Vec<Done>, LogError>> {
        let outcome = self.outcomes.recv().await;
        self.flush();
        outcome
    }

    fn flush(&mut self) {
        while let Some(order) = self.backlog.pop_front() {
            if let Err(TrySendError::Full(order) | TrySendError::Closed(order)) = self.tasks.try_send(order) {
                return self.backlog.push_front(order);
            }
        }
    }
}

/// Writes down what is to be, and returns the rest.
fn note_all(log: &mut Option<EventLog>, clock: u64, done: Vec<Done>) -> Result<Vec<Done>, LogError> {
    let mut rest = Vec::new();
    for done in done {
        match done {
            Done::Note(event) => log.note(clock, event)?,
            other => rest.push(other),
        }
    }
    Ok(rest)
}
