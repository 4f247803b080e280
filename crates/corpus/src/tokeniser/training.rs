//! Learning a byte-level vocabulary from text.

use std::collections::HashSet;

use tokenizers::decoders::DecoderWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, PreTokenizerWrapper, Tokenizer, Trainer};

use super::byte_pairs::char_of;
use super::pieces::pieces;
use super::{HuggingFace, TokeniserError};

/// What a trained tokeniser calls the end of a text, its id 0.
pub const END_OF_TEXT_NAME: &str = "<|endoftext|>";

/// Pairs that occur less often are not merged: they are accidents of the sample.
const LEAST_FREQUENT: u64 = 2;

/// Learns byte-pair merges until there are `vocabulary` ids (fewer if the text has no more to merge).
///
/// Ids: 0 is end of text, then the 256 bytes, then merges. The same texts give the same bytes of JSON, whatever
/// their order and the number of threads: ties are broken by ids.
pub fn train<Text: AsRef<str> + Sync>(
    texts: &[Text],
    vocabulary: usize,
) -> Result<HuggingFace, TokeniserError> {
    let untrained = |why: &dyn std::fmt::Display| TokeniserError::Untrained { why: why.to_string() };
    let least = 257;
    if vocabulary < least {
        return Err(untrained(&format!(
            "a vocabulary of {vocabulary} has no room for the 256 bytes and end of text, which are {least}"
        )));
    }
    let mut trainer = BpeTrainer::builder()
        .vocab_size(vocabulary)
        .min_frequency(LEAST_FREQUENT)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END_OF_TEXT_NAME, true)])
        .initial_alphabet((0..=255).map(char_of).collect::<HashSet<char>>())
        .build();
    let words = |text: &str| Ok(pieces(text).map(|piece| piece.bytes().map(char_of).collect()).collect());
    trainer.feed(texts.iter().map(AsRef::as_ref), words).map_err(|error| untrained(&error))?;
    let mut model = BPE::default();
    let special = trainer.train(&mut model).map_err(|error| untrained(&error))?;
    let byte_level = ByteLevel::new(false, true, true);
    let mut tokenizer = Tokenizer::new(model);
    tokenizer
        .with_pre_tokenizer(Some(PreTokenizerWrapper::ByteLevel(byte_level)))
        .with_decoder(Some(DecoderWrapper::ByteLevel(byte_level)));
    tokenizer.add_special_tokens(special).map_err(|error| untrained(&error))?;
    let json = tokenizer.to_string(true).map_err(|error| untrained(&error))?;
    HuggingFace::parse(&json, Some(END_OF_TEXT_NAME))
}

#[cfg(test)]
mod tests {
    use super::super::Tokeniser;
    use super::*;

    fn texts() -> Vec<String> {
        (0..300)
            .map(|i| format!("the {i} cats of year {} sat on mats, and the dogs barked", 1900 + i % 90))
            .collect()
    }

    #[test]
    fn the_order_of_the_texts_does_not_matter() {
        let forwards = train(&texts(), 320).unwrap();
        let mut backwards = texts();
        backwards.reverse();
        for _ in 0..3 {
            assert_eq!(train(&backwards, 320).unwrap().json(), forwards.json());
        }
    }

    #[test]
    fn ids_are_end_of_text_then_bytes_then_merges() {
        let trained = Tokeniser::HuggingFace(train(&texts(), 320).unwrap());
        assert_eq!((trained.vocabulary(), trained.end_of_text()), (320, 0));
        let tokens = trained.encode("the cats").unwrap();
        assert!(tokens.len() < 4, "{tokens:?}");
        assert!(trained.encode("\u{1F600}").unwrap().iter().all(|&token| (1..257).contains(&token)));
    }

    #[test]
    fn a_vocabulary_smaller_than_the_bytes_is_refused() {
        assert!(train(&texts(), 256).unwrap_err().to_string().contains("no room for the 256 bytes"));
        assert_eq!(Tokeniser::HuggingFace(train(&[""], 257).unwrap()).vocabulary(), 257);
    }
}
