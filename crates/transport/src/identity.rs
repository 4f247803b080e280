//! Who a node is: an ed25519 key pair, of which the public half is its name.
//!
//! The secret half stays in this process and in its key file. It signs tickets and proves the node's name in
//! every handshake.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use data_encoding::HEXLOWER_PERMISSIVE;
use ring::rand::{SecureRandom, SystemRandom};
use ring::signature::{ED25519, Ed25519KeyPair, KeyPair, UnparsedPublicKey};
use serde::{Deserialize, Serialize};

pub use crate::keyfile::KeyError;
use crate::keyfile::{self, SEED_BYTES};

/// A node's key pair.
pub struct Identity {
    seed: [u8; SEED_BYTES],
    pair: Ed25519KeyPair,
}

impl Identity {
    /// A new identity, from the operating system's randomness.
    pub fn generate() -> Identity {
        let mut seed = [0; SEED_BYTES];
        SystemRandom::new().fill(&mut seed).expect("the operating system gives random bytes");
        Identity::from_seed(seed)
    }

    /// Reads a key file. One that others may read is refused: its secret may be known already.
    pub fn load(path: &Path) -> Result<Identity, KeyError> {
        keyfile::load(path).map(Identity::from_seed)
    }

    /// Writes a new key file that only its owner may read. A file that is there already is never touched.
    pub fn save(&self, path: &Path) -> Result<(), KeyError> {
        keyfile::save(path, &self.seed)
    }

    /// The identity of this file; a new one if there is no such file.
    pub fn load_or_generate(path: &Path) -> Result<Identity, KeyError> {
        match Identity::load(path) {
            Err(KeyError::Missing { .. }) => {}
            other => return other,
        }
        let fresh = Identity::generate();
        match fresh.save(path) {
            Ok(()) => Ok(fresh),
            Err(KeyError::Exists { .. }) => Identity::load(path), // another process was faster: its key counts
            Err(error) => Err(error),
        }
    }

    /// The half that others may know.
    pub fn public(&self) -> PublicKey {
        let mut key = [0; 32];
        key.copy_from_slice(self.pair.public_key().as_ref());
        PublicKey(key)
    }

    /// Signs these bytes. Begin them with what they are for, so that no signature passes for another.
    pub fn sign(&self, message: &[u8]) -> Signature {
        let mut signature = [0; 64];
        signature.copy_from_slice(self.pair.sign(message).as_ref());
        Signature(signature)
    }

    /// The secret as TLS takes it.
    pub(crate) fn pkcs8(&self) -> Vec<u8> {
        keyfile::pkcs8(&self.seed)
    }

    fn from_seed(seed: [u8; SEED_BYTES]) -> Identity {
        let pair = Ed25519KeyPair::from_seed_unchecked(&seed).expect("any 32 bytes are an ed25519 seed");
        Identity { seed, pair }
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Identity({})", self.public().short())
    }
}

/// A node's name: the public half of its key.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PublicKey(pub [u8; 32]);

impl PublicKey {
    /// Whether the owner of this key signed these bytes.
    pub fn verify(&self, message: &[u8], signature: &Signature) -> bool {
        UnparsedPublicKey::new(&ED25519, self.0).verify(message, &signature.0).is_ok()
    }

    /// The first eight digits, for people.
    pub fn short(&self) -> String {
        HEXLOWER_PERMISSIVE.encode(&self.0[..4])
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&HEXLOWER_PERMISSIVE.encode(&self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.short())
    }
}

impl FromStr for PublicKey {
    type Err = BadPublicKey;

    fn from_str(text: &str) -> Result<PublicKey, BadPublicKey> {
        let refused = || BadPublicKey { length: text.len() };
        if text.len() != 64 {
            return Err(refused());
        }
        let bytes = HEXLOWER_PERMISSIVE.decode(text.as_bytes()).map_err(|_| refused())?;
        bytes.try_into().map(PublicKey).map_err(|_| refused())
    }
}

/// What is not a public key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a public key is 64 hexadecimal digits, these are {length} characters; copy the whole key")]
pub struct BadPublicKey {
    /// How long the text is.
    pub length: usize,
}

/// An ed25519 signature.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "([u8; 32], [u8; 32])", from = "([u8; 32], [u8; 32])")] // serde knows arrays up to 32
pub struct Signature(pub [u8; 64]);

impl From<Signature> for ([u8; 32], [u8; 32]) {
    fn from(signature: Signature) -> Self {
        let (mut left, mut right) = ([0; 32], [0; 32]);
        left.copy_from_slice(&signature.0[..32]);
        right.copy_from_slice(&signature.0[32..]);
        (left, right)
    }
}

impl From<([u8; 32], [u8; 32])> for Signature {
    fn from((left, right): ([u8; 32], [u8; 32])) -> Signature {
        let mut whole = [0; 64];
        whole[..32].copy_from_slice(&left);
        whole[32..].copy_from_slice(&right);
        Signature(whole)
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Signature({})", HEXLOWER_PERMISSIVE.encode(&self.0[..4]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_holds_for_its_message_and_key_only() {
        let (me, other) = (Identity::generate(), Identity::generate());
        let signature = me.sign(b"yes");
        assert!(me.public().verify(b"yes", &signature));
        assert!(!me.public().verify(b"no", &signature));
        assert!(!other.public().verify(b"yes", &signature));
        let bytes = postcard::to_stdvec(&signature).unwrap();
        assert_eq!(postcard::from_bytes::<Signature>(&bytes).unwrap(), signature);
    }

    #[test]
    fn a_public_key_survives_its_text() {
        let key = Identity::generate().public();
        assert_eq!(key.to_string().parse::<PublicKey>().unwrap(), key);
        assert_eq!(key.to_string().to_uppercase().parse::<PublicKey>().unwrap(), key);
        assert!(key.to_string().starts_with(&key.short()));
        assert!("abc".parse::<PublicKey>().is_err());
        assert!("é".repeat(32).parse::<PublicKey>().is_err());
    }

    #[test]
    fn debug_does_not_show_the_secret() {
        let me = Identity::generate();
        assert_eq!(format!("{me:?}"), format!("Identity({})", me.public().short()));
    }
}
