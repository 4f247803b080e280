//! Ctrl-C and SIGTERM: the first asks for an orderly end, the second ends at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::words;

/// Exit code after an orderly end that was asked for: the run is not finished.
pub const EXIT: u8 = 130;

/// Signals that come as close together as this are one: `timeout` and some shells send theirs twice.
const ONE_SIGNAL: Duration = Duration::from_millis(300);

/// Calls `ask` at the first signal, and ends the process at the second.
pub fn on_signal(mut ask: impl FnMut() + Send + 'static) -> Result<()> {
    let mut first: Option<Instant> = None;
    ctrlc::set_handler(move || match first {
        None => {
            first = Some(Instant::now());
            ask();
        }
        Some(first) if first.elapsed() < ONE_SIGNAL => {}
        Some(_) => std::process::exit(EXIT.into()),
    })
    .context("cannot listen for Ctrl-C")
}

/// Whether an orderly end was asked for.
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Starts to listen.
    pub fn listen() -> Result<Interrupt> {
        let asked = Arc::new(AtomicBool::new(false));
        let flag = asked.clone();
        on_signal(move || {
            flag.store(true, Ordering::SeqCst);
            words::tell("\nstopping in good order; once more to stop at once, without a checkpoint");
        })?;
        Ok(Interrupt(asked))
    }

    /// Whether somebody asked.
    pub fn asked(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}
