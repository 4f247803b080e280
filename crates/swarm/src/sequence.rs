//! Values under numbers that are handed out in order. The oldest go first as a rule, so they stand in one row, and
//! a look-up is an index: the jobs of a worker, and what its host keeps for them.

use std::collections::VecDeque;
use std::fmt;

/// See the module's head. Room for a value that is gone is given back when all before it are gone too.
#[derive(Clone)]
pub struct Sequence<T> {
    /// The number of the first place.
    first: u64,
    places: VecDeque<Option<T>>,
    len: usize,
}

impl<T> Default for Sequence<T> {
    fn default() -> Sequence<T> {
        Sequence { first: 0, places: VecDeque::new(), len: 0 }
    }
}

impl<T> Sequence<T> {
    /// The number that the next value gets.
    pub fn next(&self) -> u64 {
        self.first + self.places.len() as u64
    }

    /// Puts a value at the end, under the next number.
    pub fn push(&mut self, value: T) -> u64 {
        let number = self.next();
        self.places.push_back(Some(value));
        self.len += 1;
        number
    }

    /// Puts a value under a number that was given elsewhere. Numbers that were passed over stay empty, and may come
    /// later; they take room, so the numbers that are here at a time should not be far apart.
    pub fn insert(&mut self, number: u64, value: T) {
        if self.places.is_empty() {
            self.first = number;
        }
        while number < self.first {
            self.places.push_front(None);
            self.first -= 1;
        }
        let place = (number - self.first) as usize;
        while self.places.len() <= place {
            self.places.push_back(None);
        }
        self.len += usize::from(self.places[place].replace(value).is_none());
    }

    /// The value under a number.
    pub fn get(&self, number: u64) -> Option<&T> {
        self.places.get(usize::try_from(number.checked_sub(self.first)?).ok()?)?.as_ref()
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, number: u64) -> Option<&mut T> {
        self.places.get_mut(usize::try_from(number.checked_sub(self.first)?).ok()?)?.as_mut()
    }

    /// Takes a value out.
    pub fn remove(&mut self, number: u64) -> Option<T> {
        let place = usize::try_from(number.checked_sub(self.first)?).ok()?;
        let value = self.places.get_mut(place)?.take()?;
        self.len -= 1;
        self.give_back();
        Some(value)
    }

    /// Keeps only some values.
    pub fn retain(&mut self, mut keeps: impl FnMut(&T) -> bool) {
        for place in &mut self.places {
            if place.as_ref().is_some_and(|value| !keeps(value)) {
                *place = None;
                self.len -= 1;
            }
        }
        self.give_back();
    }

    /// Takes all values out; returns their numbers. The next number stays what it was.
    pub fn clear(&mut self) -> Vec<u64> {
        let numbers = self.iter().map(|(number, _)| number).collect();
        self.first = self.next();
        self.places.clear();
        self.len = 0;
        numbers
    }

    /// All values, in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = (u64, &T)> {
        (self.first..).zip(&self.places).filter_map(|(number, value)| Some((number, value.as_ref()?)))
    }

    /// How many values there are.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn give_back(&mut self) {
        while self.places.front().is_some_and(Option::is_none) {
            self.places.pop_front();
            self.first += 1;
        }
    }
}

/// As a map, with the next number: where values that are gone have stood makes no difference.
impl<T: fmt::Debug> fmt::Debug for Sequence<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.iter()).entry(&"next", &self.next()).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_map_of_numbers_that_grow(takes in proptest::collection::vec(0u64..40, 0..80)) {
            let (mut sequence, mut map) = (Sequence::default(), BTreeMap::new());
            for (round, take) in takes.into_iter().enumerate() {
                map.insert(sequence.push(round), round);
                prop_assert_eq!(sequence.remove(take), map.remove(&take));
                prop_assert_eq!(sequence.get(take / 2), map.get(&(take / 2)));
                prop_assert_eq!(sequence.len(), map.len());
                let all: Vec<(u64, usize)> = sequence.iter().map(|(number, value)| (number, *value)).collect();
                prop_assert_eq!(all, map.clone().into_iter().collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn numbers_from_elsewhere_may_have_gaps_and_come_in_another_order() {
        let mut sequence = Sequence::default();
        for number in [3, 5, 4] {
            sequence.insert(number, number);
        }
        assert_eq!(sequence.remove(3), Some(3));
        sequence.insert(2, 2);
        assert_eq!(sequence.iter().map(|(number, _)| number).collect::<Vec<_>>(), [2, 4, 5]);
        sequence.retain(|value| *value > 4);
        assert_eq!((sequence.len(), sequence.next()), (1, 6));
        assert_eq!(sequence.clear(), [5]);
        assert_eq!(sequence.push(9), 6);
    }
}
