//! Quantities as people write them: `200mbit,50ms`, `90s`, `10m`, `24GB`.

use std::str::FromStr;
use std::time::Duration;

use anyhow::{Result, anyhow, bail};
use serde::{Deserialize, Deserializer, de};

const RATES: [(&str, f64); 3] = [("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)];
/// The longer names first: "50ms" ends in "s" too.
const TIMES: [(&str, f64); 5] = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];

/// The longer names first: "GiB" and "GB" end in "B" too.
const SIZES: [(&str, f64); 7] = [
    ("KiB", 1024.0),
    ("MiB", 1_048_576.0),
    ("GiB", 1_073_741_824.0),
    ("MB", 1e6),
    ("GB", 1e9),
    ("TB", 1e12),
    ("B", 1.0),
];

/// Ten years: no run lasts longer, and sums of a few of them do not overflow.
const MOST_S: f64 = 10.0 * 365.0 * 86_400.0;

/// A link between two machines.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    pub bytes_per_s: f64,
    pub latency_s: f64,
}

/// An amount of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bytes(pub u64);

/// A stretch of time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Time(pub Duration);

impl Time {
    pub fn us(self) -> u64 {
        self.0.as_micros() as u64
    }
}

impl FromStr for Link {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Link> {
        let explain = || anyhow!("{text:?} is no link; write rate and latency as 200mbit,50ms or 10gbit,1ms");
        let (rate, latency) = text.split_once(',').ok_or_else(explain)?;
        let bits_per_s = number(rate, &RATES).ok_or_else(explain)?;
        let latency_s = number(latency, &TIMES).ok_or_else(explain)?;
        if bits_per_s == 0.0 {
            bail!("a link of rate 0 carries nothing; write one as 200mbit,50ms");
        }
        Ok(Link { bytes_per_s: bits_per_s / 8.0, latency_s })
    }
}

impl FromStr for Time {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Time> {
        let explain = || anyhow!("{text:?} is no time; write it as 250ms, 90s, 10m or 2h");
        let seconds = number(text, &TIMES).ok_or_else(explain)?;
        if seconds > MOST_S {
            bail!("{text:?} is longer than ten years");
        }
        Ok(Time(Duration::try_from_secs_f64(seconds).map_err(|_| explain())?))
    }
}

impl FromStr for Bytes {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Bytes> {
        let explain = || anyhow!("{text:?} is no amount of memory; write it as 24GB or 512MiB");
        let bytes = number(text, &SIZES).filter(|bytes| (1.0..1e18).contains(bytes)).ok_or_else(explain)?;
        Ok(Bytes(bytes as u64))
    }
}

fn number(text: &str, units: &[(&str, f64)]) -> Option<f64> {
    let text = text.trim();
    let (digits, scale) = units.iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?, scale)))?;
    let value: f64 = digits.trim().parse().ok()?;
    (value >= 0.0 && value.is_finite()).then_some(value * scale)
}

impl<'de> Deserialize<'de> for Link {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Link, D::Error> {
        String::deserialize(from)?.parse().map_err(de::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Time, D::Error> {
        String::deserialize(from)?.parse().map_err(de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_read_with_their_units() {
        let link: Link = "200mbit,50ms".parse().unwrap();
        assert_eq!((link.bytes_per_s, link.latency_s), (25e6, 0.05));
        assert_eq!("1.5gbit, 10us".parse::<Link>().unwrap().bytes_per_s, 187.5e6);
        for wrong in ["200", "fast,1ms", "1mbit", "-1mbit,1ms", "0mbit,1ms", "1mbit,nanms"] {
            assert!(wrong.parse::<Link>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn memory_is_read_with_its_units() {
        for (text, bytes) in [("24GB", 24_000_000_000), ("1.5 GiB", 3 << 29), ("80000B", 80_000)] {
            assert_eq!(text.parse::<Bytes>().unwrap().0, bytes, "{text}");
        }
        for wrong in ["", "24", "0GB", "-1GB", "GB", "1e30TB"] {
            assert!(wrong.parse::<Bytes>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_are_read_with_their_units() {
        for (text, us) in [("250ms", 250_000), ("90s", 90_000_000), ("1.5h", 5_400_000_000), ("0s", 0)] {
            assert_eq!(text.parse::<Time>().unwrap().us(), us, "{text}");
        }
        for wrong in ["", "10", "s", "-1s", "1e300h", "infs", "11000000m"] {
            assert!(wrong.parse::<Time>().is_err(), "{wrong}");
        }
    }
}
