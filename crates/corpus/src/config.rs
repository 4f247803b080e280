//! The `[data]` section of a run file: what it may say, and what is wrong with what it says.

use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::mixture;
use crate::synthetic::SyntheticConfig;
use crate::text::Split;

/// What the run is trained on: either `synthetic` or `sources`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct DataConfig {
    /// Train on generated languages; needs no files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub synthetic: Option<SyntheticConfig>,
    /// Train on these files, mixed by weight.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceConfig>,
    /// The fraction of documents that is kept out of training and used to judge the model. Equal documents
    /// are kept out together.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub held_out: f64,
    /// Whether attention and positions start anew at every document's start.
    pub document_mask: bool,
}

impl Default for DataConfig {
    fn default() -> DataConfig {
        DataConfig { synthetic: None, sources: Vec::new(), held_out: 0.05, document_mask: false }
    }
}

/// One file of a mixture.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SourceConfig {
    /// A folder made by `starling corpus build`, a token shard if its name ends in `.shard`, or else a
    /// plain-text file; relative to the run file. Text is tokenised as the folders are, or else as bytes.
    pub path: PathBuf,
    /// How often this source is drawn, relative to the others.
    #[serde(default = "one")]
    #[schemars(range(min = 0.0))]
    pub weight: f64,
    /// What ends a document in a text file. Shards and folders have their documents already.
    #[serde(default)]
    pub split: Split,
}

fn one() -> f64 {
    1.0
}

/// Something in a run file that cannot be meant: where, what, and how to mend it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The place in the run file, as `data.sources[0].weight`.
    pub key: String,
    /// What is wrong.
    pub message: String,
    /// What to write instead.
    pub remedy: String,
}

impl Problem {
    /// A problem with what stands at `key`.
    pub fn new(key: impl Into<String>, message: impl Into<String>, remedy: impl Into<String>) -> Problem {
        Problem { key: key.into(), message: message.into(), remedy: remedy.into() }
    }
}

impl std::fmt::Display for Problem {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(out, "{}: {}; {}", self.key, self.message, self.remedy)
    }
}

impl DataConfig {
    /// Everything that is wrong with the section, without touching a file; empty if it can be used.
    pub fn problems(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        match (&self.synthetic, self.sources.is_empty()) {
            (None, true) => problems.push(Problem::new(
                "data",
                "there is nothing to train on",
                "add [data.synthetic], or [[data.sources]] with a path",
            )),
            (Some(_), false) => problems.push(Problem::new(
                "data",
                "both synthetic and sources are given, and a run has one vocabulary",
                "keep one of them",
            )),
            _ => {}
        }
        if !(0.0..1.0).contains(&self.held_out) {
            problems.push(Problem::new(
                "data.held_out",
                format!("{} is not a fraction of the documents", self.held_out),
                "give a number from 0 to below 1, such as 0.05",
            ));
        }
        problems.extend(self.synthetic.iter().flat_map(SyntheticConfig::problems));
        problems.extend(self.sources.iter().enumerate().flat_map(|(index, source)| source.problems(index)));
        problems.extend(self.problems_of_the_mixture());
        problems
    }

    /// Weights that are fine by themselves, but not beside the others.
    fn problems_of_the_mixture(&self) -> Vec<Problem> {
        let weights: Vec<f64> = self.sources.iter().map(|source| source.weight).collect();
        if !weights.iter().all(|weight| mixture::is_weight(*weight)) {
            return Vec::new();
        }
        let Some(counts) = mixture::apportion(&weights) else {
            return vec![Problem::new(
                "data.sources",
                "the weights add up to more than a number can hold, so the sources' shares are unknown",
                "divide every weight by the largest; only their ratios matter",
            )];
        };
        counts
            .into_iter()
            .enumerate()
            .filter(|(_, count)| *count == 0)
            .map(|(index, _)| {
                Problem::new(
                    format!("data.sources[{index}].weight"),
                    format!(
                        "{} is so small beside the others that the source is never drawn",
                        weights[index]
                    ),
                    format!("give at least 1/{} of the sum of all weights, or remove it", mixture::BLOCK),
                )
            })
            .collect()
    }
}

impl SourceConfig {
    fn problems(&self, index: usize) -> Vec<Problem> {
        let key = |field| format!("data.sources[{index}].{field}");
        let mut problems = Vec::new();
        if !mixture::is_weight(self.weight) {
            problems.push(Problem::new(
                key("weight"),
                format!("{} is not a weight", self.weight),
                "give a number above 0",
            ));
        }
        problems
    }
}

/// What a source file is, by the ending of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FileKind {
    Text,
    Shard,
}

impl FileKind {
    pub(crate) fn of(path: &Path) -> FileKind {
        if path.extension().is_some_and(|ending| ending == "shard") {
            FileKind::Shard
        } else {
            FileKind::Text
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(path: &str, weight: f64) -> SourceConfig {
        SourceConfig { path: path.into(), weight, split: Split::default() }
    }

    fn keys(config: &DataConfig) -> Vec<String> {
        config.problems().into_iter().map(|problem| problem.key).collect()
    }

    #[test]
    fn a_source_needs_only_its_path() {
        let config: DataConfig = serde_json::from_str(r#"{"sources": [{"path": "a.txt"}]}"#).unwrap();
        assert_eq!(config, DataConfig { sources: vec![source("a.txt", 1.0)], ..DataConfig::default() });
        assert_eq!(config.problems(), []);
    }

    #[test]
    fn an_unknown_key_is_refused() {
        assert!(serde_json::from_str::<DataConfig>(r#"{"heldout": 0.1}"#).is_err());
        assert!(serde_json::from_str::<DataConfig>(r#"{"sources": [{"path": "a", "wait": 1}]}"#).is_err());
        assert!(serde_json::from_str::<DataConfig>(r#"{"synthetic": {"sead": 1}}"#).is_err());
    }

    #[test]
    fn every_problem_is_reported_at_once_with_its_place() {
        let sources = vec![source("a.txt", 1.0), source("b.txt", f64::NAN), source("c.shard", 0.0)];
        let config = DataConfig { sources, held_out: 1.5, ..DataConfig::default() };
        assert_eq!(keys(&config), ["data.held_out", "data.sources[1].weight", "data.sources[2].weight"]);
    }

    #[test]
    fn one_of_synthetic_and_sources_is_needed_and_only_one() {
        assert_eq!(keys(&DataConfig::default()), ["data"]);
        let synthetic = Some(SyntheticConfig::default());
        assert_eq!(keys(&DataConfig { synthetic: synthetic.clone(), ..DataConfig::default() }), [""; 0]);
        let both = DataConfig { synthetic, sources: vec![source("a.txt", 1.0)], ..DataConfig::default() };
        assert_eq!(keys(&both), ["data"]);
    }

    #[test]
    fn a_weight_that_vanishes_beside_the_others_is_a_problem() {
        let sources = vec![source("a.txt", 1.0), source("b.txt", 1e-6)];
        assert_eq!(keys(&DataConfig { sources, ..DataConfig::default() }), ["data.sources[1].weight"]);
    }

    #[test]
    fn weights_without_a_finite_sum_are_a_problem() {
        let sources = vec![source("a.txt", f64::MAX), source("b.txt", f64::MAX), source("c.txt", 1.0)];
        let problems = DataConfig { sources, ..DataConfig::default() }.problems();
        assert_eq!(problems.len(), 1);
        assert_eq!(problems[0].key, "data.sources");
        assert!(problems[0].remedy.contains("divide every weight"), "{}", problems[0]);
    }

    #[test]
    fn any_file_is_text_unless_it_is_called_a_shard() {
        for path in ["a.txt", "README", "notes.md", "a.shard.txt", ".shard", "a.TXT"] {
            assert_eq!(
                keys(&DataConfig { sources: vec![source(path, 1.0)], ..DataConfig::default() }),
                [""; 0]
            );
            assert_eq!(FileKind::of(Path::new(path)), FileKind::Text);
        }
        assert_eq!(FileKind::of(Path::new("folder.d/a.shard")), FileKind::Shard);
    }

    #[test]
    fn more_documents_than_can_be_meant_are_a_problem() {
        let with = |documents| {
            let synthetic = Some(SyntheticConfig { documents, ..SyntheticConfig::default() });
            DataConfig { synthetic, ..DataConfig::default() }.problems()
        };
        assert_eq!(with(10_000_000), []);
        let problems = with(10_000_001);
        assert_eq!(problems[0].key, "data.synthetic.documents");
        assert!(problems[0].remedy.contains("at most 10000000"), "{}", problems[0]);
    }

    #[test]
    fn the_schema_carries_the_descriptions() {
        let schema = schemars::schema_for!(DataConfig).to_value().to_string();
        assert!(schema.contains("kept out of training") && schema.contains("blank_line"), "{schema}");
    }
}
