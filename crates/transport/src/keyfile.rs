//! Key files: PKCS#8 in PEM, as `openssl pkey -in node.key -text` reads it, and for its owner's eyes only.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use data_encoding::BASE64;
use rustls::pki_types::PrivatePkcs8KeyDer;
use rustls::pki_types::pem::PemObject;

/// Bytes of an ed25519 secret.
pub(crate) const SEED_BYTES: usize = 32;

/// A key file is 119 bytes; some people add comments.
const MAX_FILE_BYTES: u64 = 16 << 10;

/// What stands before the seed in PKCS#8 (RFC 8410): version 0, the algorithm's number, an octet string in another.
const PKCS8_PREFIX: [u8; 16] =
    [0x30, 0x2e, 0x02, 0x01, 0x00, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x04, 0x22, 0x04, 0x20];

/// Why a key file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages say what the fields are")]
pub enum KeyError {
    #[error("there is no key file {path}; create one, or name another")]
    Missing { path: PathBuf },
    #[error("{path} exists already and is not overwritten; move it away if you want a new identity")]
    Exists { path: PathBuf },
    #[error(
        "others may read {path} (mode {mode:03o}), so its secret may be known; run `chmod 600 {path}`, or make a new key if others had access"
    )]
    Exposed { path: PathBuf, mode: u32 },
    #[error(
        "{path} is not an ed25519 key in PKCS#8 PEM; restore it from a copy, or move it away for a new identity"
    )]
    NotAKey { path: PathBuf },
    #[error("cannot {what} the key file {path}: {source}; without its key this node has no name")]
    Io { what: &'static str, path: PathBuf, source: io::Error },
}

pub(crate) fn load(path: &Path) -> Result<[u8; SEED_BYTES], KeyError> {
    let file = File::open(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => KeyError::Missing { path: path.into() },
        _ => KeyError::Io { what: "open", path: path.into(), source },
    })?;
    refuse_exposed(&file, path)?; // the open file, not the path: nobody can swap it in between
    let mut text = Vec::new();
    file.take(MAX_FILE_BYTES).read_to_end(&mut text).map_err(|source| KeyError::Io {
        what: "read",
        path: path.into(),
        source,
    })?;
    let refused = || KeyError::NotAKey { path: path.into() };
    let der = PrivatePkcs8KeyDer::from_pem_slice(&text).map_err(|_| refused())?;
    let seed = der.secret_pkcs8_der().strip_prefix(&PKCS8_PREFIX).ok_or_else(refused)?;
    seed.try_into().map_err(|_| refused())
}

pub(crate) fn save(path: &Path, seed: &[u8; SEED_BYTES]) -> Result<(), KeyError> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path).map_err(|source| match source.kind() {
        io::ErrorKind::AlreadyExists => KeyError::Exists { path: path.into() },
        _ => KeyError::Io { what: "create", path: path.into(), source },
    })?;
    write_whole(file, path, &pem(seed)).map_err(|source| {
        let _ = std::fs::remove_file(path); // ours, and torn
        KeyError::Io { what: "write", path: path.into(), source }
    })
}

/// The secret in PKCS#8.
pub(crate) fn pkcs8(seed: &[u8; SEED_BYTES]) -> Vec<u8> {
    [&PKCS8_PREFIX[..], seed].concat()
}

/// The key is safe when this returns: the file's bytes and its name in the directory.
fn write_whole(mut file: File, path: &Path, text: &str) -> io::Result<()> {
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    #[cfg(unix)]
    {
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
        File::open(parent.unwrap_or(Path::new(".")))?.sync_all()?;
    }
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
}

fn pem(seed: &[u8; SEED_BYTES]) -> String {
    // 48 bytes are one line of 64 characters.
    format!("-----BEGIN PRIVATE KEY-----\n{}\n-----END PRIVATE KEY-----\n", BASE64.encode(&pkcs8(seed)))
}

#[cfg(unix)]
fn refuse_exposed(file: &File, path: &Path) -> Result<(), KeyError> {
    let metadata =
        file.metadata().map_err(|source| KeyError::Io { what: "inspect", path: path.into(), source })?;
    let mode = std::os::unix::fs::MetadataExt::mode(&metadata) & 0o777;
    if mode & 0o077 != 0 { Err(KeyError::Exposed { path: path.into(), mode }) } else { Ok(()) }
}

#[cfg(not(unix))]
fn refuse_exposed(_: &File, _: &Path) -> Result<(), KeyError> {
    Ok(()) // the profile directory's rights protect it
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::Identity;

    #[test]
    fn a_saved_key_is_the_same_when_loaded_and_is_never_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.key");
        assert!(matches!(Identity::load(&path), Err(KeyError::Missing { .. })));
        let first = Identity::load_or_generate(&path).unwrap();
        assert_eq!(Identity::load(&path).unwrap().public(), first.public());
        assert_eq!(Identity::load_or_generate(&path).unwrap().public(), first.public());
        assert!(matches!(Identity::generate().save(&path), Err(KeyError::Exists { .. })));
        assert_eq!(Identity::load(&path).unwrap().public(), first.public());
    }

    #[cfg(unix)]
    #[test]
    fn a_key_file_that_others_may_read_is_refused_with_the_remedy() {
        use std::os::unix::fs::PermissionsExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.key");
        Identity::generate().save(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for mode in [0o640, 0o604, 0o660, 0o620] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            let error = Identity::load(&path).unwrap_err();
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn a_torn_key_file_is_told_apart_from_a_missing_one() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("node.key");
        save(&path, &[7; 32]).unwrap();
        let whole = std::fs::read(&path).unwrap();
        assert_eq!(load(&path).unwrap(), [7; 32]);
        for cut in [0, 10, 60, 100] {
            std::fs::write(&path, &whole[..cut]).unwrap();
            assert!(matches!(load(&path), Err(KeyError::NotAKey { .. })), "cut at {cut}");
        }
    }
}
