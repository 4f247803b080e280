//! How a handshake proves who is there: TLS 1.3 with raw ed25519 keys (RFC 7250) on both sides.
//!
//! There are no certificates and no authorities: the key is the name. There are no tickets, no resumption and no
//! early data either, so every handshake is fresh on both sides and a recorded one is worth nothing.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, Resumption};
use rustls::crypto::ring::{cipher_suite, kx_group, sign::any_eddsa_type};
use rustls::crypto::{CryptoProvider, verify_tls13_signature_with_raw_key};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{AlwaysResolvesServerRawPublicKeys, NoServerSessionStorage};
use rustls::sign::CertifiedKey;
use rustls::{
    CertificateError, ClientConfig, CommonState, DigitallySignedStruct, DistinguishedName, Error,
    ServerConfig, SignatureScheme,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::identity::{Identity, PublicKey};

/// What stands before an ed25519 key in a SubjectPublicKeyInfo (RFC 8410).
const SPKI_PREFIX: [u8; 12] = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];

/// What both sides must offer, so that the handshake of another protocol cannot be passed on to us.
const PROTOCOL: &[u8] = b"starling";

/// A node's side of all its handshakes.
pub(crate) struct Tls {
    provider: Arc<CryptoProvider>,
    own: Arc<CertifiedKey>,
    acceptor: TlsAcceptor,
}

impl Tls {
    pub(crate) fn new(identity: &Identity) -> Result<Tls, Error> {
        let provider = Arc::new(provider());
        let secret = any_eddsa_type(&PrivatePkcs8KeyDer::from(identity.pkcs8()))?;
        let own = Arc::new(CertifiedKey::new(vec![CertificateDer::from(spki(identity.public()))], secret));
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .with_client_cert_verifier(Arc::new(AnyKey(provider.clone())))
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(own.clone())));
        server.session_storage = Arc::new(NoServerSessionStorage {});
        server.send_tls13_tickets = 0;
        server.max_early_data_size = 0;
        server.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(Tls { provider, own, acceptor: TlsAcceptor::from(Arc::new(server)) })
    }

    /// For whoever comes in.
    pub(crate) fn acceptor(&self) -> &TlsAcceptor {
        &self.acceptor
    }

    /// For a dial that accepts this key only.
    pub(crate) fn connector(&self, expected: PublicKey) -> Result<TlsConnector, Error> {
        let verifier = OneKey { expected, provider: self.provider.clone() };
        let mut client = ClientConfig::builder_with_provider(self.provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous() // 'dangerous' is any verifier that is not webpki's
            .with_custom_certificate_verifier(Arc::new(verifier))
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(self.own.clone())));
        client.resumption = Resumption::disabled();
        client.enable_early_data = false;
        client.enable_sni = false;
        client.alpn_protocols = vec![PROTOCOL.to_vec()];
        Ok(TlsConnector::from(Arc::new(client)))
    }
}

/// Whom the handshake proved to be there.
pub(crate) fn peer_key(connection: &CommonState) -> Option<PublicKey> {
    connection.peer_certificates()?.first().and_then(|spki| key_in(spki))
}

/// A name that TLS wants and nobody looks at: keys are the names.
pub(crate) fn no_name() -> ServerName<'static> {
    ServerName::IpAddress(std::net::Ipv4Addr::UNSPECIFIED.into())
}

/// AES first: with the instructions that all our machines have, it is twice as fast as ChaCha.
fn provider() -> CryptoProvider {
    CryptoProvider {
        cipher_suites: vec![
            cipher_suite::TLS13_AES_128_GCM_SHA256,
            cipher_suite::TLS13_AES_256_GCM_SHA384,
            cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
        ],
        kx_groups: vec![kx_group::X25519],
        ..rustls::crypto::ring::default_provider()
    }
}

fn spki(key: PublicKey) -> Vec<u8> {
    [&SPKI_PREFIX[..], &key.0].concat()
}

fn key_in(spki: &[u8]) -> Option<PublicKey> {
    spki.strip_prefix(&SPKI_PREFIX)?.try_into().ok().map(PublicKey)
}

/// Whether the owner of this key signed this very handshake. Only ed25519 is known here.
fn check_signature(
    provider: &CryptoProvider,
    message: &[u8],
    spki: &CertificateDer<'_>,
    signed: &DigitallySignedStruct,
) -> Result<HandshakeSignatureValid, Error> {
    if signed.scheme != SignatureScheme::ED25519 {
        return Err(CertificateError::BadSignature.into());
    }
    let spki = SubjectPublicKeyInfoDer::from(spki.as_ref());
    verify_tls13_signature_with_raw_key(message, &spki, signed, &provider.signature_verification_algorithms)
}

/// The dialer's check: exactly the key that it wanted.
#[derive(Debug)]
struct OneKey {
    expected: PublicKey,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for OneKey {
    fn verify_server_cert(
        &self,
        spki: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match key_in(spki) {
            Some(key) if key == self.expected => Ok(ServerCertVerified::assertion()),
            Some(key) => Err(Error::General(format!("another node, {key}, answers there"))),
            None => Err(CertificateError::BadEncoding.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(CertificateError::BadSignature.into()) // there is no TLS 1.2 here
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        spki: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        check_signature(&self.provider, message, spki, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

/// The listener's check: any key, but proved. The gate then says whether it may come in.
#[derive(Debug)]
struct AnyKey(Arc<CryptoProvider>);

impl ClientCertVerifier for AnyKey {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        spki: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match key_in(spki) {
            Some(_) => Ok(ClientCertVerified::assertion()),
            None => Err(CertificateError::BadEncoding.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(CertificateError::BadSignature.into()) // there is no TLS 1.2 here
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        spki: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        check_signature(&self.0, message, spki, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
