//! What computes a stage.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// What computes a stage: `cpu`, `naive`, or `emulated:TFLOPS`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Device {
    /// This machine's processor, with the fast engine; in double precision with the naive one, there is no other.
    #[default]
    Cpu,
    /// This machine's processor, with the engine that judges the others.
    Naive,
    /// A device of this many 10¹² operations a second that is not there: true sizes, modelled time, no arithmetic.
    /// What comes out of it is no model.
    Emulated(f64),
}

impl Device {
    /// Whether nothing is computed.
    pub fn is_emulated(self) -> bool {
        matches!(self, Device::Emulated(_))
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cpu => write!(f, "cpu"),
            Device::Naive => write!(f, "naive"),
            Device::Emulated(tflops) => write!(f, "emulated:{tflops}"),
        }
    }
}

impl FromStr for Device {
    type Err = DeviceError;

    fn from_str(text: &str) -> Result<Device, DeviceError> {
        let unknown = || DeviceError(text.into());
        match text.split_once(':') {
            None if text == "cpu" => Ok(Device::Cpu),
            None if text == "naive" => Ok(Device::Naive),
            Some(("emulated", tflops)) => {
                let tflops: f64 = tflops.parse().map_err(|_| unknown())?;
                if (1e-6..=1e6).contains(&tflops) { Ok(Device::Emulated(tflops)) } else { Err(unknown()) }
            }
            _ => Err(unknown()),
        }
    }
}

impl TryFrom<String> for Device {
    type Error = DeviceError;

    fn try_from(text: String) -> Result<Device, DeviceError> {
        text.parse()
    }
}

impl From<Device> for String {
    fn from(device: Device) -> String {
        device.to_string()
    }
}

/// There is no such device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is no device; use \"cpu\", \"naive\" for the slow and obvious engine, or \"emulated:0.5\" for a device of 0.5 TFLOPS that computes nothing"
)]
pub struct DeviceError(String);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_read_as_it_is_written() {
        for device in [Device::Cpu, Device::Naive, Device::Emulated(0.25)] {
            assert_eq!(device.to_string().parse(), Ok(device));
        }
        for text in
            ["", "gpu", "cpu:1", "emulated", "emulated:", "emulated:-1", "emulated:nan", "emulated:inf"]
        {
            assert!(text.parse::<Device>().is_err(), "{text}");
        }
    }
}
