//! The folder of checkpoints: written aside, synced, renamed, swept.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use super::{Checkpoint, OpenError, SaveError};

/// Ends the name of a folder that is still being written.
const WRITING: &str = ".writing";
/// Ends the name of a folder that is being removed.
const OLD: &str = ".old";
/// Ends the name of a folder that was found damaged.
const DAMAGED: &str = ".damaged";

/// The name of the checkpoint of a step.
pub fn name(step: u64) -> String {
    format!("step-{step:08}")
}

/// Checkpoints in a folder with their steps, oldest first.
pub fn list(folder: &Path) -> io::Result<Vec<(u64, PathBuf)>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(found),
        entries => entries?,
    };
    for entry in entries {
        let path = entry?.path();
        let step = path.file_name().and_then(|n| n.to_str()).and_then(|n| n.strip_prefix("step-"));
        if let Some(step) = step.and_then(|step| step.parse().ok()) {
            found.push((step, path));
        }
    }
    found.sort();
    Ok(found)
}

/// Moves a checkpoint that cannot be used out of the list, without losing it: `step-N.damaged`.
pub fn set_aside(checkpoint: &Path) -> io::Result<()> {
    let away = with_suffix(checkpoint, DAMAGED);
    if away.exists() {
        fs::remove_dir_all(&away)?;
    }
    fs::rename(checkpoint, away)
}

/// Removes all but the newest `keep` checkpoints, those of steps divisible by `keep_every`, and that of `written`.
pub fn prune(folder: &Path, written: u64, keep: usize, keep_every: u64) -> Result<(), SaveError> {
    let all = list(folder).map_err(at(folder))?;
    let old = all.len().saturating_sub(keep.max(1));
    for (step, path) in &all[..old] {
        let marked = keep_every > 0 && step.is_multiple_of(keep_every);
        if *step != written && !marked {
            // Renamed first: a crash while removing must not leave half a checkpoint under its name.
            let away = with_suffix(path, OLD);
            fs::rename(path, &away).map_err(at(path))?;
            fs::remove_dir_all(&away).map_err(at(&away))?;
        }
    }
    Ok(())
}

/// Removes what crashes have left: checkpoints that were being written or removed. Nobody else may be writing.
pub fn sweep(folder: &Path) -> Result<(), SaveError> {
    if !folder.exists() {
        return Ok(());
    }
    for entry in fs::read_dir(folder).map_err(at(folder))?.flatten() {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if name.starts_with("step-") && (name.ends_with(WRITING) || name.ends_with(OLD)) {
            fs::remove_dir_all(entry.path()).map_err(at(&entry.path()))?;
        }
    }
    Ok(())
}

/// Reads a file of at most `most` bytes.
pub fn read(path: &Path, most: u64) -> Result<Vec<u8>, OpenError> {
    let fail = |source| OpenError::Read { path: path.to_path_buf(), source };
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(most.saturating_add(1)).read_to_end(&mut bytes))
        .map_err(fail)?;
    if bytes.len() as u64 > most {
        return Err(OpenError::Long { path: path.to_path_buf(), most });
    }
    Ok(bytes)
}

/// A folder that is being written; dropped unpublished, it is removed.
pub struct Aside {
    path: PathBuf,
}

impl Aside {
    /// Starts the checkpoint of a step.
    pub fn new(folder: &Path, step: u64) -> Result<Aside, SaveError> {
        if !folder.exists() {
            fs::create_dir_all(folder).map_err(at(folder))?;
            sync_folder(folder.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new(".")))?;
        }
        let path = folder.join(name(step) + WRITING);
        if path.exists() {
            fs::remove_dir_all(&path).map_err(at(&path))?;
        }
        fs::create_dir(&path).map_err(at(&path))?;
        Ok(Aside { path })
    }

    /// Where it is written.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes and syncs one file.
    pub fn write(&self, name: &str, bytes: &[u8]) -> Result<(), SaveError> {
        let path = self.path.join(name);
        let mut file = File::create(&path).map_err(at(&path))?;
        file.write_all(bytes).and_then(|()| file.sync_all()).map_err(at(&path))
    }

    /// Makes the checkpoint appear under its name. One that is there already is of the same run and step, so of the
    /// same state: if it is whole it stays, and at no instant is there none.
    pub fn publish(self, target: &Path) -> Result<(), SaveError> {
        sync_folder(&self.path)?;
        if target.exists() {
            if Checkpoint::open(target).is_ok() {
                return Ok(());
            }
            set_aside(target).map_err(at(target))?;
        }
        fs::rename(&self.path, target).map_err(at(target))?;
        sync_folder(target.parent().unwrap_or(Path::new(".")))
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.path); // After `publish` there is nothing at that path.
    }
}

fn sync_folder(folder: &Path) -> Result<(), SaveError> {
    // Folders cannot be opened, nor need to be synced, on Windows.
    if cfg!(unix) {
        File::open(folder).and_then(|folder| folder.sync_all()).map_err(at(folder))?;
    }
    Ok(())
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_os_string();
    name.push(suffix);
    name.into()
}

fn at(path: &Path) -> impl Fn(io::Error) -> SaveError + '_ {
    move |source| SaveError::Write { path: path.to_path_buf(), source }
}
