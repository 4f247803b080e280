//! A ticket as one word that a shell, a mail or a chat does not change.
//!
//! `starling-ticket-` and base64url of the postcard encoding and its crc32. The checksum is no protection against
//! anybody; it tells a torn copy from a forgery, which have different remedies.

use data_encoding::BASE64URL_NOPAD;

use crate::ticket::{Ticket, TicketError};

const PREFIX: &str = "starling-ticket-";

/// Most characters of a ticket: a screenful, and enough for dozens of addresses.
const MAX_TEXT_BYTES: usize = 4 << 10;

pub(crate) fn write(ticket: &Ticket) -> String {
    let mut bytes =
        postcard::to_stdvec(ticket).expect("plain numbers, texts and bytes always have an encoding");
    bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
    format!("{PREFIX}{}", BASE64URL_NOPAD.encode(&bytes))
}

pub(crate) fn read(text: &str) -> Result<Ticket, TicketError> {
    let refused = |what| TicketError::Text { what };
    if text.len() > MAX_TEXT_BYTES {
        return Err(refused("it is longer than 4 KiB"));
    }
    let text = text.trim().strip_prefix(PREFIX).ok_or(refused("it begins otherwise"))?;
    // A lost or changed character is mostly seen here already: say the same as for a wrong checksum.
    let bytes = BASE64URL_NOPAD.decode(text.as_bytes()).map_err(|_| TicketError::Checksum)?;
    let (content, checksum) = bytes.split_last_chunk::<4>().ok_or(TicketError::Checksum)?;
    if crc32fast::hash(content) != u32::from_le_bytes(*checksum) {
        return Err(TicketError::Checksum);
    }
    match postcard::take_from_bytes(content) {
        Ok((ticket, [])) => Ok(ticket),
        _ => Err(refused("its content is not a ticket of this version")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::identity::Identity;
    use crate::ticket::Role;

    fn ticket() -> Ticket {
        let addresses = vec!["10.0.0.1:7000".to_owned(), "[::1]:7000".to_owned()];
        Ticket::issue(&Identity::generate(), [1; 32], addresses, Role::Driver, None, 5, 6)
    }

    #[test]
    fn a_ticket_survives_its_text_and_the_text_survives_a_shell() {
        let ticket = ticket();
        let text = ticket.to_string();
        assert!(text.chars().all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_'), "{text}");
        assert_eq!(text.parse::<Ticket>().unwrap(), ticket);
        assert_eq!(format!(" {text}\n").parse::<Ticket>().unwrap(), ticket);
    }

    #[test]
    fn a_torn_copy_is_told_apart_from_what_was_never_a_ticket() {
        let text = ticket().to_string();
        for length in PREFIX.len()..text.len() {
            assert_eq!(text[..length].parse::<Ticket>(), Err(TicketError::Checksum));
        }
        assert!(matches!("hello".parse::<Ticket>(), Err(TicketError::Text { .. })));
        let endless = format!("{PREFIX}{}", "A".repeat(MAX_TEXT_BYTES));
        assert!(matches!(endless.parse::<Ticket>(), Err(TicketError::Text { .. })));
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in ".*", bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = read(&text);
            let mut bytes = bytes;
            bytes.extend(crc32fast::hash(&bytes).to_le_bytes());
            let _ = read(&format!("{PREFIX}{}", BASE64URL_NOPAD.encode(&bytes)));
        }
    }
}
