//! A build gives the same bytes whatever the number of threads and whatever interrupted it.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;

use super::*;
use crate::folder::{CorpusFolder, LeftOut};

/// A folder with inputs of every kind, about 2.5 MB of text.
struct Desk {
    folder: tempfile::TempDir,
}

impl Desk {
    fn new() -> Desk {
        let desk = Desk { folder: tempfile::tempdir().unwrap() };
        std::fs::create_dir(desk.path("in")).unwrap();
        desk.write("in/a.txt", paragraphs(0, 8000).join("\n\n").as_bytes());
        desk.write("in/b.jsonl", records(8000, 5000).as_bytes());
        desk.write("in/c.jsonl.gz", &gzip(records(13_000, 5000).as_bytes()));
        desk.write("in/d.txt.zst", &zstandard(paragraphs(18_000, 5000).join("\n\n").as_bytes()));
        desk
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, contents: &[u8]) {
        std::fs::write(self.path(name), contents).unwrap();
    }

    fn options(&self, out: &str) -> Options {
        Options {
            inputs: vec![self.path("in").display().to_string()],
            out: self.path(out),
            tokeniser: TokeniserChoice::Train { vocabulary: 600, sample_bytes: 400_000, seed: 1 },
            form: None,
            split: None,
            field: "text".into(),
            skip_bad: false,
            shard_tokens: 60_000,
            threads: 2,
            restart: false,
        }
    }

    fn build(&self, options: &Options) -> Result<Report, BuildError> {
        build(options, &mut |_| ControlFlow::Continue(()))
    }

    /// Every file of a corpus folder and its contents.
    fn contents(&self, out: &str) -> BTreeMap<String, Vec<u8>> {
        let entries = std::fs::read_dir(self.path(out)).unwrap().map(Result::unwrap);
        entries
            .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
            .collect()
    }
}

fn paragraphs(from: usize, count: usize) -> Vec<String> {
    let line =
        |i: usize| format!("Paragraph {i} tells of the {} café and its {} guests.", i % 17, i * i % 1009);
    (from..from + count).map(|i| format!("{}\n{}", line(i), line(i + 1))).collect()
}

fn records(from: usize, count: usize) -> String {
    let record = |text: String| serde_json::json!({"id": 1, "text": text}).to_string() + "\n";
    paragraphs(from, count).into_iter().map(record).collect()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstandard(bytes: &[u8]) -> Vec<u8> {
    let level = ruzstd::encoding::CompressionLevel::Fastest;
    let (first, second) = bytes.split_at(bytes.len() / 2);
    // Two frames, and one to be skipped between them.
    let frame = |bytes: &[u8]| ruzstd::encoding::compress_to_vec(bytes, level);
    let skipped: &[u8] = &[0x50, 0x2A, 0x4D, 0x18, 3, 0, 0, 0, 1, 2, 3];
    [&frame(first)[..], skipped, &frame(second)].concat()
}

#[test]
fn every_text_is_in_the_corpus_in_order() {
    let desk = Desk::new();
    let report = desk.build(&desk.options("out")).unwrap();
    let corpus = CorpusFolder::open(&desk.path("out")).unwrap();
    let shards = corpus.shards().unwrap();
    let texts = paragraphs(0, 23_000);
    assert_eq!(shards.documents(), texts.len() as u64);
    for (index, text) in (0..).zip(&texts) {
        let mut tokens = Vec::new();
        shards.read(shards.document(index).unwrap(), &mut tokens);
        assert_eq!(&corpus.tokeniser.decode(&tokens), text);
    }
    assert_eq!(report.manifest, corpus.manifest);
    assert_eq!(report.manifest.vocabulary, 600);
    assert_eq!(report.manifest.text_bytes, texts.iter().map(|text| text.len() as u64).sum::<u64>());
    assert!(report.manifest.shards.len() > 2, "{:?}", report.manifest.shards);
    assert!(!desk.path("out/building").exists());
}

#[test]
fn the_number_of_threads_does_not_matter() {
    let desk = Desk::new();
    for threads in [1, 2, 4] {
        let out = format!("out{threads}");
        desk.build(&Options { threads, ..desk.options(&out) }).unwrap();
        assert!(desk.contents(&out) == desk.contents("out1"), "{threads} threads");
    }
}

#[test]
fn a_build_that_was_stopped_anywhere_goes_on_to_the_same_bytes() {
    let desk = Desk::new();
    desk.build(&desk.options("whole")).unwrap();
    let (mut stops, mut calls) = (0, 0);
    loop {
        stops += 1;
        let mut here = 0;
        let outcome = build(&desk.options("stopped"), &mut |_| {
            (here, calls) = (here + 1, calls + 1);
            if here > stops { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        match outcome {
            Err(BuildError::Interrupted) => assert!(!desk.path("stopped/corpus.json").exists()),
            outcome => {
                assert!(outcome.unwrap().resumed > 0);
                break;
            }
        }
    }
    assert!(stops > 3, "{stops}");
    assert!(desk.contents("stopped") == desk.contents("whole"));
}

#[test]
fn a_shard_that_was_damaged_since_is_built_again() {
    let desk = Desk::new();
    desk.build(&desk.options("whole")).unwrap();
    let mut seen = 0;
    let stopped = build(&desk.options("out"), &mut |progress| {
        seen = seen.max(progress.tokens);
        if seen > 150_000 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    assert!(matches!(stopped, Err(BuildError::Interrupted)));
    desk.write("out/00001.shard", b"STARSHRD");
    assert_eq!(desk.build(&desk.options("out")).unwrap().resumed, 1);
    assert!(desk.contents("out") == desk.contents("whole"));
}

#[test]
fn another_plan_in_the_same_folder_is_refused_until_told_to_restart() {
    let desk = Desk::new();
    let stopped = build(&desk.options("out"), &mut |_| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(BuildError::Interrupted)));
    let bytes = Options { tokeniser: TokeniserChoice::Bytes, ..desk.options("out") };
    let refused = desk.build(&bytes).unwrap_err().to_string();
    assert!(refused.contains("another tokeniser") && refused.contains("--restart"), "{refused}");
    desk.write("in/a.txt", b"another text\n\nand another");
    let refused = desk.build(&desk.options("out")).unwrap_err().to_string();
    assert!(refused.contains("a.txt has changed"), "{refused}");
    assert_eq!(desk.build(&Options { restart: true, ..bytes.clone() }).unwrap().manifest.vocabulary, 257);
    assert!(matches!(desk.build(&bytes), Err(BuildError::Finished { .. })));
    assert!(!desk.path("out/building").exists() && !desk.path("out/tokenizer.json").exists());
    let again = Options { restart: true, ..desk.options("out") };
    assert_eq!(desk.build(&again).unwrap().manifest.vocabulary, 600);
}

#[test]
fn a_folder_of_something_else_is_left_alone() {
    let desk = Desk::new();
    std::fs::create_dir(desk.path("out")).unwrap();
    desk.write("out/thesis.txt", b"x");
    for restart in [false, true] {
        let options = Options { restart, ..desk.options("out") };
        assert!(matches!(desk.build(&options), Err(BuildError::NotEmpty { .. })));
    }
    assert_eq!(desk.contents("out").len(), 1);
}

#[test]
fn bad_documents_are_named_with_file_and_line_or_counted() {
    let desk = Desk::new();
    let bad = |name: &str, contents: &[u8]| {
        let input = desk.path(name);
        std::fs::write(&input, contents).unwrap();
        let options = Options {
            inputs: vec![input.display().to_string()],
            tokeniser: TokeniserChoice::Bytes,
            restart: desk.path("out").exists(),
            ..desk.options("out")
        };
        let told = desk.build(&options).unwrap_err().to_string();
        assert!(!desk.path("out/corpus.json").exists());
        let left_out = desk
            .build(&Options { skip_bad: true, restart: true, ..options })
            .map(|report| report.manifest.left_out);
        std::fs::remove_dir_all(desk.path("out")).unwrap();
        (told, left_out)
    };
    let (told, left_out) =
        bad("bad.jsonl", b"{\"text\": \"a\"}\n\n{\"text\": \n{\"body\": 1}\n{\"text\": \"\"}\n");
    assert!(told.contains("bad.jsonl, line 3: the line is not a JSON object"), "{told}");
    assert_eq!(left_out.unwrap(), LeftOut { not_json: 1, no_text: 1, empty: 1, ..LeftOut::default() });
    let (told, left_out) = bad("bad.txt", b"one\n\ntwo\nthree\n\n\xFFfour\n\nfive");
    assert!(told.contains("bad.txt, line 6: it is not UTF-8"), "{told}");
    assert_eq!(left_out.unwrap(), LeftOut { not_utf8: 1, ..LeftOut::default() });
    let whole = gzip(records(0, 3000).as_bytes());
    let (told, left_out) = bad("cut.jsonl.gz", &whole[..whole.len() / 2]);
    assert!(told.contains("cut.jsonl.gz cannot be read to its end"), "{told}");
    assert!(matches!(left_out, Err(BuildError::Broken { .. })));
    let whole = zstandard(records(0, 3000).as_bytes());
    let (told, _) = bad("cut.jsonl.zst", &whole[..whole.len() - 100]);
    assert!(told.contains("cut.jsonl.zst cannot be read to its end"), "{told}");
    let (told, _) = bad("empty.txt", b" \n\n");
    assert!(told.contains("no document with text"), "{told}");
}

#[test]
fn two_builders_do_not_share_a_folder() {
    let desk = Desk::new();
    let inner = std::cell::Cell::new(false);
    let options = desk.options("out");
    build(&options, &mut |_| {
        if !inner.replace(true) {
            assert!(matches!(desk.build(&options), Err(BuildError::Busy { .. })));
        }
        ControlFlow::Continue(())
    })
    .unwrap();
    assert!(inner.get());
}

#[test]
fn a_run_trains_on_a_folder_and_text_beside_it_with_one_tokeniser() {
    let desk = Desk::new();
    desk.build(&desk.options("out")).unwrap();
    desk.write("more.txt", b"The 3 guests of the caf\xC3\xA9.\n\nAnother.");
    let source = |path: &str| crate::SourceConfig { path: path.into(), weight: 1.0, split: Split::BlankLine };
    let config = crate::DataConfig { sources: vec![source("out"), source("more.txt")], ..Default::default() };
    let open = |config: &crate::DataConfig| crate::open(config, desk.folder.path(), &desk.path("cache"));
    let corpus = open(&config).unwrap();
    assert_eq!((corpus.tokeniser.vocabulary(), corpus.tokeniser.end_of_text()), (600, 0));
    let mut tokens = Vec::new();
    corpus.sources[1].0.read(0..1000, &mut tokens);
    assert_eq!(corpus.tokeniser.decode(&tokens), "The 3 guests of the café.Another.");
    let alone = crate::DataConfig { sources: vec![source("out")], ..Default::default() };
    let before = open(&alone).unwrap().content_hash();
    // Another tokeniser over the same shards is another corpus, and damage is noticed.
    let json = std::fs::read_to_string(desk.path("out/tokenizer.json")).unwrap();
    desk.write("out/tokenizer.json", (json + "\n").as_bytes());
    let refused = open(&alone).unwrap_err().to_string();
    assert!(refused.contains("tokenizer.json is not the one"), "{refused}");
    let bytes = Options { tokeniser: TokeniserChoice::Bytes, ..desk.options("bytes") };
    desk.build(&bytes).unwrap();
    let mixed =
        crate::DataConfig { sources: vec![source("bytes"), source("more.txt")], ..Default::default() };
    assert_ne!(open(&mixed).unwrap().content_hash(), before);
}

#[test]
fn an_unfinished_folder_is_not_a_corpus() {
    let desk = Desk::new();
    let _ = build(&desk.options("out"), &mut |_| ControlFlow::Break(()));
    let refused = CorpusFolder::open(&desk.path("out")).unwrap_err().to_string();
    assert!(refused.contains("its build was interrupted"), "{refused}");
    assert!(CorpusFolder::open(Path::new("/nowhere")).is_err());
}
