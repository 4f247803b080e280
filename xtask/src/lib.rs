//! The project's own commands, as far as more than one program has them.

pub mod tool;

use std::process::ExitCode;

/// Tells why a command failed, if it did.
pub fn exit(outcome: anyhow::Result<()>) -> ExitCode {
    let Err(error) = outcome else { return ExitCode::SUCCESS };
    eprintln!("error: {error}");
    error.chain().skip(1).for_each(|cause| eprintln!("  because {cause}"));
    ExitCode::FAILURE
}
