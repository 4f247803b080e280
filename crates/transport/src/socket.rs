//! How our sockets are set: small letters leave at once, and a peer that vanished is noticed.

use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::TcpStream;

/// A silent connection is probed after so long, ...
const QUIET: Duration = Duration::from_secs(20);
/// ... again at this interval, ...
const PROBE_EVERY: Duration = Duration::from_secs(5);
/// ... and is dead when nothing was acknowledged for so long.
const DEAD: Duration = Duration::from_secs(40);

/// Sets a new socket. What a system does not know is left as it is: it only makes us slower to notice.
pub(crate) fn set_up(tcp: &TcpStream) {
    let _ = tcp.set_nodelay(true);
    let socket = SockRef::from(tcp);
    let keepalive = TcpKeepalive::new().with_time(QUIET).with_interval(PROBE_EVERY);
    let _ = socket.set_tcp_keepalive(&keepalive);
    #[cfg(target_os = "linux")]
    let _ = socket.set_tcp_user_timeout(Some(DEAD));
    #[cfg(not(target_os = "linux"))]
    let _ = DEAD;
}
