//! The life of the two connections between two nodes: four tasks, a reader and a writer for each.
//!
//! They live and die together. The end of one is the end of all, except that the control reader may still read
//! what the peer said before it left.

use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::assembler::Assembler;
use crate::event::Event;
use crate::hub::{Admitted, Hub};
use crate::identity::PublicKey;
use crate::letter::Lane;
use crate::link::Way;
use crate::peers::Place;
use crate::secure::{SecureReader, split};
use crate::writer::Writer;

/// How long the rest of the control lane may take when a connection is closed in order.
const CLOSING: Duration = Duration::from_secs(1);
/// How long the last words of a peer that has gone are listened to.
const LAST_WORDS: Duration = Duration::from_millis(300);

/// Runs a pair from its first letter to its last; tells of both.
pub(crate) async fn run(
    hub: Arc<Hub>,
    with: PublicKey,
    control: Admitted,
    bulk: Admitted,
    answer: Option<Vec<u8>>,
) {
    let place = hub.connected(with, answer).await;
    let mut tasks = begin(&hub, with, &place, control, bulk);
    let end = tokio::select! {
        end = next_end(&mut tasks) => last_words(&mut tasks, end).await,
        () = place.replaced.notified() => End::Ours("newer connections with the same peer replace it".to_owned()),
        () = hub.closing() => {
            // The control writer sees it too, and says goodbye; the peer then closes.
            let _ = timeout(CLOSING, control_reader_ended(&mut tasks)).await;
            End::Ours("this node closed the connection".to_owned())
        }
    };
    tasks.shutdown().await; // no letter comes after `Closed`
    hub.disconnected(with, place.no, end.why()).await;
}

/// How a task ended.
enum End {
    /// The peer said goodbye.
    Goodbye,
    /// The connection broke.
    Broken(String),
    /// We ended it.
    Ours(String),
}

impl End {
    fn why(self) -> String {
        match self {
            End::Goodbye => "the peer closed the connection".to_owned(),
            End::Broken(why) | End::Ours(why) => why,
        }
    }
}

/// An end, and whether it is the control reader's.
type Ended = (End, bool);

fn begin(
    hub: &Arc<Hub>,
    with: PublicKey,
    place: &Place,
    control: Admitted,
    bulk: Admitted,
) -> JoinSet<Ended> {
    let mut tasks = JoinSet::new();
    let way = hub.ways.to(with);
    for ((tcp, tls), lanes) in [(control, Lane::OF_CONTROL), (bulk, Lane::OF_BULK)] {
        let (reader, writer) = split(tcp, tls);
        let writer = Writer::new(hub.clone(), writer, way.clone(), place, lanes);
        tasks.spawn(async move {
            match writer.run().await {
                Ok(()) => std::future::pending().await, // said goodbye; the reader hears the peer's
                Err(error) => (End::Broken(format!("the connection broke: {error}")), false),
            }
        });
        let (hub, way) = (hub.clone(), way.clone());
        tasks.spawn(async move { (read(&hub, with, reader, &way, lanes).await, lanes == Lane::OF_CONTROL) });
    }
    tasks
}

async fn read(
    hub: &Hub,
    with: PublicKey,
    mut reader: SecureReader,
    way: &Way,
    lanes: &'static [Lane],
) -> End {
    let mut assembler = Assembler::with_spares(lanes, hub.limits.body_bytes, hub.spares.clone());
    loop {
        let opened = match reader.read(&mut assembler).await {
            Ok(opened) => opened,
            Err(lost) if lost.ours => return End::Ours(lost.why),
            Err(lost) => return End::Broken(lost.why),
        };
        for letter in opened.letters {
            if way.is_cut() {
                hub.counters.dropped_cut(1);
                continue;
            }
            hub.counters.received(&letter);
            // A full channel stops the reading, and so in the end the peer's writing.
            if hub.events.send(Event::Letter { from: with, letter }).await.is_err() {
                return End::Ours("nobody here listens any more".to_owned());
            }
        }
        if opened.ended {
            return End::Goodbye;
        }
    }
}

async fn next_end(tasks: &mut JoinSet<Ended>) -> Ended {
    match tasks.join_next().await {
        Some(Ok(ended)) => ended,
        Some(Err(panic)) => (End::Ours(format!("a fault of this program: {panic}; please report it")), false),
        None => (End::Ours("all its tasks have ended".to_owned()), false),
    }
}

/// The two connections do not end in the same moment: what was said on the control lane before is still read.
async fn last_words(tasks: &mut JoinSet<Ended>, (end, of_control_reader): Ended) -> End {
    if of_control_reader || matches!(end, End::Ours(_)) {
        return end;
    }
    match timeout(LAST_WORDS, control_reader_ended(tasks)).await {
        Ok(End::Goodbye) => End::Goodbye,
        _ => end,
    }
}

async fn control_reader_ended(tasks: &mut JoinSet<Ended>) -> End {
    loop {
        match next_end(tasks).await {
            (end, true) => return end,
            (end, _) if tasks.is_empty() => return end,
            _ => {}
        }
    }
}
