//! `starling key`: a peer's key, which is its name.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use starling_transport::identity::Identity;

use crate::words;

/// Make a peer's key, or show the public half of one
///
/// A peer that joins with --key FILE is known by it whenever it comes back. The file is for this user alone
/// (mode 0600); the public half is what others see.
#[derive(clap::Args)]
pub struct Arguments {
    /// The key's file; made if it does not exist
    file: PathBuf,
}

pub fn run(arguments: &Arguments) -> Result<ExitCode> {
    let is_new = !arguments.file.exists();
    let identity = Identity::load_or_generate(&arguments.file)?;
    if is_new {
        words::tell(&format!("made a new key in {}", arguments.file.display()));
    }
    words::show(&format!("{}\n", identity.public()))
}
