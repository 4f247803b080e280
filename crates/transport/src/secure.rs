//! A connection after its handshake, split in two: one task reads, one writes.
//!
//! rustls is driven by hand from here on, because the usual adapter reads 4 KiB at a time. Here a read takes what
//! the socket has, and a write gives the socket a batch of frames at once. Both halves share the TLS state under
//! a lock that is held for one piece of work of some 50 µs, never across an await.

use std::cell::RefCell;
use std::io::{self, BufRead, IoSlice, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustls::Connection;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::Notify;

use crate::assembler::Assembler;
use crate::frame::Frame;
use crate::letter::Letter;

/// What one read takes from the socket at most. One such buffer a thread, not a connection.
const READ_BYTES: usize = 128 << 10;
/// What is deciphered under one lock.
const LOCKED_BYTES: usize = 128 << 10;

thread_local! {
    static READ_BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ_BYTES]);
}

struct Shared {
    tls: Mutex<Connection>,
    /// TLS itself has something to say: an answer to a change of keys, or an alert.
    tls_wants_to_write: Notify,
}

impl Shared {
    fn tls(&self) -> MutexGuard<'_, Connection> {
        self.tls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Splits a connection.
pub(crate) fn split(tcp: TcpStream, mut tls: Connection) -> (SecureReader, SecureWriter) {
    tls.set_buffer_limit(None); // the writer flushes after every batch
    let shared = Arc::new(Shared { tls: Mutex::new(tls), tls_wants_to_write: Notify::new() });
    let (read, write) = tcp.into_split();
    (
        SecureReader { shared: shared.clone(), tcp: read, begun: false },
        SecureWriter { shared, tcp: write, ciphertext: Vec::new() },
    )
}

/// The half that reads.
pub(crate) struct SecureReader {
    shared: Arc<Shared>,
    tcp: OwnedReadHalf,
    begun: bool,
}

/// What a read gave.
pub(crate) struct Opened {
    pub(crate) letters: Vec<Letter>,
    /// The peer said that nothing more will come.
    pub(crate) ended: bool,
}

/// Why nothing more is read.
pub(crate) struct Lost {
    pub(crate) why: String,
    /// The connection stood, but what came over it is refused.
    pub(crate) ours: bool,
}

impl Lost {
    fn refused(why: String) -> Lost {
        Lost { why, ours: true }
    }

    fn broken(error: &io::Error) -> Lost {
        Lost { why: format!("the connection broke: {error}"), ours: false }
    }
}

impl SecureReader {
    /// Waits for bytes, and gives the letters that they complete.
    pub(crate) async fn read(&mut self, assembler: &mut Assembler) -> Result<Opened, Lost> {
        if !std::mem::replace(&mut self.begun, true) {
            return self.open(&[], assembler); // what came along with the handshake
        }
        loop {
            self.tcp.readable().await.map_err(|error| Lost::broken(&error))?;
            let opened = READ_BUFFER.with_borrow_mut(|buffer| match self.tcp.try_read(buffer) {
                Ok(0) => Err(Lost {
                    why: "the connection ended without a goodbye: the peer's process is gone".to_owned(),
                    ours: false,
                }),
                Ok(length) => self.open(&buffer[..length], assembler).map(Some),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
                Err(error) => Err(Lost::broken(&error)),
            })?;
            if let Some(opened) = opened {
                return Ok(opened);
            }
        }
    }

    fn open(&self, ciphertext: &[u8], assembler: &mut Assembler) -> Result<Opened, Lost> {
        let mut opened = Opened { letters: Vec::new(), ended: false };
        let mut tls = self.shared.tls();
        opened.ended = drain(&mut tls, assembler, &mut opened.letters)?;
        for mut piece in ciphertext.chunks(LOCKED_BYTES) {
            while !piece.is_empty() && !opened.ended {
                tls.read_tls(&mut piece)
                    .map_err(|error| Lost::refused(format!("TLS cannot go on: {error}")))?;
                tls.process_new_packets()
                    .map_err(|error| Lost::refused(format!("TLS refuses what came: {error}")))?;
                opened.ended = drain(&mut tls, assembler, &mut opened.letters)?;
            }
            if tls.wants_write() {
                self.shared.tls_wants_to_write.notify_one();
            }
            drop(tls); // let the writer in
            tls = self.shared.tls();
        }
        Ok(opened)
    }
}

/// Feeds what was deciphered to the assembler. Whether the peer has closed.
fn drain(tls: &mut Connection, assembler: &mut Assembler, letters: &mut Vec<Letter>) -> Result<bool, Lost> {
    let mut reader = tls.reader();
    loop {
        let length = match reader.fill_buf() {
            Ok([]) => return Ok(true),
            Ok(plaintext) => {
                letters.extend(assembler.feed(plaintext).map_err(|error| Lost::refused(error.to_string()))?);
                plaintext.len()
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(Lost::refused(format!("TLS cannot go on: {error}"))),
        };
        reader.consume(length);
    }
}

/// The half that writes.
pub(crate) struct SecureWriter {
    shared: Arc<Shared>,
    tcp: OwnedWriteHalf,
    ciphertext: Vec<u8>,
}

impl SecureWriter {
    /// Enciphers a frame for the next [`flush`](SecureWriter::flush), and says how much waits for that.
    pub(crate) fn encipher(&mut self, frame: &Frame) -> io::Result<usize> {
        let mut tls = self.shared.tls();
        let pieces: Vec<&[u8]> = frame.pieces().collect();
        let mut slices: Vec<IoSlice<'_>> = pieces.iter().map(|piece| IoSlice::new(piece)).collect();
        let mut slices = &mut slices[..];
        while !slices.is_empty() {
            let length = tls.writer().write_vectored(slices)?;
            IoSlice::advance_slices(&mut slices, length);
        }
        collect(&mut tls, &mut self.ciphertext)?;
        Ok(self.ciphertext.len())
    }

    /// Writes all that was enciphered, and what TLS itself has to say.
    pub(crate) async fn flush(&mut self) -> io::Result<()> {
        collect(&mut self.shared.tls(), &mut self.ciphertext)?;
        self.tcp.write_all(&self.ciphertext).await?;
        self.ciphertext.clear();
        Ok(())
    }

    /// Gives memory back while there is nothing to write.
    pub(crate) fn rest(&mut self) {
        self.ciphertext.shrink_to(0);
    }

    /// Until TLS itself has something to say.
    pub(crate) async fn tls_wants_to_write(&self) {
        self.shared.tls_wants_to_write.notified().await;
    }

    /// Says that nothing more will come, and closes this direction.
    pub(crate) async fn finish(&mut self) -> io::Result<()> {
        self.shared.tls().send_close_notify();
        self.flush().await?;
        self.tcp.shutdown().await
    }
}

fn collect(tls: &mut Connection, ciphertext: &mut Vec<u8>) -> io::Result<()> {
    while tls.wants_write() {
        tls.write_tls(&mut *ciphertext as &mut dyn Write)?;
    }
    Ok(())
}
