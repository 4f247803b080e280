//! `starling support`: what a bug report needs, in one file.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use flate2::Compression;
use flate2::write::GzEncoder;
use starling_model::memory;

use crate::run_folder::RunFolder;
use crate::words;

/// The end of a file that is packed; of longer ones the beginning is left out.
const MOST_BYTES: u64 = 16 << 20;
/// Files of one run that are packed, at the most.
const MOST_FILES: usize = 4096;
/// What a ticket begins with, wherever it stands.
const TICKET: &str = "starling-ticket-";

/// Pack what a bug report needs: logs, events, journal, versions
///
/// Nothing secret goes in (no keys, no tickets) and nothing that was trained on or written by the model: look into
/// the file before you send it.
#[derive(clap::Args)]
#[command(after_help = "Example:\n  starling support runs/quickstart --out bug.tar.gz")]
pub struct Arguments {
    /// The run's folder
    folder: PathBuf,
    /// The file to write
    #[arg(long, value_name = "FILE", default_value = "starling-support.tar.gz")]
    out: PathBuf,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let Arguments { folder, out } = arguments;
    if !RunFolder::at(folder).is_used() {
        bail!("{} holds no run; name the folder of one (runs/NAME)", folder.display());
    }
    let trouble = || format!("cannot write {}", out.display());
    let file = File::create_new(out).with_context(trouble)?;
    let packed = pack(folder, GzEncoder::new(file, Compression::default())).with_context(trouble);
    if packed.is_err() {
        let _ = fs::remove_file(out); // Half of it would only mislead.
    }
    let files = packed?;
    words::show(&format!("{}: {files} files, no keys, no tickets, no text\n", out.display()))
}

fn pack(folder: &Path, out: GzEncoder<File>) -> Result<usize> {
    let mut tar = tar::Builder::new(out);
    let mut add = |name: &Path, contents: &[u8]| -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(contents.len() as u64);
        header.set_mode(0o644);
        Ok(tar.append_data(&mut header, Path::new("starling-support").join(name), contents)?)
    };
    add(Path::new("versions.txt"), versions().as_bytes())?;
    let files = files(folder)?;
    for name in &files {
        add(name, clean(&end_of(&folder.join(name))?).as_bytes())?;
    }
    tar.into_inner()?.finish()?.sync_all()?;
    Ok(files.len() + 1)
}

fn versions() -> String {
    format!(
        "starling {}\n{} on {}\n{} cores, {} of memory available\n",
        env!("CARGO_PKG_VERSION"),
        std::env::consts::ARCH,
        std::env::consts::OS,
        std::thread::available_parallelism().map_or(0, usize::from),
        memory::available_bytes()
            .map_or("an unknown amount".into(), |bytes| format!("{:.1} GB", bytes as f64 / 1e9)),
    )
}

/// What is packed: named one by one, so that nothing secret gets in by being new.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> =
        ["run.toml", "identity", "events.jsonl", "report.md", "loss.svg"].map(PathBuf::from).into();
    files.extend(
        entries(folder, "")?.into_iter().filter(|path| path.to_string_lossy().starts_with("journal")),
    );
    for peer in entries(folder, "peers")? {
        files.extend(["log", "events.jsonl"].map(|name| peer.join(name)));
    }
    files.extend(
        entries(folder, "checkpoints")?.into_iter().map(|checkpoint| checkpoint.join("manifest.json")),
    );
    files.retain(|name| folder.join(name).is_file());
    files.truncate(MOST_FILES);
    Ok(files)
}

/// What lies in a folder of the run's, if there is such a folder, in order.
fn entries(folder: &Path, name: &str) -> Result<Vec<PathBuf>> {
    let path = folder.join(name);
    if !path.is_dir() {
        return Ok(Vec::new());
    }
    let list = fs::read_dir(&path).with_context(|| format!("cannot list {}", path.display()))?;
    let mut entries =
        list.map(|entry| Ok(Path::new(name).join(entry?.file_name()))).collect::<Result<Vec<_>>>()?;
    entries.sort();
    Ok(entries)
}

fn end_of(path: &Path) -> Result<String> {
    let trouble = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(trouble)?;
    let length = file.metadata().with_context(trouble)?.len();
    let start = length.saturating_sub(MOST_BYTES);
    file.seek(SeekFrom::Start(start)).with_context(trouble)?;
    let mut bytes = Vec::new();
    file.take(MOST_BYTES).read_to_end(&mut bytes).with_context(trouble)?;
    let text = String::from_utf8_lossy(&bytes).into_owned();
    // Half a line does not show what it is, and may hold what must not be told.
    Ok(if start == 0 { text } else { text.split_once('\n').map_or(String::new(), |(_, rest)| rest.into()) })
}

/// Without tickets, and without what the model wrote.
fn clean(text: &str) -> String {
    let mut cleaned = String::with_capacity(text.len());
    for line in text.split_inclusive('\n').filter(|line| !line.contains(r#""event":"sample""#)) {
        let mut parts = line.split(TICKET);
        cleaned.push_str(parts.next().unwrap_or_default());
        for part in parts {
            cleaned.push_str(TICKET);
            cleaned.push('…');
            cleaned
                .push_str(part.trim_start_matches(|c: char| c.is_ascii_alphanumeric() || "-_.".contains(c)));
        }
    }
    cleaned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tickets_and_what_the_model_wrote_stay_here() {
        let text = "join starling-ticket-aB3-_x --site a starling-ticket-zz\n{\"event\":\"sample\",\"text\":\"x\"}\nend";
        assert_eq!(clean(text), "join starling-ticket-… --site a starling-ticket-…\nend");
    }
}
