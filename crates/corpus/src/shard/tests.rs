//! A shard says what was written, and nothing else is accepted as one.

use std::path::PathBuf;

use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

/// A folder with one shard in it.
struct Written {
    folder: TempDir,
    path: PathBuf,
}

fn written(vocabulary: u32, documents: &[Vec<u32>]) -> Written {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.shard");
    let mut writer = ShardWriter::create(&path, vocabulary).unwrap();
    for document in documents {
        writer.push(document).unwrap();
    }
    writer.finish().unwrap();
    Written { folder, path }
}

fn contents(shard: &Shard) -> Vec<Vec<u32>> {
    let read = |index| {
        let mut tokens = Vec::new();
        shard.read(shard.document(index).unwrap(), &mut tokens);
        tokens
    };
    (0..shard.documents()).map(read).collect()
}

fn files_in(folder: &Path) -> Vec<String> {
    std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect()
}

#[test]
fn nothing_but_the_finished_file_is_left() {
    let written = written(9, &[vec![1, 2], vec![3]]);
    assert_eq!(files_in(written.folder.path()), ["a.shard"]);
}

#[test]
fn an_unfinished_writer_leaves_nothing_and_an_old_shard_alone() {
    let written = written(9, &[vec![1, 2]]);
    let mut writer = ShardWriter::create(&written.path, 9).unwrap();
    writer.push(&[5]).unwrap();
    drop(writer);
    assert_eq!(files_in(written.folder.path()), ["a.shard"]);
    assert_eq!(contents(&Shard::open(&written.path).unwrap()), [vec![1, 2]]);
}

#[test]
fn two_writers_of_one_shard_do_not_disturb_each_other() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("a.shard");
    let mut writers = [ShardWriter::create(&path, 9).unwrap(), ShardWriter::create(&path, 9).unwrap()];
    for document in [[1, 2], [3, 4]] {
        writers.iter_mut().for_each(|writer| writer.push(&document).unwrap());
    }
    for writer in writers {
        assert_eq!(contents(&writer.finish().unwrap()), [[1, 2], [3, 4]]);
    }
    assert_eq!(files_in(folder.path()), ["a.shard"]);
}

#[test]
fn a_token_outside_the_vocabulary_is_not_written() {
    let folder = TempDir::new().unwrap();
    let mut writer = ShardWriter::create(&folder.path().join("a.shard"), 9).unwrap();
    writer.push(&[8]).unwrap();
    let error = writer.push(&[3, 9]).unwrap_err();
    assert!(matches!(error, ShardError::TokenOutside { token: 9, document: 1, vocabulary: 9 }), "{error}");
    assert_eq!(contents(&writer.finish().unwrap()), [[8]]);
}

#[test]
fn another_version_is_refused_by_number() {
    let written = written(9, &[vec![1]]);
    let mut bytes = std::fs::read(&written.path).unwrap();
    bytes[8] = 7;
    let message = Shard::parse(bytes).unwrap_err().to_string();
    assert!(message.contains("format version 7") && message.contains("reads version 1"), "{message}");
}

#[test]
fn text_is_not_taken_for_a_shard() {
    assert!(matches!(Shard::parse(b"Once upon a time".to_vec()), Err(ShardError::NotAShard)));
    assert!(matches!(Shard::parse(Vec::new()), Err(ShardError::NotAShard)));
}

#[test]
fn an_error_names_the_file() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("empty.shard");
    std::fs::write(&path, b"").unwrap();
    assert!(Shard::open(&path).unwrap_err().to_string().contains("empty.shard"));
    assert!(Shard::open(&folder.path().join("none")).unwrap_err().to_string().contains("none"));
}

/// A file whose checksums are right and whose contents are not: only a hostile writer makes one.
fn forged(vocabulary: u32, tokens: &[u16], bounds: &[u64], padding_byte: u8) -> Vec<u8> {
    let mut section: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
    section.resize(section.len().next_multiple_of(64), padding_byte);
    let bounds: Vec<u8> = bounds.iter().flat_map(|bound| bound.to_le_bytes()).collect();
    let header = Header {
        vocabulary,
        tokens: tokens.len() as u64,
        documents: bounds.len() as u64 / 8,
        tokens_hash: blake3::hash(&section),
        bounds_hash: blake3::hash(&bounds),
    };
    [&header.to_bytes()[..], &section, &bounds].concat()
}

#[test]
fn a_forged_shard_is_refused_though_its_checksums_hold() {
    let refusal = |bytes| Shard::parse(bytes).unwrap_err().to_string();
    assert!(Shard::parse(forged(9, &[1, 2, 3], &[1, 3], 0)).is_ok());
    assert!(refusal(forged(9, &[1, 9, 3], &[1, 3], 0)).contains("outside its vocabulary"));
    assert!(refusal(forged(9, &[1, 2, 3], &[2, 1, 3], 0)).contains("ends before it starts"));
    assert!(refusal(forged(9, &[1, 2, 3], &[1, u64::MAX], 0)).contains("do not add up"));
    assert!(refusal(forged(9, &[1, 2, 3], &[1, 2], 0)).contains("do not add up"));
    assert!(refusal(forged(9, &[1, 2, 3], &[1, 3], 7)).contains("between its sections"));
}

#[test]
fn reading_past_the_end_stops_at_the_end() {
    let shard = Shard::parse(forged(9, &[1, 2, 3], &[1, 3], 0)).unwrap();
    let mut tokens = vec![8];
    shard.read(1..u64::MAX, &mut tokens);
    shard.read(u64::MAX..u64::MAX, &mut tokens);
    #[allow(clippy::reversed_empty_ranges)]
    shard.read(2..1, &mut tokens);
    assert_eq!(tokens, [8, 2, 3]);
    assert_eq!(shard.document(2), None);
}

#[test]
fn the_content_hash_is_of_the_contents_and_not_of_the_place() {
    let hash = |documents: &[Vec<u32>]| Shard::open(&written(9, documents).path).unwrap().content_hash();
    assert_eq!(hash(&[vec![1], vec![2]]), hash(&[vec![1], vec![2]]));
    assert_ne!(hash(&[vec![1], vec![2]]), hash(&[vec![1, 2]]));
    assert_ne!(hash(&[vec![1], vec![2]]), hash(&[vec![1], vec![3]]));
}

fn vocabulary_and_documents() -> impl Strategy<Value = (u32, Vec<Vec<u32>>)> {
    prop_oneof![1u32..300, Just(1 << 16), (1u32 << 16)..]
        .prop_flat_map(|vocabulary| (Just(vocabulary), prop::collection::vec(document(vocabulary), 0..20)))
}

fn document(vocabulary: u32) -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(0..vocabulary, 0..70)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn what_is_written_is_read((vocabulary, documents) in vocabulary_and_documents()) {
        let written = written(vocabulary, &documents);
        let shard = Shard::open(&written.path).unwrap();
        prop_assert_eq!(shard.vocabulary(), vocabulary);
        prop_assert_eq!(shard.tokens(), documents.iter().map(|document| document.len() as u64).sum::<u64>());
        prop_assert_eq!(contents(&shard), documents);
        let parsed = Shard::parse(std::fs::read(&written.path).unwrap()).unwrap();
        prop_assert_eq!(parsed.content_hash(), shard.content_hash());
    }

    #[test]
    fn an_altered_shard_is_refused(
        (vocabulary, documents) in vocabulary_and_documents(),
        place: prop::sample::Index,
        flip in 1u8..,
        cut: prop::sample::Index,
    ) {
        let bytes = std::fs::read(written(vocabulary, &documents).path).unwrap();
        let mut flipped = bytes.clone();
        flipped[place.index(bytes.len())] ^= flip;
        prop_assert!(Shard::parse(flipped).is_err());
        prop_assert!(Shard::parse(bytes[..cut.index(bytes.len())].to_vec()).is_err());
        prop_assert!(Shard::parse([bytes, vec![0]].concat()).is_err());
    }
}

proptest! {
    #[test]
    fn arbitrary_bytes_are_refused(bytes: Vec<u8>) {
        prop_assert!(Shard::parse(bytes).is_err());
    }

    #[test]
    fn arbitrary_headers_with_right_checksums_do_not_panic(
        vocabulary: u32, tokens: u64, documents: u64, rest in prop::collection::vec(any::<u8>(), 0..200)
    ) {
        let (tokens_hash, bounds_hash) = (blake3::hash(&rest), blake3::hash(&[]));
        let header = Header { vocabulary, tokens, documents, tokens_hash, bounds_hash };
        let _ = Shard::parse([&header.to_bytes()[..], &rest].concat());
    }

    #[test]
    fn forged_contents_never_panic(
        vocabulary in 0u32..300, tokens: Vec<u16>, bounds: Vec<u64>, padding_byte: u8
    ) {
        let _ = Shard::parse(forged(vocabulary, &tokens, &bounds, padding_byte));
    }
}
