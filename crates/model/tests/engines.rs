//! The fast engine computes what the naive one computes, on every path of this processor; and a sample's activations
//! do not depend on its neighbours, nor anything on threads.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use starling_model::engine::cpu::{Buffer, Cpu, Isa};
use starling_model::engine::naive::Naive;
use starling_model::engine::{Activation, Attention, Engine, Linear, NO_TARGET, Norm, Shape, Span};
use starling_model::optimiser::{Rule, Update};
use starling_model::random::{Dropout, normals};

/// Rows, columns, heads, heads of keys and values, width of a head, inner width, vocabulary.
const SHAPES: [[usize; 7]; 9] = [
    [1, 1, 1, 1, 1, 1, 1],
    [2, 1, 3, 1, 5, 7, 11],
    [3, 5, 2, 2, 3, 17, 19],
    [2, 47, 1, 1, 16, 33, 300],
    [1, 48, 2, 1, 8, 15, 513],
    [2, 49, 6, 2, 7, 64, 40],
    [1, 131, 2, 2, 24, 600, 257],
    [5, 70, 1, 1, 40, 80, 31],
    [0, 8, 4, 2, 4, 8, 12],
];

/// One problem of every operation, its numbers drawn by name.
struct Case {
    shape: Shape,
    heads: usize,
    key_heads: usize,
    head_width: usize,
    inner: usize,
    vocabulary: usize,
    rate: f64,
    documents: Vec<u32>,
    samples: Vec<u64>,
    scale: f64,
}

fn cases() -> impl Iterator<Item = Case> {
    SHAPES.into_iter().flat_map(|[rows, columns, heads, key_heads, head_width, inner, vocabulary]| {
        [(0.0, 1.0), (0.3, 1.0), (0.0, 30.0)].map(|(rate, scale)| Case {
            shape: Shape { rows, columns },
            heads,
            key_heads,
            head_width,
            inner,
            vocabulary,
            rate,
            // Documents of 1, 2, 3, … positions; every other row is one document.
            documents: (0..rows * columns)
                .map(|n| if (n / columns) % 2 == 0 { ((2 * (n % columns)) as f64).sqrt() as u32 } else { 0 })
                .collect(),
            samples: (0..rows as u64).map(|row| row * 7 + 1).collect(),
            scale,
        })
    })
}

fn numbers(name: &str, count: usize, scale: f64) -> Vec<f64> {
    normals(1, name, count).map(|x| scale * x).collect()
}

fn span(start: usize, len: usize) -> Span {
    Span { start, len }
}

/// Everything that an engine makes of a case, by name.
type Results = Vec<(&'static str, Vec<f64>)>;

impl Case {
    fn width(&self) -> usize {
        self.heads * self.head_width
    }

    fn dropout(&self) -> Dropout<'_> {
        Dropout { rate: self.rate, seed: 5, place: 9, samples: &self.samples }
    }

    /// Every operation forward and backward.
    fn results<E: Engine>(&self, engine: &E) -> Results {
        let mut results = Results::new();
        let upload = |values: Vec<f64>| {
            let bytes: Vec<u8> = match engine.dtype().size() {
                4 => values.iter().flat_map(|&x| (x as f32).to_le_bytes()).collect(),
                _ => values.iter().flat_map(|&x| f64::from(x as f32).to_le_bytes()).collect(),
            };
            let mut buffer = engine.zeros(values.len());
            engine.write(&mut buffer, 0, &bytes);
            buffer
        };
        let mut note = |name, buffer: &E::Buffer| {
            let bytes = engine.read(buffer, span(0, engine.len(buffer)));
            let values = match engine.dtype().size() {
                4 => bytes.as_chunks().0.iter().map(|&x| f32::from_le_bytes(x).into()).collect(),
                _ => bytes.as_chunks().0.iter().map(|&x| f64::from_le_bytes(x)).collect(),
            };
            results.push((name, values));
        };
        let (tokens, d, f, shape) = (self.shape.tokens(), self.width(), self.inner, self.shape);
        let x = upload(numbers("x", tokens * d, self.scale));
        let d_out = upload(numbers("d", tokens * f, 1.0));
        for (norm, linear, len) in [norm_and_linear(d, f), rms_norm_and_linear(d, f)] {
            let weights = upload(numbers("weights", len, 0.5));
            let (out, kept) = engine.norm_linear(&x, &weights, norm, linear);
            note("norm_linear", &out);
            let (mut d_x, mut grads) =
                (upload(numbers("before", tokens * d, 1.0)), upload(numbers("g", len, 1.0)));
            engine.norm_linear_backward(
                &x, &kept, &weights, norm, linear, &d_out, &mut d_x, &mut grads, norm, linear,
            );
            note("norm_linear d_x", &d_x);
            note("norm_linear grads", &grads);
        }

        let attention = Attention {
            heads: self.heads,
            key_heads: self.key_heads,
            head_width: self.head_width,
            documents: &self.documents,
        };
        let mut qkv = upload(numbers("qkv", tokens * attention.qkv_width(), self.scale));
        if self.head_width.is_multiple_of(2) {
            // No angles: an operation that only multiplies and adds does not ask where its numbers come from.
            let rotation = upload(numbers("rotation", tokens * self.head_width, 0.7));
            engine.rotate(attention, &rotation, &mut qkv, self.rate > 0.0);
            note("rotate", &qkv);
        }
        let (out, kept) = engine.attention(shape, attention, &qkv, self.dropout());
        note("attention", &out);
        let d_attended = upload(numbers("d", tokens * d, 1.0));
        let d_qkv =
            engine.attention_backward(shape, attention, &qkv, &out, &kept, self.dropout(), &d_attended);
        note("attention d_qkv", &d_qkv);

        for (activation, name, back) in [
            (Activation::Identity, "linear", "linear d_x"),
            (Activation::Gelu, "gelu", "gelu d_x"),
            (Activation::GeluNew, "gelu_new", "gelu_new d_x"),
            (Activation::SwiGlu, "swiglu", "swiglu d_x"),
        ] {
            let (_, linear, len) = match activation {
                Activation::SwiGlu => rms_norm_and_linear(d, f),
                _ => norm_and_linear(d, f),
            };
            let weights = upload(numbers("weights", len, 0.5));
            let x = upload(numbers("x", tokens * activation.takes() * d, self.scale));
            let residual = upload(numbers("residual", tokens * f, 1.0));
            let (out, kept) =
                engine.linear_residual(shape, activation, &x, &weights, linear, self.dropout(), &residual);
            note(name, &out);
            let mut grads = engine.zeros(len);
            let d_x = engine.linear_residual_backward(
                shape,
                activation,
                &x,
                &kept,
                &weights,
                linear,
                self.dropout(),
                &d_out,
                &mut grads,
                linear,
            );
            note(back, &d_x);
            note("linear grads", &grads);
        }

        let (norm, ..) = norm_and_linear(d, f);
        let table = span(2 * d, self.vocabulary * d);
        let weights = upload(numbers("head", 2 * d + table.len, self.scale));
        let target = |n: usize| if n % 5 == 3 { NO_TARGET } else { (n * 7 % self.vocabulary) as u32 };
        let targets: Vec<u32> = (0..tokens).map(target).collect();
        let mut grads = engine.zeros(2 * d + table.len);
        let (loss, d_x) =
            engine.head_loss_backward(&x, &weights, norm, table, &targets, &mut grads, norm, table);
        assert_eq!(loss.to_bits(), engine.head_loss(&x, &weights, norm, table, &targets).to_bits());
        note("head d_x", &d_x);
        note("head grads", &grads);
        let chosen: Vec<usize> = (0..tokens).step_by(3).collect();
        let logits = engine.head_logits(&x, &weights, norm, table, &chosen);

        let ids: Vec<u32> = (0..tokens).map(|n| (n * n % self.vocabulary) as u32).collect();
        let positions: Vec<u32> = (0..tokens).map(|n| (n % shape.columns) as u32).collect();
        let places = span(self.vocabulary * d, shape.columns * d);
        let words = span(0, self.vocabulary * d);
        let tables = upload(numbers("tables", words.len + places.len, 1.0));
        let places = Some(places).filter(|_| self.scale == 1.0);
        let embedded = engine.embed(shape, d, &ids, &positions, &tables, words, places, self.dropout());
        note("embed", &embedded);
        let mut grads = engine.zeros(words.len + shape.columns * d);
        engine.embed_backward(
            shape,
            d,
            &ids,
            &positions,
            self.dropout(),
            &d_attended,
            &mut grads,
            words,
            places,
        );
        note("embed grads", &grads);
        results.push(("loss", vec![loss]));
        results.push(("logits", logits.into_iter().map(f64::from).collect()));
        results
    }
}

fn norm_and_linear(d: usize, f: usize) -> (Norm, Linear, usize) {
    let norm = Norm { weight: span(0, d), bias: span(d, d), epsilon: 1e-5, centred: true };
    let (weight, bias) = (span(2 * d, d * f), span(2 * d + d * f, f));
    let linear = Linear { weight, bias, inputs: d, outputs: f, row_per_output: false };
    (norm, linear, 2 * d + d * f + f)
}

/// As Llama has them.
fn rms_norm_and_linear(d: usize, f: usize) -> (Norm, Linear, usize) {
    let norm = Norm { weight: span(0, d), bias: span(d, 0), epsilon: 1e-5, centred: false };
    let (weight, bias) = (span(d, d * f), span(d + d * f, 0));
    (norm, Linear { weight, bias, inputs: d, outputs: f, row_per_output: true }, d + d * f)
}

/// Against the naive engine in double precision: relative to the largest number of the result.
#[test]
fn every_operation_on_every_path_is_the_naive_engines() {
    for case in cases() {
        let expected = case.results(&Naive::<f64>::new(1).unwrap());
        for isa in Isa::available() {
            let found = case.results(&Cpu::on(isa, 2).unwrap());
            for ((name, expected), (_, found)) in expected.iter().zip(&found) {
                assert_eq!(expected.len(), found.len());
                let size = expected.iter().fold(1.0f64, |size, x| size.max(x.abs()));
                // Large scores and logits are themselves only known to f32's precision.
                let most = 4e-6 * size * case.scale.powi(2);
                for (i, (a, b)) in expected.iter().zip(found).enumerate() {
                    let what = || format!("{isa:?} {:?} rate {} scale {}", case.shape, case.rate, case.scale);
                    assert!((a - b).abs() <= most, "{}: {name}[{i}] is {b} instead of {a}", what());
                }
            }
        }
    }
}

/// Makes an engine with so many threads.
type Make = Box<dyn Fn(usize) -> Cpu>;

/// Engines on every path of this processor, and with bf16 if it can.
fn engines() -> Vec<(String, Make)> {
    let single = |isa: Isa| {
        let make: Make = Box::new(move |threads| Cpu::on(isa, threads).unwrap());
        (format!("{isa:?}"), make)
    };
    let mut engines: Vec<_> = Isa::available().into_iter().map(single).collect();
    if has_bf16() {
        engines.push(("bf16".into(), Box::new(|threads| Cpu::bf16(threads).unwrap())));
    }
    engines
}

/// Whether this processor multiplies bf16; says so if not.
fn has_bf16() -> bool {
    let why = Cpu::bf16(1).err();
    if let Some(why) = &why {
        eprintln!("not tried with bf16: {why}");
    }
    why.is_none()
}

/// Numbers that bf16 holds, so that nothing is rounded but sums.
fn rounded(name: &str, count: usize) -> Vec<f32> {
    numbers(name, count, 1.0).iter().map(|&x| f32::from_bits((x as f32).to_bits() & 0xffff_0000)).collect()
}

#[test]
fn products_of_what_bf16_holds_are_the_naive_engines() {
    if !has_bf16() {
        return;
    }
    let (bf16, naive) = (Cpu::bf16(2).unwrap(), Naive::<f32>::new(1).unwrap());
    for (tokens, d, f) in [(1, 1, 1), (7, 5, 3), (50, 33, 70), (96, 300, 129), (300, 40, 700)] {
        for (_, linear, len) in [norm_and_linear(d, f), rms_norm_and_linear(d, f)] {
            let shape = Shape { rows: 1, columns: tokens };
            let dropout = Dropout { rate: 0.0, seed: 0, place: 0, samples: &[0] };
            let [x, weights, residual, d_out] =
                [("x", tokens * d), ("w", len), ("r", tokens * f), ("d", tokens * f)]
                    .map(|(name, count)| rounded(name, count));
            fn results<E: Engine>(
                engine: &E,
                (shape, linear, dropout): (Shape, Linear, Dropout<'_>),
                [x, weights, residual, d_out]: [&[f32]; 4],
            ) -> Vec<f32> {
                let identity = Activation::Identity;
                let [x, weights, residual, d_out] =
                    [x, weights, residual, d_out].map(|values| filled(engine, values));
                let (out, kept) =
                    engine.linear_residual(shape, identity, &x, &weights, linear, dropout, &residual);
                let mut grads = engine.zeros(engine.len(&weights));
                let d_x = engine.linear_residual_backward(
                    shape, identity, &x, &kept, &weights, linear, dropout, &d_out, &mut grads, linear,
                );
                let all = [out, d_x, grads];
                let bytes = all.iter().flat_map(|buffer| engine.read(buffer, span(0, engine.len(buffer))));
                bytes.collect::<Vec<u8>>().as_chunks().0.iter().map(|&x| f32::from_le_bytes(x)).collect()
            }
            let (case, operands) = ((shape, linear, dropout), [&x[..], &weights, &residual, &d_out]);
            let (expected, found) = (results(&naive, case, operands), results(&bf16, case, operands));
            let size = expected.iter().fold(1.0f32, |size, x| size.max(x.abs()));
            for (i, (a, b)) in expected.iter().zip(&found).enumerate() {
                assert!((a - b).abs() <= 4e-6 * size, "{tokens}, {d}, {f}: [{i}] is {b} instead of {a}");
            }
        }
    }
}

/// Against the naive engine in double precision: two operands, each off by 2⁻⁹ of itself at the most.
#[test]
fn every_operation_with_bf16_is_nearly_the_naive_engines() {
    if !has_bf16() {
        return;
    }
    for case in cases().filter(|case| case.scale == 1.0) {
        let expected = case.results(&Naive::<f64>::new(1).unwrap());
        let found = case.results(&Cpu::bf16(2).unwrap());
        for ((name, expected), (_, found)) in expected.iter().zip(&found) {
            let size = expected.iter().fold(1.0f64, |size, x| size.max(x.abs()));
            for (i, (a, b)) in expected.iter().zip(found).enumerate() {
                let far = (a - b).abs() / size;
                assert!(far <= 1.0 / 64.0, "{:?}: {name}[{i}] is {b} instead of {a}", case.shape);
            }
        }
    }
}

#[test]
fn an_engine_with_bf16_is_of_a_class_of_its_own() {
    if has_bf16() {
        assert_ne!(Cpu::bf16(1).unwrap().class(), Cpu::new(1).unwrap().class());
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for case in cases() {
        for (name, engine) in engines() {
            let one = case.results(&engine(1));
            for threads in [2, 3, 5] {
                assert!(case.results(&engine(threads)) == one, "{name}, {threads} threads");
            }
        }
    }
}

/// Buffers are used again: what was in them must not matter.
#[test]
fn what_was_computed_before_changes_no_bit() {
    for (name, make) in engines() {
        let engine = make(2);
        for case in cases() {
            case.results(&engine);
            let mut poison: Vec<Buffer> = Vec::new();
            for tokens in [case.shape.tokens(), 48, 64, 96, 256] {
                for elements in
                    [1, case.width(), 2 * case.width(), 3 * case.width(), case.inner, case.vocabulary]
                {
                    poison.push(engine.zeros(tokens * elements));
                }
            }
            poison.iter_mut().for_each(|buffer| buffer.fill(f32::NAN));
        }
        for case in cases() {
            assert!(case.results(&engine) == case.results(&make(2)), "{name} {:?}", case.shape);
        }
    }
}

/// The bits of a sample's activations are the same alone, in the middle of others, and at the end.
#[test]
fn a_samples_activations_do_not_depend_on_its_microbatch() {
    for (name, make) in engines() {
        let engine = make(3);
        for (columns, heads, head_width, inner) in
            [(1, 1, 1, 3), (7, 2, 5, 300), (53, 2, 24, 64), (96, 1, 270, 520)]
        {
            let (d, f) = (heads * head_width, inner);
            let (norm, linear, len) = norm_and_linear(d, f);
            let weights = upload(&engine, &numbers("weights", len, 0.5));
            let activations = |samples: &[u64]| {
                let shape = Shape { rows: samples.len(), columns };
                let dropout = Dropout { rate: 0.2, seed: 3, place: 1, samples };
                let of = |name: &str, width: usize| {
                    let of_sample = |s: &u64| numbers(&format!("{name}{s}"), columns * width, 1.0);
                    upload(&engine, &samples.iter().flat_map(of_sample).collect::<Vec<f64>>())
                };
                let documents = vec![0; shape.tokens()];
                let attention = Attention { heads, key_heads: 1, head_width, documents: &documents };
                let (x, residual) = (of("x", d), of("residual", f));
                let normed = engine.norm_linear(&x, &weights, norm, linear).0;
                let attended =
                    engine.attention(shape, attention, &of("qkv", attention.qkv_width()), dropout).0;
                let act = Activation::GeluNew;
                let out = engine.linear_residual(shape, act, &x, &weights, linear, dropout, &residual).0;
                let (norm_, linear_, _) = rms_norm_and_linear(d, f);
                let llamas = engine.norm_linear(&x, &weights, norm_, linear_).0;
                let (act, wide) = (Activation::SwiGlu, of("wide", 2 * d));
                let gated =
                    engine.linear_residual(shape, act, &wide, &weights, linear_, dropout, &residual).0;
                let all: Vec<usize> = (0..shape.tokens()).collect();
                let table = span(2 * d, len.saturating_sub(2 * d) / d * d);
                let logits = engine.head_logits(&x, &weights, norm, table, &all);
                let last = samples.iter().position(|&sample| sample == 42).unwrap();
                [&normed[..], &attended[..], &out[..], &llamas[..], &gated[..], &logits].map(|values| {
                    let size = values.len() / samples.len();
                    values[last * size..(last + 1) * size].to_vec()
                })
            };
            let alone = activations(&[42]);
            for samples in [&[42, 1][..], &[1, 42], &[3, 1, 2, 42, 5, 6, 7], &[9, 8, 7, 6, 42]] {
                assert!(activations(samples) == alone, "{name}, {columns} columns, samples {samples:?}");
            }
        }
    }
}

fn upload(engine: &Cpu, values: &[f64]) -> Buffer {
    let mut buffer = engine.zeros(values.len());
    buffer.iter_mut().zip(values).for_each(|(to, &x)| *to = x as f32);
    buffer
}

/// A buffer with these in it.
fn filled<E: Engine>(engine: &E, values: &[f32]) -> E::Buffer {
    let mut buffer = engine.zeros(values.len());
    let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    engine.write(&mut buffer, 0, &bytes);
    buffer
}

/// Updates use + − × ÷ √ only, none of them contracted: their bits are those of the naive engine.
#[test]
fn updates_are_the_naive_engines_bit_for_bit() {
    let rules = [
        Rule::AdamW { beta1: 0.9, beta2: 0.95, epsilon: 1e-8, weight_decay: 0.1 },
        Rule::Sgd { momentum: 0.9, weight_decay: 0.1 },
        Rule::Lamb { beta1: 0.9, beta2: 0.999, epsilon: 1e-6, weight_decay: 0.01 },
    ];
    let update = Update { lr: 1e-2, gradient_scale: 0.3, bias1: 0.19, bias2: 0.0975 };
    let len = 70_003;
    let values = |name: &str| -> Vec<f32> { numbers(name, len, 1.0).iter().map(|&x| x as f32).collect() };
    let squares = |name: &str| -> Vec<f32> { values(name).iter().map(|x| x * x).collect() };
    let (at, from) = (span(3, len - 5), span(1, len - 5));
    for (rule, decay) in rules.iter().flat_map(|rule| [(rule, true), (rule, false)]) {
        let naive = Naive::<f32>::new(1).unwrap();
        let mut weights = filled(&naive, &values("weights"));
        let mut moments = vec![filled(&naive, &values("first")), filled(&naive, &squares("second"))];
        let gradient = filled(&naive, &values("gradient"));
        naive.optimise(rule, &update, decay, &mut weights, &mut moments, at, &gradient, from);
        for isa in Isa::available() {
            let cpu = Cpu::on(isa, 2).unwrap();
            let mut found = filled(&cpu, &values("weights"));
            let mut found_moments = vec![filled(&cpu, &values("first")), filled(&cpu, &squares("second"))];
            let gradient = filled(&cpu, &gradient);
            cpu.optimise(rule, &update, decay, &mut found, &mut found_moments, at, &gradient, from);
            assert!(found[..] == weights[..], "{isa:?} {rule:?}");
            assert!(found_moments.iter().zip(&moments).all(|(a, b)| a[..] == b[..]), "{isa:?} {rule:?}");
        }
    }
}
