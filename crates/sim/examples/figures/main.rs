//! The simulator's figures, as lines of JSON: `cargo run --release -p starling-sim --example figures -- speeds`, or
//! `wan`, `coordinator`, `scale`, `crowd`, or `traces FOLDER`. Shorter ones: `HOURS=2` for `scale`; `MINUTES=20` and
//! `ONLY='p2, 125 M'`, a part of the figure's name, for `traces` and `speeds`. `cargo xtask bench sim` says what each must reach.

mod coordinator;
mod scale;
mod speeds;
mod traces;
mod wan;

use std::io::Write;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let which = std::env::args().nth(1).unwrap_or("all".into());
    let wanted = |name: &str| which == "all" || which == name;
    if wanted("speeds") {
        speeds::measure();
    }
    if wanted("steps") {
        speeds::steps();
    }
    if wanted("traces") {
        let folder = std::env::args().nth(2).ok_or("which folder are the traces in?")?;
        traces::measure(&folder)?;
    }
    if wanted("wan") {
        wan::measure();
    }
    if wanted("coordinator") {
        coordinator::measure();
    }
    if wanted("scale") {
        scale::a_day();
    }
    if wanted("crowd") {
        scale::a_crowd();
    }
    Ok(())
}

/// One number.
fn figure(name: &str, value: f64, unit: &str) {
    let line = serde_json::json!({ "name": name, "value": value, "unit": unit });
    println!("{line}");
    // Whoever waits for the next one sees this one.
    let _ = std::io::stdout().flush();
}
