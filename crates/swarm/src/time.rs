//! Time as one machine sees it: microseconds since its own start.
//!
//! Times of two machines are never compared (rule 17), and no message carries one.

use std::fmt;
use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// A moment of one machine's own monotonic clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Time(pub u64);

/// A length of time, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Span(pub u64);

impl Span {
    /// From milliseconds.
    pub const fn ms(ms: u64) -> Span {
        Span(ms * 1_000)
    }

    /// From seconds.
    pub const fn s(s: u64) -> Span {
        Span(s * 1_000_000)
    }

    /// From seconds, rounded; negative and absurd values are clamped.
    pub fn from_s_f64(s: f64) -> Span {
        Span((s * 1e6).clamp(0.0, 1e18) as u64)
    }

    /// In seconds.
    pub fn as_s_f64(self) -> f64 {
        self.0 as f64 / 1e6
    }

    /// This many times as long.
    pub fn times(self, factor: u64) -> Span {
        Span(self.0.saturating_mul(factor))
    }
}

impl Time {
    /// How long ago `earlier` was; nothing if the clock jumped back.
    pub fn since(self, earlier: Time) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Span> for Time {
    type Output = Time;
    fn add(self, span: Span) -> Time {
        Time(self.0.saturating_add(span.0))
    }
}

impl Add for Span {
    type Output = Span;
    fn add(self, other: Span) -> Span {
        Span(self.0.saturating_add(other.0))
    }
}

impl Sub for Time {
    type Output = Span;
    fn sub(self, earlier: Time) -> Span {
        self.since(earlier)
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            us if us < 1_000_000 => write!(f, "{} ms", us / 1_000),
            us => write!(f, "{:.1} s", us as f64 / 1e6),
        }
    }
}
