//! What other programs wrote becomes the documents that they meant, or is refused.

use proptest::prelude::*;

use super::*;
use crate::folder::CorpusFolder;

struct Desk {
    folder: tempfile::TempDir,
}

impl Desk {
    fn new() -> Desk {
        Desk { folder: tempfile::tempdir().unwrap() }
    }

    fn write(&self, name: &str, contents: &[u8]) {
        std::fs::write(self.folder.path().join(name), contents).unwrap();
    }

    fn import(&self, width: Width) -> Result<Vec<Vec<u32>>, BuildError> {
        let options = Options {
            input: self.folder.path().join("a.bin"),
            width,
            tokeniser: Tokeniser::Ids { vocabulary: 1000, end_of_text: 999 },
            out: self.folder.path().join("out"),
            shard_tokens: 4,
            restart: self.folder.path().join("out").exists(),
        };
        import(&options, &mut |_| ControlFlow::Continue(()))?;
        let corpus = CorpusFolder::open(&options.out).unwrap();
        assert_eq!(corpus.tokeniser, options.tokeniser);
        let shards = corpus.shards().unwrap();
        let document = |index| {
            let mut tokens = Vec::new();
            shards.read(shards.document(index).unwrap(), &mut tokens);
            tokens
        };
        Ok((0..shards.documents()).map(document).collect())
    }
}

fn u16s(tokens: &[u16]) -> Vec<u8> {
    tokens.iter().flat_map(|token| token.to_le_bytes()).collect()
}

fn index(code: u8, sequences: &[(i32, i64)], bounds: &[i64]) -> Vec<u8> {
    let mut bytes = b"MMIDIDX\0\0".to_vec();
    bytes.extend(1u64.to_le_bytes());
    bytes.push(code);
    bytes.extend((sequences.len() as u64).to_le_bytes());
    bytes.extend((bounds.len() as u64).to_le_bytes());
    bytes.extend(sequences.iter().flat_map(|sequence| sequence.0.to_le_bytes()));
    bytes.extend(sequences.iter().flat_map(|sequence| sequence.1.to_le_bytes()));
    bytes.extend(bounds.iter().flat_map(|bound| bound.to_le_bytes()));
    bytes
}

#[test]
fn nano_gpt_tokens_are_cut_at_end_of_text() {
    let desk = Desk::new();
    desk.write("a.bin", &u16s(&[999, 1, 2, 999, 999, 3, 999, 4, 5, 6]));
    assert_eq!(desk.import(Width::U16).unwrap(), [vec![1, 2], vec![3], vec![4, 5, 6]]);
    let wide: Vec<u8> = [7u32, 999, 8].iter().flat_map(|token| token.to_le_bytes()).collect();
    desk.write("a.bin", &wide);
    assert_eq!(desk.import(Width::U32).unwrap(), [[7], [8]]);
}

#[test]
fn tokens_without_any_end_of_text_are_cut_into_documents() {
    let desk = Desk::new();
    desk.write("a.bin", &u16s(&[5; 150_000]));
    let lengths: Vec<usize> = desk.import(Width::U16).unwrap().iter().map(Vec::len).collect();
    assert_eq!(
        lengths,
        [LONGEST_DOCUMENT_TOKENS, LONGEST_DOCUMENT_TOKENS, 150_000 - 2 * LONGEST_DOCUMENT_TOKENS]
    );
}

#[test]
fn megatron_documents_are_their_sequences_without_end_of_text() {
    let desk = Desk::new();
    desk.write("a.bin", &u16s(&[1, 2, 3, 999, 4, 999]));
    desk.write("a.idx", &index(8, &[(2, 0), (2, 4), (2, 8)], &[0, 2, 3]));
    assert_eq!(desk.import(Width::U32).unwrap(), [vec![1, 2, 3], vec![4]]);
    let signed: Vec<u8> = [7i32, 8, -1].iter().flat_map(|token| token.to_le_bytes()).collect();
    desk.write("a.bin", &signed);
    desk.write("a.idx", &index(4, &[(2, 0)], &[0, 1]));
    assert_eq!(desk.import(Width::U16).unwrap(), [[7, 8]]);
    desk.write("a.idx", &index(4, &[(3, 0)], &[0, 1]));
    let refused = desk.import(Width::U16).unwrap_err().to_string();
    assert!(refused.contains("token 2 is -1, outside the vocabulary of 1000"), "{refused}");
}

#[test]
fn what_does_not_fit_together_is_refused() {
    let parse = |bytes: &[u8]| Index::parse(bytes, 8).unwrap_err();
    assert_eq!(parse(b""), IndexError::Short);
    assert_eq!(parse(&[7; 40]), IndexError::NotAnIndex);
    assert_eq!(parse(&index(6, &[], &[0])), IndexError::Kind(6));
    assert_eq!(parse(&index(8, &[(3, 4)], &[0, 1])), IndexError::SequenceOutside);
    assert_eq!(parse(&index(8, &[(-1, 4)], &[0, 1])), IndexError::SequenceOutside);
    assert_eq!(parse(&index(8, &[(i32::MAX, i64::MAX)], &[0, 1])), IndexError::SequenceOutside);
    for bounds in [&[0, 2][..], &[0], &[1, 1], &[], &[0, -1, 1]] {
        assert_eq!(parse(&index(8, &[(1, 4)], bounds)), IndexError::DocumentOutside, "{bounds:?}");
    }
    let mut many = index(8, &[], &[0]);
    many[18..26].copy_from_slice(&u64::MAX.to_le_bytes());
    assert_eq!(parse(&many), IndexError::Short);

    let desk = Desk::new();
    desk.write("a.bin", &[1, 2, 3]);
    assert!(desk.import(Width::U16).unwrap_err().to_string().contains("--width"));
    desk.write("a.bin", &u16s(&[1, 2000]));
    let refused = desk.import(Width::U16).unwrap_err().to_string();
    assert!(refused.contains("token 1 is 2000"), "{refused}");
    assert!(!desk.folder.path().join("out/corpus.json").exists());
}

proptest! {
    #[test]
    fn any_bytes_are_an_index_or_refused(bytes: Vec<u8>, length: u64) {
        let _ = Index::parse(&bytes, length);
    }

    #[test]
    fn a_damaged_index_never_leads_outside(at in 9usize..70, value: u8, length in 0u64..40) {
        let mut bytes = index(8, &[(2, 0), (2, 4), (2, 8)], &[0, 2, 3]);
        bytes[at] = value;
        if let Ok(index) = Index::parse(&bytes, length) {
            let sequences: Vec<_> = index.documents().flat_map(|range| index.sequences(range)).collect();
            prop_assert!(sequences.iter().all(|sequence| sequence.end as u64 <= length));
        }
    }
}
