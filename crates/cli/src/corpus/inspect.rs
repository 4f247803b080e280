//! `starling corpus inspect`.

use std::fmt::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use starling_corpus::folder::{CorpusFolder, TokeniserEntry};
use starling_corpus::{Shards, Tokeniser};

use super::build::told_left_out;
use crate::words;

/// What a corpus holds: sizes, lengths of documents, and the first of them as text
///
/// Every shard is checked against its hash.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  starling corpus inspect my-corpus --documents 5")]
pub struct Arguments {
    /// A folder made by `starling corpus build`
    folder: PathBuf,
    /// Documents to show
    #[arg(long, default_value_t = 3)]
    documents: u64,
    /// Tokens of each to show
    #[arg(long, default_value_t = 80)]
    tokens: u64,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let corpus = CorpusFolder::open(&arguments.folder)?;
    let shards = corpus.shards()?;
    let manifest = &corpus.manifest;
    let mut out = String::new();
    let mut say = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<16} {value}");
    };
    say("tokens", manifest.tokens.to_string());
    say("documents", manifest.documents.to_string());
    say("shards", manifest.shards.len().to_string());
    say("vocabulary", format!("{} ({})", manifest.vocabulary, named(&manifest.tokeniser)));
    if manifest.text_bytes > 0 {
        say("text", words::bytes(manifest.text_bytes));
        say("bytes a token", format!("{:.3}", manifest.text_bytes as f64 / manifest.tokens.max(1) as f64));
    }
    if let Some(told) = told_left_out(&manifest.left_out) {
        say("left out", told);
    }
    say("hash", shards.content_hash().to_hex().to_string());
    out.push_str(&histogram(&lengths(&shards)));
    for index in 0..arguments.documents.min(shards.documents()) {
        out.push_str(&shown(&shards, &corpus.tokeniser, index, arguments.tokens));
    }
    words::show(&out)
}

fn named(tokeniser: &TokeniserEntry) -> String {
    match tokeniser {
        TokeniserEntry::Bytes => "bytes".into(),
        TokeniserEntry::HuggingFace { end_of_text, .. } => {
            format!("tokenizer.json, documents end with {end_of_text}")
        }
        TokeniserEntry::Ids { end_of_text } => {
            format!("ids without a tokeniser, documents end with {end_of_text}")
        }
    }
}

/// Documents by length: entry n counts those of 2ⁿ⁻¹ to 2ⁿ − 1 tokens, entry 0 those of none.
fn lengths(shards: &Shards) -> Vec<u64> {
    let mut counts = Vec::new();
    for document in (0..shards.documents()).filter_map(|index| shards.document(index)) {
        let bin = (u64::BITS - (document.end - document.start).leading_zeros()) as usize;
        if counts.len() <= bin {
            counts.resize(bin + 1, 0);
        }
        counts[bin] += 1;
    }
    counts
}

fn histogram(counts: &[u64]) -> String {
    const WIDTH: u64 = 40;
    let most = counts.iter().copied().max().unwrap_or(0).max(1);
    let first = counts.iter().position(|&count| count > 0).unwrap_or(0);
    let mut out = String::from("\ntokens a document\n");
    for (bin, &count) in counts.iter().enumerate().skip(first) {
        let range = match bin {
            0 => "0".to_string(),
            bin => format!("{} – {}", 1u64 << (bin - 1), (1u64 << (bin - 1)) * 2 - 1),
        };
        let bar = "█".repeat((count * WIDTH).div_ceil(most) as usize);
        let _ = writeln!(out, "{range:>19} {count:>10} {bar}");
    }
    out
}

fn shown(shards: &Shards, tokeniser: &Tokeniser, index: u64, most: u64) -> String {
    let Some(range) = shards.document(index) else { return String::new() };
    let length = range.end - range.start;
    let mut tokens = Vec::new();
    shards.read(range.start..range.end.min(range.start + most), &mut tokens);
    let more = if length > most { " …" } else { "" };
    let text = words::printable(&tokeniser.decode(&tokens)).replace('\n', "\n  ");
    format!("\ndocument {index}, {length} tokens\n  {text}{more}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_shown_by_powers_of_two() {
        let told = histogram(&[0, 2, 0, 4]);
        let lines: Vec<&str> = told.lines().skip(2).collect();
        assert_eq!(lines[0].split_whitespace().take(4).collect::<Vec<_>>(), ["1", "–", "1", "2"]);
        assert_eq!(lines[2].split_whitespace().take(4).collect::<Vec<_>>(), ["4", "–", "7", "4"]);
        assert!(lines[2].ends_with(&"█".repeat(40)) && !lines[0].ends_with(&"█".repeat(21)));
    }
}
