//! The links that are emulated between sites, as they are now: described in a text, or in a file that may change while
//! the run goes on.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::{Duration, Instant};

use starling_transport::endpoint::Endpoint;
use starling_transport::identity::PublicKey;
use starling_transport::wan::{BadWan, LinkState, Wan};

/// Between two looks at the file.
const LOOK: Duration = Duration::from_millis(100);
/// Longest text of links.
const MOST_BYTES: u64 = 1 << 20;

/// Where the links are described: `200mbit,50ms;paris-tokyo=cut`, or `@FILE` with such a text in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum WanSource {
    /// Nothing is emulated.
    #[default]
    None,
    /// They stay as they are.
    Fixed(Wan),
    /// They are what this file says, whenever that changes.
    File(PathBuf),
}

impl FromStr for WanSource {
    type Err = BadWan;

    fn from_str(text: &str) -> Result<WanSource, BadWan> {
        match text.strip_prefix('@') {
            Some(path) => Ok(WanSource::File(path.into())),
            None => text.parse().map(WanSource::Fixed),
        }
    }
}

/// See the module's head: what one node sends to those in other sites goes by them.
pub struct Links {
    here: String,
    source: WanSource,
    text: String,
    wan: Wan,
    peers: BTreeMap<PublicKey, String>,
    next_look: Instant,
}

impl Links {
    /// Those of a node in this site.
    pub fn new(here: &str, source: WanSource) -> Links {
        let wan = if let WanSource::Fixed(wan) = &source { wan.clone() } else { Wan::default() };
        let (text, peers) = (String::new(), BTreeMap::new());
        Links { here: here.into(), source, text, wan, peers, next_look: Instant::now() }
    }

    /// A connection stands with somebody in that site.
    pub fn met(&mut self, endpoint: &Endpoint, key: PublicKey, site: &str) {
        self.peers.insert(key, site.into());
        self.set(endpoint, key, site);
    }

    /// When it wants to look at its file again.
    pub fn next_wake(&self) -> Option<Instant> {
        matches!(self.source, WanSource::File(_)).then_some(self.next_look)
    }

    /// Looks at the file, if it is time. What cannot be read, or makes no sense, changes nothing.
    pub fn wake(&mut self, endpoint: &Endpoint) {
        let WanSource::File(path) = &self.source else { return };
        if Instant::now() < self.next_look {
            return;
        }
        self.next_look = Instant::now() + LOOK;
        let is_short = std::fs::metadata(path).is_ok_and(|file| file.len() <= MOST_BYTES);
        let Some(text) = is_short.then(|| std::fs::read_to_string(path).ok()).flatten() else { return };
        if text == self.text {
            return;
        }
        self.text = text;
        if let Ok(wan) = self.text.trim().parse() {
            self.wan = wan;
            for (key, site) in &self.peers {
                self.set(endpoint, *key, site);
            }
        }
    }

    fn set(&self, endpoint: &Endpoint, key: PublicKey, site: &str) {
        let state = self.wan.link_between(&self.here, site);
        endpoint.cut(key, state == Some(LinkState::Cut));
        let link = match state {
            Some(LinkState::Open(link)) => Some((format!("{}-{site}", self.here), link)),
            Some(LinkState::Cut) | None => None,
        };
        endpoint.shape(key, link);
    }
}
