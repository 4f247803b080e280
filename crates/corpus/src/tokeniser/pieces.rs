//! Where GPT-2's byte-level tokenisers cut a text before they merge: words with the space before them,
//! numbers, runs of signs, white space.
//!
//! The rule is the pattern below, which `tokenizer.json` means by `ByteLevel`. Matched by hand it costs a
//! table lookup a character; as a regular expression, whose look-ahead needs backtracking, it took most of
//! the time of encoding. The classes come from the tables of the regular expressions themselves.
//!
//! ```text
//! 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//! ```

use std::sync::LazyLock;

use regex_syntax::hir::{Class, HirKind};

/// The pieces of a text, in order; together they are the text.
pub(super) fn pieces(text: &str) -> impl Iterator<Item = &str> {
    let mut rest = text;
    std::iter::from_fn(move || {
        if rest.is_empty() {
            return None;
        }
        let (piece, after) = rest.split_at(length_of_first(rest));
        rest = after;
        Some(piece)
    })
}

/// What the pattern tells characters by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Other,
    Letter,
    Number,
    Space,
}

/// The kind of every character.
static KINDS: LazyLock<Box<[Kind]>> = LazyLock::new(|| {
    let mut kinds = vec![Kind::Other; char::MAX as usize + 1];
    for (class, kind) in [(r"\p{L}", Kind::Letter), (r"\p{N}", Kind::Number), (r"\s", Kind::Space)] {
        let parsed = regex_syntax::parse(class).expect("the class is one that regular expressions have");
        let HirKind::Class(Class::Unicode(class)) = parsed.kind() else { continue };
        for range in class.ranges() {
            kinds[range.start() as usize..=range.end() as usize].fill(kind);
        }
    }
    kinds.into_boxed_slice()
});

fn kind_of(character: char) -> Kind {
    KINDS[character as usize]
}

/// Bytes of the first piece of a text that is not empty.
fn length_of_first(text: &str) -> usize {
    if let Some(length) = contraction(text) {
        return length;
    }
    let behind_space = text.strip_prefix(' ').unwrap_or(text);
    let kind = behind_space.chars().next().map_or(Kind::Space, kind_of);
    if kind != Kind::Space {
        return text.len() - behind_space.len() + run(behind_space, kind);
    }
    // White space leaves its last character to the word that follows, unless it is the only one.
    let spaces = run(text, Kind::Space);
    let last = text[..spaces].chars().next_back().map_or(0, char::len_utf8);
    if spaces == text.len() || spaces == last { spaces } else { spaces - last }
}

fn contraction(text: &str) -> Option<usize> {
    let after = text.strip_prefix('\'')?.as_bytes();
    match after {
        [b's' | b't' | b'm' | b'd', ..] => Some(2),
        [b'r', b'e', ..] | [b'v', b'e', ..] | [b'l', b'l', ..] => Some(3),
        _ => None,
    }
}

/// Bytes at the start of a text that are characters of one kind.
fn run(text: &str, kind: Kind) -> usize {
    text.char_indices().find(|(_, character)| kind_of(*character) != kind).map_or(text.len(), |(at, _)| at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cut(text: &str) -> Vec<&str> {
        pieces(text).collect()
    }

    #[test]
    fn words_keep_the_space_before_them() {
        assert_eq!(
            cut("We're 12 cats,  aren't we? "),
            ["We", "'re", " 12", " cats", ",", " ", " aren", "'t", " we", "?", " "]
        );
        assert_eq!(cut("a\n\n b\t"), ["a", "\n\n", " b", "\t"]);
        assert_eq!(cut("''s 's 'S"), ["''", "s", " '", "s", " '", "S"]);
        assert_eq!(cut("  \u{3000}é٣"), ["  ", "\u{3000}", "é", "٣"]);
        assert!(cut("").is_empty());
    }
}
