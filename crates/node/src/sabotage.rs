//! Faults that are built in on purpose, so that tests can show that they are found.

use std::str::FromStr;

use starling_model::stage::Hidden;

/// What a worker does wrong, from [`FROM_STEP`] on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sabotage {
    /// A lot counts twice.
    Double,
    /// A lot does not count.
    Drop,
    /// A microbatch is computed with the weights of the version before.
    Stale,
    /// What the device computes is not finite.
    Nan,
    /// What it tells of its sums is garbage.
    Garble,
}

/// The first step that is done wrong.
pub const FROM_STEP: u64 = 5;

impl FromStr for Sabotage {
    type Err = String;

    fn from_str(text: &str) -> Result<Sabotage, String> {
        match text {
            "double" => Ok(Sabotage::Double),
            "drop" => Ok(Sabotage::Drop),
            "stale" => Ok(Sabotage::Stale),
            "nan" => Ok(Sabotage::Nan),
            "garble" => Ok(Sabotage::Garble),
            _ => Err(format!("{text:?} is none of double, drop, stale, nan, garble")),
        }
    }
}

/// No element is a number any more.
pub fn spoil(hidden: &mut Hidden) {
    hidden.bytes.fill(0xff);
}
