//! How much of the first stage is whose to feed, where several drive. Lots begin at home: a driver feeds the peers of its
//! own site, with the other drivers there, and its part of those in whose site nobody drives.
//!
//! The coordinator sizes a driver's window by it, and a driver what it has in flight. Both must take the same: if
//! those of four sites that have nobody in the first stage each took all peers for theirs, workers would refuse nine
//! microbatches of ten.

use std::collections::BTreeMap;

use crate::ids::SiteId;

/// The peers of the first stage that one driver of `site` feeds. `first`: how many stand where; `drivers`: where each
/// driver stands.
pub fn peers_fed_from(site: SiteId, drivers: &[SiteId], first: &BTreeMap<SiteId, usize>) -> f64 {
    let drivers_in = |site: SiteId| drivers.iter().filter(|driver| **driver == site).count();
    let share = |(&of, &peers): (&SiteId, &usize)| match drivers_in(of) {
        here if of == site => peers as f64 / here.max(1) as f64,
        0 => peers as f64 / drivers.len().max(1) as f64,
        _ => 0.0,
    };
    first.iter().map(share).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_peer_is_fed_once_whoever_drives_where() {
        let first = BTreeMap::from([(SiteId(0), 6), (SiteId(1), 2), (SiteId(2), 3)]);
        let feeds = |drivers: &[u16]| -> Vec<f64> {
            let drivers: Vec<SiteId> = drivers.iter().copied().map(SiteId).collect();
            drivers.iter().map(|&site| peers_fed_from(site, &drivers, &first)).collect()
        };
        assert_eq!(feeds(&[0]), [11.0], "one feeds all");
        assert_eq!(feeds(&[0, 1, 2]), [6.0, 2.0, 3.0]);
        assert_eq!(feeds(&[0, 1]), [7.5, 3.5], "nobody drives in the third site");
        assert_eq!(feeds(&[0, 0, 1, 2]), [3.0, 3.0, 2.0, 3.0], "two in one site");
        assert_eq!(
            feeds(&[0, 1, 2, 3]),
            [6.0, 2.0, 3.0, 0.0],
            "none of the first stage stands in the fourth"
        );
    }
}
