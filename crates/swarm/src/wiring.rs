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

use std::collections::BTreeMap;

use crate::ids::PeerId;
use crate::message::Pass;
use crate::time::Span;

/// The weight of a new measurement in the average (SWARM's γ).
const GAMMA: f64 = 0.2;

/// The accounts of one stage, as one driver keeps them.
#[derive(Clone, Debug, Default)]
pub struct Wiring {
    accounts: BTreeMap<PeerId, Account>,
}

#[derive(Clone, Copy, Debug)]
struct Account {
    owes: u32,
    forward_us: f64,
    backward_us: f64,
    /// How many times slower it is taken to be, since it let a deadline pass.
    blame: f64,
}

impl Account {
    fn microbatch_us(&self) -> f64 {
        (self.forward_us + self.backward_us) * self.blame
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
    /// Takes the peers that hold the stage, each with a first guess of its time for a microbatch; forgets others.
    pub fn set_peers(&mut self, peers: impl IntoIterator<Item = (PeerId, Span)>) {
        let mut accounts = BTreeMap::new();
        for (peer, guess) in peers {
            let (forward_us, backward_us) = (guess.0 as f64 / 3.0, guess.0 as f64 * 2.0 / 3.0);
            let fresh = Account { owes: 0, forward_us, backward_us, blame: 1.0 };
            accounts.insert(peer, self.accounts.get(&peer).copied().unwrap_or(fresh));
        }
        self.accounts = accounts;
    }

    /// The peer for a lot of `size` microbatches among those for which `extra` gives a cost of reaching it.
    pub fn choose(&mut self, size: u32, extra: impl Fn(PeerId) -> Option<Span>) -> Option<Choice> {
        let done_us = |account: &Account, extra: Span| {
            f64::from(account.owes + size) * account.microbatch_us() + extra.0 as f64
        };
        let (us, peer) = self
            .accounts
            .iter()
            .filter_map(|(&peer, account)| Some((done_us(account, extra(peer)?), peer)))
            .min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))?;
        self.accounts.get_mut(&peer)?.owes += size;
        Some(Choice { peer, done_in: Span(us as u64) })
    }

    /// Work came back, or was taken away.
    pub fn paid(&mut self, peer: PeerId, microbatches: u32) {
        if let Some(account) = self.accounts.get_mut(&peer) {
            account.owes = account.owes.saturating_sub(microbatches);
        }
    }

    /// How long a peer needs for all that it owes us, and one microbatch more.
    pub fn busy_for(&self, peer: PeerId) -> Span {
        let us = |account: &Account| f64::from(account.owes + 1) * (account.forward_us + account.backward_us);
        Span(self.accounts.get(&peer).map_or(0.0, us) as u64)
    }

    /// Takes a measured time of computing.
    pub fn observe(&mut self, peer: PeerId, pass: Pass, computed: Span) {
        let Some(account) = self.accounts.get_mut(&peer) else { return };
        let average_us = match pass {
            Pass::Forward => &mut account.forward_us,
            Pass::Backward => &mut account.backward_us,
        };
        *average_us += GAMMA * (computed.0 as f64 - *average_us);
        account.blame = 1.0 + (account.blame - 1.0) * (1.0 - GAMMA);
    }

    /// A peer let its deadline pass: it counts as twice as slow, until what it does shows otherwise.
    pub fn blame(&mut self, peer: PeerId) {
        if let Some(account) = self.accounts.get_mut(&peer) {
            account.blame = (account.blame * 2.0).min(64.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wiring(ms: &[u64]) -> Wiring {
        let mut wiring = Wiring::default();
        wiring.set_peers(ms.iter().zip(0..).map(|(&ms, peer)| (PeerId(peer), Span::ms(ms))));
        wiring
    }

    fn draw(wiring: &mut Wiring) -> u32 {
        wiring.choose(1, |_| Some(Span(0))).unwrap().peer.0
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
        let far = |peer: PeerId| Some(Span::ms(if peer.0 == 1 { 50 } else { 0 }));
        let first: Vec<u32> = (0..20).map(|_| wiring.choose(1, far).unwrap().peer.0).collect();
        assert_eq!(first.iter().filter(|&&peer| peer == 1).count(), 7, "{first:?}");
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
        assert_eq!(wiring.choose(1, |_| None), None);
    }
}
