//! The parcels that this worker gives to others: those that were read for a joiner, as long as somebody asks for them.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use starling_swarm::ids::{PeerId, Step};
use starling_swarm::worker::io::StateOf;

use crate::parcel::{Parcel, ParcelId};

/// Parcels at a time; what a third would replace is asked for anew by whoever still wants it.
const MOST_PARCELS: usize = 2;
/// A parcel that nobody has asked for so long is of no use any more.
const UNUSED: Duration = Duration::from_secs(30);
/// Chunks that wait for their parcel to be read, at the most.
const MOST_WAITING: usize = 1024;

/// See the module's head.
#[derive(Default)]
pub struct Giving {
    parcels: BTreeMap<ParcelId, Given>,
    /// What each joiner was told of last.
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
    parcel: Option<ParcelId>,
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
        let told = self.told.entry(joiner).or_insert(Told { wanted, have, parcel: None });
        if told.have != have {
            told.parcel = None;
        }
        (told.wanted, told.have) = (wanted, have);
    }

    /// What a joiner is being given already, if that is still good for it.
    pub fn again(&self, joiner: PeerId) -> Option<Arc<Parcel>> {
        let told = self.told.get(&joiner)?;
        let parcel = &self.parcels.get(&told.parcel?)?.parcel;
        (parcel.outline.of.version >= told.wanted).then(|| parcel.clone())
    }

    /// A parcel was read, for this joiner if for any.
    pub fn keep(&mut self, parcel: Arc<Parcel>, joiner: Option<PeerId>, now: Instant) {
        let id = parcel.outline.id();
        self.parcels.insert(id, Given { parcel, asked: now });
        while self.parcels.len() > MOST_PARCELS {
            let oldest =
                self.parcels.iter().filter(|(of, _)| **of != id).min_by_key(|(_, given)| given.asked);
            let Some((&oldest, _)) = oldest else { break };
            self.parcels.remove(&oldest);
        }
        if let Some(told) = joiner.and_then(|joiner| self.told.get_mut(&joiner)) {
            told.parcel = Some(id);
        }
    }

    /// A chunk of a parcel that is here.
    pub fn chunk(&mut self, wanted: Wanted, now: Instant) -> Option<Bytes> {
        let given = self.parcels.get_mut(&wanted.id)?;
        given.asked = now;
        given.parcel.chunks.get(wanted.chunk as usize).cloned()
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
        self.told.retain(|_, told| told.parcel.is_none_or(|id| parcels.contains_key(&id)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parcel::tests::parcel;

    const JOINER: PeerId = PeerId(4);

    #[test]
    fn who_asks_again_while_it_is_given_something_is_told_of_the_same() {
        let (now, parcel) = (Instant::now(), Arc::new(parcel(8, 100)));
        let mut giving = Giving::default();
        giving.note(JOINER, Step(7), None);
        assert!(giving.again(JOINER).is_none());
        giving.keep(parcel.clone(), Some(JOINER), now);
        giving.note(JOINER, Step(7), None);
        assert_eq!(giving.again(JOINER), Some(parcel.clone()));
        giving.note(JOINER, Step(9), None);
        assert!(giving.again(JOINER).is_none(), "that would be too old for it");
        giving.note(JOINER, Step(8), Some(Step(8)));
        assert!(giving.again(JOINER).is_none(), "it has that");
        giving.tidy(now + UNUSED);
        let wanted = Wanted { by: 4, of: parcel.outline.of, id: parcel.outline.id(), chunk: 0 };
        assert!(giving.chunk(wanted, now).is_none(), "nobody asked for it for long");
    }

    #[test]
    fn the_parcel_that_was_asked_for_longest_ago_makes_room() {
        let now = Instant::now();
        let mut giving = Giving::default();
        let parcels: Vec<Arc<Parcel>> = (1..=3).map(|version| Arc::new(parcel(version, 100))).collect();
        let wanted =
            |parcel: &Parcel| Wanted { by: 4, of: parcel.outline.of, id: parcel.outline.id(), chunk: 1 };
        giving.keep(parcels[0].clone(), None, now);
        giving.keep(parcels[1].clone(), None, now);
        let later = now + Duration::from_secs(1);
        assert_eq!(giving.chunk(wanted(&parcels[0]), later), Some(parcels[0].chunks[1].clone()));
        giving.keep(parcels[2].clone(), None, later);
        let has = |giving: &mut Giving, parcel: &Parcel| giving.chunk(wanted(parcel), later).is_some();
        assert_eq!([0, 1, 2].map(|of| has(&mut giving, &parcels[of])), [true, false, true]);
        assert!(giving.wait(wanted(&parcels[1])) && !giving.wait(wanted(&parcels[1])));
        assert_eq!(giving.waited(parcels[1].outline.of).len(), 2);
        assert_eq!(giving.waited(parcels[1].outline.of).len(), 0);
    }
}
