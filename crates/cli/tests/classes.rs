//! Promise (b) between numerics classes: whatever path through the instruction set computes, the losses of the first hundred
//! steps and the weights after them are the naive engine's but for the last bits.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::collections::BTreeMap;

use process::{Place, texts};
use serde_json::Value;

const RUN: &str = r#"
seed = 3
data = { synthetic = { documents = 200 } }
optimiser = { lr = 1e-3, clip = 1.0, warmup_steps = 10 }
train = { steps = 100, batch = 8, microbatch = 4, lots = 2, threads = 1 }
"#;

/// A GPT-2 with dropout, and a Llama with fewer heads of keys.
const MODELS: [&str; 2] = [
    "model = { context = 24, width = 24, layers = 2, heads = 2, dropout = 0.1 }",
    "model = { family = \"llama\", context = 24, width = 24, layers = 2, heads = 2, key_heads = 1 }",
];

#[test]
fn every_path_through_the_instruction_set_trains_what_the_naive_engine_trains() {
    for model in MODELS {
        let place = Place::new();
        place.write("run.toml", &format!("{model}\n{RUN}"));
        place.good("train run.toml --out naive --set train.device=naive");
        let (losses, weights) = (place.losses("naive"), weights(&place, "naive"));
        assert_eq!(losses.len(), 100);
        let mut paths = 0;
        for path in ["baseline", "avx2", "avx512", "neon"] {
            let mut command = place.command(&format!("train run.toml --out {path}"));
            let output = command.env("STARLING_ISA", path).output().unwrap();
            if !output.status.success() {
                let (_, told) = texts(&output);
                assert!(told.contains("which this processor does not have"), "{told}");
                continue;
            }
            paths += 1;
            for (step, loss) in place.losses(path) {
                let difference = (loss - losses[&step]).abs();
                assert!(difference <= 2e-6, "{path}: the loss of step {step} differs by {difference:e}");
            }
            let distance = distance(&weights, &self::weights(&place, path));
            assert!(distance <= 1e-4, "{path}: the weights are {distance:e} apart");
        }
        assert!(paths > 0, "every processor has one");
    }
}

/// The weights of a run by name, from what it exports.
fn weights(place: &Place, run: &str) -> BTreeMap<String, Vec<f32>> {
    place.good(&format!("export {run} --out {run}-exported"));
    let file = std::fs::read(place.path(&format!("{run}-exported/model.safetensors"))).unwrap();
    let (length, rest) = file.split_first_chunk::<8>().unwrap();
    let (head, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
    let head: BTreeMap<String, Value> = serde_json::from_slice(head).unwrap();
    let tensors = head.into_iter().filter(|(name, _)| name != "__metadata__");
    let read = |(name, about): (String, Value)| {
        assert_eq!(about["dtype"], "F32");
        let at = |end: usize| about["data_offsets"][end].as_u64().unwrap() as usize;
        let elements = data[at(0)..at(1)].as_chunks().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
        (name, elements.collect())
    };
    tensors.map(read).collect()
}

/// The relative L2 distance of two models.
fn distance(a: &BTreeMap<String, Vec<f32>>, b: &BTreeMap<String, Vec<f32>>) -> f64 {
    assert!(a.keys().eq(b.keys()) && a.len() > 10);
    let pairs = a.values().flatten().zip(b.values().flatten());
    let (apart, size) = pairs.fold((0.0, 0.0), |(apart, size), (&x, &y)| {
        let (x, y) = (f64::from(x), f64::from(y));
        (apart + (x - y) * (x - y), size + x * x)
    });
    (apart / size).sqrt()
}
