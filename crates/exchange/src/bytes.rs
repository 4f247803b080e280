//! The tokeniser of bytes, as a `tokenizer.json`: a byte-level one without merges, whose ids are the bytes.

use serde_json::{Map, Value, json};

/// What it calls the end of a text.
pub const END_OF_TEXT: &str = "<|endoftext|>";

/// The text of its `tokenizer.json`; 256 ends a text.
pub fn byte_tokeniser() -> String {
    let mut vocabulary: Map<String, Value> =
        (0..=255u8).map(|byte| (shown(byte).to_string(), json!(byte))).collect();
    vocabulary.insert(END_OF_TEXT.into(), json!(256));
    let level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let file = json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": [{
            "id": 256, "content": END_OF_TEXT, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true,
        }],
        "normalizer": null,
        "pre_tokenizer": level,
        "post_processor": null,
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [],
        },
    });
    format!("{file:#}\n")
}

/// The character that stands for a byte in byte-level vocabularies: itself if it can be seen, or else one after U+00FF.
fn shown(byte: u8) -> char {
    let is_seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    if is_seen(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&earlier| !is_seen(earlier)).count() as u32;
    char::from_u32(256 + before).unwrap_or('\u{FFFD}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shown_as_byte_level_tokenisers_do() {
        assert_eq!([b'a', b' ', b'\n', 0, 0xAD, 0xFF].map(shown), ['a', 'Ġ', 'Ċ', 'Ā', 'Ń', 'ÿ']);
        let all: std::collections::BTreeSet<char> = (0..=255).map(shown).collect();
        assert_eq!(all.len(), 256);
    }
}
