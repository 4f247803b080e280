//! Emulated links: what a letter waits before it is written, as it would on a real one.
//!
//! A link is a clock: the time at which it will be free. A frame moves it on by its length over the rate, and is
//! held until its last bit would have arrived. All peers on one name share the clock.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::frame::MAX_FRAME_BYTES;
use crate::identity::PublicKey;
use crate::letter::Lane;
use crate::wan::Link;

/// A frame is taken this long before the link is free, so that a timer's millisecond does not cost rate.
const AHEAD: Duration = Duration::from_millis(5);
/// A frame takes about this long on the link, so that nothing urgent waits longer for one.
const FRAME_TIME_S: f64 = 0.005;
/// The smallest frame.
const MIN_FRAME_BYTES: usize = 4 << 10;
/// Longer than any wait that matters, and still within what clocks can hold.
const MAX_WAIT_S: f64 = 3600.0;

/// A link that several peers may share.
pub(crate) struct SharedLink(Mutex<Clock>);

struct Clock {
    link: Link,
    /// When it is free for bulk: after all that was taken.
    free: Instant,
    /// When it is free for control: after other control only.
    free_for_control: Instant,
}

impl SharedLink {
    fn new(link: Link) -> SharedLink {
        let now = Instant::now();
        SharedLink(Mutex::new(Clock { link, free: now, free_for_control: now }))
    }

    /// Whether a frame of this lane may be taken now; if not, when to ask again.
    pub(crate) fn ready(&self, lane: Lane, now: Instant) -> Result<(), Instant> {
        let clock = lock(&self.0);
        let free = if lane == Lane::Control { clock.free_for_control } else { clock.free };
        if free <= now + AHEAD { Ok(()) } else { Err(free - AHEAD) }
    }

    /// Most payload of a frame.
    pub(crate) fn frame_bytes(&self) -> usize {
        let bytes = lock(&self.0).link.bytes_per_s * FRAME_TIME_S;
        (bytes as usize).clamp(MIN_FRAME_BYTES, MAX_FRAME_BYTES) // `as` saturates
    }

    /// Puts a frame on the link; when its last bit arrives.
    pub(crate) fn charge(&self, lane: Lane, bytes: usize, now: Instant) -> Instant {
        let mut clock = lock(&self.0);
        let takes = Duration::from_secs_f64((bytes as f64 / clock.link.bytes_per_s).min(MAX_WAIT_S));
        clock.free = clock.free.max(now) + takes;
        if lane != Lane::Control {
            return clock.free + clock.link.latency;
        }
        clock.free_for_control = clock.free_for_control.max(now) + takes;
        clock.free_for_control + clock.link.latency
    }
}

/// The way to one peer: its link, if one is emulated, and whether it is cut.
#[derive(Default)]
pub(crate) struct Way {
    link: Mutex<Option<Arc<SharedLink>>>,
    cut: AtomicBool,
}

impl Way {
    pub(crate) fn link(&self) -> Option<Arc<SharedLink>> {
        lock(&self.link).clone()
    }

    pub(crate) fn is_cut(&self) -> bool {
        self.cut.load(Ordering::Relaxed)
    }

    fn is_plain(&self) -> bool {
        !self.is_cut() && lock(&self.link).is_none()
    }
}

/// The ways to all peers. They outlast connections.
#[derive(Default)]
pub(crate) struct Ways {
    ways: Mutex<HashMap<PublicKey, Arc<Way>>>,
    links: Mutex<HashMap<String, Weak<SharedLink>>>,
}

impl Ways {
    /// The way to this peer.
    pub(crate) fn to(&self, peer: PublicKey) -> Arc<Way> {
        let mut ways = lock(&self.ways);
        if !ways.contains_key(&peer) {
            // What is neither in use nor emulates anything is forgotten: strangers do not fill the table.
            ways.retain(|_, way| Arc::strong_count(way) > 1 || !way.is_plain());
        }
        ways.entry(peer).or_default().clone()
    }

    /// Gives the way to this peer a named link, or none. A name's new rate holds for all on it.
    pub(crate) fn shape(&self, peer: PublicKey, link: Option<(String, Link)>) {
        let link = link.map(|(name, link)| self.named(name, link));
        *lock(&self.to(peer).link) = link;
    }

    pub(crate) fn cut(&self, peer: PublicKey, cut: bool) {
        self.to(peer).cut.store(cut, Ordering::Relaxed);
    }

    fn named(&self, name: String, link: Link) -> Arc<SharedLink> {
        let mut links = lock(&self.links);
        links.retain(|_, link| link.strong_count() > 0);
        if let Some(shared) = links.get(&name).and_then(Weak::upgrade) {
            lock(&shared.0).link = link;
            return shared;
        }
        let shared = Arc::new(SharedLink::new(link));
        links.insert(name, Arc::downgrade(&shared));
        shared
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(text: &str) -> SharedLink {
        SharedLink::new(text.parse().unwrap())
    }

    #[test]
    fn bulk_queues_behind_all_and_control_behind_control_only() {
        let (link, now) = (link("8mbit,50ms"), Instant::now()); // a byte a microsecond
        let ms = Duration::from_millis;
        assert_eq!(link.charge(Lane::Work, 100_000, now), now + ms(150));
        assert_eq!(link.charge(Lane::State, 100_000, now), now + ms(250));
        assert_eq!(link.charge(Lane::Control, 10_000, now), now + ms(60));
        assert_eq!(link.charge(Lane::Control, 10_000, now), now + ms(70));
        assert_eq!(link.charge(Lane::Sum, 100_000, now), now + ms(370), "control was charged to bulk");
        assert_eq!(link.ready(Lane::Work, now), Err(now + ms(320) - AHEAD));
        assert_eq!(link.ready(Lane::Work, now + ms(320)), Ok(()));
    }

    #[test]
    fn a_latency_alone_has_no_rate() {
        let (link, now) = (link("20ms"), Instant::now());
        assert_eq!(link.charge(Lane::Work, 1 << 30, now), now + Duration::from_millis(20));
        assert_eq!(link.frame_bytes(), MAX_FRAME_BYTES);
        assert_eq!(link.ready(Lane::Work, now), Ok(()));
    }

    #[test]
    fn peers_on_one_name_share_its_rate() {
        let (ways, now) = (Ways::default(), Instant::now());
        let (a, b) = (PublicKey([1; 32]), PublicKey([2; 32]));
        ways.shape(a, Some(("paris-oslo".to_owned(), "8mbit".parse().unwrap())));
        ways.shape(b, Some(("paris-oslo".to_owned(), "8mbit".parse().unwrap())));
        ways.to(a).link().unwrap().charge(Lane::Work, 1_000_000, now);
        assert!(ways.to(b).link().unwrap().ready(Lane::Work, now).is_err());
        ways.shape(b, None);
        assert!(ways.to(b).link().is_none());
    }

    #[test]
    fn strangers_are_forgotten() {
        let ways = Ways::default();
        ways.cut(PublicKey([9; 32]), true);
        for number in 0..100 {
            ways.to(PublicKey([number; 32]));
        }
        assert!(lock(&ways.ways).len() <= 2);
        assert!(ways.to(PublicKey([9; 32])).is_cut());
    }
}
