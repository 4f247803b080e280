//! Who comes in: handshake, introduction, gate, answer; and then the other half.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{sleep, timeout};
use tokio_rustls::server::TlsStream;

use crate::hub::{Admitted, HalfId, Hub};
use crate::identity::PublicKey;
use crate::pair;
use crate::preamble::{self, Answer, MAX_ANSWER_BYTES, Preamble, Which};
use crate::{socket, tls};

/// How long to wait when the system gives no connection, mostly because too many files are open.
const NO_CONNECTION: Duration = Duration::from_millis(50);
/// How long one who was refused may take to read why.
const FAREWELL: Duration = Duration::from_secs(1);
/// What it may still say meanwhile.
const FAREWELL_BYTES: u64 = 256 << 10;

/// Accepts until the endpoint closes. While too many are unfinished, others wait in the system's queue; each of
/// them has a deadline, so nobody waits for longer than that.
pub(crate) async fn listen(hub: Arc<Hub>, listener: TcpListener) {
    let unfinished = Arc::new(Semaphore::new(hub.limits.handshakes.clamp(1, Semaphore::MAX_PERMITS)));
    loop {
        let next = async {
            let permit = unfinished.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            next = next => next,
            () = hub.closing() => return,
        };
        match (permit, accepted) {
            (Ok(permit), Ok((tcp, at))) => hub.spawn(greet(hub.clone(), tcp, at, permit)),
            _ => sleep(NO_CONNECTION).await,
        }
    }
}

/// Sees one connection through.
async fn greet(hub: Arc<Hub>, tcp: TcpStream, at: SocketAddr, unfinished: OwnedSemaphorePermit) {
    let mut proved = None;
    let welcome = match timeout(hub.limits.handshake, admit(&hub, tcp, &mut proved)).await {
        Ok(welcome) => welcome,
        Err(_) => Err(Some("it took too long to introduce itself".to_owned())),
    };
    drop(unfinished);
    match welcome {
        Ok(Welcome::Control { key, connection, bulk, room, half }) => {
            let bulk = timeout(hub.limits.handshake, bulk).await;
            drop(half);
            match bulk {
                Ok(Ok(bulk)) => pair::run(hub.clone(), key, connection, bulk, None).await,
                _ => hub.refused(Some(key), at, "its second connection did not come in time".to_owned()),
            }
            drop(room);
        }
        Ok(Welcome::Bulk { connection, to }) => {
            let _ = to.send(connection); // whoever waits for it runs the pair
        }
        Err(Some(why)) => hub.refused(proved, at, why),
        Err(None) => {}
    }
}

enum Welcome {
    Control {
        key: PublicKey,
        connection: Admitted,
        bulk: oneshot::Receiver<Admitted>,
        room: OwnedSemaphorePermit,
        half: Half,
    },
    Bulk {
        connection: Admitted,
        to: oneshot::Sender<Admitted>,
    },
}

/// Takes the entry of a control connection out of the table when it no longer waits.
struct Half {
    hub: Arc<Hub>,
    id: HalfId,
}

impl Drop for Half {
    fn drop(&mut self) {
        self.hub.halves.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
    }
}

/// The handshake and the answer. An error says why it was refused, if that is worth telling.
async fn admit(
    hub: &Arc<Hub>,
    tcp: TcpStream,
    proved: &mut Option<PublicKey>,
) -> Result<Welcome, Option<String>> {
    socket::set_up(&tcp);
    let accepted = hub.tls.acceptor().accept(tcp).await;
    let mut stream = accepted.map_err(|error| Some(format!("the handshake failed: {error}")))?;
    let key = tls::peer_key(stream.get_ref().1).ok_or_else(|| Some("it proved no key".to_owned()))?;
    *proved = Some(key);
    if hub.ways.to(key).is_cut() {
        return Err(None); // emulated: its packets never came
    }
    let preamble = match preamble::read(&mut stream, Preamble::decode).await {
        Ok(preamble) => preamble,
        Err(error) => return refuse(stream, error.to_string()).await,
    };
    let answer = match decide(hub, key, &preamble) {
        Ok(answer) => answer,
        Err(why) => return refuse(stream, why).await,
    };
    match preamble.which {
        Which::Control => admit_control(hub, stream, key, preamble.pair, answer).await,
        Which::Bulk => admit_bulk(hub, stream, key, preamble.pair).await,
    }
}

fn decide(hub: &Hub, key: PublicKey, preamble: &Preamble) -> Result<Vec<u8>, String> {
    if key == hub.own {
        return Err("this is the node's own key; give each node a key file of its own".to_owned());
    }
    let answer = hub.gate.admit(key, &preamble.introduction)?;
    if answer.len() > MAX_ANSWER_BYTES {
        return Err(format!(
            "the node's answer of {} bytes is over the limit of {MAX_ANSWER_BYTES}",
            answer.len()
        ));
    }
    Ok(answer)
}

async fn admit_control(
    hub: &Arc<Hub>,
    stream: TlsStream<TcpStream>,
    key: PublicKey,
    pair: [u8; 16],
    answer: Vec<u8>,
) -> Result<Welcome, Option<String>> {
    let Ok(room) = hub.room.clone().try_acquire_owned() else {
        return refuse(stream, format!("all {} connections are taken; try later", hub.limits.connections))
            .await;
    };
    let (to, bulk) = oneshot::channel();
    let half = Half { hub: hub.clone(), id: (key, pair) };
    hub.halves.lock().unwrap_or_else(PoisonError::into_inner).insert(half.id, to);
    let connection = accept(stream, answer).await?;
    Ok(Welcome::Control { key, connection, bulk, room, half })
}

async fn admit_bulk(
    hub: &Hub,
    stream: TlsStream<TcpStream>,
    key: PublicKey,
    pair: [u8; 16],
) -> Result<Welcome, Option<String>> {
    let waiting = hub.halves.lock().unwrap_or_else(PoisonError::into_inner).remove(&(key, pair));
    let Some(to) = waiting else {
        return refuse(stream, "no control connection waits for this one; dial again".to_owned()).await;
    };
    Ok(Welcome::Bulk { connection: accept(stream, Vec::new()).await?, to })
}

async fn accept(mut stream: TlsStream<TcpStream>, answer: Vec<u8>) -> Result<Admitted, Option<String>> {
    let bytes = Answer::Accepted(answer).encode();
    let written = async {
        stream.write_all(&bytes).await?;
        stream.flush().await
    };
    written.await.map_err(|error| Some(format!("it went away before it was answered: {error}")))?;
    let (tcp, tls) = stream.into_inner();
    Ok((tcp, tls.into()))
}

/// Tells the reason, and waits until it was read: a socket that is closed with unread bytes loses it.
async fn refuse<T>(mut stream: TlsStream<TcpStream>, why: String) -> Result<T, Option<String>> {
    let farewell = async {
        stream.write_all(&Answer::Refused(why.clone()).encode()).await?;
        stream.shutdown().await?;
        let mut rest = stream.take(FAREWELL_BYTES);
        tokio::io::copy(&mut rest, &mut tokio::io::sink()).await
    };
    let _ = timeout(FAREWELL, farewell).await;
    Err(Some(why))
}
