//! The first words on a connection, after TLS: the dialer introduces itself, the other answers.
//!
//! ```text
//! preamble = "starling", version u16, connection u8, pair [u8; 16], length u32, introduction
//! answer   = kind u8 (1: accepted, 2: refused), length u32, answer or reason
//! ```
//! The first ten bytes and the answer are the same in all versions, so that any two can tell each other.

use tokio::io::{AsyncRead, AsyncReadExt};

/// The version of the transport that this code speaks.
pub const VERSION: u16 = 1;

/// Most bytes of an introduction.
pub const MAX_INTRODUCTION_BYTES: usize = 64 << 10;
/// Most bytes of what a gate answers.
pub const MAX_ANSWER_BYTES: usize = 4 << 20;
/// Most bytes of the reason of a refusal.
pub const MAX_REASON_BYTES: usize = 1 << 10;

const MAGIC: [u8; 8] = *b"starling";
const START_BYTES: usize = 10;
const FIXED_BYTES: usize = START_BYTES + 1 + 16 + 4;
const ANSWER_START_BYTES: usize = 5;

/// What is read at once of something whose length was only claimed.
const STEP_BYTES: usize = 64 << 10;

/// Which of the two connections between two nodes this is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Which {
    /// The one of the control lane; its answer counts.
    Control,
    /// The one of the other lanes.
    Bulk,
}

/// What the dialer says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Preamble {
    /// Which of the two connections this is.
    pub which: Which,
    /// A random number that both connections name, so that they are paired.
    pub pair: [u8; 16],
    /// For the gate.
    pub introduction: Vec<u8>,
}

/// What it is answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Come in; this is what the gate says.
    Accepted(Vec<u8>),
    /// Stay out, for this reason.
    Refused(String),
}

/// What can be told from the bytes so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoded<T> {
    /// All of it.
    Whole(T),
    /// At least so many bytes more are needed.
    Needs(usize),
}

/// Why a preamble or an answer is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum PreambleError {
    #[error("what came is not Starling's protocol; another program listens or dials there")]
    NotStarling,
    #[error(
        "the dialer speaks transport version {got}, the other node {VERSION}; upgrade the older of the two"
    )]
    Version { got: u16 },
    #[error("{what} of {got} bytes is over the limit of {limit}; send less")]
    TooLong { what: &'static str, got: usize, limit: usize },
    #[error("the {what} {got} is unknown; the peer is broken or hostile")]
    Unknown { what: &'static str, got: u8 },
}

impl Preamble {
    /// As it is sent.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(FIXED_BYTES + self.introduction.len());
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.push(match self.which {
            Which::Control => 0,
            Which::Bulk => 1,
        });
        bytes.extend(self.pair);
        bytes.extend((self.introduction.len() as u32).to_le_bytes());
        bytes.extend(&self.introduction);
        bytes
    }

    /// What these bytes say, or how many more it takes to tell.
    pub fn decode(bytes: &[u8]) -> Result<Decoded<Preamble>, PreambleError> {
        let Some((start, rest)) = bytes.split_first_chunk::<START_BYTES>() else {
            return Ok(Decoded::Needs(START_BYTES - bytes.len()));
        };
        let [magic @ .., v0, v1] = *start;
        if magic != MAGIC {
            return Err(PreambleError::NotStarling);
        }
        let got = u16::from_le_bytes([v0, v1]);
        if got != VERSION {
            return Err(PreambleError::Version { got });
        }
        let Some((fixed, rest)) = rest.split_first_chunk::<{ FIXED_BYTES - START_BYTES }>() else {
            return Ok(Decoded::Needs(FIXED_BYTES - bytes.len()));
        };
        let [which, pair @ .., l0, l1, l2, l3] = *fixed;
        let which = match which {
            0 => Which::Control,
            1 => Which::Bulk,
            got => return Err(PreambleError::Unknown { what: "connection", got }),
        };
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        Ok(match tail("an introduction", rest, length, MAX_INTRODUCTION_BYTES)? {
            Decoded::Needs(more) => Decoded::Needs(more),
            Decoded::Whole(bytes) => Decoded::Whole(Preamble { which, pair, introduction: bytes.to_vec() }),
        })
    }
}

impl Answer {
    /// As it is sent. A long reason is cut.
    pub fn encode(&self) -> Vec<u8> {
        let (kind, content) = match self {
            Answer::Accepted(answer) => (1, &answer[..]),
            Answer::Refused(reason) => {
                (2, &reason.as_bytes()[..reason.floor_char_boundary(MAX_REASON_BYTES)])
            }
        };
        let length = (content.len() as u32).to_le_bytes();
        [&[kind][..], &length, content].concat()
    }

    /// What these bytes say, or how many more it takes to tell.
    pub fn decode(bytes: &[u8]) -> Result<Decoded<Answer>, PreambleError> {
        let Some((start, rest)) = bytes.split_first_chunk::<ANSWER_START_BYTES>() else {
            return Ok(Decoded::Needs(ANSWER_START_BYTES - bytes.len()));
        };
        let [kind, l0, l1, l2, l3] = *start;
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let (what, limit) = match kind {
            1 => ("an answer", MAX_ANSWER_BYTES),
            2 => ("a reason", MAX_REASON_BYTES),
            got => return Err(PreambleError::Unknown { what: "answer", got }),
        };
        Ok(match tail(what, rest, length, limit)? {
            Decoded::Needs(more) => Decoded::Needs(more),
            Decoded::Whole(content) if kind == 1 => Decoded::Whole(Answer::Accepted(content.to_vec())),
            Decoded::Whole(content) => {
                Decoded::Whole(Answer::Refused(String::from_utf8_lossy(content).into_owned()))
            }
        })
    }
}

fn tail<'a>(
    what: &'static str,
    rest: &'a [u8],
    length: usize,
    limit: usize,
) -> Result<Decoded<&'a [u8]>, PreambleError> {
    if length > limit {
        return Err(PreambleError::TooLong { what, got: length, limit });
    }
    Ok(match rest.get(..length) {
        Some(content) => Decoded::Whole(content),
        None => Decoded::Needs((length - rest.len()).min(STEP_BYTES)),
    })
}

/// Why nothing came out of a stream.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ReadError {
    #[error(transparent)]
    Refused(#[from] PreambleError),
    #[error("the connection ended before it was answered: {0}")]
    Io(#[from] std::io::Error),
}

/// Reads exactly one preamble or answer: not a byte of what follows.
pub(crate) async fn read<T>(
    stream: &mut (impl AsyncRead + Unpin),
    decode: impl Fn(&[u8]) -> Result<Decoded<T>, PreambleError>,
) -> Result<T, ReadError> {
    let mut bytes = Vec::new();
    loop {
        match decode(&bytes)? {
            Decoded::Whole(whole) => return Ok(whole),
            Decoded::Needs(more) => {
                let have = bytes.len();
                bytes.resize(have + more, 0);
                stream.read_exact(&mut bytes[have..]).await?;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn another_version_is_refused_and_both_are_named() {
        let mut bytes = Preamble { which: Which::Bulk, pair: [1; 16], introduction: vec![] }.encode();
        bytes[8] = 9;
        let error = Preamble::decode(&bytes[..START_BYTES]).unwrap_err().to_string();
        assert!(error.contains("version 9") && error.contains(&VERSION.to_string()), "{error}");
    }

    #[test]
    fn a_claimed_length_over_the_limit_is_refused_at_once() {
        let mut bytes = Preamble { which: Which::Control, pair: [1; 16], introduction: vec![] }.encode();
        bytes[FIXED_BYTES - 1] = 0xff;
        assert!(matches!(Preamble::decode(&bytes), Err(PreambleError::TooLong { .. })));
        assert!(matches!(Answer::decode(&[2, 1, 4, 0, 0]), Err(PreambleError::TooLong { .. })));
    }

    #[test]
    fn a_long_reason_is_cut_between_characters() {
        let bytes = Answer::Refused("é".repeat(1000)).encode();
        assert_eq!(Answer::decode(&bytes), Ok(Decoded::Whole(Answer::Refused("é".repeat(512)))));
    }

    proptest! {
        #[test]
        fn a_preamble_is_read_to_its_last_byte_and_no_further(
            introduction in prop::collection::vec(any::<u8>(), 0..500),
            pair: [u8; 16],
            bulk: bool,
        ) {
            let which = if bulk { Which::Bulk } else { Which::Control };
            let preamble = Preamble { which, pair, introduction };
            let bytes = preamble.encode();
            let mut have = 0;
            let got = loop {
                match Preamble::decode(&bytes[..have]).unwrap() {
                    Decoded::Needs(more) => have += more,
                    Decoded::Whole(whole) => break whole,
                }
            };
            prop_assert_eq!((got, have), (preamble, bytes.len()));
        }

        #[test]
        fn any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Preamble::decode(&bytes);
            let _ = Answer::decode(&bytes);
            let _ = Preamble::decode(&[&MAGIC[..], &VERSION.to_le_bytes(), &bytes].concat());
        }
    }
}
