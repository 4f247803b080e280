//! What tells a value from every other: 128 bits over what `Debug` writes of it.

use std::cell::Cell;
use std::fmt::{self, Debug, Write};
use std::rc::Rc;

use starling_sim::rng::mix2;

/// Something that is shared between states until it changes, and whose print is taken at most once.
#[derive(Clone, Default)]
pub(crate) struct Printed<T> {
    pub(crate) inner: Rc<T>,
    pub(crate) print: Cell<Option<u128>>,
}

impl<T: Clone + Debug> Printed<T> {
    pub(crate) fn new(inner: T) -> Printed<T> {
        Printed { inner: Rc::new(inner), print: Cell::new(None) }
    }

    pub(crate) fn change(&mut self) -> &mut T {
        self.print.set(None);
        Rc::make_mut(&mut self.inner)
    }

    pub(crate) fn print(&self) -> u128 {
        let print = self.print.get().unwrap_or_else(|| print_of(&*self.inner));
        self.print.set(Some(print));
        print
    }
}

impl<T> std::ops::Deref for Printed<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

impl<T: Debug> Debug for Printed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

pub(crate) fn print_of(value: &impl Debug) -> u128 {
    let mut print = Print::default();
    let _ = write!(print, "{value:?}"); // A `Print` takes everything.
    print.value()
}

/// A hash of 128 bits over what `Debug` writes, without the run's spec and the counts of what was refused.
#[derive(Default)]
pub(crate) struct Print {
    pub(crate) low: u64,
    pub(crate) high: u64,
    /// While something is left out: how many brackets are open.
    pub(crate) leaves_out: Option<u32>,
}

impl Print {
    pub(crate) fn number(&mut self, number: u128) {
        self.word(number as u64);
        self.word((number >> 64) as u64);
    }

    pub(crate) fn word(&mut self, word: u64) {
        self.low = (self.low ^ word).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
        self.high = (self.high ^ self.low).wrapping_mul(0xC2B2_AE3D_27D4_EB4F).rotate_left(31);
    }

    pub(crate) fn value(&self) -> u128 {
        u128::from(mix2(self.low, self.high)) << 64 | u128::from(mix2(self.high, self.low))
    }

    /// Follows the brackets of what is left out to their end.
    pub(crate) fn leave_out(&mut self, text: &str, open: u32) {
        self.leaves_out = match text {
            "(" | "{" | " { " => Some(open + 1),
            ")" | "}" | " }" => open.checked_sub(1).filter(|open| *open > 0),
            _ => Some(open),
        };
    }
}

impl Write for Print {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        if let Some(open) = self.leaves_out {
            self.leave_out(text, open);
            return Ok(());
        }
        if matches!(text, "refusals" | "spec") {
            self.leaves_out = Some(0);
            return Ok(());
        }
        if matches!(text, ", " | ": ") {
            return Ok(()); // Every piece is ended by its length.
        }
        let mut bytes = text.as_bytes();
        while let Some((first, rest)) = bytes.split_first_chunk::<8>() {
            self.word(u64::from_le_bytes(*first));
            bytes = rest;
        }
        let tail = bytes.iter().fold(0, |word, &byte| word << 8 | u64::from(byte));
        self.word(tail << 8 | bytes.len() as u64);
        Ok(())
    }
}
