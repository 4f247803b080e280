//! Who may talk to the coordinator, under which number, and how it is reached.
//!
//! A key that showed a good ticket gets a number for the life of the run, written down before it is told: the machines'
//! journal names peers by these numbers. Everything else here is known anew when a member connects.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};
use starling_swarm::ids::SiteId;
use starling_transport::endpoint::{Contact, Gate};
use starling_transport::identity::{Identity, PublicKey};
use starling_transport::ticket::{Pass, Role, Ticket};

use crate::charter::Charter;
use crate::guests::{Guest, now_s, read};
use crate::journal::{Journal, JournalError};
use crate::post::{Admission, Card, Credential, Introduction};

/// How long a pass is good; it is renewed whenever its holder connects.
const PASS_S: u64 = 30 * 24 * 3600;
/// Most members that a run may ever have.
const MOST_MEMBERS: usize = 1 << 20;
/// Longest name of a site, and most addresses of a member.
const MOST_SITE_BYTES: usize = 64;
const MOST_ADDRESSES: usize = 16;
/// Operators are no members, and share a number.
const OPERATOR: u32 = u32::MAX;

/// See the module's head.
pub struct Registry {
    authority: Arc<Identity>,
    run: [u8; 32],
    site: String,
    charter: String,
    book: Mutex<Book>,
}

struct Book {
    journal: Journal,
    members: BTreeMap<PublicKey, Guest>,
    contacts: BTreeMap<u32, Contact>,
    /// Numbers of sites, by the order in which they were first heard of.
    sites: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    key: String,
    number: u32,
    role: Role,
    site: String,
    /// Where it is reached: a coordinator that takes over looks for it there.
    #[serde(default)]
    addresses: Vec<String>,
}

impl Registry {
    /// Opens the registry of a run; `site` is where the coordinator stands.
    pub fn open(
        path: &Path,
        authority: Arc<Identity>,
        site: &str,
        charter: &Charter,
    ) -> Result<Registry, JournalError> {
        let (journal, entries) = Journal::open::<Entry>(path)?;
        let mut book =
            Book { journal, members: BTreeMap::new(), contacts: BTreeMap::new(), sites: Vec::new() };
        book.site(site);
        for Entry { key, number, role, site, addresses } in entries {
            book.site(&site);
            if let Ok(key) = key.parse() {
                book.contacts.insert(number, Contact { key, addresses });
                book.members.insert(key, Guest { number, role, site });
            }
        }
        let charter_text = serde_json::to_string(charter).unwrap_or_default();
        Ok(Registry {
            authority,
            run: charter.identity(),
            site: site.into(),
            charter: charter_text,
            book: Mutex::new(book),
        })
    }

    /// Who has this key.
    pub fn get(&self, key: PublicKey) -> Option<Guest> {
        self.book().members.get(&key).cloned()
    }

    /// Who has this number, and its key.
    pub fn by_number(&self, number: u32) -> Option<(PublicKey, Guest)> {
        let book = self.book();
        let key = book.contacts.get(&number)?.key;
        Some((key, book.members.get(&key)?.clone()))
    }

    /// How a member is reached.
    pub fn card(&self, number: u32) -> Option<Card> {
        let book = self.book();
        let contact = book.contacts.get(&number)?.clone();
        let Guest { role, site, .. } = book.members.get(&contact.key)?.clone();
        Some(Card { contact, role, site })
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a credential makes of who has this key.
    fn guest(&self, book: &mut Book, key: PublicKey, introduction: &Introduction) -> Result<Guest, String> {
        let site = introduction.site.clone();
        match &introduction.credential {
            Credential::Pass(pass) => {
                pass.check(self.authority.public(), self.run, key, now_s()).map_err(|e| e.to_string())?;
                match book.members.get(&key).cloned() {
                    Some(known) if known.site == site => Ok(known),
                    Some(known) => Err(format!("your pass is for site {:?}, not {site:?}", known.site)),
                    None => Err("your pass is of another life of this run; join with a ticket".into()),
                }
            }
            Credential::Authority => Err("this is the coordinator; there is no other".into()),
            Credential::Ticket(text) => {
                let ticket: Ticket =
                    text.parse().map_err(|e: starling_transport::ticket::TicketError| e.to_string())?;
                ticket.check(self.authority.public(), self.run, now_s()).map_err(|e| e.to_string())?;
                if let Some(only) = ticket.site.as_ref().filter(|only| **only != site) {
                    return Err(format!(
                        "the ticket is for site {only:?}, and you came as {site:?}; use --site {only}"
                    ));
                }
                if ticket.role == Role::Operator {
                    return Ok(Guest { number: OPERATOR, role: Role::Operator, site });
                }
                match book.members.get(&key).cloned() {
                    Some(known) if (known.role, &known.site) == (ticket.role, &site) => Ok(known),
                    Some(known) => Err(format!(
                        "your key is known as a {} of site {:?}; use another key (--key) for another part",
                        known.role, known.site
                    )),
                    None => book.admit_new(key, ticket.role, introduction),
                }
            }
        }
    }

    /// How all members that were ever here were last reached.
    pub fn contacts(&self) -> Vec<Contact> {
        self.book().contacts.values().cloned().collect()
    }
}

impl Book {
    fn admit_new(
        &mut self,
        key: PublicKey,
        role: Role,
        introduction: &Introduction,
    ) -> Result<Guest, String> {
        if self.members.len() >= MOST_MEMBERS {
            return Err(format!("the run has had {MOST_MEMBERS} members, and takes no more"));
        }
        let (number, site) = (self.members.len() as u32, introduction.site.clone());
        self.site(&site);
        let guest = Guest { number, role, site };
        let addresses = introduction.addresses.iter().take(MOST_ADDRESSES).cloned().collect();
        self.move_to(key, &guest, addresses).map_err(|error| error.to_string())?;
        self.members.insert(key, guest.clone());
        Ok(guest)
    }

    /// Writes down where a member is reached, if that is news.
    fn move_to(&mut self, key: PublicKey, guest: &Guest, addresses: Vec<String>) -> Result<(), JournalError> {
        let contact = Contact { key, addresses };
        if self.contacts.get(&guest.number) != Some(&contact) {
            let Guest { number, role, site } = guest.clone();
            let addresses = contact.addresses.clone();
            self.journal.append([&Entry { key: key.to_string(), number, role, site, addresses }])?;
            self.contacts.insert(number, contact);
        }
        Ok(())
    }

    /// The number of a site.
    fn site(&mut self, name: &str) -> SiteId {
        let known = self.sites.iter().position(|site| site == name);
        let index = known.unwrap_or_else(|| {
            self.sites.push(name.into());
            self.sites.len() - 1
        });
        SiteId(index as u16)
    }
}

impl Gate for Registry {
    fn admit(&self, key: PublicKey, introduction: &[u8]) -> Result<Vec<u8>, String> {
        let introduction = read(introduction)?;
        if introduction.site.is_empty() || introduction.site.len() > MOST_SITE_BYTES {
            return Err(format!("a site's name has 1 to {MOST_SITE_BYTES} characters"));
        }
        if !introduction.site.chars().all(|c| c.is_alphanumeric() || "-_.".contains(c)) {
            return Err("a site's name has letters, digits, -, _ and .".into());
        }
        let mut book = self.book();
        let guest = self.guest(&mut book, key, &introduction)?;
        let site = if guest.role == Role::Operator { SiteId(0) } else { book.site(&guest.site) };
        let addresses: Vec<String> = introduction.addresses.into_iter().take(MOST_ADDRESSES).collect();
        if guest.role != Role::Operator {
            book.move_to(key, &guest, addresses).map_err(|error| error.to_string())?;
        }
        let Guest { number, role, site: name } = guest;
        let pass = Pass::issue(&self.authority, self.run, key, role, name, number, now_s() + PASS_S);
        let (coordinator_site, charter) = (self.site.clone(), self.charter.clone());
        let admission = Admission { pass, site, coordinator_site, charter };
        postcard::to_stdvec(&admission).map_err(|error| error.to_string())
    }
}
