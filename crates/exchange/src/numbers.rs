//! How numbers are stored in a file, and as the model's.

use half::{bf16, f16};
use safetensors::Dtype as FileDtype;
use starling_model::engine::Dtype;

/// How a file stores numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Single precision.
    F32,
    /// Half precision.
    F16,
    /// The upper half of single precision.
    Bf16,
}

impl Format {
    /// As `transformers` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Format::F32 => "float32",
            Format::F16 => "float16",
            Format::Bf16 => "bfloat16",
        }
    }

    pub(crate) fn dtype(self) -> FileDtype {
        match self {
            Format::F32 => FileDtype::F32,
            Format::F16 => FileDtype::F16,
            Format::Bf16 => FileDtype::BF16,
        }
    }
}

/// The model's bytes of what a file holds; none if it holds no floating-point numbers that we know.
pub(crate) fn to_model(bytes: &[u8], from: FileDtype, to: Dtype) -> Option<Vec<u8>> {
    match (from, to) {
        (FileDtype::F32, Dtype::F32) | (FileDtype::F64, Dtype::F64) => Some(bytes.to_vec()),
        (FileDtype::F32, _) => {
            Some(write(bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x).into()), to))
        }
        (FileDtype::F64, _) => Some(write(bytes.as_chunks().0.iter().map(|&x| f64::from_le_bytes(x)), to)),
        (FileDtype::F16, _) => {
            Some(write(bytes.as_chunks().0.iter().map(|&x| f16::from_le_bytes(x).into()), to))
        }
        (FileDtype::BF16, _) => {
            Some(write(bytes.as_chunks().0.iter().map(|&x| bf16::from_le_bytes(x).into()), to))
        }
        _ => None,
    }
}

/// A file's bytes of what the model holds.
pub(crate) fn to_file(bytes: &[u8], from: Dtype, to: Format) -> Vec<u8> {
    let numbers: Box<dyn Iterator<Item = f32>> = match (from, to) {
        (Dtype::F32, Format::F32) => return bytes.to_vec(),
        (Dtype::F32, _) => Box::new(bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x))),
        (Dtype::F64, _) => Box::new(bytes.as_chunks().0.iter().map(|&x| f64::from_le_bytes(x) as f32)),
    };
    match to {
        Format::F32 => numbers.flat_map(f32::to_le_bytes).collect(),
        Format::F16 => numbers.flat_map(|x| f16::from_f32(x).to_le_bytes()).collect(),
        Format::Bf16 => numbers.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect(),
    }
}

fn write(numbers: impl Iterator<Item = f64>, to: Dtype) -> Vec<u8> {
    match to {
        Dtype::F32 => numbers.flat_map(|x| (x as f32).to_le_bytes()).collect(),
        Dtype::F64 => numbers.flat_map(f64::to_le_bytes).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_that_both_can_hold_come_back_as_they_were() {
        let numbers = [0.0_f32, -1.5, 0.25, 384.0, -0.0];
        let model: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        for format in [Format::F32, Format::F16, Format::Bf16] {
            let file = to_file(&model, Dtype::F32, format);
            assert_eq!(to_model(&file, format.dtype(), Dtype::F32).as_ref(), Some(&model), "{format:?}");
            let double = to_model(&file, format.dtype(), Dtype::F64).unwrap();
            assert_eq!(to_file(&double, Dtype::F64, format), file, "{format:?}");
        }
        assert_eq!(to_model(&[1, 2], FileDtype::I8, Dtype::F32), None);
    }
}
