//! Any text as a run file, any line as an override: refused, or a run that can be written down and read back.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling_model::run::Run;

fuzz_target!(|input: (&str, &str)| {
    let (text, setting) = input;
    let settings: &[String] = if setting.is_empty() { &[] } else { &[setting.to_string()] };
    let Ok(run) = Run::parse(text, "fuzz.toml", settings) else { return };
    assert!(run.problems().is_empty());
    let _ = run.definition(257, String::new()).identity();
});
