//! What `--chaos` does to the peers.

use std::str::FromStr;
use std::time::{Duration, Instant};

use super::peers::Peers;

/// Kills a peer every so often. Which one depends on the count of kills alone, so that it can be told again.
#[derive(Clone, Debug)]
pub struct Chaos {
    every: Duration,
    next: Instant,
    random: u64,
}

impl Chaos {
    /// Does what is due.
    pub fn act(&mut self, peers: &mut Peers) {
        if Instant::now() < self.next {
            return;
        }
        self.next = Instant::now() + self.every;
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        peers.kill((self.random >> 33) as usize);
    }
}

impl FromStr for Chaos {
    type Err = String;

    fn from_str(text: &str) -> Result<Chaos, String> {
        let seconds = text
            .strip_prefix("kill every ")
            .and_then(|time| time.trim().strip_suffix('s')?.trim().parse::<f64>().ok())
            .filter(|&seconds| seconds > 0.0 && seconds <= 1e6);
        let every = seconds.map(Duration::from_secs_f64);
        let every = every.ok_or_else(|| format!("{text:?} is not understood; write 'kill every 10s'"))?;
        Ok(Chaos { every, next: Instant::now() + every, random: 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_understood_is_done() {
        assert_eq!("kill every 2.5s".parse::<Chaos>().unwrap().every, Duration::from_millis(2500));
        for text in ["", "kill", "kill every s", "kill every -1s", "kill every 10", "kill every nans"] {
            assert!(text.parse::<Chaos>().is_err(), "{text}");
        }
    }
}
