//! The parcels that this worker gives to others: those that were read for a joiner, as long as somebody asks for them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use starling_swarm::ids::{PeerId, Step};
use starling_swarm::worker::io::StateOf;

use crate::parcel::{Parcel, ParcelId};

/// States at a time: each takes as much memory as the state itself. Whoever asks for another waits.
const MOST_STATES: usize = 2;
/// Parcels of updates at a time; they share the memory of the updates that are kept anyway.
const MOST_UPDATES: usize = 16;
/// A parcel that nobody has asked for so long is of no use any more.
const UNUSED: Duration = Duration::from_secs(30);
/// And one that was asked for within this time is being taken.
const IN_USE: Duration = Duration::from_secs(10);
/// Chunks that wait for their parcel to be read, at the most.
const MOST_WAITING: usize = 1024;

/// See the module's head.
#[derive(Default)]
pub struct Giving {
    parcels: BTreeMap<ParcelId, Given>,
    /// What each joiner asked for last.
    told: BTreeMap<PeerId, Told>,
    /// Who waits for chunks of states that are being read.
    waiting: Vec<Wanted>,
}

struct Given {
    parcel: Arc<Parcel>,
    asked: Instant,
}

struct Told {
    /// The oldest version that it takes.
    wanted: Step,
    /// What it said it had.
    have: Option<Step>,
    answer: Answer,
}

#[derive(Clone, Copy, PartialEq)]
enum Answer {
    None,
    /// It is being read.
    Reading,
    /// It was told of this.
    Parcel(ParcelId),
}

/// What is to be done for a joiner that asks.
#[derive(Debug, PartialEq)]
pub enum Next {
    /// Read what it needs.
    Read,
    /// Tell it of this.
    Tell(Arc<Parcel>),
    /// Nothing: it is being read, or too much is given already. It asks again.
    Wait,
}

/// A chunk that somebody asks for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Wanted {
    /// Who.
    pub by: u32,
    /// Of which state.
    pub of: StateOf,
    /// Of which parcel.
    pub id: ParcelId,
    /// Which chunk.
    pub chunk: u32,
}

impl Giving {
    /// A joiner asks for a state of this version or later, and says what it has.
    pub fn note(&mut self, joiner: PeerId, wanted: Step, have: Option<Step>) {
        let told = self.told.entry(joiner).or_insert(Told { wanted, have, answer: Answer::None });
        if told.have != have {
            told.answer = Answer::None;
        }
        (told.wanted, told.have) = (wanted, have);
    }

    /// What to do for a joiner now, if our state is this one.
    pub fn next(&mut self, joiner: PeerId, ours: StateOf, now: Instant) -> Next {
        let Some(told) = self.told.get_mut(&joiner) else { return Next::Read };
        let of_now = |given: &&Given| {
            let of = given.parcel.outline.of;
            (of.stage, of.epoch) == (ours.stage, ours.epoch) && of.version >= told.wanted
        };
        match told.answer {
            Answer::Reading => return Next::Wait,
            Answer::Parcel(id) => {
                if let Some(given) = self.parcels.get(&id).filter(of_now) {
                    return Next::Tell(given.parcel.clone());
                }
            }
            Answer::None => {}
        }
        if told.have.is_none() {
            let states = self.parcels.iter().filter(|(_, given)| given.parcel.outline.is_state());
            if let Some((&id, given)) = states.clone().find(|(_, given)| given.parcel.outline.of == ours) {
                told.answer = Answer::Parcel(id);
                return Next::Tell(given.parcel.clone());
            }
            if states.filter(|(_, given)| given.asked + IN_USE > now).count() >= MOST_STATES {
                return Next::Wait;
            }
        }
        told.answer = Answer::Reading;
        Next::Read
    }

    /// Nothing could be read for a joiner.
    pub fn failed(&mut self, joiner: PeerId) {
        self.told.remove(&joiner);
    }

    /// A parcel was read, for this joiner if for any.
    pub fn keep(&mut self, parcel: Arc<Parcel>, joiner: Option<PeerId>, now: Instant) {
        let (id, is_state) = (parcel.outline.id(), parcel.outline.is_state());
        self.parcels.insert(id, Given { parcel, asked: now });
        let most = if is_state { MOST_STATES } else { MOST_UPDATES };
        let alike = self.parcels.iter().filter(|(_, given)| given.parcel.outline.is_state() == is_state);
        if alike.clone().count() > most
            && let Some((&oldest, _)) =
                alike.filter(|(of, _)| **of != id).min_by_key(|(_, given)| given.asked)
        {
            self.parcels.remove(&oldest);
        }
        if let Some(told) = joiner.and_then(|joiner| self.told.get_mut(&joiner)) {
            told.answer = Answer::Parcel(id);
        }
    }

    /// A chunk of a parcel that is here.
    pub fn chunk(&mut self, wanted: Wanted, now: Instant) -> Option<Bytes> {
        let given = self.parcels.get_mut(&wanted.id)?;
        given.asked = now;
        given.parcel.chunks.get(wanted.chunk as usize).cloned()
    }

    /// Whether this state was read already.
    pub fn has_state(&self, of: StateOf) -> bool {
        self.parcels.values().any(|given| given.parcel.outline.is_state() && given.parcel.outline.of == of)
    }

    /// A chunk of a state that is not read yet waits for that; whether it is the first that does.
    pub fn wait(&mut self, wanted: Wanted) -> bool {
        let first = self.waiting.iter().all(|other| other.of != wanted.of);
        if self.waiting.len() < MOST_WAITING {
            self.waiting.push(wanted);
        }
        first
    }

    /// A state was read, or cannot be: who waited for its chunks.
    pub fn waited(&mut self, of: StateOf) -> Vec<Wanted> {
        self.waiting.extract_if(.., |wanted| wanted.of == of).collect()
    }

    /// When it wants to be tidied up.
    pub fn next_wake(&self) -> Option<Instant> {
        self.parcels.values().map(|given| given.asked + UNUSED).min()
    }

    /// Drops what nobody asks for any more.
    pub fn tidy(&mut self, now: Instant) {
        self.parcels.retain(|_, given| given.asked + UNUSED > now);
        let parcels = &self.parcels;
        let is_current = |told: &Told| match told.answer {
            Answer::Parcel(id) => parcels.contains_key(&id),
            Answer::Reading => true,
            Answer::None => false,
        };
        self.told.retain(|_, told| is_current(told));
    }
}

#[cfg(test)]
mod tests {
    use starling_swarm::ids::Epoch;

    use super::*;
    use crate::parcel::tests::parcel;

    const JOINER: PeerId = PeerId(4);

    fn wanted(parcel: &Parcel) -> Wanted {
        Wanted { by: 4, of: parcel.outline.of, id: parcel.outline.id(), chunk: 1 }
    }

    #[test]
    fn who_asks_again_is_told_of_what_it_is_given_and_of_nothing_that_it_cannot_use() {
        let (now, parcel) = (Instant::now(), Arc::new(parcel(8, 100)));
        let ours = StateOf { version: Step(9), ..parcel.outline.of };
        let mut giving = Giving::default();
        giving.note(JOINER, Step(7), None);
        assert_eq!(giving.next(JOINER, parcel.outline.of, now), Next::Read);
        giving.note(JOINER, Step(7), None);
        assert_eq!(giving.next(JOINER, ours, now), Next::Wait, "it is being read");
        giving.keep(parcel.clone(), Some(JOINER), now);
        giving.note(JOINER, Step(7), None);
        assert_eq!(giving.next(JOINER, ours, now), Next::Tell(parcel.clone()));
        let other = StateOf { epoch: Epoch(2), ..ours };
        assert_eq!(giving.next(JOINER, other, now), Next::Read, "the run went back");
        giving.failed(JOINER);
        giving.note(JOINER, Step(9), None);
        assert_eq!(giving.next(JOINER, ours, now), Next::Read, "what is here would be too old for it");
        let second = PeerId(5);
        giving.note(second, Step(8), None);
        assert_eq!(
            giving.next(second, parcel.outline.of, now),
            Next::Tell(parcel.clone()),
            "it was read before"
        );
        giving.note(second, Step(8), Some(Step(8)));
        assert_eq!(giving.next(second, ours, now), Next::Read, "it has that");
        giving.tidy(now + UNUSED);
        assert!(giving.chunk(wanted(&parcel), now).is_none(), "nobody asked for it for long");
    }

    #[test]
    fn a_third_state_waits_until_one_is_not_taken_any_more() {
        let now = Instant::now();
        let mut giving = Giving::default();
        let parcels: Vec<Arc<Parcel>> = (1..=3).map(|version| Arc::new(parcel(version, 100))).collect();
        for parcel in &parcels[..2] {
            giving.keep(parcel.clone(), None, now);
        }
        giving.note(JOINER, Step(3), None);
        assert_eq!(giving.next(JOINER, parcels[2].outline.of, now), Next::Wait);
        let later = now + IN_USE;
        assert_eq!(giving.chunk(wanted(&parcels[0]), later), Some(parcels[0].chunks[1].clone()));
        assert_eq!(giving.next(JOINER, parcels[2].outline.of, later), Next::Read);
        giving.keep(parcels[2].clone(), Some(JOINER), later);
        assert_eq!([0, 1, 2].map(|of| giving.has_state(parcels[of].outline.of)), [true, false, true]);
        assert!(giving.wait(wanted(&parcels[1])) && !giving.wait(wanted(&parcels[1])));
        assert_eq!(giving.waited(parcels[1].outline.of).len(), 2);
        assert_eq!(giving.waited(parcels[1].outline.of).len(), 0);
    }
}
