//! Who computes the next lot: SWARM's interleaved weighted round robin, with two changes.
//!
//! Every peer of a stage has an account: the time that the work it was given, and has not given back, will take.
//! The peer on which the next lot would be done first gets it. So work goes out interleaved and in proportion to
//! speed, and the last lots of a step do not go to a slow peer for which everybody would then wait. In SWARM an
//! account grows by the average *response* time and never falls; a response contains the queue that the driver
//! itself made, so with several lots in flight all peers of a stage look equally slow. Here it grows by the time
//! that the peer *computes*, which the worker measures, and falls as work comes back.
//!
//! A hop to another site is a handicap in the same currency, not a ban: it is preferred as soon as the near
//! peers are busier by that much.

use std::collections::{BTreeMap, BTreeSet};

use crate::ids::{PeerId, SiteId, Step};
use crate::message::{Holder, Pass};
use crate::time::Span;

/// The weight of a new measurement in the average (SWARM's γ).
const GAMMA: f64 = 0.2;

/// The accounts of one stage, as one driver keeps them.
#[derive(Clone, Debug, Default)]
pub struct Wiring {
    accounts: BTreeMap<PeerId, Account>,
    /// Peers by when they would be done with one microbatch more, so that a choice does not look at all of them.
    order: BTreeSet<(u64, PeerId)>,
    /// Microbatches a second of all.
    speed: f64,
}

#[derive(Clone, Copy, Debug)]
struct Account {
    about: About,
    forward_us: f64,
    backward_us: f64,
    /// How many times slower it is taken to be, since it let a deadline pass.
    blame: f64,
}

/// What is known of a peer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct About {
    /// Where it stands.
    pub site: SiteId,
    /// It will leave soon, and wants no new lots.
    pub draining: bool,
    /// The first step for which it has the weights.
    pub since: Step,
    /// Microbatches that it owes us.
    pub owes: u32,
}

impl Account {
    fn new(holder: &Holder) -> Account {
        let us = 1e6 / holder.speed.max(1e-6);
        let about = About { site: holder.site, draining: holder.draining, since: holder.since, owes: 0 };
        Account { about, forward_us: us / 3.0, backward_us: us * 2.0 / 3.0, blame: 1.0 }
    }

    fn microbatch_us(&self) -> f64 {
        (self.forward_us + self.backward_us) * self.blame
    }

    fn done_us(&self, size: u32) -> f64 {
        f64::from(self.about.owes.saturating_add(size)) * self.microbatch_us()
    }

    fn rank(&self) -> u64 {
        self.done_us(1) as u64
    }

    fn speed(&self) -> f64 {
        1e6 / self.microbatch_us().max(1.0)
    }
}

/// A choice, and why.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// Who gets the work.
    pub peer: PeerId,
    /// When it will be done with it, as far as we know.
    pub done_in: Span,
}

impl Choice {
    /// Why, in plain words.
    pub fn reason(&self) -> String {
        format!("{} will be done with it first, in {}", self.peer, self.done_in)
    }
}

impl Wiring {
    /// Takes the peers that hold the stage; what was measured of those that stay is kept. Whether somebody left.
    pub fn set_peers(&mut self, holders: &[Holder]) -> bool {
        let mut accounts = BTreeMap::new();
        for holder in holders {
            let mut account = Account::new(holder);
            if let Some(known) = self.accounts.get(&holder.peer) {
                let about = About { owes: known.about.owes, ..account.about };
                account = Account { about, ..*known };
            }
            accounts.insert(holder.peer, account);
        }
        self.order = accounts.iter().map(|(&peer, account)| (account.rank(), peer)).collect();
        self.speed = accounts.values().map(Account::speed).sum();
        let before = std::mem::replace(&mut self.accounts, accounts);
        before.keys().any(|peer| !self.accounts.contains_key(peer))
    }

    /// Whether the stage has this holder.
    pub fn has(&self, peer: PeerId) -> bool {
        self.accounts.contains_key(&peer)
    }

    /// How many holders the stage has.
    pub fn len(&self) -> usize {
        self.accounts.len()
    }

    /// Whether the stage has none.
    pub fn is_empty(&self) -> bool {
        self.accounts.is_empty()
    }

    /// What the coordinator says of a holder.
    pub fn about(&self, peer: PeerId) -> Option<About> {
        self.accounts.get(&peer).map(|account| account.about)
    }

    /// The part of the stage's work that this peer can do.
    pub fn share_of(&self, peer: PeerId) -> f64 {
        self.accounts.get(&peer).map_or(0.0, |account| account.speed() / self.speed.max(1e-9))
    }

    /// The peer for a lot of `size` microbatches among those for which `extra` gives a cost of reaching it.
    pub fn choose(&self, size: u32, extra: impl Fn(PeerId, About) -> Option<Span>) -> Option<Choice> {
        let mut best: Option<(f64, PeerId)> = None;
        for &(rank, peer) in &self.order {
            if best.is_some_and(|(us, _)| rank as f64 > us) {
                break; // Who would be done later with one microbatch is so with more.
            }
            let Some(account) = self.accounts.get(&peer) else { continue };
            let Some(extra) = extra(peer, account.about) else { continue };
            let us = account.done_us(size) + extra.0 as f64;
            if best.is_none_or(|(other, _)| us < other) {
                best = Some((us, peer));
            }
        }
        best.map(|(us, peer)| Choice { peer, done_in: Span(us as u64) })
    }

    /// When a peer would be done with `size` microbatches more.
    pub fn done_in(&self, peer: PeerId, size: u32) -> Option<Span> {
        self.accounts.get(&peer).map(|account| Span(account.done_us(size) as u64))
    }

    /// Work goes to a peer.
    pub fn charge(&mut self, peer: PeerId, microbatches: u32) {
        self.change(peer, |account| account.about.owes = account.about.owes.saturating_add(microbatches));
    }

    /// Work came back, or was taken away.
    pub fn paid(&mut self, peer: PeerId, microbatches: u32) {
        self.change(peer, |account| account.about.owes = account.about.owes.saturating_sub(microbatches));
    }

    /// How long a peer needs for all that it owes us, and one microbatch more.
    pub fn busy_for(&self, peer: PeerId) -> Span {
        let us = |account: &Account| {
            f64::from(account.about.owes.saturating_add(1)) * (account.forward_us + account.backward_us)
        };
        Span(self.accounts.get(&peer).map_or(0.0, us) as u64)
    }

    /// Takes a measured time of computing.
    pub fn observe(&mut self, peer: PeerId, pass: Pass, computed: Span) {
        self.change(peer, |account| {
            let average_us = match pass {
                Pass::Forward => &mut account.forward_us,
                Pass::Backward => &mut account.backward_us,
            };
            *average_us += GAMMA * (computed.0 as f64 - *average_us);
            account.blame = 1.0 + (account.blame - 1.0) * (1.0 - GAMMA);
        });
    }

    /// A peer let its deadline pass: it counts as twice as slow, until what it does shows otherwise.
    pub fn blame(&mut self, peer: PeerId) {
        self.change(peer, |account| account.blame = (account.blame * 2.0).min(64.0));
    }

    fn change(&mut self, peer: PeerId, change: impl FnOnce(&mut Account)) {
        let Some(account) = self.accounts.get_mut(&peer) else { return };
        let (before, speed) = (account.rank(), account.speed());
        change(account);
        self.speed += account.speed() - speed;
        if account.rank() != before {
            let after = account.rank();
            self.order.remove(&(before, peer));
            self.order.insert((after, peer));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wiring(ms: &[u64]) -> Wiring {
        let mut wiring = Wiring::default();
        let holder = |(&ms, peer): (&u64, u32)| Holder {
            peer: PeerId(peer),
            site: SiteId(0),
            speed: 1e3 / ms as f64,
            draining: false,
            since: Step(0),
        };
        wiring.set_peers(&ms.iter().zip(0..).map(holder).collect::<Vec<_>>());
        wiring
    }

    fn draw(wiring: &mut Wiring) -> u32 {
        draw_with(wiring, |_, _| Some(Span(0)))
    }

    fn draw_with(wiring: &mut Wiring, extra: impl Fn(PeerId, About) -> Option<Span>) -> u32 {
        let peer = wiring.choose(1, extra).unwrap().peer;
        wiring.charge(peer, 1);
        peer.0
    }

    fn counts(wiring: &mut Wiring, draws: usize) -> Vec<usize> {
        let mut counts = vec![0; wiring.accounts.len()];
        (0..draws).for_each(|_| counts[draw(wiring) as usize] += 1);
        counts
    }

    #[test]
    fn work_goes_out_in_proportion_to_speed_and_interleaved() {
        let mut wiring = wiring(&[10, 20, 40]);
        assert_eq!(counts(&mut wiring, 700), [400, 200, 100]);
        let next: Vec<u32> = (0..21).map(|_| draw(&mut wiring)).collect();
        assert!(next.windows(3).all(|window| window.contains(&0)), "{next:?}");
    }

    #[test]
    fn the_last_lots_do_not_go_to_a_peer_that_would_finish_after_the_others() {
        // Seven lots take a fast peer less time than one lot takes the slow one.
        assert_eq!(counts(&mut wiring(&[10, 80]), 7), [7, 0]);
    }

    #[test]
    fn a_far_peer_gets_less_but_is_not_starved() {
        let mut wiring = wiring(&[10, 10]);
        let far = |peer: PeerId, _| Some(Span::ms(if peer.0 == 1 { 50 } else { 0 }));
        let first: Vec<u32> = (0..20).map(|_| draw_with(&mut wiring, far)).collect();
        let far = first.iter().filter(|&&peer| peer == 1).count();
        assert!((7..=8).contains(&far), "{first:?}");
        assert_eq!(first[..5], [0; 5]);
    }

    #[test]
    fn who_gives_work_back_gets_more_and_who_slows_down_gets_less() {
        let mut wiring = wiring(&[10, 10]);
        counts(&mut wiring, 20);
        wiring.paid(PeerId(1), 10);
        assert_eq!(counts(&mut wiring, 10), [0, 10]);
        for _ in 0..50 {
            wiring.observe(PeerId(1), Pass::Forward, Span::ms(30));
            wiring.observe(PeerId(1), Pass::Backward, Span::ms(60));
        }
        let drawn = counts(&mut wiring, 100);
        assert!(drawn[0] >= 89, "{drawn:?}");
    }

    #[test]
    fn a_peer_that_was_late_is_forgiven_when_it_works_again() {
        let mut wiring = wiring(&[10, 11]);
        wiring.blame(PeerId(0));
        assert_eq!(draw(&mut wiring), 1);
        for _ in 0..30 {
            wiring.observe(PeerId(0), Pass::Forward, Span(3_333));
        }
        wiring.paid(PeerId(1), 1);
        assert_eq!(draw(&mut wiring), 0);
        assert_eq!(wiring.choose(1, |_, _| None), None);
    }
}
