//! Which files a build reads, in which order, and what each of them is.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};

use super::BuildError;
use super::streams;
use crate::text::{LOOK_BYTES, Split};

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Form {
    /// Plain text.
    Text,
    /// A JSON object a line.
    Jsonl,
}

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Packing {
    Plain,
    Gzip,
    Zstandard,
    /// Rows in columns; unpacked, they are JSON lines.
    Parquet,
}

/// One file to read. Its size and time tell whether it is still the same when a build goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Input {
    pub(super) path: PathBuf,
    pub(super) form: Form,
    pub(super) packing: Packing,
    pub(super) split: Split,
    pub(super) bytes: u64,
    modified_ns: u64,
}

impl Input {
    /// Whether the file is still what it was.
    pub(super) fn is_unchanged(&self) -> bool {
        std::fs::metadata(&self.path)
            .is_ok_and(|metadata| (metadata.len(), modified_ns(&metadata)) == (self.bytes, self.modified_ns))
    }
}

fn modified_ns(metadata: &Metadata) -> u64 {
    let modified = metadata.modified().ok().and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    modified.unwrap_or_default().as_nanos() as u64 // enough until the year 2554
}

/// The files that some arguments mean: paths, folders (all that is in them, and can be read), patterns. Each is
/// read once, in the order of the arguments, and within one by name.
pub(super) fn resolve(
    arguments: &[String],
    form: Option<Form>,
    split: Option<Split>,
) -> Result<Vec<Input>, BuildError> {
    let mut seen = BTreeSet::new();
    let mut inputs = Vec::new();
    for argument in arguments {
        for path in expand(argument, form)? {
            if seen.insert(path.clone()) {
                inputs.push(describe(&path, form, split)?);
            }
        }
    }
    if inputs.is_empty() {
        return Err(BuildError::NoInputs);
    }
    Ok(inputs)
}

fn expand(argument: &str, form: Option<Form>) -> Result<Vec<PathBuf>, BuildError> {
    let path = PathBuf::from(argument);
    if path.is_dir() {
        let mut files = Vec::new();
        walk(&path, form, &mut files)?;
        files.sort();
        return match files.is_empty() {
            true => Err(BuildError::EmptyFolder { path }),
            false => Ok(files),
        };
    }
    if path.exists() || !argument.contains(['*', '?', '[']) {
        return Ok(vec![path]); // one that is missing is reported when it is described
    }
    let matches = glob::glob(argument)
        .map_err(|error| BuildError::Pattern { pattern: argument.into(), why: error.to_string() })?;
    let mut files = Vec::new();
    for found in matches {
        let path = found.map_err(|error| BuildError::Unreadable {
            path: error.path().to_path_buf(),
            source: std::io::Error::new(error.error().kind(), error.error().to_string()),
        })?;
        if path.is_file() {
            files.push(path);
        }
    }
    match files.is_empty() {
        true => Err(BuildError::Pattern { pattern: argument.into(), why: "no file matches it".into() }),
        false => Ok(files),
    }
}

/// The files in a folder and in those below it that can be read. Links are not followed: they may lead back.
fn walk(folder: &Path, form: Option<Form>, files: &mut Vec<PathBuf>) -> Result<(), BuildError> {
    let unreadable = |source| BuildError::Unreadable { path: folder.to_path_buf(), source };
    for entry in std::fs::read_dir(folder).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        let kind = entry.file_type().map_err(unreadable)?;
        let path = entry.path();
        if kind.is_dir() {
            walk(&path, form, files)?;
        } else if kind.is_file() && kinds(&path, form).is_ok() {
            files.push(path);
        }
    }
    Ok(())
}

fn describe(path: &Path, form: Option<Form>, split: Option<Split>) -> Result<Input, BuildError> {
    let unreadable = |source| BuildError::Unreadable { path: path.to_path_buf(), source };
    let (form, packing) = kinds(path, form)?;
    let metadata = std::fs::metadata(path).map_err(unreadable)?;
    let mut input = Input {
        path: path.to_path_buf(),
        form,
        packing,
        split: split.unwrap_or(Split::Line),
        bytes: metadata.len(),
        modified_ns: modified_ns(&metadata),
    };
    if split.is_none() && form == Form::Text {
        let mut beginning = Vec::new();
        let stream = streams::open(&input, 0).map_err(unreadable)?;
        stream
            .take(LOOK_BYTES)
            .read_to_end(&mut beginning)
            .map_err(|error| BuildError::broken(&input, error))?;
        input.split = Split::of(&beginning);
    }
    Ok(input)
}

/// What a file is by the endings of its name, `corpus.jsonl.zst`; a form that is given stands for the ending.
fn kinds(path: &Path, form: Option<Form>) -> Result<(Form, Packing), BuildError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
    let endings = [(".gz", Packing::Gzip), (".zst", Packing::Zstandard), (".zstd", Packing::Zstandard)];
    let packed = endings.iter().find_map(|(ending, packing)| Some((name.strip_suffix(ending)?, *packing)));
    if packed.is_none() && name.ends_with(".parquet") {
        return Ok((Form::Jsonl, Packing::Parquet));
    }
    let (name, packing) = packed.unwrap_or((&name, Packing::Plain));
    let form = form.or_else(|| match Path::new(name).extension()?.to_str()? {
        "txt" | "text" | "md" => Some(Form::Text),
        "jsonl" | "ndjson" => Some(Form::Jsonl),
        _ => None,
    });
    Ok((form.ok_or_else(|| BuildError::UnknownEnding { path: path.to_path_buf() })?, packing))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ending_says_what_a_file_is() {
        let of = |name: &str| kinds(Path::new(name), None).ok();
        assert_eq!(of("a/b.txt"), Some((Form::Text, Packing::Plain)));
        assert_eq!(of("b.JSONL.GZ"), Some((Form::Jsonl, Packing::Gzip)));
        assert_eq!(of("b.ndjson.zst"), Some((Form::Jsonl, Packing::Zstandard)));
        assert_eq!(of("b.parquet"), Some((Form::Jsonl, Packing::Parquet)));
        assert_eq!(of("b.pdf"), None);
        assert_eq!(of("b.gz"), None);
        let given = kinds(Path::new("train.en.gz"), Some(Form::Text)).unwrap();
        assert_eq!(given, (Form::Text, Packing::Gzip));
    }

    #[test]
    fn folders_and_patterns_are_read_by_name_and_each_file_once() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("sub")).unwrap();
        for name in ["b.txt", "a.txt", "sub/c.jsonl", "notes.pdf"] {
            std::fs::write(folder.path().join(name), "one\n\ntwo").unwrap();
        }
        let argument = |name: &str| folder.path().join(name).display().to_string();
        let names = |arguments: &[String]| -> Vec<String> {
            let inputs = resolve(arguments, None, None).unwrap();
            inputs.iter().map(|input| input.path.file_name().unwrap().to_string_lossy().into()).collect()
        };
        assert_eq!(names(&[argument("")]), ["a.txt", "b.txt", "c.jsonl"]);
        assert_eq!(names(&[argument("b.txt"), argument("*.txt")]), ["b.txt", "a.txt"]);
        let refused = |name: &str| resolve(&[argument(name)], None, None).unwrap_err().to_string();
        assert!(refused("*.csv").contains("no file matches"), "{}", refused("*.csv"));
        assert!(refused("gone.txt").contains("gone.txt"));
        assert!(refused("notes.pdf").contains("--format"));
    }
}
