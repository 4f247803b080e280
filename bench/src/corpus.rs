//! `corpus`: text to tokens on disk by Starling and by the Python package `tokenizers`, with the same tokenizer.json.
//!
//! Both read the same .jsonl, take the text out of each record, encode it, and write the ids with end of text behind
//! each document. The two take turns; what counts is the ratio of the medians. The ids must be equal.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use starling_corpus::build::{Options, TokeniserChoice, build};
use starling_corpus::{CorpusFolder, SyntheticConfig, World};

use super::{Arguments, Figure, Must};
use crate::python;
use xtask::tool::{output, program, root};

/// Text that is tokenised; a shorter one is repeated.
const TEXT_BYTES: usize = 32 << 20;
/// Both sides take so many turns.
const TURNS: usize = 3;
const VOCABULARY: usize = 8192;

/// The files of the benchmark, and the tokenizer.json that both sides use.
struct Bench {
    directory: PathBuf,
    python: PathBuf,
    input: PathBuf,
    text_bytes: u64,
}

pub fn run(arguments: &Arguments) -> Result<Vec<Figure>> {
    let directory = root().join("target/bench/corpus");
    fs::create_dir_all(&directory).with_context(|| format!("cannot make {}", directory.display()))?;
    let input = directory.join("text.jsonl");
    let text_bytes = write_input(&input, arguments.text.as_deref())?;
    let bench =
        Bench { python: python::environment(&["tokenizers", "numpy"])?, directory, input, text_bytes };
    bench.starling(
        "trained",
        2,
        TokeniserChoice::Train { vocabulary: VOCABULARY, sample_bytes: 8 << 20, seed: 0 },
    )?;
    let plain = fs::read_to_string(bench.directory.join("trained/tokenizer.json"))?;
    // A normaliser makes it a chain that has no path of its own.
    let other = plain.replacen("\"normalizer\": null", "\"normalizer\": {\"type\": \"NFC\"}", 1);
    ensure!(other != plain, "the tokenizer.json is not written as it was");
    let mut figures = Vec::new();
    for (name, json, threads) in
        [("byte-level", &plain, 1), ("byte-level", &plain, 2), ("with NFC", &other, 2)]
    {
        figures.extend(bench.compare(name, json, threads)?);
    }
    Ok(figures)
}

/// Lines of a text, or paragraphs of a generated language, as records; how many bytes of text they hold.
fn write_input(path: &Path, text: Option<&Path>) -> Result<u64> {
    let text = match text {
        Some(path) => fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?,
        None => {
            let world = World::new(&SyntheticConfig::default());
            (0..20_000).map(|index| world.tokeniser().decode(&world.document(index)) + "\n").collect()
        }
    };
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    ensure!(!lines.is_empty(), "the text is empty");
    let (mut records, mut bytes) = (String::new(), 0);
    for line in lines.iter().cycle() {
        if bytes >= TEXT_BYTES {
            break;
        }
        bytes += line.len();
        records.push_str(&serde_json::json!({"text": line}).to_string());
        records.push('\n');
    }
    fs::write(path, records)?;
    Ok(bytes as u64)
}

impl Bench {
    fn compare(&self, name: &str, json: &str, threads: usize) -> Result<Vec<Figure>> {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        fs::write(self.directory.join("tokenizer.json"), json)?;
        for turn in 1..=TURNS {
            eprintln!("{name}, {threads} threads, turn {turn} of {TURNS}");
            theirs.push(self.python(threads)?);
            ours.push(self.starling(
                "ours",
                threads,
                TokeniserChoice::Json { json: json.into(), end_of_text: None },
            )?);
        }
        let equal = self.ids_are_equal()?;
        let (ours, theirs) = (median(ours), median(theirs));
        let mb = self.text_bytes as f64 / 1e6;
        let figure = |what: &str, value, unit: &str, must| Figure {
            name: format!("{name}, {threads} threads: {what}"),
            value,
            unit: unit.into(),
            must,
        };
        Ok(vec![
            figure("Python", mb / theirs, "MB/s", None),
            figure("Starling", mb / ours, "MB/s", None),
            figure("Starling ÷ Python", theirs / ours, "", Some(Must::AtLeast(1.0))),
            figure("equal ids", f64::from(equal), "", Some(Must::NearOne(0.0))),
        ])
    }

    /// Seconds of a build, the reading of the tokenizer.json and the syncing of the shards included.
    fn starling(&self, out: &str, threads: usize, tokeniser: TokeniserChoice) -> Result<f64> {
        let options = Options {
            inputs: vec![self.input.display().to_string()],
            out: self.directory.join(out),
            tokeniser,
            form: None,
            split: None,
            field: "text".into(),
            skip_bad: false,
            shard_tokens: 1 << 25,
            threads,
            restart: true,
        };
        if options.out.exists() {
            fs::remove_dir_all(&options.out)?;
        }
        let start = Instant::now();
        build(&options, &mut |_| ControlFlow::Continue(()))?;
        Ok(start.elapsed().as_secs_f64())
    }

    /// Seconds that the script measured, without its start and imports.
    fn python(&self, threads: usize) -> Result<f64> {
        let script = root().join("bench/python/tokenise.py");
        let mut command = program(&self.python);
        command.env("PYTHONDONTWRITEBYTECODE", "1").env("RAYON_NUM_THREADS", threads.to_string());
        command.env("TOKENIZERS_PARALLELISM", if threads > 1 { "true" } else { "false" });
        command.arg(script).arg(self.directory.join("tokenizer.json")).arg(&self.input);
        let told = output(command.arg(self.directory.join("theirs.bin")))?;
        told.trim().parse().with_context(|| format!("the script printed {told:?}"))
    }

    fn ids_are_equal(&self) -> Result<bool> {
        let corpus = CorpusFolder::open(&self.directory.join("ours"))?;
        let shards = corpus.shards()?;
        let theirs = fs::read(self.directory.join("theirs.bin"))?;
        let theirs: Vec<u32> =
            theirs.as_chunks::<2>().0.iter().map(|&id| u32::from(u16::from_le_bytes(id))).collect();
        let mut ours = Vec::with_capacity(theirs.len());
        for document in (0..shards.documents()).filter_map(|index| shards.document(index)) {
            shards.read(document, &mut ours);
            ours.push(corpus.tokeniser.end_of_text());
        }
        Ok(ours == theirs)
    }
}

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}
