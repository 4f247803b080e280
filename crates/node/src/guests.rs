//! Who may talk to a member: whoever shows the coordinator's word on the key that the handshake proved.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use starling_swarm::ids::{Address, DriverId, PeerId};
use starling_transport::endpoint::{Contact, Gate};
use starling_transport::identity::PublicKey;
use starling_transport::ticket::Role;

use crate::post::{Credential, Introduction, MAX_INTRODUCTION_BYTES};

/// Most members that one remembers.
const MOST_GUESTS: usize = 1 << 16;

/// Members that are known by their keys.
pub struct Guests {
    run: [u8; 32],
    authority: PublicKey,
    known: Mutex<BTreeMap<PublicKey, Guest>>,
    /// Where the coordinator stands; it may have moved.
    coordinator: Mutex<Vec<String>>,
}

/// Who somebody is.
#[derive(Clone, Debug, PartialEq)]
pub struct Guest {
    /// Its number.
    pub number: u32,
    /// What it does.
    pub role: Role,
    /// Where it stands.
    pub site: String,
}

impl Guest {
    /// The name under which it may speak; an operator has none.
    pub fn address(&self) -> Option<Address> {
        match self.role {
            Role::Worker => Some(Address::Worker(PeerId(self.number))),
            Role::Driver => Some(Address::Driver(DriverId(self.number))),
            Role::Operator => None,
        }
    }
}

impl Guests {
    /// Those of a run, whose coordinator has this key and stands at these addresses.
    pub fn new(run: [u8; 32], authority: PublicKey, addresses: Vec<String>) -> Guests {
        Guests { run, authority, known: Mutex::default(), coordinator: Mutex::new(addresses) }
    }

    /// How the coordinator is reached.
    pub fn coordinator_contact(&self) -> Contact {
        Contact { key: self.authority, addresses: self.coordinator().clone() }
    }

    /// Who has this key.
    pub fn get(&self, key: PublicKey) -> Option<Guest> {
        self.known().get(&key).cloned()
    }

    /// Remembers somebody whom the coordinator named.
    pub fn remember(&self, key: PublicKey, guest: Guest) {
        let mut known = self.known();
        if known.len() < MOST_GUESTS || known.contains_key(&key) {
            known.insert(key, guest);
        }
    }

    fn coordinator(&self) -> MutexGuard<'_, Vec<String>> {
        self.coordinator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn known(&self) -> MutexGuard<'_, BTreeMap<PublicKey, Guest>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Gate for Guests {
    fn admit(&self, key: PublicKey, introduction: &[u8]) -> Result<Vec<u8>, String> {
        let Introduction { credential, addresses, .. } = read(introduction)?;
        let pass = match credential {
            Credential::Pass(pass) => pass,
            Credential::Authority if key == self.authority => {
                self.coordinator().clone_from(&addresses);
                return Ok(Vec::new());
            }
            Credential::Authority => return Err("you are not the coordinator of this run".into()),
            Credential::Ticket(_) => {
                return Err("a ticket is for the coordinator; show the pass that it gave you".into());
            }
        };
        pass.check(self.authority, self.run, key, now_s()).map_err(|error| error.to_string())?;
        if pass.role == Role::Operator {
            return Err("operators talk to the coordinator alone".into());
        }
        self.remember(key, Guest { number: pass.number, role: pass.role, site: pass.site });
        Ok(Vec::new())
    }
}

/// Reads an introduction.
pub fn read(introduction: &[u8]) -> Result<Introduction, String> {
    if introduction.len() > MAX_INTRODUCTION_BYTES {
        return Err("the introduction is too long".into());
    }
    let read: Introduction = postcard::from_bytes(introduction)
        .map_err(|_| format!("the introduction is not of this version ({})", env!("CARGO_PKG_VERSION")))?;
    if read.version != env!("CARGO_PKG_VERSION") {
        let plain = |c: &char| c.is_ascii_alphanumeric() || ".-+".contains(*c);
        let theirs: String = read.version.chars().filter(plain).take(32).collect();
        let ours = env!("CARGO_PKG_VERSION");
        return Err(format!(
            "you run Starling {theirs}, this run is trained by {ours}; install that version"
        ));
    }
    Ok(read)
}

/// Seconds since 1970, by this machine's clock: only tickets and passes look at it, and only at days.
pub fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
