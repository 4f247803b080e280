//! How long to wait: from what was measured, never a constant of seconds.
//!
//! The estimate is TCP's (RFC 6298): a smoothed mean and a smoothed mean deviation. Four deviations above the
//! mean is late for almost any distribution that occurs; the floor keeps a perfectly regular peer from being
//! suspected over a millisecond, and every retry doubles the wait, up to sixteen times, so that a wrong estimate heals by itself.

use serde::{Deserialize, Serialize};

use crate::time::Span;

/// Mean and deviation of a duration, smoothed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Estimate {
    mean_us: f64,
    deviation_us: f64,
    samples: u32,
}

impl Estimate {
    /// Takes a measurement.
    pub fn observe(&mut self, measured: Span) {
        let measured_us = measured.0 as f64;
        if self.samples == 0 {
            self.mean_us = measured_us;
            self.deviation_us = measured_us / 2.0;
        } else {
            let error = measured_us - self.mean_us;
            self.deviation_us += (error.abs() - self.deviation_us) / 4.0;
            self.mean_us += error / 8.0;
        }
        self.samples = self.samples.saturating_add(1);
    }

    /// The smoothed mean, once anything was measured.
    pub fn mean(&self) -> Option<Span> {
        (self.samples > 0).then_some(Span(self.mean_us as u64))
    }

    /// How long to wait for the try number `retry`; `unknown` while nothing was measured.
    pub fn deadline(&self, floor: Span, unknown: Span, retry: u32) -> Span {
        let wait = match self.samples {
            0 => unknown,
            _ => Span((self.mean_us + 4.0 * self.deviation_us) as u64) + floor,
        };
        wait.times(1 << retry.min(4))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_regular_peer_gets_a_tight_deadline_and_a_jittery_one_a_loose_one() {
        let (mut regular, mut jittery) = (Estimate::default(), Estimate::default());
        for round in 0..50 {
            regular.observe(Span::ms(100));
            jittery.observe(Span::ms(if round % 2 == 0 { 20 } else { 180 }));
        }
        let deadline = |estimate: Estimate| estimate.deadline(Span::ms(10), Span::s(9), 0);
        assert!(deadline(regular) < Span::ms(120), "{}", deadline(regular));
        assert!(deadline(jittery) > Span::ms(300), "{}", deadline(jittery));
    }

    #[test]
    fn every_retry_doubles_the_wait() {
        let mut estimate = Estimate::default();
        assert_eq!(estimate.deadline(Span::ms(1), Span::s(3), 1), Span::s(6));
        estimate.observe(Span::ms(10));
        assert_eq!(
            estimate.deadline(Span::ms(1), Span::s(3), 2),
            estimate.deadline(Span::ms(1), Span::s(3), 0).times(4)
        );
    }
}
