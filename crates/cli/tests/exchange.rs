//! Models that come from elsewhere, and go there: what is exported writes, is judged and is trained on as it was.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use process::Place;

fn place() -> Place {
    let place = Place::new();
    let text: String =
        (0..400).map(|n| format!("line {n} of a text that is {} lines long.\n", 400 - n)).collect();
    place.write("text.txt", &text);
    place.good("train text.txt --out first --set model.width=32 --set model.layers=2 --set model.context=32 --set train.steps=30 --set train.threads=1");
    place.good("export first --out folder");
    place
}

#[test]
fn an_exported_model_writes_and_is_judged_as_the_run_that_made_it() {
    let place = place();
    let written = |path: &str| place.good(&format!("generate {path} --tokens 40 --prompt line --seed 3")).0;
    assert_eq!(written("first"), written("folder"));
    let judged = |path: &str| {
        let (shown, _) = place.good(&format!("eval {path} --text text.txt --windows 8"));
        shown.lines().skip(1).map(String::from).collect::<Vec<_>>()
    };
    assert_eq!(judged("first"), judged("folder"));
    let tokens = |options: &str| {
        let (shown, _) = place.good(&format!("eval folder --text text.txt --windows 8 {options}"));
        let tokens = shown.lines().find_map(|line| line.trim().strip_prefix("tokens").map(str::trim));
        tokens.unwrap().parse::<u64>().unwrap()
    };
    assert_eq!((tokens(""), tokens("--context 16")), (8 * 32, 8 * 16));
    place.write("short.txt", "line 1");
    place.good("eval folder --text short.txt");
    let told = place.bad("eval folder --text text.txt --context 33");
    assert!(told.contains("the model knows 32 positions"), "{told}");
    let again = place.bad("export first --out folder");
    assert!(again.contains("exists already"), "{again}");
    place.good("export first --out half --numbers bf16");
}

#[test]
fn a_run_that_begins_with_weights_goes_on_with_them_in_one_process_and_in_a_swarm() {
    let place = place();
    place.write(
        "tune.toml",
        r#"
        initial = { path = "folder" }
        data = { sources = [{ path = "text.txt", split = "line" }] }
        optimiser = { lr = 1e-4 }
        train = { steps = 6, batch = 6, microbatch = 2, lots = 2, stages = 2, threads = 1 }
        evaluate = { every = 0, sample_tokens = 0 }
        checkpoint = { every = 2 }
        "#,
    );
    place.good("train tune.toml --out one");
    let first = place.losses("one")[&0];
    assert!(first < 4.5, "it begins with what was learnt: {first}");
    place.good("up tune.toml --out many --peers 3 --sites 1 --compare 6");
    assert_eq!(place.losses("many"), place.losses("one"));
    let report = std::fs::read_to_string(place.path("many/report.md")).unwrap();
    assert!(report.contains("the same, bit for bit"), "{report}");
    let told = place.bad("train tune.toml --out other --set model.width=64");
    assert!(
        told.contains("model.width = 64, and") && told.contains("folder it is 32; leave it out"),
        "{told}"
    );
    let told = place.bad("train tune.toml --out other --set model.context=64");
    assert!(told.contains("folder knows 32 positions"), "{told}");
    place.good("train tune.toml --out short --set model.context=16 --set model.layers=2");
    let first = place.losses("short")[&0];
    assert!(first < 4.5, "a part of the positions will do: {first}");
    let recorded = std::fs::read_to_string(place.path("short/run.toml")).unwrap();
    assert!(recorded.contains("context = 16"), "{recorded}");
    place.good("train tune.toml --out short --resume --set train.steps=8 --set optimiser.decay_steps=6");
    assert_eq!(place.losses("short").len(), 8);
    place.good("eval short");
    let plan = |more: &str| place.good(&format!("plan tune.toml {more}")).0;
    assert_ne!(plan(""), plan("--set model={context=16}"));
}

#[test]
fn a_run_file_may_name_the_weights_it_begins_with_and_what_it_leaves_as_it_is() {
    let place = place();
    let begin = |more: &str| {
        let file = format!(
            "initial = {{ path = \"first\"{more} }}\ndata = {{ sources = [{{ path = \"text.txt\", split = \"line\" }}] }}\n\
             train = {{ steps = 2, threads = 1 }}\nevaluate = {{ every = 0, sample_tokens = 0 }}\n\
             model = {{ context = 8, attention_bias = false, tied = true }}\n"
        );
        place.write("tune.toml", &file);
    };
    begin("");
    place.good("train tune.toml --out one");
    let recorded = std::fs::read_to_string(place.path("one/run.toml")).unwrap();
    let hash = recorded.split("weights = \"").nth(1).unwrap().split('"').next().unwrap();
    begin(&format!(", weights = \"{hash}\""));
    place.good("up tune.toml --out two --peers 1 --sites 1 --compare 2");
    assert_eq!(place.losses("one"), place.losses("two"));
    begin(", weights = \"00\"");
    let told = place.bad("train tune.toml --out three");
    assert!(told.contains("holds other weights"), "{told}");
}
