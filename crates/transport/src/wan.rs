//! Links that are emulated between sites, so that a run on one machine meets the distances of a real one.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::time::Duration;

/// What a link carries, and how long it takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Bytes a second; infinite if only the latency is emulated.
    pub bytes_per_s: f64,
    /// From one end to the other: half of a round trip.
    pub latency: Duration,
}

/// How it stands between two sites.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LinkState {
    /// A link.
    Open(Link),
    /// Nothing gets through.
    Cut,
}

/// What is emulated between sites: one link for all pairs, and others for named pairs. Inside a site there is none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Wan {
    default: Option<LinkState>,
    pairs: BTreeMap<(String, String), LinkState>,
}

/// Most pairs in one text.
const MAX_PAIRS: usize = 4096;

impl Wan {
    /// What lies between two sites; `None`: nothing is emulated, or they are one.
    pub fn link_between(&self, a: &str, b: &str) -> Option<LinkState> {
        if a == b {
            return None;
        }
        self.pairs.get(&pair(a, b)).copied().or(self.default)
    }
}

/// Why a text describes no link or no WAN.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum BadWan {
    #[error(
        "`{text}` is neither a rate (like 200mbit) nor a latency (like 50ms); write both as `200mbit,50ms`"
    )]
    Part { text: String },
    #[error("`{text}` names a rate or a latency twice; write each once, as in `200mbit,50ms`")]
    Twice { text: String },
    #[error(
        "`{text}` is not a pair of two sites; write it as `paris-tokyo=100mbit,120ms` or `paris-tokyo=cut`"
    )]
    Pair { text: String },
    #[error("{what} is given twice; keep one of the two")]
    Repeated { what: String },
    #[error("more than {MAX_PAIRS} pairs; give most of them the default link")]
    TooMany,
}

impl FromStr for Link {
    type Err = BadWan;

    fn from_str(text: &str) -> Result<Link, BadWan> {
        let (mut bytes_per_s, mut latency) = (None, None);
        for part in text.split(',').map(str::trim) {
            let again = if let Some(rate) = parse_rate(part) {
                bytes_per_s.replace(rate).is_some()
            } else if let Some(time) = parse_latency(part) {
                latency.replace(time).is_some()
            } else {
                return Err(BadWan::Part { text: shown(part) });
            };
            if again {
                return Err(BadWan::Twice { text: shown(text) });
            }
        }
        let bytes_per_s = bytes_per_s.unwrap_or(f64::INFINITY);
        Ok(Link { bytes_per_s, latency: latency.unwrap_or_default() })
    }
}

impl FromStr for Wan {
    type Err = BadWan;

    /// `200mbit,50ms;paris-tokyo=100mbit,120ms;paris-oslo=cut`
    fn from_str(text: &str) -> Result<Wan, BadWan> {
        let mut wan = Wan::default();
        for part in text.split(';').map(str::trim).filter(|part| !part.is_empty()) {
            let Some((sites, state)) = part.split_once('=') else {
                if wan.default.replace(parse_state(part)?).is_some() {
                    return Err(BadWan::Repeated { what: "the link between all sites".to_owned() });
                }
                continue;
            };
            let (a, b) = parse_pair(sites).ok_or_else(|| BadWan::Pair { text: shown(part) })?;
            if wan.pairs.insert(pair(a, b), parse_state(state)?).is_some() {
                return Err(BadWan::Repeated { what: format!("the link {}", shown(sites)) });
            }
            if wan.pairs.len() > MAX_PAIRS {
                return Err(BadWan::TooMany);
            }
        }
        Ok(wan)
    }
}

fn parse_state(text: &str) -> Result<LinkState, BadWan> {
    if text.trim() == "cut" { Ok(LinkState::Cut) } else { text.parse().map(LinkState::Open) }
}

fn parse_pair(sites: &str) -> Option<(&str, &str)> {
    let (a, b) = sites.split_once('-')?;
    let (a, b) = (a.trim(), b.trim());
    (!a.is_empty() && !b.is_empty() && a != b && !b.contains('-')).then_some((a, b))
}

fn parse_rate(text: &str) -> Option<f64> {
    let units = [("gbit", 1e9), ("mbit", 1e6), ("kbit", 1e3)];
    let (number, bits) = units.iter().find_map(|(unit, bits)| Some((text.strip_suffix(unit)?, bits)))?;
    Some(positive(number)? * bits / 8.0)
}

fn parse_latency(text: &str) -> Option<Duration> {
    let (number, seconds) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s')?, 1.0),
    };
    if number.trim() == "0" {
        return Some(Duration::ZERO);
    }
    // An hour is more than any link, and far from what `Duration` cannot hold.
    Some(positive(number)? * seconds).filter(|seconds| *seconds <= 3600.0).map(Duration::from_secs_f64)
}

fn positive(number: &str) -> Option<f64> {
    number.trim().parse().ok().filter(|number: &f64| number.is_finite() && *number > 0.0)
}

fn pair(a: &str, b: &str) -> (String, String) {
    let (low, high) = if a <= b { (a, b) } else { (b, a) };
    (low.to_owned(), high.to_owned())
}

/// As much of a text as an error message bears.
fn shown(text: &str) -> String {
    text.chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(text: &str) -> Link {
        text.parse().unwrap()
    }

    #[test]
    fn a_link_is_a_rate_a_latency_or_both() {
        let both = Link { bytes_per_s: 25e6, latency: Duration::from_millis(50) };
        assert_eq!(link("200mbit,50ms"), both);
        assert_eq!(link(" 50ms , 0.2gbit "), both);
        assert_eq!(link("8kbit").bytes_per_s, 1000.0);
        assert_eq!(link("8kbit").latency, Duration::ZERO);
        assert_eq!(link("1.5s").latency, Duration::from_millis(1500));
        assert_eq!(link("0ms").bytes_per_s, f64::INFINITY);
    }

    #[test]
    fn what_is_no_link_is_refused_with_an_example() {
        for text in
            ["", "fast", "200", "-5ms", "0mbit", "nanmbit", "1e400mbit", "5ms,6ms", "99999s", "1mbit;"]
        {
            let error = text.parse::<Link>().unwrap_err().to_string();
            assert!(error.contains("200mbit,50ms"), "{text}: {error}");
        }
    }

    #[test]
    fn named_pairs_go_before_the_default_and_a_site_has_no_link_to_itself() {
        let wan: Wan = "200mbit,50ms;paris-tokyo=100mbit,120ms;paris-oslo=cut".parse().unwrap();
        let tokyo = Some(LinkState::Open(link("100mbit,120ms")));
        assert_eq!(wan.link_between("tokyo", "paris"), tokyo);
        assert_eq!(wan.link_between("paris", "tokyo"), tokyo);
        assert_eq!(wan.link_between("oslo", "paris"), Some(LinkState::Cut));
        assert_eq!(wan.link_between("oslo", "tokyo"), Some(LinkState::Open(link("200mbit,50ms"))));
        assert_eq!(wan.link_between("oslo", "oslo"), None);
        assert_eq!("".parse::<Wan>().unwrap().link_between("a", "b"), None);
    }

    #[test]
    fn a_wan_with_a_mistake_is_refused() {
        for text in ["paris=cut", "paris-paris=cut", "1mbit;2mbit", "a-b=cut;b-a=1ms", "-b=cut", "a-b-c=cut"]
        {
            assert!(text.parse::<Wan>().is_err(), "{text}");
        }
    }
}
