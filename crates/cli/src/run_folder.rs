//! The folder of a run: what lies where, and that only one process trains in it.

use std::fs::{self, File, TryLockError};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use starling_model::checkpoint;

/// Where a run writes.
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// The folder at `path`, whether it exists or not.
    pub fn at(path: &Path) -> RunFolder {
        RunFolder { path: path.to_path_buf() }
    }

    /// Makes the folder if need be, and claims it for this process as long as the lock lives.
    pub fn claim(&self) -> Result<Lock> {
        fs::create_dir_all(&self.path)
            .with_context(|| format!("cannot make the run's folder {}", self.path.display()))?;
        let path = self.path.join("lock");
        let file = File::create(&path).with_context(|| format!("cannot write {}", path.display()))?;
        match file.try_lock() {
            Ok(()) => Ok(Lock { _file: file }),
            Err(TryLockError::WouldBlock) => bail!(
                "another process is training in {}; wait for it, stop it, or choose another folder with --out",
                self.path.display()
            ),
            Err(TryLockError::Error(error)) => {
                Err(error).with_context(|| format!("cannot lock {}", path.display()))
            }
        }
    }

    /// Whether a run was started here before.
    pub fn is_used(&self) -> bool {
        self.run_file().exists() || self.events().exists() || self.checkpoints().exists()
    }

    /// Checkpoints, newest first.
    pub fn checkpoints_newest_first(&self) -> Result<Vec<PathBuf>> {
        let folder = self.checkpoints();
        let list = checkpoint::list(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        Ok(list.into_iter().rev().map(|(_, path)| path).collect())
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The run as it was resolved.
    pub fn run_file(&self) -> PathBuf {
        self.path.join("run.toml")
    }

    pub fn events(&self) -> PathBuf {
        self.path.join("events.jsonl")
    }

    /// Curves for TensorBoard.
    pub fn curves(&self) -> PathBuf {
        self.path.join("tensorboard")
    }

    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// Token shards made for this run.
    pub fn corpus(&self) -> PathBuf {
        self.path.join("corpus")
    }

    /// What the coordinator has promised.
    pub fn journal(&self) -> PathBuf {
        self.path.join("journal")
    }

    /// A ticket for who may give the run orders.
    pub fn operator_ticket(&self) -> PathBuf {
        self.path.join("operator.ticket")
    }

    pub fn plot(&self) -> PathBuf {
        self.path.join("loss.svg")
    }

    pub fn report(&self) -> PathBuf {
        self.path.join("report.md")
    }
}

/// The claim of one process on a folder; the system drops it with the process, however that ends.
pub struct Lock {
    _file: File,
}

/// Writes a small file that only this user may read, whole or not at all.
pub fn write_private(path: &Path, contents: &str) -> Result<()> {
    write(path, contents, 0o600)
}

/// Writes a small file whole or not at all.
pub fn write_whole(path: &Path, contents: &str) -> Result<()> {
    write(path, contents, 0o666)
}

fn write(path: &Path, contents: &str, mode: u32) -> Result<()> {
    let trouble = || format!("cannot write {}", path.display());
    let mut name = path.as_os_str().to_os_string();
    name.push(".writing");
    let aside = PathBuf::from(name);
    let _ = fs::remove_file(&aside); // What a crash has left may have another mode.
    let mut options = File::options();
    options.write(true).create(true).truncate(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, mode);
    #[cfg(not(unix))]
    let _ = mode;
    let mut file = options.open(&aside).with_context(trouble)?;
    file.write_all(contents.as_bytes()).and_then(|()| file.sync_all()).with_context(trouble)?;
    fs::rename(&aside, path).with_context(trouble)
}

/// The checkpoint that a path names: the folder of a checkpoint itself, or the newest of a run's folder.
pub fn checkpoint_at(path: &Path) -> Result<PathBuf> {
    if path.join("manifest.json").is_file() {
        return Ok(path.to_path_buf());
    }
    if !path.exists() {
        bail!("{} does not exist; name a run's folder (runs/NAME) or one of its checkpoints", path.display());
    }
    // A run's folder, or the folder of its checkpoints.
    let mut found = RunFolder::at(path).checkpoints_newest_first()?;
    if found.is_empty() {
        let list = checkpoint::list(path).with_context(|| format!("cannot list {}", path.display()))?;
        found.extend(list.into_iter().rev().map(|(_, path)| path));
    }
    let newest = found.into_iter().next();
    newest.with_context(|| format!("{} holds no checkpoint; name a run's folder (runs/NAME) that was trained long enough to have one", path.display()))
}
