//! Something for each lot of the open steps that a driver has, found by index: a driver looks lots up several times
//! for every piece of news, and has thousands.

use std::fmt;

use crate::ids::{Lot, LotOf, Step};
use crate::small::SmallMap;

/// See the module's head.
#[derive(Clone)]
pub(super) struct LotTable<T> {
    /// Step by step, and lot by lot: where it stands, as far as lots were seen.
    places: SmallMap<Step, Vec<Option<u32>>>,
    rows: Vec<Option<T>>,
    /// Rows that are empty.
    free: Vec<u32>,
}

impl<T> Default for LotTable<T> {
    fn default() -> LotTable<T> {
        LotTable { places: SmallMap::default(), rows: Vec::new(), free: Vec::new() }
    }
}

impl<T> LotTable<T> {
    pub(super) fn get(&self, at: &LotOf) -> Option<&T> {
        self.rows[self.place(at)?].as_ref()
    }

    pub(super) fn get_mut(&mut self, at: &LotOf) -> Option<&mut T> {
        let place = self.place(at)?;
        self.rows[place].as_mut()
    }

    /// Puts something in for a lot, which the caller knows to exist.
    pub(super) fn insert(&mut self, at: LotOf, value: T) {
        self.remove(&at);
        let row = self.free.pop().unwrap_or_else(|| {
            self.rows.push(None);
            self.rows.len() as u32 - 1
        });
        self.rows[row as usize] = Some(value);
        let places = self.places.get_or_insert_with(at.step, Vec::new);
        if places.len() <= at.lot.0 as usize {
            places.resize(at.lot.0 as usize + 1, None);
        }
        places[at.lot.0 as usize] = Some(row);
    }

    pub(super) fn remove(&mut self, at: &LotOf) -> Option<T> {
        let row = self.places.get_mut(at.step)?.get_mut(at.lot.0 as usize)?.take()?;
        self.free.push(row);
        self.rows[row as usize].take()
    }

    /// Takes out all of the steps before this one; they are closed.
    pub(super) fn take_before(&mut self, step: Step) -> Vec<(LotOf, T)> {
        let before: Vec<LotOf> = self.iter().map(|(at, _)| at).take_while(|at| at.step < step).collect();
        let taken = before.into_iter().filter_map(|at| Some((at, self.remove(&at)?))).collect();
        self.places.retain(|open, _| open >= step);
        taken
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len() - self.free.len()
    }

    /// Something of each, in the order of steps, then of lots.
    pub(super) fn collect<U>(&self, of: impl Fn(&T) -> U) -> Vec<U> {
        let mut all = Vec::with_capacity(self.len());
        for places in self.places.values() {
            for row in places.iter().flatten() {
                all.extend(self.rows[*row as usize].as_ref().map(&of));
            }
        }
        all
    }

    /// In the order of steps, then of lots.
    pub(super) fn iter(&self) -> impl Iterator<Item = (LotOf, &T)> {
        self.places.iter().flat_map(move |(step, places)| {
            (0..).map(Lot).zip(places).filter_map(move |(lot, place)| {
                Some((LotOf { step, lot }, self.rows[(*place)? as usize].as_ref()?))
            })
        })
    }

    fn place(&self, at: &LotOf) -> Option<usize> {
        let place = self.places.get(at.step)?.get(at.lot.0 as usize)?;
        place.map(|row| row as usize)
    }
}

/// As a map: which row something stands in makes no difference.
impl<T: fmt::Debug> fmt::Debug for LotTable<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}
