//! Strangers at the door.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use ring::signature::KeyPair;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{AlwaysResolvesClientRawPublicKeys, ResolvesClientCert};
use rustls::crypto::ring::{default_provider, sign::any_eddsa_type};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};
use starling_transport::endpoint::{Contact, Limits};
use starling_transport::letter::Lane;
use starling_transport::preamble::{Preamble, VERSION, Which};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::world::{Node, PATIENCE, two};

#[tokio::test(flavor = "multi_thread")]
async fn the_reason_of_a_refusal_reaches_the_dialer_and_is_reported() {
    let (mut mallory, mut b) = (Node::new(), Node::new());
    mallory.endpoint.dial(b.contact(), b"mallory".to_vec());
    assert_eq!(mallory.unreachable().await, "refused: mallory is not on the list");
    assert_eq!(b.refused().await, (Some(mallory.key), "mallory is not on the list".to_owned()));
    assert!(!b.endpoint.is_connected(mallory.key));
}

#[tokio::test(flavor = "multi_thread")]
async fn another_key_than_expected_is_refused_and_named() {
    let (mut a, b) = (Node::new(), Node::new());
    let other = Node::new().key;
    a.endpoint.dial(Contact { key: other, ..b.contact() }, vec![]);
    let why = a.unreachable().await;
    assert!(why.starts_with("no answer: ") && why.contains(&b.key.to_string()), "{why}");
    assert_eq!(b.doorman.asked.load(Ordering::Relaxed), 0, "an introduction is not shown to a stranger");
}

#[tokio::test(flavor = "multi_thread")]
async fn who_shows_no_key_is_refused_before_the_gate() {
    let mut b = Node::new();
    for client in [client_with(None), client_with(Some(Arc::new(Shy)))] {
        if let Ok(mut stream) = connect_as(&b, client).await {
            // The dialer's side of the handshake ends before the listener has looked.
            let _ = stream.write_all(&preamble()).await;
            let mut answer = Vec::new();
            let ended = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.unwrap();
            assert!(ended.is_err() && answer.is_empty(), "{ended:?}");
        }
        let (key, why) = b.refused().await;
        assert!(key.is_none() && why.contains("handshake failed"), "{why}");
    }
    assert_eq!(b.doorman.asked.load(Ordering::Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn another_version_is_told_both_versions() {
    let mut b = Node::new();
    let mut stream = connect(&b).await;
    let mut bytes = preamble();
    bytes[8] = 77;
    stream.write_all(&bytes).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    let text = String::from_utf8_lossy(&answer[5..]).into_owned();
    assert!(text.contains("version 77") && text.contains(&format!("node {VERSION}")), "{text}");
    assert_eq!(b.refused().await.1, text);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bulk_connection_without_its_control_connection_is_refused() {
    let mut b = Node::new();
    let mut stream = connect(&b).await;
    let lonely = Preamble { which: Which::Bulk, pair: [1; 16], introduction: vec![] };
    stream.write_all(&lonely.encode()).await.unwrap();
    let mut answer = Vec::new();
    tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await.unwrap().unwrap();
    assert!(String::from_utf8_lossy(&answer).contains("dial again"));
    b.refused().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn garbage_at_the_door_does_not_disturb_others() {
    let (a, mut b) = two().await;
    for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 5000], &[0x16, 3, 1, 0xff, 0xff, 1, 2, 3], b""] {
        let mut stream = TcpStream::connect(b.address()).await.unwrap();
        let _ = stream.write_all(garbage).await;
        let _ = stream.shutdown().await;
        assert_eq!(b.refused().await.0, None);
    }
    // Garbage after an honest handshake, in place of an introduction.
    let mut stream = connect(&b).await;
    stream.write_all(&[0x55; 100_000]).await.unwrap();
    assert!(b.refused().await.1.contains("not Starling's protocol"));
    a.send(&b, Lane::Work, "undisturbed");
    assert_eq!(&b.letter().await.head[..], b"undisturbed");
}

#[tokio::test(flavor = "multi_thread")]
async fn half_open_handshakes_do_not_lock_out_an_honest_peer() {
    let handshake = Duration::from_millis(300);
    let mut b = Node::with(Limits { handshakes: 4, handshake, ..Limits::default() });
    let mut silent = Vec::new();
    for _ in 0..4 {
        silent.push(TcpStream::connect(b.address()).await.unwrap());
    }
    let mut a = Node::new();
    a.dial(&b);
    assert_eq!(a.connected().await.0, b.key);
    assert_eq!(b.connected().await.0, a.key);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_recorded_handshake_is_worth_nothing() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let proxy = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let contact = Contact { key: b.key, addresses: vec![proxy.local_addr().unwrap().to_string()] };
    let recording = tokio::spawn(record_two(proxy, b.address()));
    a.endpoint.dial(contact, b"alice".to_vec());
    a.connected().await;
    b.connected().await;
    a.endpoint.close();
    b.closed().await;
    let asked = b.doorman.asked.load(Ordering::Relaxed);
    for recorded in tokio::time::timeout(PATIENCE, recording).await.unwrap().unwrap() {
        assert!(recorded.len() > 200);
        let mut stream = TcpStream::connect(b.address()).await.unwrap();
        stream.write_all(&recorded).await.unwrap();
        let (key, why) = b.refused().await;
        assert!(key.is_none() && why.contains("handshake failed"), "{why}");
    }
    assert_eq!(b.doorman.asked.load(Ordering::Relaxed), asked, "the gate was not even asked");
}

/// Passes two connections on, and gives what the dialer said on each.
async fn record_two(proxy: TcpListener, to: std::net::SocketAddr) -> Vec<Vec<u8>> {
    let mut recordings = Vec::new();
    for _ in 0..2 {
        let (dialer, _) = proxy.accept().await.unwrap();
        recordings.push(tokio::spawn(record(dialer, to)));
    }
    let mut recorded = Vec::new();
    for recording in recordings {
        recorded.push(recording.await.unwrap());
    }
    recorded
}

async fn record(dialer: TcpStream, to: std::net::SocketAddr) -> Vec<u8> {
    let (mut from_dialer, mut to_dialer) = dialer.into_split();
    let (mut from_listener, mut to_listener) = TcpStream::connect(to).await.unwrap().into_split();
    tokio::spawn(async move { tokio::io::copy(&mut from_listener, &mut to_dialer).await });
    let (mut recorded, mut buffer) = (Vec::new(), [0; 4096]);
    while let Ok(length @ 1..) = from_dialer.read(&mut buffer).await {
        recorded.extend(&buffer[..length]);
        if to_listener.write_all(&buffer[..length]).await.is_err() {
            break;
        }
    }
    recorded
}

fn preamble() -> Vec<u8> {
    Preamble { which: Which::Control, pair: [1; 16], introduction: b"x".to_vec() }.encode()
}

async fn connect(to: &Node) -> TlsStream<TcpStream> {
    let own = AlwaysResolvesClientRawPublicKeys::new(Arc::new(own_key()));
    connect_as(to, client_with(Some(Arc::new(own)))).await.unwrap()
}

async fn connect_as(to: &Node, client: ClientConfig) -> std::io::Result<TlsStream<TcpStream>> {
    let tcp = TcpStream::connect(to.address()).await?;
    let name = ServerName::try_from("nobody").unwrap();
    TlsConnector::from(Arc::new(client)).connect(name, tcp).await
}

fn own_key() -> CertifiedKey {
    let pkcs8 = ring::signature::Ed25519KeyPair::generate_pkcs8(&ring::rand::SystemRandom::new()).unwrap();
    let pair = ring::signature::Ed25519KeyPair::from_pkcs8(pkcs8.as_ref()).unwrap();
    let prefix = [0x30, 0x2a, 0x30, 0x05, 0x06, 0x03, 0x2b, 0x65, 0x70, 0x03, 0x21, 0x00];
    let spki = [&prefix[..], pair.public_key().as_ref()].concat();
    let secret = any_eddsa_type(&PrivatePkcs8KeyDer::from(pkcs8.as_ref())).unwrap();
    CertifiedKey::new(vec![CertificateDer::from(spki)], secret)
}

fn client_with(keys: Option<Arc<dyn ResolvesClientCert>>) -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(Arc::new(default_provider()))
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .dangerous()
        .with_custom_certificate_verifier(Arc::new(Gullible));
    let mut config = match keys {
        None => builder.with_no_client_auth(),
        Some(keys) => builder.with_client_cert_resolver(keys),
    };
    config.alpn_protocols = vec![b"starling".to_vec()];
    config
}

/// Speaks of raw keys, and shows none.
#[derive(Debug)]
struct Shy;

impl ResolvesClientCert for Shy {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn only_raw_public_keys(&self) -> bool {
        true
    }

    fn has_certs(&self) -> bool {
        true
    }
}

/// Believes anybody.
#[derive(Debug)]
struct Gullible;

impl ServerCertVerifier for Gullible {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
