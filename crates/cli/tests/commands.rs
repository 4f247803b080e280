//! The commands as a user types them, the happy and the unhappy paths.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::fs;

use process::Place;
use starling_corpus::{SyntheticConfig, World};

/// Some kilobytes of text in paragraphs.
fn text() -> String {
    let world = World::new(&SyntheticConfig::default());
    let paragraph = |index| world.tokeniser().decode(&world.document(index)).replace(" .", ".");
    (0..120).map(|index| paragraph(index) + "\n\n").collect()
}

const QUICK: &str = "--set train.steps=6 --set train.batch=2 --set train.microbatch=2 --set model.width=16 \
                     --set model.layers=1 --set model.heads=2 --set model.context=32 --set evaluate.every=3";

#[test]
fn a_text_file_needs_no_run_file() {
    let place = Place::new();
    place.write("my.txt", &text());
    let (out, told) = place.good(&format!("train my.txt {QUICK}"));
    assert!(out.contains("held-out loss") && out.contains("bits per byte"), "{out}");
    assert!(told.contains("it writes:"), "{told}");
    for file in
        ["run.toml", "events.jsonl", "loss.svg", "report.md", "checkpoints/step-00000006/manifest.json"]
    {
        assert!(place.path("runs/my").join(file).exists(), "{file}");
    }

    let (out, _) = place.good("eval runs/my");
    assert!(out.contains("perplexity"), "{out}");
    let (out, _) = place.good("eval runs/my --text my.txt");
    assert!(out.contains("step 6"), "{out}");
    let (out, _) = place.good("generate runs/my --prompt kovo --tokens 20 --seed 4");
    assert!(out.starts_with("kovo"), "{out}");
    assert_eq!(place.good("generate runs/my --prompt kovo --tokens 20 --seed 4").0, out);
    // What it writes ends before what it is told to stop at.
    let long = "generate runs/my --prompt kovo --tokens 100 --seed 4";
    let (out, _) = place.good(long);
    let written = out.strip_prefix("kovo").unwrap();
    let at = written.find(|c: char| c.is_ascii_alphanumeric()).unwrap();
    let (stopped, _) = place.good(&format!("{long} --stop {}", &written[at..=at]));
    assert_eq!(stopped, format!("kovo{}\n", &written[..at]));
    place.good("generate runs/my --tokens 40 --top-k 5 --top-p 0.5");
    let message = place.bad("generate runs/my --top-p 0");
    assert!(message.contains("--top-p 0 is not a probability"), "{message}");
    let curves = fs::read_dir(place.path("runs/my/tensorboard")).unwrap().count();
    assert_eq!(curves, 1);
    // With the whole context as stride no token is scored twice, and none is left out.
    let tokens = |out: &str| {
        out.lines().find_map(|line| line.trim().strip_prefix("tokens")).unwrap().trim().to_string()
    };
    let (wide, _) = place.good("eval runs/my --text my.txt --stride 32");
    let (narrow, _) = place.good("eval runs/my --text my.txt --stride 5");
    assert_eq!(tokens(&wide), tokens(&narrow));
    let (out, _) = place.good("checkpoint inspect runs/my");
    assert!(out.contains("h.0.attn.c_attn.weight") && out.contains("16 × 48"), "{out}");
}

#[test]
fn a_run_is_not_overwritten_and_resume_needs_no_other_flag() {
    let place = Place::new();
    place.good("train small.toml --set train.steps=3");
    let message = place.bad("train small.toml");
    assert!(message.contains("--resume"), "{message}");
    // The override is recorded in the run's folder: the run is at its end already.
    let (_, told) = place.good("train small.toml --resume");
    assert!(told.contains("going on from step 3"), "{told}");
    let message = place.bad("train small.toml --resume --set optimiser.lr=1");
    assert!(message.contains("optimiser.lr: 0.003 there, 1.0 here"), "{message}");
    // More steps would bend the schedule: that is another training, unless the schedule is kept.
    let message = place.bad("train small.toml --resume --set train.steps=5");
    assert!(message.contains("optimiser.decay_steps: 3 there, 5 here"), "{message}");
    assert!(message.contains("add --set optimiser.decay_steps=3"), "{message}");
    place.good("train small.toml --resume --set train.steps=5 --set optimiser.decay_steps=3");
    assert_eq!(place.hashes("runs/small").len(), 5);
    // What the run file says otherwise is told.
    let (_, told) = place.good("train small.toml --resume");
    assert!(told.contains("train.steps: 5, not 120"), "{told}");
}

#[test]
fn two_processes_do_not_train_in_one_folder() {
    let place = Place::new();
    let mut first = place.start("train small.toml --set train.steps=1000000 --set optimiser.decay=constant");
    while !place.path("runs/small/events.jsonl").exists() {
        assert!(first.try_wait().unwrap().is_none(), "the first run must start");
        std::thread::yield_now();
    }
    let message = place.bad("train small.toml --resume");
    assert!(message.contains("another process is training in"), "{message}");
    first.kill().unwrap();
    first.wait().unwrap();
    place.good("train small.toml --resume --set train.steps=1");
}

#[test]
fn any_file_with_text_in_it_will_do() {
    let place = Place::new();
    place.write("notes.md", &text().replace('\n', "\r\n"));
    place.good(&format!("train notes.md {QUICK} --set train.steps=2"));
    let recorded = fs::read_to_string(place.path("runs/notes/run.toml")).unwrap();
    assert!(recorded.contains("blank_line"), "{recorded}");
    let message =
        place.bad(&format!("train notes.md {QUICK} --out other --set model.width=18 --set model.heads=4"));
    assert!(message.contains("--set model.heads: 4 heads") && !message.contains("line "), "{message}");
}

#[test]
fn a_text_that_was_changed_is_not_evaluated_as_if_it_were_held_out() {
    let place = Place::new();
    place.write("my.txt", &text());
    place.good(&format!("train my.txt {QUICK} --set train.steps=1"));
    place.write("my.txt", &text()[2000..]);
    let message = place.bad("eval runs/my");
    assert!(message.contains("the text was changed since"), "{message}");
    place.good("eval runs/my --text my.txt");
    place.good("train small.toml --set train.steps=1");
    let message = place.bad("eval runs/small --text my.txt");
    assert!(message.contains("only the words of its generated languages"), "{message}");
}

#[test]
fn training_that_diverges_stops_and_says_so() {
    let place = Place::new();
    let message = place.bad("train small.toml --set optimiser.lr=1e30 --set optimiser.clip=0");
    assert!(message.contains("diverged") && message.contains("optimiser.lr"), "{message}");
}

#[test]
#[cfg(unix)]
fn nobody_needs_to_listen() {
    let place = Place::new();
    let mut child = place.start_deaf("train small.toml");
    assert!(child.wait().unwrap().success(), "the run goes on when its terminal is gone");
    place.good("checkpoint verify runs/small");
}

#[test]
fn a_damaged_checkpoint_gives_way_to_an_older_one() {
    let place = Place::new();
    place.good("train small.toml --out whole --set train.steps=9");
    place.good("train small.toml --out other --set train.steps=9");
    let newest = place.path("other/checkpoints/step-00000009/stage-1.safetensors");
    let bytes = fs::read(&newest).unwrap();
    fs::write(&newest, &bytes[..bytes.len() / 2]).unwrap();
    let message = place.bad("checkpoint verify other");
    assert!(message.contains("damaged or altered") && message.contains("stage-1.safetensors"), "{message}");
    let (_, told) = place.good("train small.toml --out other --resume");
    assert!(told.contains("warning:") && told.contains("going on from step 8"), "{told}");
    assert_eq!(place.hashes("other"), place.hashes("whole"));

    for step in [8, 9] {
        fs::write(place.path(&format!("other/checkpoints/step-{step:08}/manifest.json")), "{").unwrap();
    }
    let message = place.bad("train small.toml --out other --resume");
    assert!(message.contains("no checkpoint of the run can be used"), "{message}");
}

#[test]
fn what_cannot_be_done_is_told_in_one_message_and_nothing_is_left_behind() {
    let place = Place::new();
    place.write("wrong.toml", "[model]\nwidth = 64\nheads = 5\n[data]\nsynthetic = {}\n");
    place.write("typo.toml", "[modle]\nwidth = 64\n");
    place.write("nothing.toml", "");
    place.write("gone.toml", "[[data.sources]]\npath = \"gone.txt\"\n");
    place.write("tiny.txt", "too short");
    place.write("empty.txt", "");
    fs::create_dir(place.path("folder")).unwrap();
    for (arguments, parts) in [
        ("train wrong.toml", vec!["line 3", "5 heads do not divide the width 64", "use 4 heads"]),
        ("train typo.toml", vec!["line 1", "modle"]),
        ("train nothing.toml", vec!["data"]),
        ("train gone.toml", vec!["gone.txt"]),
        ("train nowhere.toml", vec!["nowhere.toml"]),
        ("train nowhere.txt", vec!["nowhere.txt"]),
        ("train tiny.txt", vec!["tiny.txt"]),
        ("train empty.txt", vec!["empty.txt"]),
        ("train folder", vec!["folder is a folder", "name a run file"]),
        ("train small.toml --set optimiser.clip=inf", vec!["optimiser.clip", "0 to turn clipping off"]),
        ("train small.toml --set model.width=200000", vec!["GB of memory", "smaller model.width"]),
        (
            "train small.toml --set train.lots=0",
            vec!["--set train.lots", "at least one lot", "use at least 1"],
        ),
        ("eval nowhere", vec!["nowhere does not exist"]),
        ("generate .", vec!["holds no checkpoint"]),
        ("checkpoint verify small.toml", vec!["small.toml"]),
    ] {
        let message = place.bad(arguments);
        for part in parts {
            assert!(message.contains(part), "starling {arguments}: {message}");
        }
        assert!(message.matches("os error").count() <= 1, "a cause is told once: {message}");
        let left: Vec<_> = fs::read_dir(place.path("runs")).into_iter().flatten().flatten().collect();
        assert!(left.is_empty(), "starling {arguments} left {left:?}");
    }
}

#[test]
fn a_word_that_a_model_does_not_know_is_named() {
    let place = Place::new();
    place.good("train small.toml --set train.steps=1");
    let message = place.bad("generate runs/small --prompt zzzz");
    assert!(message.contains("zzzz"), "{message}");
}

#[test]
fn help_teaches() {
    let place = Place::new();
    for (command, part) in [
        ("--help", "Train a run file"),
        ("train --help", "--set"),
        ("eval --help", "--text"),
        ("generate --help", "--temperature"),
        ("checkpoint --help", "verify"),
    ] {
        let (out, _) = place.good(command);
        assert!(out.contains(part), "{command}: {out}");
    }
}

#[test]
fn every_example_is_a_valid_run_file() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");
    let mut seen = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let text = fs::read_to_string(&path).unwrap();
        starling_model::run::Run::parse(&text, &path.display().to_string(), &[]).unwrap();
        seen += 1;
    }
    assert!(seen > 0);
}

#[test]
fn the_example_of_two_sites_is_simulated_and_told() {
    let place = Place::new();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scenarios/two-sites.toml");
    let (story, _) = place.good(&format!("sim {example} --plot plot.svg"));
    for told in ["every invariant held", "1 rollbacks", "between sites", "what was decided", "plot.svg"] {
        assert!(story.contains(told), "{told}:\n{story}");
    }
}
