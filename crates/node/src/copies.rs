//! A driver's copies of checkpoints: those of a run are written where its coordinator stands, and whoever drives from
//! another site keeps the newest too, so that no single machine, nor site, is the only one that has it.
//!
//! A thread of its own writes them; one piece is on its way at a time, behind everything that training needs.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::time::Duration;

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
        let writer = Writer { folder: folder.to_path_buf(), identity, copying: None, posts: sender };
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
    posts: mpsc::Sender<Post>,
}

impl Writer {
    fn run(mut self, inbox: &Receiver<Letter>) {
        if let Err(error) = checkpoint::sweep(&self.folder) {
            self.write(Post::NotCopied(error.to_string()));
        }
        loop {
            let result = match inbox.recv_timeout(PATIENCE) {
                Ok(Letter::Newest(manifest)) => self.begin(&manifest),
                Ok(Letter::Piece(step, piece, bytes)) => self.put(step, piece, &bytes),
                Err(RecvTimeoutError::Timeout) => Ok(()),
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if let Err(error) = result {
                self.copying = None;
                self.write(Post::NotCopied(error.to_string()));
            }
            self.go_on();
        }
    }

    /// A copy that is under way is finished first, unless its original goes away meanwhile.
    fn begin(&mut self, manifest: &Bytes) -> Result<(), CopyError> {
        if self.copying.is_some() {
            return Ok(());
        }
        let copying = Copying::new(&self.folder, manifest.to_vec())?;
        let step = copying.manifest().step;
        let has_it = checkpoint::list(&self.folder).is_ok_and(|all| all.iter().any(|(of, _)| *of == step));
        if copying.manifest().identity == self.identity && !has_it {
            self.copying = Some(copying);
        }
        Ok(())
    }

    fn put(&mut self, step: u64, piece: Piece, bytes: &[u8]) -> Result<(), CopyError> {
        let Some(mut copying) = self.copying.take_if(|copying| copying.manifest().step == step) else {
            return Ok(());
        };
        if bytes.is_empty() {
            return Ok(()); // It is gone: a later one will be told of.
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

    fn go_on(&self) {
        if let Some(copying) = &self.copying
            && let Some(piece) = copying.wants()
        {
            self.write(Post::Read(copying.manifest().step, piece));
        }
    }

    fn write(&self, post: Post) {
        // If nobody listens any more, the inbox is closed too.
        let _ = self.posts.blocking_send(post);
    }
}
