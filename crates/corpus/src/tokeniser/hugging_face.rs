//! A `tokenizer.json` of Hugging Face: read, checked, and carried along as it was written.
//!
//! The text of the file is part of what a run is, and stands in every checkpoint: so a model is never
//! asked with another tokeniser than the one that it was trained with.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::EncodeError;
use super::byte_pairs::BytePairs;

/// How end of text is called in the tokenisers that are around, the likelier first.
const USUAL_ENDS: [&str; 7] =
    ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<｜end▁of▁sentence｜>", "[SEP]"];
/// Ids beyond this are none of a vocabulary's.
const MOST_IDS: u32 = 1 << 24;

/// What a `tokenizer.json` says. Copies share one.
#[derive(Clone, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct HuggingFace {
    json: Arc<str>,
    end_of_text: u32,
    read: Arc<Read>,
}

/// What is made of the text.
struct Read {
    tokenizer: Tokenizer,
    /// Bytes of text that each id stands for.
    bytes: Vec<u32>,
    byte_pairs: Option<BytePairs>,
}

impl HuggingFace {
    /// Reads the text of a `tokenizer.json`. `end_of_text` names the token that stands between documents;
    /// without it, the names that are usual are looked for.
    pub fn parse(json: &str, end_of_text: Option<&str>) -> Result<HuggingFace, TokeniserError> {
        let unreadable =
            |error: &dyn std::fmt::Display| TokeniserError::Unreadable { why: error.to_string() };
        let value: Value = serde_json::from_str(json).map_err(|error| unreadable(&error))?;
        let mut tokenizer = Tokenizer::from_bytes(json).map_err(|error| unreadable(&error))?;
        // Lengths are the run's affair, and the name of a special token in a text is text.
        tokenizer.with_truncation(None).map_err(|error| unreadable(&error))?.with_padding(None);
        tokenizer.set_encode_special_tokens(true);
        let id = match end_of_text {
            Some(name) => tokenizer.token_to_id(name),
            None => USUAL_ENDS.iter().find_map(|name| tokenizer.token_to_id(name)),
        };
        let end_of_text = id.ok_or_else(|| TokeniserError::NoEndOfText {
            looked_for: end_of_text.map_or(USUAL_ENDS.join(", "), String::from),
        })?;
        let read =
            Read { bytes: bytes_of_ids(&tokenizer, &value)?, byte_pairs: BytePairs::of(&value), tokenizer };
        Ok(HuggingFace { json: json.into(), end_of_text, read: Arc::new(read) })
    }

    /// The text of the file.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// How the token that stands between documents is called.
    pub fn end_of_text_name(&self) -> String {
        self.read.tokenizer.id_to_token(self.end_of_text).unwrap_or_default()
    }

    /// Whether the fast path for byte-level merges applies.
    pub fn is_byte_level(&self) -> bool {
        self.read.byte_pairs.is_some()
    }

    pub(super) fn byte_pairs(&self) -> Option<&BytePairs> {
        self.read.byte_pairs.as_ref()
    }

    pub(super) fn vocabulary(&self) -> usize {
        self.read.bytes.len()
    }

    pub(super) fn end_of_text(&self) -> u32 {
        self.end_of_text
    }

    /// What the file's post-processor puts before a text, if it is one token.
    pub(super) fn begin_of_text(&self) -> Option<u32> {
        let empty = self.read.tokenizer.encode_fast("", true).ok()?;
        empty.get_ids().first().copied().filter(|&id| (id as usize) < self.vocabulary())
    }

    /// The general way: whatever parts the file names.
    pub(super) fn encode(&self, text: &str) -> Result<Vec<u32>, EncodeError> {
        let encoded = self.read.tokenizer.encode_fast(text, false);
        let encoded = encoded.map_err(|error| EncodeError::Refused { why: error.to_string() })?;
        Ok(encoded.get_ids().to_vec())
    }

    pub(super) fn decode(&self, tokens: &[u32]) -> String {
        let known = |token: &u32| (*token as usize) < self.vocabulary();
        let parts = tokens.split(|token| !known(token)).map(|part| {
            self.read.tokenizer.decode(part, false).unwrap_or_else(|_| char::REPLACEMENT_CHARACTER.into())
        });
        parts.collect::<Vec<_>>().join("\u{FFFD}")
    }

    pub(super) fn bytes_of(&self, token: u32) -> u64 {
        self.read.bytes.get(token as usize).copied().unwrap_or(0).into()
    }
}

impl std::fmt::Debug for HuggingFace {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "HuggingFace({} ids, {})", self.vocabulary(), blake3::hash(self.json.as_bytes()).to_hex())
    }
}

impl PartialEq for HuggingFace {
    fn eq(&self, other: &HuggingFace) -> bool {
        self.json == other.json && self.end_of_text == other.end_of_text
    }
}

/// How it stands in a manifest.
#[derive(Clone, Serialize, Deserialize)]
struct Written {
    json: String,
    end_of_text: String,
}

impl TryFrom<Written> for HuggingFace {
    type Error = TokeniserError;

    fn try_from(written: Written) -> Result<HuggingFace, TokeniserError> {
        HuggingFace::parse(&written.json, Some(&written.end_of_text))
    }
}

impl From<HuggingFace> for Written {
    fn from(file: HuggingFace) -> Written {
        Written { json: file.json.to_string(), end_of_text: file.end_of_text_name() }
    }
}

/// Why a `tokenizer.json` cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TokeniserError {
    /// It is not one.
    #[error(
        "this is not a tokenizer.json that can be read: {why}; save it anew with the Python package \
         `tokenizers` (`tokenizer.save`) or `transformers` (`save_pretrained`)"
    )]
    Unreadable {
        /// What was found.
        why: String,
    },
    /// Nothing can stand between documents.
    #[error(
        "the tokenizer.json has no token for the end of a text (looked for {looked_for}), so documents would run \
         into each other; name the token with --end-of-text"
    )]
    NoEndOfText {
        /// The names that it does not have.
        looked_for: String,
    },
    /// An id is beyond everything that a model could have.
    #[error(
        "the tokenizer.json has a token with id {id}, and ids end at {MOST_IDS}; number its tokens from 0 on"
    )]
    LargeId {
        /// The id.
        id: u32,
    },
    /// The text to learn from has nothing to learn.
    #[error("a tokeniser could not be trained: {why}; give more text, or a tokenizer.json with --tokeniser")]
    Untrained {
        /// What was found.
        why: String,
    },
}

/// How many bytes of text each id up to the largest stands for; special tokens and gaps for none.
///
/// In a byte-level vocabulary every character is a byte. In others `▁` is a space, `<0x0A>` a byte, and `##`
/// says that no space stands before: there the count is that of the usual text, not always the exact one.
fn bytes_of_ids(tokenizer: &Tokenizer, json: &Value) -> Result<Vec<u32>, TokeniserError> {
    let vocabulary = tokenizer.get_vocab(true);
    let largest = vocabulary.values().copied().max().unwrap_or(0);
    if largest >= MOST_IDS {
        return Err(TokeniserError::LargeId { id: largest });
    }
    let byte_level = mentions_byte_level(&json["decoder"]) || mentions_byte_level(&json["pre_tokenizer"]);
    let added = tokenizer.get_added_tokens_decoder();
    let mut bytes = vec![0; largest as usize + 1];
    for (token, id) in vocabulary {
        bytes[id as usize] = match added.get(&id) {
            Some(token) if token.special => 0,
            Some(token) => token.content.len() as u32,
            None if byte_level => token.chars().count() as u32,
            None if token.len() == 6 && token.starts_with("<0x") => 1,
            None => token.trim_start_matches("##").replace('▁', " ").len() as u32,
        };
    }
    Ok(bytes)
}

fn mentions_byte_level(part: &Value) -> bool {
    match part {
        Value::Object(fields) => {
            fields.get("type").is_some_and(|kind| kind == "ByteLevel")
                || fields.values().any(mentions_byte_level)
        }
        Value::Array(parts) => parts.iter().any(mentions_byte_level),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Tokeniser, train};
    use super::*;

    fn trained() -> Tokeniser {
        let text =
            "the cat's paws and the dog's 12 bones; cafés, naïve 中文 — they've we'll I'm\n\n  ".repeat(20);
        Tokeniser::HuggingFace(train(&[text], 400).unwrap())
    }

    fn json_with(change: impl FnOnce(&mut Value)) -> String {
        let Tokeniser::HuggingFace(file) = trained() else { unreachable!("it was just trained") };
        let mut json = serde_json::from_str(file.json()).unwrap();
        change(&mut json);
        json.to_string()
    }

    #[test]
    fn it_is_written_and_read_with_its_kind() {
        let tokeniser = trained();
        let written = serde_json::to_string(&tokeniser).unwrap();
        assert!(written.starts_with(r#"{"kind":"hugging_face","json":"#), "{}", &written[..60]);
        assert_eq!(serde_json::from_str::<Tokeniser>(&written).unwrap(), tokeniser);
    }

    #[test]
    fn no_document_can_end_itself() {
        let tokeniser = trained();
        let tokens = tokeniser.encode("a<|endoftext|>b").unwrap();
        assert!(!tokens.contains(&tokeniser.end_of_text()));
        assert_eq!(tokeniser.decode(&tokens), "a<|endoftext|>b");
        assert_eq!(tokeniser.decode(&[tokeniser.end_of_text(), 9999]), "<|endoftext|>\u{FFFD}");
    }

    #[test]
    fn what_cannot_be_used_is_refused_with_a_remedy() {
        let refused = |json: &str, end| HuggingFace::parse(json, end).unwrap_err().to_string();
        assert!(refused("{}", None).contains("save it anew"));
        assert!(refused("\u{1}", None).contains("save it anew"));
        assert!(refused(&json_with(|_| ()), Some("<end>")).contains("looked for <end>"));
        let unnamed = json_with(|json| {
            json["added_tokens"] = Value::Array(Vec::new());
            json["model"]["vocab"].as_object_mut().unwrap().remove("<|endoftext|>");
        });
        assert!(refused(&unnamed, None).contains("--end-of-text"));
        let far = json_with(|json| json["model"]["vocab"]["!"] = (1u32 << 30).into());
        assert!(HuggingFace::parse(&far, None).is_err());
    }

    #[test]
    fn other_chains_than_the_plain_one_take_the_general_way() {
        let is_fast = |json: &str| HuggingFace::parse(json, None).unwrap().is_byte_level();
        assert!(is_fast(&json_with(|_| ())));
        assert!(!is_fast(&json_with(|json| json["normalizer"] = serde_json::json!({"type": "NFC"}))));
        assert!(!is_fast(&json_with(|json| json["pre_tokenizer"]["add_prefix_space"] = true.into())));
        assert!(!is_fast(&json_with(|json| json["model"]["ignore_merges"] = true.into())));
        assert!(!is_fast(&json_with(|json| json["added_tokens"][0]["special"] = false.into())));
    }

    #[test]
    fn a_long_piece_is_merged_as_a_short_one() {
        let tokeniser = trained();
        let text = "thethe".repeat(20_000);
        let mut fast = Vec::new();
        tokeniser.encoder().encode(&text, &mut fast).unwrap();
        assert_eq!(fast, tokeniser.encode(&text).unwrap());
    }

    fn anything() -> impl Strategy<Value = String> {
        let lump = prop_oneof![
            any::<String>(),
            "[ \n\t\u{3000}\u{A0}]{0,4}",
            "[a-z' ]{0,20}",
            "(the|cat|'s|'ll|'re|'ve|'d|paws| 12|中文|é|é|٣|½|ª|़){1,9}",
        ];
        prop::collection::vec(lump, 0..8).prop_map(|lumps| lumps.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn the_fast_way_gives_the_ids_of_the_general_one(texts in prop::collection::vec(anything(), 1..20)) {
            let tokeniser = trained();
            let mut encoder = tokeniser.encoder();
            for text in &texts {
                let mut fast = Vec::new();
                encoder.encode(text, &mut fast).unwrap();
                prop_assert_eq!(&fast, &tokeniser.encode(text).unwrap());
                prop_assert_eq!(&tokeniser.decode(&fast), text);
                let bytes = fast.iter().map(|&token| tokeniser.bytes_of(token)).sum::<u64>();
                prop_assert_eq!(bytes, text.len() as u64);
            }
        }
    }
}
