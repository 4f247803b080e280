//! Byte-pair encoding as fast as it goes: the tokenisers that GPT-2 made common, without the general machine.
//!
//! A `tokenizer.json` describes a chain of parts. For the chain that matters most (bytes, GPT-2's
//! pieces, merges, and nothing else) this gives the ids that the `tokenizers` crate gives, some ten times
//! as fast: no alignment with the text is kept, and a word that was seen is looked up. Every other chain
//! goes through that crate, which is also the judge in the tests.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

use serde_json::Value;

use super::pieces::pieces;

/// The merges of a byte-level tokeniser.
#[derive(Debug)]
pub(super) struct BytePairs {
    /// The id of each byte.
    bytes: [u32; 256],
    /// What two neighbours become, and how early: lower ranks first.
    merges: Table<(u32, u32), (u32, u32)>,
}

impl BytePairs {
    /// The merges of a `tokenizer.json`, if it is one of the plain byte-level chain.
    pub(super) fn of(json: &Value) -> Option<BytePairs> {
        let model = &json["model"];
        let plain = json["normalizer"].is_null()
            && is_byte_level(&json["pre_tokenizer"])
            && all(&json["added_tokens"], |token| token["special"] == true)
            && model["type"] == "BPE"
            && is_zero(&model["dropout"])
            && ["continuing_subword_prefix", "end_of_word_suffix"].iter().all(|key| is_nothing(&model[key]))
            && model["ignore_merges"] != true;
        if !plain {
            return None;
        }
        let vocabulary = model["vocab"].as_object()?;
        let id = |token: &str| vocabulary.get(token)?.as_u64().and_then(|id| u32::try_from(id).ok());
        let mut bytes = [0; 256];
        for (byte, slot) in (0..=255).zip(&mut bytes) {
            *slot = id(char_of(byte).encode_utf8(&mut [0; 4]))?;
        }
        let mut merges = Table::default();
        for (rank, merge) in (0..).zip(model["merges"].as_array()?) {
            let (left, right) = match merge {
                Value::String(pair) => pair.split_once(' ')?,
                pair => (pair.get(0)?.as_str()?, pair.get(1)?.as_str()?),
            };
            merges.insert((id(left)?, id(right)?), (rank, id(&format!("{left}{right}"))?));
        }
        Some(BytePairs { bytes, merges })
    }

    /// Appends the ids of a text.
    pub(super) fn encode(&self, text: &str, memory: &mut Memory, into: &mut Vec<u32>) {
        for piece in pieces(text) {
            if piece.len() > LONGEST_REMEMBERED {
                self.merge(piece.as_bytes(), into);
            } else if !memory.recall(piece.as_bytes(), into) {
                let start = into.len();
                self.merge(piece.as_bytes(), into);
                memory.remember(piece.as_bytes(), &into[start..]);
            }
        }
    }

    /// Merges neighbours, lowest rank first and leftmost among equals, until none is left: in n log n, for
    /// a piece may be a megabyte.
    fn merge(&self, piece: &[u8], into: &mut Vec<u32>) {
        let mut symbols: Vec<Symbol> = (0..)
            .zip(piece)
            .map(|(at, &byte)| Symbol {
                id: self.bytes[usize::from(byte)],
                before: at - 1,
                after: at + 1,
                gone: false,
            })
            .collect();
        let length = symbols.len() as i64;
        let mut queue = BinaryHeap::new();
        let offer = |queue: &mut BinaryHeap<_>, symbols: &[Symbol], left: i64| {
            if left < 0 || symbols[left as usize].after >= length {
                return;
            }
            let symbol = &symbols[left as usize];
            let pair = (symbol.id, symbols[symbol.after as usize].id);
            if let Some(&(rank, merged)) = self.merges.get(&pair) {
                queue.push(Reverse((rank, left, merged)));
            }
        };
        (0..length).for_each(|left| offer(&mut queue, &symbols, left));
        while let Some(Reverse((_, left, merged))) = queue.pop() {
            let symbol = symbols[left as usize];
            if symbol.gone || symbol.after >= length {
                continue;
            }
            // The neighbours may have changed since this was offered; what they would become must not have.
            let right = symbols[symbol.after as usize];
            if self.merges.get(&(symbol.id, right.id)).is_none_or(|&(_, now)| now != merged) {
                continue;
            }
            symbols[symbol.after as usize].gone = true;
            symbols[left as usize] = Symbol { id: merged, after: right.after, ..symbol };
            if right.after < length {
                symbols[right.after as usize].before = left;
            }
            offer(&mut queue, &symbols, symbol.before);
            offer(&mut queue, &symbols, left);
        }
        into.extend(symbols.iter().filter(|symbol| !symbol.gone).map(|symbol| symbol.id));
    }
}

/// One id of a piece that is being merged, and where its neighbours stand.
#[derive(Clone, Copy)]
struct Symbol {
    id: u32,
    before: i64,
    after: i64,
    gone: bool,
}

/// The character that stands for a byte in a `tokenizer.json`: itself if it can be seen, or else one of
/// those from U+0100 on.
pub(super) fn char_of(byte: u8) -> char {
    let shifted = |index: u32| char::from_u32(0x100 + index).unwrap_or(char::REPLACEMENT_CHARACTER);
    match byte {
        b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF => char::from(byte),
        0..=b' ' => shifted(u32::from(byte)),
        0x7F..=0xA0 => shifted(u32::from(byte) - 0x7F + 33),
        0xAD => shifted(67),
    }
}

/// Longer pieces are rare, and merged anew each time.
const LONGEST_REMEMBERED: usize = 48;
/// Words that are remembered; when there are more, all are forgotten.
const MOST_WORDS: usize = 1 << 17;

/// The ids of words that were seen.
#[derive(Debug, Default)]
pub(super) struct Memory {
    words: Table<Box<[u8]>, (u32, u32)>,
    ids: Vec<u32>,
}

impl Memory {
    fn recall(&self, word: &[u8], into: &mut Vec<u32>) -> bool {
        let Some(&(start, end)) = self.words.get(word) else { return false };
        into.extend_from_slice(&self.ids[start as usize..end as usize]);
        true
    }

    fn remember(&mut self, word: &[u8], ids: &[u32]) {
        if self.words.len() == MOST_WORDS {
            self.words.clear();
            self.ids.clear();
        }
        let start = self.ids.len() as u32; // at most MOST_WORDS × LONGEST_REMEMBERED
        self.ids.extend_from_slice(ids);
        self.words.insert(word.into(), (start, self.ids.len() as u32));
    }
}

type Table<Key, Value> = HashMap<Key, Value, BuildHasherDefault<Mixer>>;

/// A hash for short keys, several times as fast as the standard one. Whoever chooses words that collide
/// slows down the tokenising of their own text.
#[derive(Default)]
struct Mixer(u64);

impl Mixer {
    fn mix(&mut self, word: u64) {
        let product = u128::from(self.0 ^ word) * 0x9E37_79B9_7F4A_7C15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }
}

impl Hasher for Mixer {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|&word| self.mix(u64::from_le_bytes(word)));
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        self.mix(u64::from_le_bytes(last) ^ (bytes.len() as u64) << 56);
    }

    fn write_u32(&mut self, number: u32) {
        self.mix(u64::from(number));
    }

    fn write_usize(&mut self, _length: usize) {} // `write` has it already

    fn finish(&self) -> u64 {
        self.0
    }
}

fn is_byte_level(part: &Value) -> bool {
    part["type"] == "ByteLevel" && part["add_prefix_space"] == false && part["use_regex"] != false
}

fn is_zero(number: &Value) -> bool {
    number.is_null() || number.as_f64() == Some(0.0)
}

fn is_nothing(text: &Value) -> bool {
    text.is_null() || text == ""
}

fn all(list: &Value, holds: impl Fn(&Value) -> bool) -> bool {
    list.is_null() || list.as_array().is_some_and(|list| list.iter().all(holds))
}
