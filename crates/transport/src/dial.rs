//! Whom we dial: each address in turn, and at one of them both connections.

use std::net::SocketAddr;
use std::sync::Arc;

use ring::rand::{SecureRandom, SystemRandom};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, lookup_host};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;

use crate::event::Contact;
use crate::hub::{Admitted, Hub};
use crate::pair;
use crate::preamble::{self, Answer, MAX_INTRODUCTION_BYTES, Preamble, Which};
use crate::{socket, tls};

/// Most addresses that one dial tries, of all names together.
const MAX_ADDRESSES: usize = 32;

/// One dial, and if it succeeds the life of its connections.
pub(crate) async fn run(hub: Arc<Hub>, to: Contact, introduction: Vec<u8>) {
    let reached = tokio::select! {
        reached = reach(&hub, &to, introduction) => reached,
        () = hub.closing() => Err("this node is closing".to_owned()),
    };
    match reached {
        Ok((reached, room)) => {
            pair::run(hub, to.key, reached.control, reached.bulk, Some(reached.answer)).await;
            drop(room);
        }
        Err(why) => hub.unreachable(to.key, why).await,
    }
}

struct Reached {
    control: Admitted,
    bulk: Admitted,
    answer: Vec<u8>,
}

enum Failure {
    /// The right node answered, and does not want us: no other address will change that.
    Refused(String),
    /// Nobody, or somebody else, answered there.
    NoAnswer(String),
}

async fn reach(
    hub: &Arc<Hub>,
    to: &Contact,
    introduction: Vec<u8>,
) -> Result<(Reached, tokio::sync::OwnedSemaphorePermit), String> {
    if to.key == hub.own {
        return Err("refused: this is the node's own key".to_owned());
    }
    if introduction.len() > MAX_INTRODUCTION_BYTES {
        let length = introduction.len();
        return Err(format!(
            "refused: an introduction of {length} bytes is over the limit of {MAX_INTRODUCTION_BYTES}"
        ));
    }
    let Ok(room) = hub.room.clone().try_acquire_owned() else {
        return Err(format!("refused: all {} connections of this node are taken", hub.limits.connections));
    };
    if hub.ways.to(to.key).is_cut() {
        sleep(hub.limits.handshake).await;
        return Err("no answer: the link is cut".to_owned());
    }
    let connector =
        hub.tls.connector(to.key).map_err(|error| format!("no answer: TLS cannot begin: {error}"))?;
    let mut reasons = Vec::new();
    let mut tried = 0;
    for name in &to.addresses {
        let addresses = match timeout(hub.limits.handshake, lookup_host(name)).await {
            Ok(Ok(addresses)) => addresses.collect::<Vec<_>>(),
            Ok(Err(error)) => {
                reasons.push(format!("{name}: {error}"));
                continue;
            }
            Err(_) => {
                reasons.push(format!("{name}: its name was not resolved in time"));
                continue;
            }
        };
        for at in addresses {
            tried += 1;
            if tried > MAX_ADDRESSES {
                break;
            }
            match timeout(hub.limits.handshake, reach_at(&connector, at, &introduction)).await {
                Ok(Ok(reached)) => return Ok((reached, room)),
                Ok(Err(Failure::Refused(why))) => return Err(format!("refused: {why}")),
                Ok(Err(Failure::NoAnswer(why))) => reasons.push(format!("{at}: {why}")),
                Err(_) => reasons.push(format!("{at}: nothing came in {:?}", hub.limits.handshake)),
            }
        }
    }
    if reasons.is_empty() {
        reasons.push("no address is known".to_owned());
    }
    Err(format!("no answer: {}", reasons.join("; ")))
}

/// Both connections, one after the other: the second names the first.
async fn reach_at(connector: &TlsConnector, at: SocketAddr, introduction: &[u8]) -> Result<Reached, Failure> {
    let mut pair = [0; 16];
    let random = SystemRandom::new().fill(&mut pair);
    random.map_err(|_| Failure::NoAnswer("this system gives no random numbers".to_owned()))?;
    let (control, answer) = connect(connector, at, Which::Control, pair, introduction).await?;
    let (bulk, _) = connect(connector, at, Which::Bulk, pair, introduction).await?;
    Ok(Reached { control, bulk, answer })
}

async fn connect(
    connector: &TlsConnector,
    at: SocketAddr,
    which: Which,
    pair: [u8; 16],
    introduction: &[u8],
) -> Result<(Admitted, Vec<u8>), Failure> {
    let preamble = Preamble { which, pair, introduction: introduction.to_vec() };
    let tcp = TcpStream::connect(at).await.map_err(no_answer)?;
    socket::set_up(&tcp);
    let mut stream = connector.connect(tls::no_name(), tcp).await.map_err(no_answer)?;
    stream.write_all(&preamble.encode()).await.map_err(no_answer)?;
    stream.flush().await.map_err(no_answer)?;
    match preamble::read(&mut stream, Answer::decode).await {
        Ok(Answer::Accepted(answer)) => {
            let (tcp, tls) = stream.into_inner();
            Ok(((tcp, tls.into()), answer))
        }
        Ok(Answer::Refused(why)) => Err(Failure::Refused(why)),
        Err(error) => Err(Failure::NoAnswer(error.to_string())),
    }
}

fn no_answer(error: std::io::Error) -> Failure {
    Failure::NoAnswer(error.to_string())
}
