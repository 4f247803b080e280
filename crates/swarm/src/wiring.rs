//! Who computes the next lot: SWARM's interleaved weighted round robin, with two changes.
//!
//! Every peer of a stage has an account: the time that it needs for what it has to do for us now, forward work that
//! is on its way to it included. As long as there is more to hand out, the peer that can begin first gets the next
//! lot, so that everybody is at work; towards the end of a step the one that can be *done* first, so that nobody
//! waits for a slow peer. In SWARM an account grows by the average *response* time and never falls; a response
//! contains the queue that the driver itself made, so with several lots in flight all peers of a stage look equally
//! slow. Here it grows by the time that the peer *computes*, which the worker measures, and falls as work is done.
//!
//! A hop to another site is a handicap in the same currency, not a ban: it is preferred as soon as the near
//! peers are busier by that much (the driver says by how much, see `routing`).

use std::collections::BTreeMap;

use crate::ids::{PeerId, SiteId, Step};
use crate::message::{Holder, Pass};
use crate::time::{Span, Time};

/// The weight of a new measurement in the average (SWARM's γ).
const GAMMA: f64 = 0.2;

/// The accounts of one stage, as one driver keeps them.
#[derive(Clone, Debug, Default)]
pub struct Wiring {
    /// In the order of their numbers.
    peers: Vec<PeerId>,
    /// Theirs, in the same order.
    accounts: Vec<Account>,
    /// When each can begin: all that a choice has to look at of most of them.
    ranks: Vec<u64>,
    /// Microbatches a second of all.
    speed: f64,
    /// The step for a lot of which nobody was found, if nothing has changed since.
    full_for: Option<Step>,
}

#[derive(Clone, Copy, Debug)]
struct Account {
    about: About,
    forward_us: f64,
    backward_us: f64,
    /// How many times slower it is taken to be, since it let a deadline pass.
    blame: f64,
    /// Microbatches whose gradients have come back to it.
    to_return: u32,
    /// Microbatches that it does again, before everything else.
    urgent: u32,
    /// When it last told us of any work.
    heard: Option<Time>,
    /// For either pass: from one microbatch that it is done with to the next, as long as there are any, and when it last
    /// was. What comes over a slow wire comes no faster than that, however fast the device is.
    every_us: [f64; 2],
    done: [Option<Time>; 2],
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
    /// The last one, if it still lacks a sum.
    pub until: Option<Step>,
    /// Microbatches that it has, or is about to get.
    pub owes: u32,
    /// Those of them that it has not computed forward.
    pub to_begin: u32,
}

/// What a choice of a peer is to achieve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aim {
    /// Everybody at work: who can begin first.
    Throughput,
    /// An end soon: who can be done first. For the last lots of a step.
    End,
}

impl Aim {
    /// How much the time counts that the work itself takes. Not nothing in `Throughput`: of two that are free the
    /// faster is better.
    fn weight(self) -> f64 {
        match self {
            Aim::Throughput => 0.05,
            Aim::End => 1.0,
        }
    }
}

/// What a peer has to do for us.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Load {
    /// Microbatches that it has not computed forward.
    pub forward: u32,
    /// Microbatches whose gradients have come back to it.
    pub backward: u32,
    /// Microbatches that it does again for a step that is about to be closed.
    pub urgent: u32,
}

impl About {
    /// Whether it has the weights for a step.
    pub fn has_weights_of(&self, step: Step) -> bool {
        self.since <= step && self.until.is_none_or(|until| step <= until)
    }
}

impl Account {
    fn new(holder: &Holder) -> Account {
        let us = 1e6 / holder.speed.max(1e-6);
        let about = About {
            site: holder.site,
            draining: holder.draining,
            since: holder.since,
            until: holder.until,
            owes: 0,
            to_begin: 0,
        };
        Account {
            about,
            forward_us: us / 3.0,
            backward_us: us * 2.0 / 3.0,
            blame: 1.0,
            to_return: 0,
            urgent: 0,
            heard: None,
            every_us: [0.0; 2],
            done: [None; 2],
        }
    }

    fn microbatch_us(&self) -> f64 {
        (self.forward_us + self.backward_us) * self.blame
    }

    fn done_us(&self, size: u32, weight: f64) -> f64 {
        self.busy_us() + f64::from(size) * self.microbatch_us() * weight
    }

    fn busy_us(&self) -> f64 {
        let forward_us = f64::from(self.about.to_begin) * self.forward_us;
        forward_us * self.blame + self.returning_us()
    }

    /// What comes back later counts too: a peer that gets much because it is free now is flooded then, while others
    /// of its stage have nothing to do.
    fn returning_us(&self) -> f64 {
        let to_return = self.about.owes.saturating_sub(self.about.to_begin).max(self.to_return);
        f64::from(to_return) * self.backward_us * self.blame
    }

    fn rank(&self) -> u64 {
        self.busy_us() as u64
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
        let mut holders: Vec<&Holder> = holders.iter().collect();
        holders.sort_by_key(|holder| holder.peer);
        holders.dedup_by_key(|holder| holder.peer);
        let mut accounts = Vec::with_capacity(holders.len());
        for holder in &holders {
            let mut account = Account::new(holder);
            if let Some(known) = self.account(holder.peer) {
                let About { owes, to_begin, .. } = known.about;
                let about = About { owes, to_begin, ..account.about };
                account = Account { about, ..*known };
            }
            accounts.push(account);
        }
        self.full_for = None;
        self.ranks = accounts.iter().map(Account::rank).collect();
        self.speed = accounts.iter().map(Account::speed).sum();
        self.accounts = accounts;
        let before = std::mem::replace(&mut self.peers, holders.iter().map(|holder| holder.peer).collect());
        before.into_iter().any(|peer| !self.has(peer))
    }

    fn place(&self, peer: PeerId) -> Option<usize> {
        self.peers.binary_search(&peer).ok()
    }

    fn account(&self, peer: PeerId) -> Option<&Account> {
        self.place(peer).map(|place| &self.accounts[place])
    }

    /// Whether the stage has this holder.
    pub fn has(&self, peer: PeerId) -> bool {
        self.place(peer).is_some()
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
        self.account(peer).map(|account| account.about)
    }

    /// How many holders stand where.
    pub fn by_site(&self) -> BTreeMap<SiteId, usize> {
        let mut holders = BTreeMap::new();
        for account in &self.accounts {
            *holders.entry(account.about.site).or_default() += 1;
        }
        holders
    }

    /// Whether there is such a holder.
    pub fn any(&self, is_such: impl Fn(PeerId, About) -> bool) -> bool {
        self.peers.iter().zip(&self.accounts).any(|(&peer, account)| is_such(peer, account.about))
    }

    /// The least that any peer of a site has to do for us that is, or comes, on its way back.
    pub fn returning(&self, site: SiteId) -> Span {
        let near = self.accounts.iter().filter(|account| account.about.site == site);
        Span(near.map(Account::returning_us).reduce(f64::min).unwrap_or(0.0) as u64)
    }

    /// How long a microbatch takes one of the holders on average.
    pub fn microbatch(&self) -> Span {
        Span((self.accounts.len() as f64 * 1e6 / self.speed.max(1e-9)) as u64)
    }

    /// The part of its site's work for the stage that this peer can do.
    pub fn share_of(&self, peer: PeerId) -> f64 {
        let Some(account) = self.account(peer) else { return 0.0 };
        let near = self.accounts.iter().filter(|other| other.about.site == account.about.site);
        account.speed() / near.map(Account::speed).sum::<f64>().max(1e-9)
    }

    /// The peer for a lot of `size` microbatches among those for which `extra` gives a cost of reaching it.
    pub fn choose(
        &self,
        size: u32,
        aim: Aim,
        extra: impl Fn(PeerId, About) -> Option<Span>,
    ) -> Option<Choice> {
        // Of those that are done at the same time the one that begins first, then the one with the lowest number.
        let mut best: Option<(f64, u64, usize)> = None;
        let look_at = |place: usize, best: &mut Option<(f64, u64, usize)>| {
            let (account, rank) = (&self.accounts[place], self.ranks[place]);
            let is_better = |us: f64| best.is_none_or(|best| (us, rank, place) < best);
            let us = account.done_us(size, aim.weight());
            if !is_better(us) {
                return; // What it takes to get there does not make it better.
            }
            let Some(extra) = extra(self.peers[place], account.about) else { return };
            let us = us + extra.0 as f64;
            if is_better(us) {
                *best = Some((us, rank, place));
            }
        };
        // Who can begin first is likely to be best, or nearly: few others are then worth a look.
        let earliest = *self.ranks.iter().min()?;
        let first = self.ranks.iter().position(|rank| *rank == earliest)?;
        look_at(first, &mut best);
        let mut latest = best.map_or(u64::MAX, |(us, ..)| us as u64);
        for (place, &rank) in self.ranks.iter().enumerate() {
            if rank <= latest && place != first {
                look_at(place, &mut best);
                latest = best.map_or(u64::MAX, |(us, ..)| us as u64);
            }
        }
        best.map(|(us, _, place)| Choice { peer: self.peers[place], done_in: Span(us as u64) })
    }

    /// The peer that is done first with a lot of `size` microbatches that goes before everything that a peer has to do but
    /// others of its kind.
    pub fn choose_urgent(&self, size: u32, extra: impl Fn(PeerId, About) -> Option<Span>) -> Option<PeerId> {
        let able = self.peers.iter().zip(&self.accounts).filter_map(|(&peer, account)| {
            let microbatches = f64::from(account.urgent.saturating_add(size));
            let us = microbatches * account.microbatch_us() + extra(peer, account.about)?.0 as f64;
            Some((us as u64, account.rank(), peer))
        });
        able.min().map(|(_, _, peer)| peer)
    }

    /// Nobody was found for a lot of a step: as long as no peer changes, there is no use in looking again.
    pub fn note_full(&mut self, step: Step) {
        self.full_for = Some(step);
    }

    /// Whether that is so.
    pub fn is_full_for(&self, step: Step) -> bool {
        self.full_for == Some(step)
    }

    /// Something else has changed that a choice depends on.
    pub fn look_again(&mut self) {
        self.full_for = None;
    }

    /// When a peer would be done with `size` microbatches more.
    pub fn done_in(&self, peer: PeerId, size: u32) -> Option<Span> {
        self.account(peer).map(|account| Span(account.done_us(size, 1.0) as u64))
    }

    /// Work goes to a peer; if it is urgent, it is done before everything else.
    pub fn charge(&mut self, peer: PeerId, microbatches: u32, is_urgent: bool) {
        self.change(peer, |account| {
            account.about.owes = account.about.owes.saturating_add(microbatches);
            account.about.to_begin = account.about.to_begin.saturating_add(microbatches);
            account.urgent = account.urgent.saturating_add(if is_urgent { microbatches } else { 0 });
        });
    }

    /// A peer has computed a microbatch forward.
    pub fn gone_on(&mut self, peer: PeerId) {
        self.change(peer, |account| account.about.to_begin = account.about.to_begin.saturating_sub(1));
    }

    /// The gradient of a microbatch came back to a peer.
    pub fn come_back(&mut self, peer: PeerId) {
        self.change(peer, |account| account.to_return = account.to_return.saturating_add(1));
    }

    /// A peer is done with a microbatch.
    pub fn paid(&mut self, peer: PeerId, is_urgent: bool) {
        self.settle(peer, 1, Load { forward: 0, backward: 1, urgent: is_urgent.into() });
    }

    /// Work was taken away from a peer.
    pub fn settle(&mut self, peer: PeerId, owed: u32, load: Load) {
        self.change(peer, |account| {
            account.about.owes = account.about.owes.saturating_sub(owed);
            account.about.to_begin = account.about.to_begin.saturating_sub(load.forward);
            account.to_return = account.to_return.saturating_sub(load.backward);
            account.urgent = account.urgent.saturating_sub(load.urgent);
        });
    }

    /// How long a peer may need for all that it owes us, and one microbatch more: what it has now, and what may
    /// come back to it before it gets there; or what is on its way to it, if that takes longer.
    pub fn busy_for(&self, peer: PeerId, pass: Pass) -> Span {
        let us = |account: &Account| {
            let computing_us =
                f64::from(account.about.owes.saturating_add(1)) * (account.forward_us + account.backward_us);
            let coming = match pass {
                Pass::Forward => account.about.to_begin,
                Pass::Backward => account.to_return,
            };
            computing_us.max(f64::from(coming.saturating_add(1)) * account.every_us[pass as usize])
        };
        Span(self.account(peer).map_or(0.0, us) as u64)
    }

    /// When a peer last told us of any work.
    pub fn heard(&self, peer: PeerId) -> Option<Time> {
        self.account(peer)?.heard
    }

    /// A peer is done with a microbatch, so long after it was given to it.
    pub fn hear(&mut self, peer: PeerId, pass: Pass, took: Span, now: Time) {
        let Some(place) = self.place(peer) else { return };
        let account = &mut self.accounts[place];
        account.heard = Some(now);
        let every_us = &mut account.every_us[pass as usize];
        // What it was done with before was before this, unless that was before this was given to it.
        let since =
            account.done[pass as usize].replace(now).map_or(took, |before| now.since(before).min(took));
        let us = since.0 as f64;
        *every_us = if *every_us == 0.0 { us } else { *every_us + GAMMA * (us - *every_us) };
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
        let Some(place) = self.place(peer) else { return };
        self.full_for = None;
        let account = &mut self.accounts[place];
        let speed = account.speed();
        change(account);
        self.speed += account.speed() - speed;
        self.ranks[place] = account.rank();
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
            until: None,
        };
        wiring.set_peers(&ms.iter().zip(0..).map(holder).collect::<Vec<_>>());
        wiring
    }

    fn draw(wiring: &mut Wiring) -> u32 {
        draw_with(wiring, |_, _| Some(Span(0)))
    }

    fn draw_with(wiring: &mut Wiring, extra: impl Fn(PeerId, About) -> Option<Span>) -> u32 {
        let peer = wiring.choose(1, Aim::End, extra).unwrap().peer;
        wiring.charge(peer, 1, false);
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
        assert_eq!(counts(&mut wiring, 700), [401, 200, 99]);
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
        // Until the near one is busier by what the way costs.
        assert_eq!(first[..15], [0; 15]);
        assert_eq!(first[15..], [1, 0, 1, 0, 1]);
    }

    #[test]
    fn who_gives_work_back_gets_more_and_who_slows_down_gets_less() {
        let mut wiring = wiring(&[10, 10]);
        counts(&mut wiring, 20);
        wiring.settle(PeerId(1), 10, Load { forward: 10, ..Load::default() });
        assert_eq!(counts(&mut wiring, 10), [0, 10]);
        for _ in 0..50 {
            wiring.observe(PeerId(1), Pass::Forward, Span::ms(30));
            wiring.observe(PeerId(1), Pass::Backward, Span::ms(60));
        }
        let drawn = counts(&mut wiring, 100);
        assert!(drawn[0] >= 89, "{drawn:?}");
    }

    #[test]
    fn what_is_done_again_is_shared_out_whatever_else_peers_have_to_do() {
        let mut wiring = wiring(&[10, 10, 20]);
        (0..9).for_each(|_| wiring.charge(PeerId(0), 1, false));
        let mut draw = || {
            let peer = wiring.choose_urgent(1, |_, _| Some(Span(0))).unwrap();
            wiring.charge(peer, 1, true);
            peer.0
        };
        assert_eq!([(); 5].map(|()| draw()), [1, 0, 2, 1, 0], "in proportion to speed, the idle first");
        wiring.paid(PeerId(0), true);
        assert_eq!(wiring.choose_urgent(1, |_, _| Some(Span(0))), Some(PeerId(0)));
    }

    #[test]
    fn a_peer_that_was_late_is_forgiven_when_it_works_again() {
        let mut wiring = wiring(&[10, 11]);
        wiring.blame(PeerId(0));
        assert_eq!(draw(&mut wiring), 1);
        for _ in 0..30 {
            wiring.observe(PeerId(0), Pass::Forward, Span(3_333));
        }
        wiring.settle(PeerId(1), 1, Load { forward: 1, ..Load::default() });
        assert_eq!(draw(&mut wiring), 0);
        assert_eq!(wiring.choose(1, Aim::End, |_, _| None), None);
    }
}
