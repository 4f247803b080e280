//! A driver's copies of checkpoints: those of a run are written where its coordinator stands, and whoever drives from
//! another site keeps the newest too, so that no single machine, nor site, is the only one that has it.
//!
//! A thread of its own writes them; one piece is on its way at a time, behind everything that training needs.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use bytes::Bytes;
use starling_model::checkpoint::{self, CopyError, Copying, Piece};
use tokio::sync::mpsc;

use crate::post::Post;

/// After so long without an answer it asks again.
const PATIENCE: Duration = Duration::from_secs(30);
/// Letters on their way to the thread, at the most: it is sent what it asked for, and no more.
const MOST_LETTERS: usize = 16;

/// See the module's head. Dropped, it ends the thread; a copy that is not whole is removed.
pub struct Copies {
    letters: SyncSender<Letter>,
    posts: mpsc::Receiver<Post>,
}

enum Letter {
    /// There is a checkpoint with this manifest.
    Newest(Bytes),
    /// A piece of the one of this step; nothing, if that is gone.
    Piece(u64, Piece, Bytes),
}

impl Copies {
    /// Keeps copies of this training's checkpoints in a folder.
    pub fn start(folder: &Path, identity: String) -> std::io::Result<Copies> {
        let (letters, inbox) = sync_channel(MOST_LETTERS);
        let (sender, posts) = mpsc::channel(MOST_LETTERS);
        let (folder, copying, asked, newest) = (folder.to_path_buf(), None, None, None);
        let writer = Writer { folder, identity, copying, asked, newest, posts: sender };
        std::thread::Builder::new().name("copies".into()).spawn(move || writer.run(&inbox))?;
        Ok(Copies { letters, posts })
    }

    /// What the coordinator sent, if it is about checkpoints. What finds no room is asked for again.
    pub fn receive(&self, post: &Post, body: Bytes) {
        let letter = match *post {
            Post::Checkpoint(_) => Letter::Newest(body),
            Post::Piece(step, piece) => Letter::Piece(step, piece, body),
            _ => return,
        };
        let _ = self.letters.try_send(letter);
    }

    /// What is to be written to the coordinator next; never, if the thread has ended.
    pub async fn next(&mut self) -> Post {
        match self.posts.recv().await {
            Some(post) => post,
            None => std::future::pending().await,
        }
    }
}

struct Writer {
    folder: PathBuf,
    identity: String,
    copying: Option<Copying>,
    /// The piece that is on its way, and since when.
    asked: Option<(Piece, Instant)>,
    /// The manifest that was told of last, until its copy is begun.
    newest: Option<Bytes>,
    posts: mpsc::Sender<Post>,
}

impl Writer {
    fn run(mut self, inbox: &Receiver<Letter>) {
        if let Err(error) = checkpoint::sweep(&self.folder) {
            self.write(Post::NotCopied(error.to_string()));
        }
        loop {
            let result = match inbox.recv_timeout(PATIENCE) {
                Ok(Letter::Newest(manifest)) => {
                    self.newest = Some(manifest);
                    Ok(())
                }
                Ok(Letter::Piece(step, piece, bytes)) => self.put(step, piece, &bytes),
                Err(RecvTimeoutError::Timeout) => Ok(()),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if let Err(error) = result.and_then(|()| self.begin()) {
                self.copying = None;
                self.write(Post::NotCopied(error.to_string()));
            }
            self.go_on();
        }
    }

    /// A copy that is under way is finished first, unless its original goes away meanwhile.
    fn begin(&mut self) -> Result<(), CopyError> {
        let Some(manifest) = self.newest.take_if(|_| self.copying.is_none()) else { return Ok(()) };
        let copying = Copying::new(&self.folder, manifest.to_vec())?;
        let step = copying.manifest().step;
        let has_it = checkpoint::list(&self.folder).is_ok_and(|all| all.iter().any(|(of, _)| *of == step));
        if has_it {
            self.write(Post::Copied(step));
        } else if copying.manifest().identity == self.identity {
            (self.copying, self.asked) = (Some(copying), None);
        }
        Ok(())
    }

    fn put(&mut self, step: u64, piece: Piece, bytes: &[u8]) -> Result<(), CopyError> {
        let Some(mut copying) = self.copying.take_if(|copying| copying.manifest().step == step) else {
            return Ok(());
        };
        if bytes.is_empty() {
            return Err(CopyError::Gone(step));
        }
        copying.put(piece, bytes)?;
        if copying.wants().is_some() {
            self.copying = Some(copying);
            return Ok(());
        }
        copying.publish()?;
        self.write(Post::Copied(step));
        Ok(())
    }

    /// Asks for the next piece, once, and again if it does not come.
    fn go_on(&mut self) {
        let wanted =
            self.copying.as_ref().and_then(|copying| Some((copying.manifest().step, copying.wants()?)));
        let Some((step, piece)) = wanted else { return };
        if self.asked.is_none_or(|(asked, since)| asked != piece || since.elapsed() >= PATIENCE) {
            self.asked = Some((piece, Instant::now()));
            self.write(Post::Read(step, piece));
        }
    }

    fn write(&self, post: Post) {
        // If nobody listens any more, the inbox is closed too.
        let _ = self.posts.blocking_send(post);
    }
}

#[cfg(test)]
mod tests {
    use starling_corpus::Tokeniser;
    use starling_model::checkpoint::{Progress, newest_manifest, read_piece, save};
    use starling_model::pipeline;
    use starling_model::run::Run;

    use super::*;

    #[tokio::test]
    async fn one_piece_is_asked_for_at_a_time_whatever_comes_meanwhile() {
        let text = "model = { context = 8, width = 64, layers = 2, heads = 2 }\n\
                    data = { synthetic = { documents = 9 } }\ntrain = { stages = 2, threads = 1 }";
        let run = Run::parse(text, "small.toml", &[]).unwrap();
        let (architecture, rule) = (run.model.architecture(257), run.optimiser.rule());
        let build = |stage| pipeline::build_stage(&architecture, rule, &run.train, run.seed, stage).unwrap();
        let stages: Vec<_> = (0..2).map(build).collect();
        let definition = run.definition(257, "text".into());
        let identity = definition.identity();
        let progress = Progress { run: run.clone(), definition, tokeniser: Tokeniser::Bytes, skipped: 0 };
        let (original, target) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        save(original.path(), &progress, &stages).unwrap();
        let (step, manifest) = newest_manifest(original.path()).unwrap();
        let manifest = Bytes::from(manifest);

        let mut copies = Copies::start(target.path(), identity).unwrap();
        copies.receive(&Post::Checkpoint(step), manifest.clone());
        let mut reads = 0;
        loop {
            match copies.next().await {
                Post::Read(of, piece) => {
                    reads += 1;
                    let bytes = Bytes::from(read_piece(original.path(), of, piece).unwrap());
                    copies.receive(&Post::Checkpoint(step), manifest.clone());
                    for _ in 0..2 {
                        copies.receive(&Post::Piece(of, piece), bytes.clone());
                    }
                }
                Post::Copied(of) => break assert_eq!(of, step),
                post => panic!("{post:?}"),
            }
        }
        assert_eq!(reads, 2, "each file is one piece");
        // Who is told of what it has says so.
        copies.receive(&Post::Checkpoint(step), manifest);
        assert_eq!(copies.next().await, Post::Copied(step));
    }
}
