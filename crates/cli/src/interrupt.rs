//! Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};

use crate::words;

/// Exit code after an orderly end that was asked for: the run is not finished.
pub const EXIT: u8 = 130;

/// Whether an orderly end was asked for.
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Starts to listen.
    pub fn listen() -> Result<Interrupt> {
        let asked = Arc::new(AtomicBool::new(false));
        let flag = asked.clone();
        ctrlc::set_handler(move || {
            if flag.swap(true, Ordering::SeqCst) {
                std::process::exit(EXIT.into());
            }
            words::tell("\nstopping in good order; once more to stop at once, without a checkpoint");
        })
        .context("cannot listen for Ctrl-C")?;
        Ok(Interrupt(asked))
    }

    /// Whether somebody asked.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
