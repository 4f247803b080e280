//! A map in one sorted vector: for a few entries that are touched often. It keeps its room when it is emptied, and a
//! look-up touches one place in memory.

use std::fmt;

/// See the module's head.
#[derive(Clone, PartialEq)]
pub struct SmallMap<K, V> {
    entries: Vec<(K, V)>,
}

impl<K, V> Default for SmallMap<K, V> {
    fn default() -> SmallMap<K, V> {
        SmallMap { entries: Vec::new() }
    }
}

impl<K: Ord + Copy, V> SmallMap<K, V> {
    /// An empty map with room for so many.
    pub fn with_capacity(entries: usize) -> SmallMap<K, V> {
        SmallMap { entries: Vec::with_capacity(entries) }
    }

    fn place(&self, key: K) -> Result<usize, usize> {
        // What is new comes last as a rule.
        match self.entries.last() {
            Some((last, _)) if *last < key => Err(self.entries.len()),
            _ => self.entries.binary_search_by_key(&key, |(key, _)| *key),
        }
    }

    /// The value of a key.
    pub fn get(&self, key: K) -> Option<&V> {
        self.place(key).ok().map(|place| &self.entries[place].1)
    }

    /// The same, to be changed.
    pub fn get_mut(&mut self, key: K) -> Option<&mut V> {
        self.place(key).ok().map(|place| &mut self.entries[place].1)
    }

    /// The value of a key, made if there is none.
    pub fn get_or_insert_with(&mut self, key: K, make: impl FnOnce() -> V) -> &mut V {
        let place = self.place(key).unwrap_or_else(|place| {
            self.entries.insert(place, (key, make()));
            place
        });
        &mut self.entries[place].1
    }

    /// Whether a key is there.
    pub fn contains(&self, key: K) -> bool {
        self.place(key).is_ok()
    }

    /// Puts a value in; the one that was there before.
    pub fn insert(&mut self, key: K, value: V) -> Option<V> {
        match self.place(key) {
            Ok(place) => Some(std::mem::replace(&mut self.entries[place].1, value)),
            Err(place) => {
                self.entries.insert(place, (key, value));
                None
            }
        }
    }

    /// Takes a value out.
    pub fn remove(&mut self, key: K) -> Option<V> {
        self.place(key).ok().map(|place| self.entries.remove(place).1)
    }

    /// Takes the entry of the smallest key out.
    pub fn pop_first(&mut self) -> Option<(K, V)> {
        (!self.entries.is_empty()).then(|| self.entries.remove(0))
    }

    /// Keeps only some entries.
    pub fn retain(&mut self, mut keeps: impl FnMut(K, &V) -> bool) {
        self.entries.retain(|(key, value)| keeps(*key, value));
    }

    /// Takes all out.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// All keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = K> {
        self.entries.iter().map(|(key, _)| *key)
    }

    /// All values, in the order of their keys.
    pub fn values(&self) -> impl Iterator<Item = &V> {
        self.entries.iter().map(|(_, value)| value)
    }

    /// All entries, in order.
    pub fn iter(&self) -> impl Iterator<Item = (K, &V)> {
        self.entries.iter().map(|(key, value)| (*key, value))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl<K: Ord + Copy, V> FromIterator<(K, V)> for SmallMap<K, V> {
    fn from_iter<I: IntoIterator<Item = (K, V)>>(entries: I) -> SmallMap<K, V> {
        let entries = entries.into_iter();
        let mut map = SmallMap::with_capacity(entries.size_hint().0);
        entries.for_each(|(key, value)| drop(map.insert(key, value)));
        map
    }
}

impl<K: fmt::Debug, V: fmt::Debug> fmt::Debug for SmallMap<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_map().entries(self.entries.iter().map(|(key, value)| (key, value))).finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_map(changes in proptest::collection::vec((0u8..12, any::<bool>()), 0..60)) {
            let (mut small, mut map) = (SmallMap::default(), BTreeMap::new());
            for (round, (key, insert)) in changes.into_iter().enumerate() {
                match insert {
                    true => prop_assert_eq!(small.insert(key, round), map.insert(key, round)),
                    false => prop_assert_eq!(small.remove(key), map.remove(&key)),
                }
                prop_assert_eq!(small.get(key / 2), map.get(&(key / 2)));
                prop_assert_eq!(small.keys().collect::<Vec<_>>(), map.keys().copied().collect::<Vec<_>>());
            }
            prop_assert_eq!(small.pop_first(), map.pop_first());
        }
    }
}
