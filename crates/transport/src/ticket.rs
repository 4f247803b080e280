//! Who may take part: a [`Ticket`] lets somebody ask, a [`Pass`] says that one key was let in.
//!
//! A ticket is a secret, like an invitation: whoever holds it may join, until it expires. A pass is no secret:
//! it names one key, and is worthless without the key's other half. Both are signed by the coordinator. Time is
//! always an argument here, in seconds since 1970; nothing reads a clock.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::identity::{Identity, PublicKey, Signature};
use crate::ticket_text;

/// What somebody may be in a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// Holds a stage.
    Worker,
    /// Sees microbatches through.
    Driver,
    /// Looks on and gives orders, as the dashboard does.
    Operator,
}

/// An invitation to a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ticket {
    /// The run.
    pub run: [u8; 32],
    /// Who invites. The dialer accepts nobody else at these addresses.
    pub coordinator: PublicKey,
    /// Where it listens, as host:port.
    pub addresses: Vec<String>,
    /// What the guest may be.
    pub role: Role,
    /// Where the guest must stand; `None`: anywhere.
    pub site: Option<String>,
    /// From this second on it is void.
    pub expires_s: u64,
    /// Tells tickets apart, so that one can be revoked.
    pub number: u64,
    signature: Signature,
}

/// The coordinator's word on one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pass {
    /// The run.
    pub run: [u8; 32],
    /// Who was let in.
    pub key: PublicKey,
    /// What it may be.
    pub role: Role,
    /// Where it stands.
    pub site: String,
    /// The number under which the run knows it.
    pub number: u32,
    /// From this second on it is void.
    pub expires_s: u64,
    signature: Signature,
}

/// Why a ticket or a pass is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum TicketError {
    #[error("this is no ticket: {what}; copy the whole word that begins with `starling-ticket-`")]
    Text { what: &'static str },
    #[error("the ticket's checksum is wrong, so a part of it was lost or changed in copying; copy it again")]
    Checksum,
    #[error("the signature is not the coordinator's; somebody made or changed this, ask for a new ticket")]
    Forged,
    #[error(
        "another coordinator ({got:?}) signed this, not {want:?}; ask this run's coordinator for a ticket"
    )]
    OtherCoordinator { got: PublicKey, want: PublicKey },
    #[error("it expired {ago_s} s ago (by this machine's clock); ask the coordinator for a new ticket")]
    Expired { ago_s: u64 },
    #[error("it is for another run; ask the coordinator of this run for a ticket")]
    OtherRun,
    #[error(
        "the pass is for key {pass:?}, but the connection proved {proved:?}; join with a ticket of your own"
    )]
    OtherKey { pass: PublicKey, proved: PublicKey },
}

impl Ticket {
    /// Invites whoever will hold this ticket.
    pub fn issue(
        authority: &Identity,
        run: [u8; 32],
        addresses: Vec<String>,
        role: Role,
        site: Option<String>,
        expires_s: u64,
        number: u64,
    ) -> Ticket {
        let coordinator = authority.public();
        let mut ticket =
            Ticket { run, coordinator, addresses, role, site, expires_s, number, signature: UNSIGNED };
        ticket.signature = authority.sign(&ticket.signed_bytes());
        ticket
    }

    /// Whether this coordinator issued it for this run, and it is still valid.
    pub fn check(&self, authority: PublicKey, run: [u8; 32], now_s: u64) -> Result<(), TicketError> {
        if self.coordinator != authority {
            return Err(TicketError::OtherCoordinator { got: self.coordinator, want: authority });
        }
        if !authority.verify(&self.signed_bytes(), &self.signature) {
            return Err(TicketError::Forged);
        }
        check_run_and_time(self.run, run, self.expires_s, now_s)
    }

    fn signed_bytes(&self) -> Vec<u8> {
        let Ticket { run, coordinator, addresses, role, site, expires_s, number, signature: _ } = self;
        signed_bytes(b"starling ticket 1\0", &(run, coordinator, addresses, role, site, expires_s, number))
    }
}

impl Pass {
    /// Says that this key was let in.
    pub fn issue(
        authority: &Identity,
        run: [u8; 32],
        key: PublicKey,
        role: Role,
        site: String,
        number: u32,
        expires_s: u64,
    ) -> Pass {
        let mut pass = Pass { run, key, role, site, number, expires_s, signature: UNSIGNED };
        pass.signature = authority.sign(&pass.signed_bytes());
        pass
    }

    /// Whether this coordinator let `key`, which the handshake has proved, into this run.
    pub fn check(
        &self,
        authority: PublicKey,
        run: [u8; 32],
        key: PublicKey,
        now_s: u64,
    ) -> Result<(), TicketError> {
        if !authority.verify(&self.signed_bytes(), &self.signature) {
            return Err(TicketError::Forged);
        }
        if self.key != key {
            return Err(TicketError::OtherKey { pass: self.key, proved: key });
        }
        check_run_and_time(self.run, run, self.expires_s, now_s)
    }

    fn signed_bytes(&self) -> Vec<u8> {
        let Pass { run, key, role, site, number, expires_s, signature: _ } = self;
        signed_bytes(b"starling pass 1\0", &(run, key, role, site, number, expires_s))
    }
}

const UNSIGNED: Signature = Signature([0; 64]);

/// `purpose` ends in a zero, so that none is the beginning of another.
fn signed_bytes(purpose: &[u8], content: &impl Serialize) -> Vec<u8> {
    let content =
        postcard::to_stdvec(content).expect("plain numbers, texts and bytes always have an encoding");
    [purpose, &content].concat()
}

fn check_run_and_time(got: [u8; 32], want: [u8; 32], expires_s: u64, now_s: u64) -> Result<(), TicketError> {
    if got != want {
        return Err(TicketError::OtherRun);
    }
    if now_s >= expires_s {
        return Err(TicketError::Expired { ago_s: now_s - expires_s });
    }
    Ok(())
}

impl fmt::Display for Ticket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&ticket_text::write(self))
    }
}

impl FromStr for Ticket {
    type Err = TicketError;

    /// Reads the text only: whether it is genuine and valid, [`Ticket::check`] says.
    fn from_str(text: &str) -> Result<Ticket, TicketError> {
        ticket_text::read(text)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Worker => "worker",
            Role::Driver => "driver",
            Role::Operator => "operator",
        })
    }
}

/// What is not a role.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a role; there are worker, driver and operator")]
pub struct BadRole(pub String);

impl FromStr for Role {
    type Err = BadRole;

    fn from_str(text: &str) -> Result<Role, BadRole> {
        match text {
            "worker" => Ok(Role::Worker),
            "driver" => Ok(Role::Driver),
            "operator" => Ok(Role::Operator),
            _ => Err(BadRole(text.chars().take(40).collect())),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: [u8; 32] = [3; 32];

    fn ticket(authority: &Identity) -> Ticket {
        let addresses = vec!["10.0.0.1:7000".to_owned()];
        Ticket::issue(authority, RUN, addresses, Role::Worker, Some("paris".to_owned()), 1000, 7)
    }

    #[test]
    fn a_ticket_is_valid_until_it_expires() {
        let authority = Identity::generate();
        let ticket = ticket(&authority);
        assert_eq!(ticket.check(authority.public(), RUN, 999), Ok(()));
        let late = ticket.check(authority.public(), RUN, 1000);
        assert_eq!(late, Err(TicketError::Expired { ago_s: 0 }));
    }

    #[test]
    fn a_ticket_of_another_run_or_coordinator_is_refused() {
        let (authority, other) = (Identity::generate(), Identity::generate());
        let ticket = ticket(&authority);
        assert_eq!(ticket.check(authority.public(), [4; 32], 0), Err(TicketError::OtherRun));
        assert!(matches!(ticket.check(other.public(), RUN, 0), Err(TicketError::OtherCoordinator { .. })));
    }

    #[test]
    fn a_ticket_that_was_changed_or_signed_by_another_is_forged() {
        let (authority, other) = (Identity::generate(), Identity::generate());
        let changes: [fn(&mut Ticket); 5] = [
            |ticket| ticket.role = Role::Operator,
            |ticket| ticket.site = None,
            |ticket| ticket.expires_s += 1,
            |ticket| ticket.number += 1,
            |ticket| ticket.addresses.push("10.0.0.2:1".to_owned()),
        ];
        for change in changes {
            let mut changed = ticket(&authority);
            change(&mut changed);
            assert_eq!(changed.check(authority.public(), RUN, 0), Err(TicketError::Forged));
        }
        let mut forged = ticket(&other);
        forged.coordinator = authority.public();
        assert_eq!(forged.check(authority.public(), RUN, 0), Err(TicketError::Forged));
    }

    #[test]
    fn a_pass_is_worthless_for_another_key() {
        let (authority, worker, thief) = (Identity::generate(), Identity::generate(), Identity::generate());
        let authority_key = authority.public();
        let pass = Pass::issue(&authority, RUN, worker.public(), Role::Worker, "oslo".to_owned(), 4, 1000);
        assert_eq!(pass.check(authority_key, RUN, worker.public(), 0), Ok(()));
        assert!(matches!(
            pass.check(authority_key, RUN, thief.public(), 0),
            Err(TicketError::OtherKey { .. })
        ));
        assert_eq!(pass.check(authority_key, [0; 32], worker.public(), 0), Err(TicketError::OtherRun));
        let late = pass.check(authority_key, RUN, worker.public(), 1001);
        assert_eq!(late, Err(TicketError::Expired { ago_s: 1 }));
        assert_eq!(pass.check(thief.public(), RUN, worker.public(), 0), Err(TicketError::Forged));
        let stolen = Pass { key: thief.public(), ..pass };
        assert_eq!(stolen.check(authority_key, RUN, thief.public(), 0), Err(TicketError::Forged));
    }

    #[test]
    fn a_role_survives_its_name() {
        for role in [Role::Worker, Role::Driver, Role::Operator] {
            assert_eq!(role.to_string().parse::<Role>(), Ok(role));
        }
        assert!("king".parse::<Role>().is_err());
    }
}
