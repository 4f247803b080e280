//! What the coordinator keeps: its journal and the parts of checkpoints. Two threads, so that a record is not stuck
//! behind the gigabytes of a checkpoint, and the loop waits for neither.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use starling_model::checkpoint::{self, Checkpoint, Draft, OpenError, Part, Progress, SaveError};
use starling_swarm::ids::{Epoch, Step};
use starling_swarm::journal::Record;
use starling_swarm::worker::io::StateOf;
use starling_transport::identity::PublicKey;
use tokio::sync::mpsc;

use crate::journal::{Journal, JournalError};

/// Chores that wait for a thread, at the most. The machine waits for its journal, and a stage has one saver: it is a
/// fault if there are ever more.
const MOST_CHORES: usize = 4096;
/// Checkpoints that are being written at a time, at the most.
const MOST_DRAFTS: usize = 4;

/// See the module's head.
pub struct Disk {
    records: mpsc::Sender<(u64, Record, u64)>,
    parts: mpsc::Sender<Chore>,
    done: mpsc::Receiver<Result<Kept, DiskError>>,
}

/// What is to be done with a checkpoint.
enum Chore {
    Keep(PublicKey, StateOf, Part),
    Fetch(PublicKey, StateOf, Vec<String>),
}

/// What was done.
#[derive(Debug)]
pub enum Kept {
    /// The record of this number is safe, and all before it.
    Journaled(u64),
    /// A part of a checkpoint is safe.
    Part(PublicKey, StateOf),
    /// The parameters that somebody wanted.
    Found(PublicKey, StateOf, Option<Vec<u8>>),
}

/// Why something could not be kept.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    /// The journal.
    #[error(transparent)]
    Journal(#[from] JournalError),
    /// A checkpoint could not be written.
    #[error(transparent)]
    Save(#[from] SaveError),
    /// A checkpoint is said to be whole, and is not.
    #[error("the checkpoint of {0} is not whole; nothing further is promised. Start the run again")]
    Draft(Step),
    /// A thread could not be started, or has died, or is hopelessly behind.
    #[error(
        "the threads that write to the disk have failed; nothing further is promised. Start the run again"
    )]
    Threads,
}

/// The checkpoints of a run, and the one that is being written.
struct Archive {
    folder: PathBuf,
    progress: Progress,
    /// Those that are being written. One that is whole waits until the journal may name it.
    drafts: BTreeMap<(Epoch, Step), Draft>,
}

impl Disk {
    /// Starts the threads. `progress` is what a checkpoint says of the run.
    pub fn start(journal: Journal, checkpoints: &Path, progress: Progress) -> Result<Disk, DiskError> {
        checkpoint::sweep(checkpoints)?;
        let archive = Archive { folder: checkpoints.to_path_buf(), progress, drafts: BTreeMap::new() };
        let archive = Arc::new(Mutex::new(archive));
        let (records, to_write) = mpsc::channel(MOST_CHORES);
        let (parts, chores) = mpsc::channel(MOST_CHORES);
        let (sender, done) = mpsc::channel(MOST_CHORES);
        let (other, shared) = (sender.clone(), archive.clone());
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        thread("journal")
            .spawn(move || write_records(journal, &shared, to_write, &sender))
            .map_err(|_| DiskError::Threads)?;
        thread("checkpoints")
            .spawn(move || do_chores(&archive, chores, &other))
            .map_err(|_| DiskError::Threads)?;
        Ok(Disk { records, parts, done })
    }

    /// Writes a record, after all before it. `skipped`: how many steps were skipped so far.
    pub fn append(&self, number: u64, record: Record, skipped: u64) -> Result<(), DiskError> {
        self.records.try_send((number, record, skipped)).map_err(|_| DiskError::Threads)
    }

    /// Keeps a part of a checkpoint.
    pub fn keep(&self, from: PublicKey, of: StateOf, part: Part) -> Result<(), DiskError> {
        self.parts.try_send(Chore::Keep(from, of, part)).map_err(|_| DiskError::Threads)
    }

    /// Reads parameters of a checkpoint.
    pub fn fetch(&self, to: PublicKey, of: StateOf, parameters: Vec<String>) -> Result<(), DiskError> {
        self.parts.try_send(Chore::Fetch(to, of, parameters)).map_err(|_| DiskError::Threads)
    }

    /// What was done next.
    pub async fn next(&mut self) -> Result<Kept, DiskError> {
        self.done.recv().await.unwrap_or(Err(DiskError::Threads))
    }
}

type Done = mpsc::Sender<Result<Kept, DiskError>>;

fn write_records(
    mut journal: Journal,
    archive: &Mutex<Archive>,
    mut records: mpsc::Receiver<(u64, Record, u64)>,
    done: &Done,
) {
    while let Some((number, record, skipped)) = records.blocking_recv() {
        // Before the journal says that there is a checkpoint, there is one.
        let published = match record {
            Record::Checkpoint(version) => lock(archive).publish(version, skipped),
            _ => Ok(()),
        };
        let result = published.and_then(|()| Ok(journal.append([&record])?));
        let failed = result.is_err();
        if done.blocking_send(result.map(|()| Kept::Journaled(number))).is_err() || failed {
            return;
        }
    }
}

fn do_chores(archive: &Mutex<Archive>, mut chores: mpsc::Receiver<Chore>, done: &Done) {
    while let Some(chore) = chores.blocking_recv() {
        let result = match chore {
            Chore::Keep(from, of, part) => {
                lock(archive).keep(of, part).map(|()| Kept::Part(from, of)).map_err(DiskError::from)
            }
            Chore::Fetch(to, of, parameters) => {
                let folder = lock(archive).folder.clone();
                Ok(Kept::Found(to, of, fetch(&folder, of, &parameters)))
            }
        };
        if done.blocking_send(result).is_err() {
            return;
        }
    }
}

fn lock(archive: &Mutex<Archive>) -> MutexGuard<'_, Archive> {
    archive.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Archive {
    fn keep(&mut self, of: StateOf, part: Part) -> Result<(), SaveError> {
        let key = (of.epoch, of.version);
        if !self.drafts.contains_key(&key) {
            // A history that was left has no further parts; and of this one, the oldest had their time.
            self.drafts.retain(|(epoch, version), _| *epoch == of.epoch && *version != of.version);
            while self.drafts.len() >= MOST_DRAFTS {
                self.drafts.pop_first();
            }
            self.drafts.insert(key, Draft::new(&self.folder, of.version.0)?);
        }
        match self.drafts.get_mut(&key) {
            Some(draft) => draft.put(of.stage.0.into(), part),
            None => Ok(()),
        }
    }

    fn publish(&mut self, version: Step, skipped: u64) -> Result<(), DiskError> {
        let key = self.drafts.keys().copied().rfind(|(_, of)| *of == version);
        let draft = key.and_then(|key| self.drafts.remove(&key)).ok_or(DiskError::Draft(version))?;
        draft.publish(&Progress { skipped, ..self.progress.clone() })?;
        Ok(())
    }
}

/// Parameters of the checkpoint of a version.
fn fetch(folder: &Path, of: StateOf, parameters: &[String]) -> Option<Vec<u8>> {
    let path = checkpoint::list(folder).ok()?.into_iter().find(|(step, _)| *step == of.version.0)?.1;
    let checkpoint: Result<Checkpoint, OpenError> = Checkpoint::open(&path);
    checkpoint.ok()?.extract(parameters).ok()
}
