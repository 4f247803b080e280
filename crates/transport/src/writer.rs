//! The sending side of one connection: which frame goes next, and when.
//!
//! Between two frames the most urgent lane goes first. On an emulated link a frame is first held for as long as
//! it would have travelled; what is held is at most what such a link would carry.

use std::collections::VecDeque;
use std::io;
use std::pin::pin;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};

use crate::frame::{Cutter, Frame, MAX_FRAME_BYTES};
use crate::hub::{Hub, Phase};
use crate::letter::Lane;
use crate::link::{SharedLink, Way};
use crate::outbox::{Outbox, PairNo};
use crate::peers::Place;
use crate::secure::SecureWriter;

/// What is given to the socket at once.
const BATCH_BYTES: usize = 128 << 10;
/// Most that is held of a link without a rate.
const MAX_HELD_BYTES: usize = 256 << 20;

pub(crate) struct Writer {
    hub: Arc<Hub>,
    phase: watch::Receiver<Phase>,
    secure: SecureWriter,
    way: Arc<Way>,
    outbox: Arc<Outbox>,
    pair: PairNo,
    lanes: &'static [Lane],
    /// The letter of each lane that is on its way.
    open: [Option<Cutter>; 4],
    held: VecDeque<(Instant, Frame)>,
    held_bytes: usize,
    /// Enciphered, and not yet written.
    waiting_bytes: usize,
}

impl Writer {
    pub(crate) fn new(
        hub: Arc<Hub>,
        secure: SecureWriter,
        way: Arc<Way>,
        place: &Place,
        lanes: &'static [Lane],
    ) -> Writer {
        Writer {
            phase: hub.phase.subscribe(),
            hub,
            secure,
            way,
            outbox: place.outbox.clone(),
            pair: place.no,
            lanes,
            open: [const { None }; 4],
            held: VecDeque::new(),
            held_bytes: 0,
            waiting_bytes: 0,
        }
    }

    /// Writes until the connection breaks, or the endpoint is closed and the control lane is empty.
    pub(crate) async fn run(mut self) -> io::Result<()> {
        let outbox = self.outbox.clone();
        loop {
            let mut changed = pin!(outbox.changed());
            changed.as_mut().enable(); // before looking, so that nothing is missed in between
            let closing = *self.phase.borrow_and_update() != Phase::Open;
            let again = self.gather(Instant::now())?;
            if self.waiting_bytes > 0 {
                self.secure.flush().await?;
                self.waiting_bytes = 0;
                continue;
            }
            if closing && (again.is_none() || self.way.is_cut()) {
                return self.secure.finish().await;
            }
            self.secure.rest();
            tokio::select! {
                () = changed => {}
                () = sleep_until(again.unwrap_or_else(Instant::now)), if again.is_some() => {}
                () = self.secure.tls_wants_to_write() => self.secure.flush().await?,
                _ = self.phase.changed() => {}
            }
        }
    }

    /// Enciphers what may go now, up to a batch. `None`: nothing waits for a time; else when to look again.
    fn gather(&mut self, now: Instant) -> io::Result<Option<Instant>> {
        if self.way.is_cut() {
            return Ok(None); // what is half written goes on when the cut heals
        }
        let link = self.way.link();
        let link_is_free = link.as_ref().and_then(|link| self.hold(link, now));
        while self.waiting_bytes < BATCH_BYTES
            && let Some((_, frame)) = self.held.pop_front_if(|(due, _)| *due <= now)
        {
            self.held_bytes -= frame.bytes();
            self.put(&frame, true)?;
        }
        // When a link is taken away, what it holds still goes first.
        while self.waiting_bytes < BATCH_BYTES && link.is_none() && self.held.is_empty() {
            let Some(frame) = self.next_frame(MAX_FRAME_BYTES) else { break };
            self.put(&frame, false)?;
        }
        let due = self.held.front().map(|(due, _)| *due);
        Ok(link_is_free.into_iter().chain(due).min())
    }

    /// Puts frames on the link while it is free; then, when it will be so again.
    fn hold(&mut self, link: &SharedLink, now: Instant) -> Option<Instant> {
        while self.held_bytes < MAX_HELD_BYTES {
            if let Err(free) = link.ready(self.lanes[0], now) {
                return Some(free);
            }
            let frame = self.next_frame(link.frame_bytes())?;
            self.held_bytes += frame.bytes();
            self.held.push_back((link.charge(frame.lane, frame.bytes(), now), frame));
        }
        None
    }

    fn put(&mut self, frame: &Frame, shaped: bool) -> io::Result<()> {
        self.hub.counters.sent(frame, shaped);
        self.waiting_bytes = self.secure.encipher(frame)?;
        Ok(())
    }

    /// The next piece of the most urgent letter.
    fn next_frame(&mut self, most_bytes: usize) -> Option<Frame> {
        for lane in self.lanes {
            let open = &mut self.open[lane.index()];
            if open.is_none() {
                *open = self.outbox.pop(*lane, self.pair).map(Cutter::new);
            }
            let Some(frame) = open.as_mut().and_then(|letter| letter.next_frame(most_bytes)) else {
                continue;
            };
            if frame.last {
                *open = None;
            }
            return Some(frame);
        }
        None
    }
}
