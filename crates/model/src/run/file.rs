//! From the text of a run file, and overrides, to a [`Run`]; errors name the line and the remedy.

use std::fmt::Write;
use std::path::Path;

use starling_corpus::Problem;
use toml::de::{DeTable, DeValue};

use super::Run;

/// Why a run file was refused; nothing was started.
#[derive(Debug, thiserror::Error)]
pub enum RunFileError {
    /// Not TOML, or not of the run file's form; the message shows the line.
    #[error("{file} is not a run file as it stands:\n{message}")]
    Form {
        /// The file.
        file: String,
        /// Line, column, what was expected.
        message: String,
    },
    /// An override that cannot be set.
    #[error("--set {setting}: {message}")]
    Override {
        /// As it was given.
        setting: String,
        /// What is wrong with it, and what to do.
        message: String,
    },
    /// Values that do not go together.
    #[error("{file} cannot be run:\n{list}")]
    Problems {
        /// The file.
        file: String,
        /// Each problem with its line and remedy.
        list: String,
    },
}

impl Run {
    /// Reads a run file. `file` names it in messages; each override is `key.path=value`, the value as in TOML
    /// (a bare word counts as a string).
    pub fn parse(text: &str, file: &str, overrides: &[String]) -> Result<Run, RunFileError> {
        let form =
            |error: toml::de::Error| RunFileError::Form { file: file.into(), message: trimmed(&error) };
        // The text alone first: only then do errors know their lines.
        let run: Run = toml::from_str(text).map_err(form)?;
        Run::finish(run, Some(text), file, overrides)
    }

    /// A run that no file says, with overrides; `name` stands for it in messages.
    pub fn with(self, name: &str, overrides: &[String]) -> Result<Run, RunFileError> {
        Run::finish(self, None, name, overrides)
    }

    fn finish(run: Run, text: Option<&str>, file: &str, overrides: &[String]) -> Result<Run, RunFileError> {
        let mut run = overridden(run, overrides)?;
        if run.name.is_empty() {
            run.name = Path::new(file).file_stem().map_or("run".into(), |stem| {
                stem.to_string_lossy().chars().map(|c| if c.is_alphanumeric() { c } else { '-' }).collect()
            });
        }
        if let Some(initial) = &mut run.initial {
            initial.said = Some(said_of_model(text.unwrap_or_default(), overrides));
        }
        let problems = run.problems();
        if problems.is_empty() {
            return Ok(run);
        }
        Err(RunFileError::Problems { file: file.into(), list: list(text, &problems, overrides) })
    }
}

/// The keys of `[model]` in a run file and its overrides, which can be set.
fn said_of_model(text: &str, overrides: &[String]) -> Vec<String> {
    let mut table = text.parse::<toml::Table>().unwrap_or_default();
    for setting in overrides {
        let _ = set(&mut table, setting);
    }
    let model = table.get("model").and_then(toml::Value::as_table);
    model.map(|model| model.keys().cloned().collect()).unwrap_or_default()
}

fn overridden(run: Run, overrides: &[String]) -> Result<Run, RunFileError> {
    let mut run = run;
    for setting in overrides {
        let refuse = |message: String| RunFileError::Override { setting: setting.clone(), message };
        let mut table = toml::Table::try_from(&run).map_err(|error| refuse(error.to_string()))?;
        set(&mut table, setting)?;
        run = table.try_into().map_err(|error: toml::de::Error| refuse(trimmed(&error)))?;
    }
    Ok(run)
}

/// The parser's message, without its trailing line ends.
fn trimmed(error: &toml::de::Error) -> String {
    error.to_string().trim_end().to_string()
}

fn set(table: &mut toml::Table, setting: &str) -> Result<(), RunFileError> {
    let refuse = |message: &str| RunFileError::Override { setting: setting.into(), message: message.into() };
    let (path, value) = setting
        .split_once('=')
        .ok_or_else(|| refuse("write it as key=value, for example --set optimiser.lr=1e-3"))?;
    let (path, value) = (path.trim(), value.trim());
    let document = format!("value = {value}");
    let value = match document.parse::<toml::Table>() {
        Ok(mut parsed) => parsed.remove("value").ok_or_else(|| refuse("the value is missing"))?,
        Err(_) => toml::Value::String(value.to_string()),
    };
    let mut table = table;
    let mut keys = path.split('.').peekable();
    while let Some(key) = keys.next() {
        if key.is_empty() {
            return Err(refuse("a part of the key is empty; write it as section.key=value"));
        }
        if keys.peek().is_none() {
            table.insert(key.to_string(), value);
            break;
        }
        table = table
            .entry(key)
            .or_insert_with(|| toml::Value::Table(toml::Table::new()))
            .as_table_mut()
            .ok_or_else(|| refuse("the key leads into a value, not into a section"))?;
    }
    Ok(())
}

fn list(text: Option<&str>, problems: &[Problem], overrides: &[String]) -> String {
    let mut list = String::new();
    for Problem { key, message, remedy } in problems {
        let overridden = overrides.iter().any(|o| o.split('=').next().is_some_and(|k| k.trim() == key));
        let place = match text.and_then(|text| line_of(text, key)) {
            _ if overridden => format!("--set {key}"),
            Some((line, true)) => format!("line {line}, {key}"),
            Some((line, false)) => format!("line {line}, {key} (by default)"),
            None => format!("{key} (by default)"),
        };
        let _ = writeln!(list, "  {place}: {message}\n    → {remedy}");
    }
    list.truncate(list.trim_end().len());
    list
}

/// The line of a key, and whether the key itself is there or only the section around it.
fn line_of(text: &str, key: &str) -> Option<(usize, bool)> {
    let document = DeTable::parse(text).ok()?;
    let mut table = Some(document.get_ref());
    let mut array: Option<&toml::de::DeArray<'_>> = None;
    let mut found = None;
    let mut whole = true;
    // `data.sources[0].weight` is walked as data, sources, 0, weight.
    for part in key.split(['.', '[', ']']).filter(|part| !part.is_empty()) {
        let next = match (table, array, part.parse::<usize>()) {
            (Some(table), ..) => table
                .iter()
                .find(|(name, _)| name.get_ref().as_ref() == part)
                .map(|(name, value)| (name.span().start, value.get_ref())),
            (None, Some(array), Ok(index)) => {
                array.get(index).map(|value| (value.span().start, value.get_ref()))
            }
            _ => None,
        };
        let Some((start, value)) = next else {
            whole = false;
            break;
        };
        found = Some(start);
        table = if let DeValue::Table(table) = value { Some(table) } else { None };
        array = if let DeValue::Array(array) = value { Some(array) } else { None };
    }
    found.map(|start| (text[..start].matches('\n').count() + 1, whole))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = "name = \"a\"\n\n[data]\nsynthetic = {}\n\n[model]\nwidth = 64\nheads = 5\n";

    #[test]
    fn a_problem_names_its_line_and_the_remedy() {
        let message = Run::parse(FILE, "a.toml", &[]).unwrap_err().to_string();
        assert!(message.contains("line 8, model.heads: 5 heads do not divide the width 64"), "{message}");
        assert!(message.contains("→ use 4 heads, or a width of 65"), "{message}");
    }

    #[test]
    fn an_unknown_key_names_its_line_and_the_known_ones() {
        let message = Run::parse("[model]\nwidht = 3\n", "a.toml", &[]).unwrap_err().to_string();
        assert!(message.contains("line 2") && message.contains("`width`"), "{message}");
    }

    #[test]
    fn an_override_takes_the_place_of_the_file() {
        let run =
            Run::parse(FILE, "a.toml", &["model.heads=8".into(), "optimiser.kind=lamb".into()]).unwrap();
        assert_eq!((run.model.heads, run.optimiser.kind), (8, crate::optimiser::Kind::Lamb));
        let wrong = |setting: &str| Run::parse(FILE, "a.toml", &["model.heads=8".into(), setting.into()]);
        for (setting, part) in [
            ("optimiser.lr", "key=value"),
            ("optimiser.lr=fast", "invalid type"),
            ("model.heads.x=1", "not into a section"),
            ("model..x=1", "empty"),
            ("model.legs=1", "unknown field"),
        ] {
            let message = wrong(setting).unwrap_err().to_string();
            assert!(message.contains(part) && message.contains(setting), "{message}");
        }
        let message = wrong("model.heads=7").unwrap_err().to_string();
        assert!(message.contains("--set model.heads: 7 heads"), "{message}");
    }

    #[test]
    fn a_run_written_down_reads_back_the_same() {
        let run = Run::parse(FILE, "a.toml", &["model.heads=8".into()]).unwrap();
        let text = toml::to_string(&run).unwrap();
        assert_eq!(Run::parse(&text, "b.toml", &[]).unwrap(), run);
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[a-z.=\\[\\]{}\"0-9 \n#]{0,80}", setting in "[a-z.=\\[\\]0-9]{0,20}") {
            let _ = Run::parse(&text, "a.toml", &[]);
            let _ = Run::parse(FILE, "a.toml", &["model.heads=8".into(), setting]);
        }
    }
}
