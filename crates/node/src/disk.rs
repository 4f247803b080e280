//! What the coordinator keeps: its journal and the parts of checkpoints. Threads of their own, so that a record is not stuck
//! behind the gigabytes of a checkpoint, and the loop waits for none.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use starling_model::checkpoint::{self, Checkpoint, Draft, OpenError, Part, Piece, Progress, SaveError};
use starling_swarm::ids::{Epoch, Step};
use starling_swarm::journal::Record;
use starling_swarm::worker::io::StateOf;
use starling_transport::identity::PublicKey;
use tokio::sync::mpsc;

use crate::journal::{Journal, JournalError};
use crate::post::Post;

/// Records that wait for their thread, at the most: the machine waits for them, so it is a fault if there are more.
const MOST_RECORDS: usize = 4096;
/// Parts that wait to be written, and questions for them, at the most.
const MOST_CHORES: usize = 64;
/// Pieces that wait to be read for those who keep copies, at the most.
const MOST_COPIES: usize = 32;
/// Checkpoints that are being written at a time, at the most.
const MOST_DRAFTS: usize = 4;
/// The same with those that are whole: one may wait for its record, behind others that the journal has to sync. One that
/// so many others have overtaken waits for nothing: whoever was to tell of it is gone.
const MOST_WHOLE_DRAFTS: usize = 16;

/// See the module's head.
pub struct Disk {
    records: mpsc::Sender<(u64, Record, u64)>,
    parts: mpsc::Sender<Chore>,
    copies: mpsc::Sender<Chore>,
    done: mpsc::Receiver<Result<Kept, DiskError>>,
}

/// What is to be done with a checkpoint.
enum Chore {
    Keep(PublicKey, StateOf, Part),
    Fetch(PublicKey, StateOf, Vec<String>),
    /// The newest, for somebody who may copy it.
    Announce(PublicKey),
    Read(PublicKey, u64, Piece),
}

/// What was done.
#[derive(Debug)]
pub enum Kept {
    /// The record of this number is safe, and all before it.
    Journaled(u64),
    /// A part of a checkpoint is safe.
    Part(PublicKey, StateOf),
    /// What somebody wanted was read: this is the answer.
    Answer(PublicKey, Box<Post>, Vec<u8>),
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

/// The checkpoints of a run.
struct Archive {
    folder: PathBuf,
    progress: Progress,
    stages: usize,
    drafts: Mutex<Drafts>,
    /// A part was written.
    written: Condvar,
}

/// Checkpoints that are being written.
#[derive(Default)]
struct Drafts {
    /// One that is whole waits here until the journal may name it.
    open: BTreeMap<(Epoch, Step), Draft>,
    /// The one of which a part is being written: it is not among the others meanwhile.
    writing: Option<(Epoch, Step)>,
    /// Those that were given up for later ones: a part that comes now is of no use.
    given_up: BTreeSet<(Epoch, Step)>,
}

impl Disk {
    /// Starts the threads. `progress` is what a checkpoint says of the run.
    pub fn start(journal: Journal, checkpoints: &Path, progress: Progress) -> Result<Disk, DiskError> {
        checkpoint::sweep(checkpoints)?;
        let (folder, stages) = (checkpoints.to_path_buf(), progress.run.train.stages);
        let archive =
            Arc::new(Archive { folder, progress, stages, drafts: Mutex::default(), written: Condvar::new() });
        let (records, to_write) = mpsc::channel(MOST_RECORDS);
        let (parts, chores) = mpsc::channel(MOST_CHORES);
        let (sender, done) = mpsc::channel(MOST_RECORDS);
        // What is copied elsewhere has a thread of its own too: it never takes the place of a part that is to be kept.
        let (copies, to_copy) = mpsc::channel(MOST_COPIES);
        let (other, shared) = (sender.clone(), archive.clone());
        let (third, read) = (sender.clone(), archive.clone());
        let thread = |name: &str| std::thread::Builder::new().name(name.into());
        thread("journal")
            .spawn(move || write_records(journal, &shared, to_write, &sender))
            .map_err(|_| DiskError::Threads)?;
        thread("checkpoints")
            .spawn(move || do_chores(&archive, chores, &other))
            .map_err(|_| DiskError::Threads)?;
        thread("copies").spawn(move || do_chores(&read, to_copy, &third)).map_err(|_| DiskError::Threads)?;
        Ok(Disk { records, parts, copies, done })
    }

    /// Writes a record, after all before it. `skipped`: how many steps were skipped so far.
    pub fn append(&self, number: u64, record: Record, skipped: u64) -> Result<(), DiskError> {
        self.records.try_send((number, record, skipped)).map_err(|_| DiskError::Threads)
    }

    /// Keeps a part of a checkpoint. If there is too much to do, nothing is promised: it is asked for again.
    pub fn keep(&self, from: PublicKey, of: StateOf, part: Part) {
        let _ = self.parts.try_send(Chore::Keep(from, of, part));
    }

    /// Reads parameters of a checkpoint, in the same way.
    pub fn fetch(&self, to: PublicKey, of: StateOf, parameters: Vec<String>) {
        let _ = self.parts.try_send(Chore::Fetch(to, of, parameters));
    }

    /// Tells somebody of the newest checkpoint.
    pub fn announce(&self, to: PublicKey) {
        let _ = self.copies.try_send(Chore::Announce(to));
    }

    /// Reads a piece of a checkpoint for somebody, in the same way.
    pub fn read(&self, to: PublicKey, step: u64, piece: Piece) {
        let _ = self.copies.try_send(Chore::Read(to, step, piece));
    }

    /// What was done next.
    pub async fn next(&mut self) -> Result<Kept, DiskError> {
        self.done.recv().await.unwrap_or(Err(DiskError::Threads))
    }
}

type Done = mpsc::Sender<Result<Kept, DiskError>>;

fn write_records(
    mut journal: Journal,
    archive: &Archive,
    mut records: mpsc::Receiver<(u64, Record, u64)>,
    done: &Done,
) {
    while let Some((number, record, skipped)) = records.blocking_recv() {
        let result = write_record(&mut journal, archive, &record, skipped);
        let failed = result.is_err();
        if done.blocking_send(result.map(|()| Kept::Journaled(number))).is_err() || failed {
            return;
        }
    }
}

/// Before the journal says that there is a checkpoint, there is one; and what it said before stays until then.
fn write_record(
    journal: &mut Journal,
    archive: &Archive,
    record: &Record,
    skipped: u64,
) -> Result<(), DiskError> {
    let Record::Checkpoint(version) = record else { return Ok(journal.append([record])?) };
    archive.publish(*version, skipped)?;
    journal.append([record])?;
    // What is left over does no harm.
    let _ = checkpoint::prune(&archive.folder, &archive.progress.run.checkpoint, version.0);
    Ok(())
}

fn do_chores(archive: &Archive, mut chores: mpsc::Receiver<Chore>, done: &Done) {
    while let Some(chore) = chores.blocking_recv() {
        let result = match chore {
            Chore::Keep(from, of, part) => match archive.keep(of, part) {
                Ok(true) => Ok(Kept::Part(from, of)),
                Ok(false) => continue,
                Err(error) => Err(error.into()),
            },
            Chore::Fetch(to, of, parameters) => {
                let file = fetch(&archive.folder, of, &parameters);
                let answer = Box::new(Post::Fetched(of, file.is_some()));
                Ok(Kept::Answer(to, answer, file.unwrap_or_default()))
            }
            Chore::Announce(to) => match checkpoint::newest_manifest(&archive.folder) {
                Some((step, manifest)) => Ok(Kept::Answer(to, Box::new(Post::Checkpoint(step)), manifest)),
                None => continue,
            },
            Chore::Read(to, step, piece) => {
                let bytes = checkpoint::read_piece(&archive.folder, step, piece).unwrap_or_default();
                Ok(Kept::Answer(to, Box::new(Post::Piece(step, piece)), bytes))
            }
        };
        if done.blocking_send(result).is_err() {
            return;
        }
    }
}

impl Archive {
    /// Writes a part, and says whether it is kept. The lock is not held meanwhile: a record may want to be written.
    fn keep(&self, of: StateOf, part: Part) -> Result<bool, SaveError> {
        let key = (of.epoch, of.version);
        let begun = {
            let mut drafts = self.drafts();
            let Drafts { open, writing, given_up } = &mut *drafts;
            // A history that was left has no further parts; and of this one, the oldest had their time.
            open.retain(|(epoch, _), _| *epoch == of.epoch);
            given_up.retain(|(epoch, _)| *epoch == of.epoch);
            if given_up.contains(&key) {
                return Ok(false);
            }
            // A part that is here already is not written again: the record that names the checkpoint may be on its way.
            if open.get(&key).is_some_and(|draft| draft.has(of.stage.0.into())) {
                return Ok(true);
            }
            // Nor is one given up of which that may be so.
            let is_partial = |draft: &Draft| !draft.is_whole(self.stages);
            while !open.contains_key(&key) {
                let full = open.len() >= MOST_WHOLE_DRAFTS;
                if !full && open.values().filter(|draft| is_partial(draft)).count() < MOST_DRAFTS {
                    break;
                }
                let oldest = open.iter().find(|(_, draft)| full || is_partial(draft)).map(|(&key, _)| key);
                let Some(oldest) = oldest else { break };
                open.remove(&oldest);
                given_up.insert(oldest);
            }
            *writing = Some(key);
            open.remove(&key)
        };
        let draft = begun.map_or_else(|| Draft::new(&self.folder, of.version.0), Ok);
        let put = draft.and_then(|mut draft| draft.put(of.stage.0.into(), part).map(|()| draft));
        let mut drafts = self.drafts();
        drafts.writing = None;
        self.written.notify_all();
        drafts.open.insert(key, put?);
        Ok(true)
    }

    fn publish(&self, version: Step, skipped: u64) -> Result<(), DiskError> {
        let draft = {
            let drafts = self.drafts();
            // Its last part may be on its way back into the drafts.
            let is_writing = |drafts: &mut Drafts| drafts.writing.is_some_and(|(_, of)| of == version);
            let drafts = self.written.wait_while(drafts, is_writing);
            let Drafts { open, .. } = &mut *drafts.unwrap_or_else(PoisonError::into_inner);
            let key = open.keys().copied().rfind(|(_, of)| *of == version);
            let draft = key.and_then(|key| open.remove(&key));
            open.retain(|(_, of), _| *of > version);
            draft.ok_or(DiskError::Draft(version))?
        };
        draft.publish(&Progress { skipped, ..self.progress.clone() }, self.stages)?;
        Ok(())
    }

    fn drafts(&self) -> MutexGuard<'_, Drafts> {
        self.drafts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Parameters of the checkpoint of a version, each once.
fn fetch(folder: &Path, of: StateOf, parameters: &[String]) -> Option<Vec<u8>> {
    let path = checkpoint::list(folder).ok()?.into_iter().find(|(step, _)| *step == of.version.0)?.1;
    let checkpoint: Result<Checkpoint, OpenError> = Checkpoint::open(&path);
    let wanted: BTreeSet<String> = parameters.iter().cloned().collect();
    checkpoint.ok()?.extract(&wanted.into_iter().collect::<Vec<_>>()).ok()
}
