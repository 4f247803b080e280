//! `starling corpus` as a user types it: build, kill, go on, train, ask.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use process::Place;
use starling_corpus::{SyntheticConfig, World};
use starling_model::random::uniform;

/// So many paragraphs of a generated language.
fn paragraphs(count: u64) -> Vec<String> {
    let world = World::new(&SyntheticConfig::default());
    (0..count).map(|index| world.tokeniser().decode(&world.document(index)).replace(" .", ".")).collect()
}

fn records(texts: &[String]) -> String {
    texts.iter().map(|text| serde_json::json!({"id": 7, "text": text}).to_string() + "\n").collect()
}

/// Every file of a corpus and its contents.
fn contents(place: &Place, folder: &str) -> BTreeMap<String, Vec<u8>> {
    let entries = std::fs::read_dir(place.path(folder)).unwrap().map(Result::unwrap);
    entries
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect()
}

const QUICK: &str = "--set train.steps=6 --set train.batch=2 --set train.microbatch=2 --set model.width=16 \
                     --set model.layers=1 --set model.heads=2 --set model.context=32 --set evaluate.every=3";

#[test]
fn a_corpus_is_built_trained_on_and_asked_in_text() {
    let place = Place::new();
    place.write("a.txt", &paragraphs(400).join("\n\n"));
    place.write("b.jsonl", &records(&paragraphs(200)));
    let (out, _) = place.good("corpus build *.txt b.jsonl --out words --vocabulary 400");
    assert!(out.contains("vocabulary 400") && out.contains("starling train words"), "{out}");
    let (out, _) = place.good("corpus inspect words --documents 2");
    assert!(out.contains("600") && out.contains("<|endoftext|>"), "{out}");
    assert!(out.contains(&paragraphs(1)[0][..20]), "{out}");

    let (out, told) = place.good(&format!("train words {QUICK}"));
    assert!(out.contains("bits per byte") && told.contains("it writes:"), "{out}{told}");
    let (out, _) = place.good("generate runs/words --prompt kovo --tokens 20 --seed 4");
    assert!(out.starts_with("kovo"), "{out}");
    place.good("eval runs/words");
    place.write("other.txt", &paragraphs(30).join("\n\n"));
    let (out, _) = place.good("eval runs/words --text other.txt");
    assert!(out.contains("bits per byte"), "{out}");
    let (out, _) = place.good("plan runs/words/run.toml");
    assert!(out.contains("parameters"), "{out}");

    // A run file names the folder; a model knows its tokeniser without it.
    place.write(
        "run.toml",
        "name = \"named\"\nmodel = { context = 32, width = 16, layers = 1, heads = 2 }\ntrain = { steps = 2, batch = 2 }\n\
         data = { sources = [{ path = \"words\" }] }",
    );
    place.good("train run.toml");
    std::fs::rename(place.path("words"), place.path("elsewhere")).unwrap();
    place.good("generate runs/named --prompt kovo --tokens 5");
    let message = place.bad("train run.toml --resume");
    assert!(message.contains("words"), "{message}");
}

#[test]
fn another_tokeniser_is_another_training() {
    let place = Place::new();
    place.write("a.txt", &paragraphs(300).join("\n\n"));
    place.good("corpus build a.txt --out words --vocabulary 300");
    place.good(&format!("train words {QUICK}"));
    std::fs::rename(place.path("words"), place.path("old")).unwrap();
    place.good("corpus build a.txt --out words --tokeniser old/tokenizer.json");
    assert!(contents(&place, "words") == contents(&place, "old"));
    place.good("train words --resume");
    place.good("corpus build a.txt --out words --vocabulary 310 --restart");
    let message = place.bad("train words --resume");
    assert!(message.contains("corpus"), "{message}");
}

#[test]
#[cfg(unix)]
fn a_build_that_is_killed_goes_on_to_the_same_bytes() {
    let place = Place::new();
    let texts = paragraphs(3000);
    for part in 0..6 {
        place.write(&format!("{part}.jsonl"), &records(&texts).repeat(4));
    }
    let build = "corpus build *.jsonl --vocabulary 500 --sample 1 --shard-tokens 40000 --threads 2 --out";
    place.good(&format!("{build} whole"));
    let whole = contents(&place, "whole");
    assert!(whole.len() > 8, "{:?}", whole.keys());

    let shards = || {
        let entries = std::fs::read_dir(place.path("killed")).into_iter().flatten().flatten();
        entries.filter(|entry| entry.file_name().to_string_lossy().ends_with(".shard")).count()
    };
    let mut kills = 0;
    while !place.path("killed/corpus.json").exists() {
        let mut child = place.start(&format!("{build} killed"));
        // Any instant of the first moments, and then just after each shard: some fall between it and its record.
        let (start, had) = (Instant::now(), shards());
        let moment = Duration::from_secs_f64(0.1 * uniform(5, kills));
        let is_time = || if kills < 4 { start.elapsed() >= moment } else { shards() > had };
        while child.try_wait().unwrap().is_none() && !is_time() {
            std::thread::yield_now();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        kills += 1;
        assert!(kills < 200, "the build does not get on");
    }
    assert!(kills > 5, "only {kills} kills");
    // Killed after its last word, it may have left its notes; the same command clears them away.
    if place.path("killed/building").exists() {
        place.good(&format!("{build} killed"));
    }
    let killed = contents(&place, "killed");
    assert!(killed == whole, "{:?} {:?}", killed.keys(), whole.keys());
}

#[test]
fn what_is_wrong_with_an_input_is_told_with_its_place() {
    let place = Place::new();
    place.write("bad.jsonl", "{\"text\": \"fine\"}\n{\"body\": \"?\"}\n");
    let message = place.bad("corpus build bad.jsonl --bytes --out c");
    assert!(message.contains("bad.jsonl, line 2: the record has no field \"text\""), "{message}");
    let (out, told) = place.good("corpus build bad.jsonl --bytes --skip-bad --restart --out c");
    assert!(told.contains("left out: 1 without the field") && out.contains("4 tokens"), "{told}{out}");
    let message = place.bad("corpus build bad.jsonl --bytes --out c");
    assert!(message.contains("holds a corpus already"), "{message}");
    place.write("a.pdf", "x");
    assert!(place.bad("corpus build a.pdf --out d").contains("--format"));
    assert!(place.bad("corpus build none*.txt --out d").contains("no file matches"));
    assert!(!place.path("d").exists());
    place.write("t.json", "{}");
    let message = place.bad("corpus build bad.jsonl --tokeniser t.json --out d");
    assert!(message.contains("not a tokenizer.json"), "{message}");
    assert!(place.bad("corpus inspect d").contains("not a corpus"));
}

#[test]
fn tokens_of_other_programs_are_imported() {
    let place = Place::new();
    let tokens: Vec<u8> =
        (0..4000u16).map(|i| if i % 50 == 0 { 99 } else { i * 7 % 90 }).flat_map(u16::to_le_bytes).collect();
    std::fs::write(place.path("train.bin"), tokens).unwrap();
    assert!(place.bad("corpus import train.bin --out c").contains("--vocabulary"));
    let (out, _) = place.good("corpus import train.bin --vocabulary 100 --end-of-text 99 --out c");
    assert!(out.contains("80 documents"), "{out}");
    place.good(&format!("train c {QUICK}"));
    let (out, _) = place.good("generate runs/c --tokens 5 --temperature 0 --prompt 3");
    assert!(out.starts_with("3 "), "{out}");
    assert!(
        place.bad("corpus import train.bin --vocabulary 50 --end-of-text 49 --out d").contains("outside")
    );
}
