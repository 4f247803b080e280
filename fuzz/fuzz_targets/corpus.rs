//! Any bytes as files that other programs made: refused, or read without leaving them.
#![no_main]

use std::ops::ControlFlow;

use libfuzzer_sys::fuzz_target;
use starling_corpus::build::import::Index;
use starling_corpus::build::{BuildError, Form, Options, TokeniserChoice, build};
use starling_corpus::{CorpusFolder, HuggingFace};

fuzz_target!(|bytes: &[u8]| {
    let Some((&kind, bytes)) = bytes.split_first() else { return };
    match kind % 4 {
        0 => index(bytes),
        1 => drop(str::from_utf8(bytes).map(|json| HuggingFace::parse(json, None))),
        2 => lines(bytes, "in.jsonl"),
        _ => lines(bytes, ["in.jsonl.gz", "in.jsonl.zst"][usize::from(kind / 4 % 2)]),
    }
});

fn index(bytes: &[u8]) {
    let Ok(index) = Index::parse(bytes, 1000) else { return };
    for sequence in index.documents().flat_map(|range| index.sequences(range)) {
        assert!(sequence.end <= 1000);
    }
}

/// What is built of any lines can be opened, and holds what it says.
fn lines(bytes: &[u8], name: &str) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let input = folder.path().join(name);
    std::fs::write(&input, bytes).expect("a small file");
    let options = Options {
        inputs: vec![input.display().to_string()],
        out: folder.path().join("out"),
        tokeniser: TokeniserChoice::Bytes,
        form: Some(Form::Jsonl),
        split: None,
        field: "text".into(),
        skip_bad: true,
        shard_tokens: 100,
        threads: 1,
        restart: false,
    };
    match build(&options, &mut |_| ControlFlow::Continue(())) {
        Ok(report) => {
            let shards =
                CorpusFolder::open(&options.out).expect("it was just built").shards().expect("whole shards");
            assert_eq!(shards.tokens(), report.manifest.tokens);
            assert_eq!(report.manifest.tokens, report.manifest.text_bytes);
        }
        Err(BuildError::Empty | BuildError::Broken { .. } | BuildError::Unreadable { .. }) => {
            assert!(!CorpusFolder::is_one(&options.out));
        }
        Err(error) => panic!("{error}"),
    }
}
