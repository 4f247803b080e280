//! The thread that computes: it carries out what the worker's machine wants done, in order, and the loop never waits
//! for it.

use std::collections::VecDeque;

use starling_swarm::worker::Command;
use tokio::sync::mpsc::{self, error::TrySendError};

use crate::host::{Done, Host, HostError};

/// Commands that are on their way to the thread, at the most. More wait in the loop, where the machine's own bounds
/// hold.
const MOST_COMMANDS: usize = 256;

/// See the module's head. Dropped, it ends the thread after what is being computed.
pub struct Compute {
    commands: mpsc::Sender<Command>,
    backlog: VecDeque<Command>,
    outcomes: mpsc::Receiver<Outcome>,
}

/// What came of one command.
#[derive(Debug, Default)]
pub struct Outcome {
    /// What is to be told and sent.
    pub done: Vec<Done>,
    /// Why it was not carried out.
    pub error: Option<HostError>,
}

impl Compute {
    /// Starts the thread.
    pub fn start(mut host: Host) -> std::io::Result<Compute> {
        let (commands, mut orders) = mpsc::channel(MOST_COMMANDS);
        // Every command has one outcome, so that sending one never waits.
        let (sender, outcomes) = mpsc::channel(MOST_COMMANDS + 1);
        std::thread::Builder::new().name("compute".into()).spawn(move || {
            while let Some(command) = orders.blocking_recv() {
                let mut done = Vec::new();
                let error = host.carry_out(command, &mut done).err();
                if sender.blocking_send(Outcome { done, error }).is_err() {
                    return;
                }
            }
        })?;
        Ok(Compute { commands, backlog: VecDeque::new(), outcomes })
    }

    /// Has a command carried out after all before it.
    pub fn carry_out(&mut self, command: Command) {
        self.backlog.push_back(command);
        self.flush();
    }

    /// The next outcome; none if the thread has died.
    pub async fn next(&mut self) -> Option<Outcome> {
        let outcome = self.outcomes.recv().await;
        self.flush();
        outcome
    }

    fn flush(&mut self) {
        while let Some(command) = self.backlog.pop_front() {
            if let Err(TrySendError::Full(command) | TrySendError::Closed(command)) =
                self.commands.try_send(command)
            {
                return self.backlog.push_front(command);
            }
        }
    }
}
