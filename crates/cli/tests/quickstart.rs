//! The README's first command keeps its word: the model ends much nearer to the best possible than to a 5-gram model.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use process::Place;

#[test]
fn the_quickstart_goes_most_of_the_way_from_a_5_gram_model_to_the_bound() {
    let place = Place::new();
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/quickstart.toml");
    let (report, _) = place.good(&format!("train {example} --set evaluate.every=0"));
    let (_, rest) = report.split_once("The model has gone ").expect("the report says how far it went");
    let percent: f64 = rest.split_once(" %").expect("a percentage").0.parse().expect("a number");
    assert!(percent >= 65.0, "only {percent} % of the way:\n{report}");
}
