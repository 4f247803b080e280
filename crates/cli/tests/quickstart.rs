//! The README's first command keeps its word: the model ends much nearer to the best possible than to a 5-gram model.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use process::Place;

#[test]
fn the_quickstart_goes_most_of_the_way_from_a_5_gram_model_to_the_bound() {
    let place = Place::new();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/quickstart.toml");
    // Processes die meanwhile, and it makes no difference.
    let command = ["up", example, "--peers", "4", "--chaos", "kill every 15s"];
    let output = place.command("").args(command).output().unwrap();
    let (report, told) = process::texts(&output);
    assert!(output.status.success(), "{told}");
    assert!(report.contains("the same, bit for bit"), "{report}");
    let (proof, _) = place.good("run audit runs/quickstart");
    assert!(proof.contains("every sample was counted once"), "{proof}");
    let (_, rest) = report.split_once("The model has gone ").expect("the report says how far it went");
    let percent: f64 = rest.split_once(" %").expect("a percentage").0.parse().expect("a number");
    assert!(percent >= 65.0, "only {percent} % of the way:\n{report}");
}
