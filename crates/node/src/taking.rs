//! A parcel on its way to us: from the worker that told of it, and from others that have the same.
//!
//! Pure: it says what to ask whom, and is told what came. A chunk that does not come is asked for again, of whoever has
//! room; one that is not what the outline says is thrown away, and so is who sent it. Without the worker that told of it there
//! is nothing to take: it has to tell of something anew.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::Bytes;
use starling_swarm::message::Envelope;

use crate::parcel::{Outline, Parcel, ParcelId};

/// Chunks that one worker is asked for at a time: what is on its way over a fast link across an ocean.
const WINDOW: usize = 16;
/// Until it is known who else has the parcel, and not for longer than this, a few: the others are to get their share.
const AT_FIRST: (usize, Duration) = (2, Duration::from_secs(1));
/// Who sent nothing for so long is asked again; the next time it is waited for twice as long, for its link may be slow.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(5), Duration::from_secs(80));
/// And after so many times it is not asked any more, unless it is the one that told of the parcel.
const MOST_STRIKES: u32 = 3;

/// See the module's head.
pub struct Taking {
    /// The message that told of it, which the machine gets when all is there.
    envelope: Envelope,
    first: u32,
    outline: Outline,
    id: ParcelId,
    lengths: Vec<usize>,
    chunks: Vec<Option<Bytes>>,
    sources: BTreeMap<u32, Source>,
    /// Until then it may be that others have it, too.
    alone_until: Option<Instant>,
    /// How many chunks came from whom.
    came: BTreeMap<u32, u32>,
}

/// Somebody who has the parcel.
struct Source {
    asked: Vec<u32>,
    /// When it last sent something, or was asked while it had nothing to send.
    heard: Instant,
    patience: Duration,
    strikes: u32,
}

/// What a chunk brought.
#[derive(Debug, PartialEq)]
pub enum Came {
    /// Others are missing.
    More,
    /// It is not what it should be.
    Forged,
    /// Everything is here.
    All,
}

impl Taking {
    /// A parcel that the worker of number `first` told of. What has come of the same parcel before is not asked for again.
    pub fn new(
        envelope: Envelope,
        first: u32,
        outline: Outline,
        before: Option<Taking>,
        now: Instant,
    ) -> Taking {
        let id = outline.id();
        let (chunks, mut sources, came) = match before.filter(|before| before.id == id) {
            Some(before) => (before.chunks, before.sources, before.came),
            None => (vec![None; outline.hashes.len()], BTreeMap::new(), BTreeMap::new()),
        };
        sources.entry(first).or_insert_with(|| Source::new(now));
        let alone_until = outline.is_state().then_some(now + AT_FIRST.1);
        let lengths = outline.chunk_lengths().collect();
        Taking { envelope, first, outline, id, lengths, chunks, sources, alone_until, came }
    }

    /// The parcel's name.
    pub fn id(&self) -> ParcelId {
        self.id
    }

    /// What it holds.
    pub fn outline(&self) -> &Outline {
        &self.outline
    }

    /// Whether a worker has told of just this.
    pub fn is(&self, first: u32, outline: &Outline) -> bool {
        self.first == first && self.outline == *outline
    }

    /// These may have it too.
    pub fn add_sources(&mut self, numbers: &[u32], now: Instant) {
        self.alone_until = None;
        for &number in numbers {
            self.sources.entry(number).or_insert_with(|| Source::new(now));
        }
    }

    /// This one does not have it. Whether there is any use in going on.
    pub fn refused(&mut self, by: u32) -> bool {
        self.sources.remove(&by);
        by != self.first
    }

    /// Who told of it.
    pub fn first(&self) -> u32 {
        self.first
    }

    /// When something is to be asked again, whatever comes.
    pub fn next_wake(&self) -> Instant {
        let next = self.sources.values().map(|source| source.heard + source.patience);
        next.chain(self.alone_until).min().unwrap_or_else(Instant::now)
    }

    /// Whom to ask for which chunk now.
    pub fn requests(&mut self, now: Instant) -> Vec<(u32, u32)> {
        self.alone_until.take_if(|until| now >= *until);
        let window = if self.alone_until.is_some() { AT_FIRST.0 } else { WINDOW };
        for source in self.sources.values_mut().filter(|source| now >= source.heard + source.patience) {
            if !source.asked.is_empty() {
                source.strikes += 1;
                source.patience = (2 * source.patience).min(PATIENCE.1);
            }
            source.asked.clear();
            source.heard = now;
        }
        self.sources.retain(|&number, source| number == self.first || source.strikes < MOST_STRIKES);
        let mut requests = Vec::new();
        let mut open: Vec<u32> =
            (0..self.chunks.len() as u32).filter(|&chunk| self.is_wanted(chunk)).collect();
        open.reverse();
        // One each in turn, so that a small parcel comes from all of them too.
        for _ in 0..window {
            for (&number, source) in self.sources.iter_mut().filter(|(_, source)| source.asked.len() < window)
            {
                if let Some(chunk) = open.pop() {
                    source.ask(chunk, now);
                    requests.push((number, chunk));
                }
            }
        }
        // Who has nothing to do helps out with what another has not sent yet.
        let idle: Vec<u32> = self
            .sources
            .iter()
            .filter(|(_, source)| source.asked.is_empty())
            .map(|(&number, _)| number)
            .collect();
        for number in idle {
            let slowest =
                self.sources.values().filter(|source| !source.asked.is_empty()).min_by_key(|s| s.heard);
            let late = slowest.and_then(|source| source.asked.last().copied());
            if let (Some(chunk), Some(source)) = (late, self.sources.get_mut(&number)) {
                source.ask(chunk, now);
                requests.push((number, chunk));
            }
        }
        requests
    }

    /// A chunk came.
    pub fn receive(&mut self, from: u32, chunk: u32, bytes: Bytes, now: Instant) -> Came {
        let Some(source) = self.sources.get_mut(&from) else { return Came::More };
        (source.heard, source.strikes) = (now, 0);
        source.asked.retain(|&asked| asked != chunk);
        let Some(slot) = self.chunks.get_mut(chunk as usize) else { return Came::More };
        let number = chunk as usize;
        if self.lengths[number] != bytes.len()
            || self.outline.hashes[number] != *blake3::hash(&bytes).as_bytes()
        {
            self.sources.remove(&from);
            return Came::Forged;
        }
        if slot.replace(bytes).is_none() {
            *self.came.entry(from).or_default() += 1;
        }
        for source in self.sources.values_mut() {
            source.asked.retain(|&asked| asked != chunk);
        }
        if self.is_complete() { Came::All } else { Came::More }
    }

    /// Whether everything is here.
    pub fn is_complete(&self) -> bool {
        self.chunks.iter().all(Option::is_some)
    }

    /// How many chunks came from which worker.
    pub fn came(&self) -> &BTreeMap<u32, u32> {
        &self.came
    }

    /// The parcel, if it is complete, with the message that told of it.
    pub fn finish(self) -> Option<(Envelope, Parcel)> {
        let chunks = self.chunks.into_iter().collect::<Option<Vec<Bytes>>>()?;
        Some((self.envelope, Parcel { outline: self.outline, chunks }))
    }

    fn is_wanted(&self, chunk: u32) -> bool {
        self.chunks[chunk as usize].is_none()
            && self.sources.values().all(|source| !source.asked.contains(&chunk))
    }
}

impl Source {
    fn new(now: Instant) -> Source {
        Source { asked: Vec::new(), heard: now, patience: PATIENCE.0, strikes: 0 }
    }

    fn ask(&mut self, chunk: u32, now: Instant) {
        if self.asked.is_empty() {
            self.heard = now;
        }
        self.asked.push(chunk);
    }
}

#[cfg(test)]
mod tests {
    use starling_swarm::ids::*;
    use starling_swarm::message::{Body, Fence, PROTOCOL};

    use super::*;
    use crate::parcel::CHUNK_BYTES;
    use crate::parcel::tests::parcel;

    const DONOR: u32 = 7;
    const OTHER: u32 = 9;

    fn envelope() -> Envelope {
        let (from, to) = (Address::Worker(PeerId(DONOR)), Address::Worker(PeerId(1)));
        let body = Body::State { stage: StageId(1), payload: Payload::default(), onto: None };
        Envelope { protocol: PROTOCOL, from, to, fence: Fence::default(), body }
    }

    fn taking(parcel: &Parcel, now: Instant) -> Taking {
        Taking::new(envelope(), DONOR, parcel.outline.clone(), None, now)
    }

    fn chunk(parcel: &Parcel, chunk: u32) -> Bytes {
        parcel.chunks[chunk as usize].clone()
    }

    #[test]
    fn two_workers_give_one_parcel_and_each_chunk_is_asked_for_once() {
        let (parcel, now) = (parcel(3, 5 * CHUNK_BYTES), Instant::now());
        let mut taking = taking(&parcel, now);
        taking.add_sources(&[OTHER], now);
        let mut from = BTreeMap::new();
        let mut waiting = taking.requests(now);
        assert_eq!(waiting.len(), 6, "all of it is on its way at once");
        while let Some((source, number)) = waiting.pop() {
            *from.entry(source).or_insert(0) += 1;
            let came = taking.receive(source, number, chunk(&parcel, number), now);
            assert_eq!(came == Came::All, waiting.is_empty());
        }
        assert_eq!(from, BTreeMap::from([(DONOR, 3), (OTHER, 3)]));
        assert_eq!(taking.finish().map(|(_, whole)| whole), Some(parcel));
    }

    #[test]
    fn what_was_lost_with_a_connection_is_asked_for_again_and_nothing_else() {
        let (parcel, now) = (parcel(3, 2 * CHUNK_BYTES), Instant::now());
        let mut taking = taking(&parcel, now);
        assert_eq!(taking.requests(now), [(DONOR, 0), (DONOR, 1)], "others may have it, too");
        let now = taking.next_wake();
        assert_eq!(taking.requests(now), [(DONOR, 2)], "nobody said so");
        taking.receive(DONOR, 1, chunk(&parcel, 1), now);
        assert_eq!(taking.requests(now), [], "the others are on their way");
        let later = taking.next_wake();
        assert_eq!(taking.requests(later), [(DONOR, 0), (DONOR, 2)]);
        assert!(taking.next_wake() >= later + 2 * PATIENCE.0, "a slow link is given more time");
        // Told of again, also by another worker, it goes on where it was.
        let mut taking = Taking::new(envelope(), OTHER, parcel.outline.clone(), Some(taking), later);
        assert_eq!(taking.requests(later), [(OTHER, 2)], "who has nothing to do helps out");
        taking.receive(OTHER, 2, chunk(&parcel, 2), later);
        assert_eq!(taking.receive(DONOR, 0, chunk(&parcel, 0), later), Came::All);
    }

    #[test]
    fn who_sends_something_else_or_nothing_is_not_asked_again() {
        let (parcel, mut now) = (parcel(3, CHUNK_BYTES), Instant::now());
        let mut taking = taking(&parcel, now);
        taking.add_sources(&[OTHER], now);
        assert_eq!(taking.requests(now), [(DONOR, 0), (OTHER, 1)]);
        assert_eq!(taking.receive(OTHER, 1, Bytes::from_static(b"what"), now), Came::Forged);
        assert_eq!(taking.requests(now), [(DONOR, 1)]);
        taking.add_sources(&[8], now);
        for _ in 0..MOST_STRIKES {
            assert!(taking.requests(now).iter().any(|(source, _)| *source == 8));
            now += PATIENCE.1;
        }
        let requests = taking.requests(now);
        assert_eq!(requests, [(DONOR, 0), (DONOR, 1)], "the one that told of it is asked for ever");
        assert_eq!(taking.receive(DONOR, 99, Bytes::new(), now), Came::More);
        assert!(!taking.refused(DONOR), "without it there is nothing to take");
        assert_eq!(taking.requests(now), []);
    }
}
