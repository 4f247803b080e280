//! Text to token ids and back. Owns what an id means; knows nothing of files.

mod byte_pairs;
mod hugging_face;
mod pieces;
mod training;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use byte_pairs::Memory;
pub use hugging_face::{HuggingFace, TokeniserError};
pub use training::{END_OF_TEXT_NAME, train};

/// How end of text is shown, and its entry in a word list.
pub(crate) const END_OF_TEXT: &str = "<eot>";

/// What the token ids of a corpus stand for. Travels with the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Tokeniser {
    /// Ids 0 to 255 are bytes, 256 is end of text. Needs no training and refuses no text.
    Bytes,
    /// Ids index a closed list of words; id 0 is end of text, listed as `<eot>`.
    Words {
        /// The word of every id.
        words: Vec<String>,
    },
    /// What a `tokenizer.json` of Hugging Face says.
    HuggingFace(HuggingFace),
    /// Nobody said what the ids stand for; as text they are numbers, separated by white space.
    Ids {
        /// How many ids there are.
        vocabulary: u32,
        /// The one that stands between documents.
        end_of_text: u32,
    },
}

impl Tokeniser {
    /// How many ids there are, end of text included.
    pub fn vocabulary(&self) -> usize {
        match self {
            Tokeniser::Bytes => 257,
            Tokeniser::Words { words } => words.len(),
            Tokeniser::HuggingFace(file) => file.vocabulary(),
            Tokeniser::Ids { vocabulary, .. } => *vocabulary as usize,
        }
    }

    /// The id that stands between documents.
    pub fn end_of_text(&self) -> u32 {
        match self {
            Tokeniser::Bytes => 256,
            Tokeniser::Words { .. } => 0,
            Tokeniser::HuggingFace(file) => file.end_of_text(),
            Tokeniser::Ids { end_of_text, .. } => *end_of_text,
        }
    }

    /// The id that a text begins with: what a `tokenizer.json` puts before it, or what stands between documents.
    pub fn begin_of_text(&self) -> u32 {
        match self {
            Tokeniser::HuggingFace(file) => file.begin_of_text().unwrap_or(file.end_of_text()),
            _ => self.end_of_text(),
        }
    }

    /// The ids of a text: its bytes, its words as separated by white space, or what a `tokenizer.json` makes
    /// of it. Names of special tokens that occur in the text are text like any other, so no document can
    /// end itself.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        let words = match self {
            Tokeniser::Bytes => return Ok(text.bytes().map(u32::from).collect()),
            Tokeniser::Words { words } => words,
            Tokeniser::HuggingFace(file) => return file.encode(text),
            Tokeniser::Ids { vocabulary, .. } => return numbers(text, *vocabulary),
        };
        let ids: BTreeMap<&str, u32> = words.iter().map(String::as_str).zip(0..).collect();
        text.split_whitespace()
            .map(|word| ids.get(word).copied().ok_or_else(|| EncodeError::unknown(word, words)))
            .collect()
    }

    /// The text of some ids. Broken UTF-8 and ids outside the vocabulary become U+FFFD; end of text is
    /// shown as `<eot>`, or as the `tokenizer.json` calls it.
    pub fn decode(&self, tokens: &[u32]) -> String {
        match self {
            Tokeniser::Bytes => decode_bytes(tokens),
            Tokeniser::Words { words } => {
                let word = |&token: &u32| words.get(token as usize).map_or("\u{FFFD}", String::as_str);
                tokens.iter().map(word).collect::<Vec<_>>().join(" ")
            }
            Tokeniser::HuggingFace(file) => file.decode(tokens),
            Tokeniser::Ids { .. } => tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(" "),
        }
    }

    /// How many bytes of text a token stands for (for bits per byte). A word counts with the space that
    /// sets it apart; end of text and ids outside the vocabulary count nothing. Ids without a meaning count
    /// as one byte each.
    pub fn bytes_of(&self, token: u32) -> u64 {
        if token == self.end_of_text() {
            return 0;
        }
        match self {
            Tokeniser::Bytes => u64::from(token < 256),
            Tokeniser::Words { words } => words.get(token as usize).map_or(0, |word| word.len() as u64 + 1),
            Tokeniser::HuggingFace(file) => file.bytes_of(token),
            Tokeniser::Ids { vocabulary, .. } => u64::from(token < *vocabulary),
        }
    }

    /// For encoding many texts: gives the same ids as [`Tokeniser::encode`], and remembers words.
    pub fn encoder(&self) -> Encoder<'_> {
        Encoder { tokeniser: self, memory: Memory::default() }
    }
}

/// Encodes one text after another with a memory of the words that it has seen. One for each thread.
#[derive(Debug)]
pub struct Encoder<'a> {
    tokeniser: &'a Tokeniser,
    memory: Memory,
}

impl Encoder<'_> {
    /// Appends the ids of a text.
    pub fn encode(&mut self, text: &str, into: &mut Vec<u32>) -> Result<(), EncodeError> {
        match self.tokeniser {
            Tokeniser::Bytes => into.extend(text.bytes().map(u32::from)),
            Tokeniser::Words { .. } | Tokeniser::Ids { .. } => into.extend(self.tokeniser.encode(text)?),
            Tokeniser::HuggingFace(file) => match file.byte_pairs() {
                Some(byte_pairs) => byte_pairs.encode(text, &mut self.memory, into),
                None => into.extend(file.encode(text)?),
            },
        }
        Ok(())
    }
}

/// Why a text could not be turned into tokens.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EncodeError {
    /// A closed word list has no such word.
    #[error(
        "the word '{word}' is not in this corpus's vocabulary, so the text cannot be tokenised; {}",
        suggestion(near)
    )]
    UnknownWord {
        /// The word, cut to 40 characters.
        word: String,
        /// Up to three words of the vocabulary that are spelt almost the same.
        near: Vec<String>,
    },
    /// What should be a number is none, or none of the vocabulary's.
    #[error(
        "'{word}' is not an id below {vocabulary}, and this corpus has only ids; separate numbers by spaces, \
         or import the corpus again with its tokenizer.json"
    )]
    NotAnId {
        /// The word, cut to 40 characters.
        word: String,
        /// The size of the vocabulary.
        vocabulary: u32,
    },
    /// The `tokenizer.json` has no ids for something in the text.
    #[error(
        "the tokenizer.json cannot encode this text: {why}; use one that knows every character, such as a \
         byte-level one"
    )]
    Refused {
        /// The tokeniser's own words.
        why: String,
    },
}

impl EncodeError {
    fn unknown(word: &str, words: &[String]) -> EncodeError {
        EncodeError::UnknownWord { word: word.chars().take(40).collect(), near: near_matches(word, words) }
    }
}

fn suggestion(near: &[String]) -> String {
    match near {
        [] => "use only words that the corpus contains".to_string(),
        near => format!("did you mean {}?", near.join(" or ")),
    }
}

/// The up to three nearest words at most two edits away, nearest first.
fn near_matches(word: &str, words: &[String]) -> Vec<String> {
    const EDITS: usize = 2;
    let mut near: Vec<(usize, &String)> = words
        .iter()
        .filter(|candidate| candidate.len().abs_diff(word.len()) <= 4 * EDITS)
        .map(|candidate| (edit_distance(word, candidate), candidate))
        .filter(|(distance, _)| *distance <= EDITS)
        .collect();
    near.sort();
    near.into_iter().take(3).map(|(_, word)| word.clone()).collect()
}

/// Levenshtein's distance between two words, in characters.
fn edit_distance(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (above, from_char) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], above + 1);
        for column in 0..to.len() {
            let substituted = diagonal + usize::from(from_char != to[column]);
            diagonal = row[column + 1];
            row[column + 1] = substituted.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}

fn numbers(text: &str, vocabulary: u32) -> Result<Vec<u32>, EncodeError> {
    let id = |word: &str| {
        let id = word.parse().ok().filter(|id| *id < vocabulary);
        id.ok_or_else(|| EncodeError::NotAnId { word: word.chars().take(40).collect(), vocabulary })
    };
    text.split_whitespace().map(id).collect()
}

fn decode_bytes(tokens: &[u32]) -> String {
    let mut bytes = Vec::with_capacity(tokens.len());
    for &token in tokens {
        match token {
            0..=255 => bytes.push(token as u8),
            256 => bytes.extend_from_slice(END_OF_TEXT.as_bytes()),
            _ => bytes.extend_from_slice("\u{FFFD}".as_bytes()),
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn words() -> Tokeniser {
        Tokeniser::Words { words: ["<eot>", "fox", "box", "eats", "."].map(String::from).to_vec() }
    }

    #[test]
    fn words_become_their_ids_and_return() {
        assert_eq!(words().encode("fox  eats\nbox .").unwrap(), [1, 3, 2, 4]);
        assert_eq!(words().decode(&[1, 3, 2, 4, 0, 9]), "fox eats box . <eot> \u{FFFD}");
        assert_eq!(words().vocabulary(), 5);
    }

    #[test]
    fn an_unknown_word_is_named_with_its_neighbours() {
        let error = words().encode("fix eats").unwrap_err();
        assert_eq!(
            error.to_string(),
            "the word 'fix' is not in this corpus's vocabulary, so the text cannot be tokenised; \
             did you mean fox or box?"
        );
        let error = words().encode("crocodile").unwrap_err();
        assert!(matches!(error, EncodeError::UnknownWord { near, .. } if near.is_empty()));
    }

    #[test]
    fn ids_without_a_meaning_are_numbers() {
        let ids = Tokeniser::Ids { vocabulary: 50, end_of_text: 49 };
        assert_eq!(ids.encode("7  12 49").unwrap(), [7, 12, 49]);
        assert_eq!(ids.decode(&[7, 12, 49]), "7 12 49");
        assert!(ids.encode("7 50").unwrap_err().to_string().contains("'50' is not an id below 50"));
        assert_eq!((ids.vocabulary(), ids.bytes_of(3), ids.bytes_of(49)), (50, 1, 0));
    }

    #[test]
    fn bytes_of_counts_the_text_and_not_the_bounds() {
        assert_eq!([0, 65, 256, 257].map(|token| Tokeniser::Bytes.bytes_of(token)), [1, 1, 0, 0]);
        assert_eq!([0, 1, 3, 9].map(|token| words().bytes_of(token)), [0, 4, 5, 0]);
    }

    #[test]
    fn it_is_written_with_its_kind() {
        assert_eq!(serde_json::to_string(&Tokeniser::Bytes).unwrap(), r#"{"kind":"bytes"}"#);
        let written = serde_json::to_string(&words()).unwrap();
        assert_eq!(serde_json::from_str::<Tokeniser>(&written).unwrap(), words());
    }

    proptest! {
        #[test]
        fn bytes_round_trip_any_text(text: String) {
            let tokens = Tokeniser::Bytes.encode(&text).unwrap();
            prop_assert_eq!(tokens.iter().map(|&token| Tokeniser::Bytes.bytes_of(token)).sum::<u64>(), text.len() as u64);
            prop_assert_eq!(Tokeniser::Bytes.decode(&tokens), text);
        }

        #[test]
        fn any_ids_decode(tokens: Vec<u32>) {
            Tokeniser::Bytes.decode(&tokens);
            words().decode(&tokens);
        }

        #[test]
        fn any_text_is_encoded_or_refused(text: String) {
            let _ = words().encode(&text);
        }
    }
}
