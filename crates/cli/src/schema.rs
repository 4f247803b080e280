//! `starling schema`: the JSON Schema of run files.

use std::process::ExitCode;

use anyhow::Result;
use starling_model::run::Run;

use crate::words;

pub fn run() -> Result<ExitCode> {
    words::show(&text()?)
}

/// The schema as it stands in `docs/run.schema.json`.
fn text() -> Result<String> {
    let mut schema = schemars::schema_for!(Run);
    schema.insert("title".into(), "Starling run file".into());
    Ok(serde_json::to_string_pretty(&schema)? + "\n")
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_schema_in_the_documents_is_the_one_that_is_printed() {
        let written = include_str!("../../../docs/run.schema.json");
        let current = super::text().unwrap();
        assert!(written == current, "renew it: cargo run -- schema > docs/run.schema.json");
    }
}
