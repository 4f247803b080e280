//! `starling plan` as a user sees it: what it predicts, and what it refuses.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use process::Place;

const RUN: &str = r#"
name = "planned"
model = { context = 128, width = 256, layers = 6, heads = 4 }
data = { synthetic = {} }
train = { steps = 1000, batch = 64, microbatch = 2, lots = 8, stages = 2 }
"#;

fn place() -> Place {
    let place = Place::new();
    place.write("run.toml", RUN);
    place
}

#[test]
fn a_plan_says_how_fast_it_would_be_what_holds_it_up_and_what_to_change() {
    let (out, _) =
        place().good("plan run.toml --peers 8 --device 0.1 --link 50mbit,20ms --deaths-per-hour 60");
    for said in [
        "8 peers in 2 sites (4 + 4), 0.1 TFLOP/s each; 50 Mbit/s and 20 ms between sites",
        "tokens/s",
        "of what they could",
        "between sites",
        "for 1000 steps",
        "waiting for the wire: sums",
        "at work",
        "Bottleneck: the wire",
        "If a peer lives 1 min 00 s on average and is replaced after 1 min 00 s",
        "--link 100mbit,20ms",
        "The square-cube law",
    ] {
        assert!(out.contains(said), "{said}: {out}");
    }
}

#[test]
fn without_a_simulation_only_arithmetic_is_told() {
    let (out, _) = place().good("plan run.toml --no-simulation");
    assert!(out.contains("Bottleneck") && out.contains("square-cube") && !out.contains("Predicted"), "{out}");
}

#[test]
fn a_model_can_be_planned_before_its_corpus_is_built() {
    let (out, _) = place().good("plan run.toml --no-simulation --vocabulary 50257");
    assert!(out.contains("17.6 M parameters"), "{out}");
}

#[test]
fn bad_input_is_refused_with_what_to_do() {
    let place = place();
    for (arguments, named) in [
        ("--peers 1", "2 stages need at least one peer each, and there is 1"),
        ("--memory 1MB", "none of 4 peers have that much"),
        ("--sites 0", "peers stand in 1 to 1000 sites"),
        ("--peers 1000000", "more than can be simulated"),
        ("--wire-bytes 0", "--wire-bytes is 4 as it is"),
        ("--deaths-per-hour 0", "as 0.5 for one that lives"),
        ("--stages 99", "cannot be cut into 99 stages"),
    ] {
        let message = place.bad(&format!("plan run.toml {arguments}"));
        assert!(message.contains(named), "{arguments}: {message}");
    }
    // What is no flag's value is named with an example by the command line itself.
    for (arguments, named) in [
        ("--device fast", "write TFLOP/s"),
        ("--site 8", "8x30 for eight"),
        ("--memory 24", "24GB"),
        ("--site 2x1 --peers 3", "cannot be used with"),
    ] {
        let output = place.run(&format!("plan run.toml {arguments}"));
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(2) && told.contains(named), "{arguments}: {told}");
    }
}
