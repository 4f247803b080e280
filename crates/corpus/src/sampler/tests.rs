//! Every window is a pure function of its number; epochs, mixtures and the held-out split are exact.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::config::{DataConfig, SourceConfig};
use crate::shard::ShardWriter;
use crate::synthetic::SyntheticConfig;
use crate::text::Split;
use crate::tokeniser::Tokeniser;

/// Sources of documents whose every token tells source and document apart: `source * 100 + document`.
fn corpus(sources: &[(usize, usize, f64)]) -> Corpus {
    let folder = tempfile::tempdir().unwrap();
    let shard = |source: usize, documents: usize, length: usize| -> Shards {
        let mut writer = ShardWriter::create(&folder.path().join("a.shard"), 1000).unwrap();
        for document in 0..documents {
            writer.push(&vec![(1 + source * 100 + document % 99) as u32; length]).unwrap();
        }
        writer.finish().unwrap().into()
    };
    let sources = sources
        .iter()
        .enumerate()
        .map(|(source, &(documents, length, weight))| (shard(source, documents, length), weight))
        .collect();
    Corpus { tokeniser: Tokeniser::Words { words: Vec::new() }, sources, synthetic: None }
}

#[test]
fn an_epoch_visits_every_window_once_and_the_next_in_another_order() {
    let sampler = Sampler::new(corpus(&[(97, 13, 1.0)]), 0.1, 7, 5).unwrap();
    let length = sampler.windows_per_epoch();
    let stream = &sampler.sources[0].training;
    let mut all: Vec<Window> = (0..length).map(|window| sampler.read(0, stream, window)).collect();
    all.sort_by(|a, b| a.tokens.cmp(&b.tokens));
    let epoch = |epoch: u64| -> Vec<Window> {
        (epoch * length..(epoch + 1) * length).map(|sample| sampler.window(sample)).collect()
    };
    for number in 0..3 {
        let mut drawn = epoch(number);
        drawn.sort_by(|a, b| a.tokens.cmp(&b.tokens));
        assert!(drawn.iter().map(|window| &window.tokens).eq(all.iter().map(|window| &window.tokens)));
    }
    assert_ne!(epoch(0), epoch(1));
}

#[test]
fn a_sampler_can_be_shared_by_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Sampler>();
}

#[test]
fn every_token_but_the_first_and_a_short_tail_is_predicted_once_an_epoch() {
    let sampler = Sampler::new(corpus(&[(21, 5, 1.0)]), 0.0, 8, 5).unwrap();
    let stream = &sampler.sources[0].training;
    let mut whole = stream.read(&sampler.corpus.sources[0].0, 0, 1000, 0).tokens;
    let tail = whole.split_off(whole.len() - (whole.len() - 1) % 8);
    assert_eq!((whole.len(), tail.len()), (121, 5)); // of 21 × 6
    let mut predicted: Vec<u32> = (0..sampler.windows_per_epoch())
        .flat_map(|sample| sampler.window(sample).tokens.split_off(1))
        .collect();
    predicted.sort();
    whole.remove(0);
    whole.sort();
    assert_eq!(predicted, whole);
    for window in 1..sampler.windows_per_epoch() {
        let (before, after) = (sampler.read(0, stream, window - 1), sampler.read(0, stream, window));
        assert_eq!(before.tokens.last(), after.tokens.first());
        assert_eq!(after.tokens.len(), 9);
    }
}

#[test]
fn sources_are_mixed_by_weight() {
    let sampler = Sampler::new(corpus(&[(40, 64, 3.0), (40, 64, 1.0)]), 0.1, 16, 5).unwrap();
    let from_second = (0..4096).filter(|&sample| sampler.window(sample).tokens[1..].iter().any(|&t| t > 100));
    assert_eq!(from_second.count(), 1024);
}

#[test]
fn each_source_of_a_mixture_runs_through_its_own_epochs() {
    let sampler = Sampler::new(corpus(&[(40, 64, 1.0), (40, 64, 1.0)]), 0.1, 16, 5).unwrap();
    let windows = sampler.sources[1].training_windows;
    let mut numbers: Vec<u64> = (0..3 * 4096)
        .map(|sample| sampler.mixture.place(sample))
        .filter(|(source, _)| *source == 1)
        .map(|(_, number)| number)
        .collect();
    numbers.sort();
    assert!(numbers.iter().copied().eq(0..3 * 2048) && windows < 3 * 2048);
}

#[test]
fn a_short_last_held_out_window_is_kept_only_if_it_is_the_only_one() {
    let long = Sampler::new(corpus(&[(40, 10, 1.0)]), 0.5, 8, 5).unwrap();
    assert!((0..long.held_out_windows()).all(|index| long.held_out(index).tokens.len() == 9));
    let short = Sampler::new(corpus(&[(40, 10, 1.0)]), 1e-9, 64, 5).unwrap();
    assert_eq!((short.held_out_windows(), short.held_out(0).tokens.len()), (1, 11));
    assert!(short.held_out(1).tokens.is_empty());
}

#[test]
fn what_cannot_be_sampled_is_refused_with_a_reason() {
    let refused = |sources: &[(usize, usize, f64)], held_out: f64, context: usize| {
        Sampler::new(corpus(sources), held_out, context, 5).unwrap_err()
    };
    let one = refused(&[(9, 9, 1.0), (1, 50, 1.0)], 0.05, 8);
    assert_eq!(one, SamplerError::AllEqual { name: SourceName::Listed(1), documents: 1 });
    assert!(Sampler::new(corpus(&[(1, 50, 1.0)]), 0.0, 8, 5).is_ok());
    let short = refused(&[(9, 9, 1.0), (2, 4, 1.0)], 0.05, 8);
    assert_eq!(short, SamplerError::TooShort { name: SourceName::Listed(1), tokens: 5, context: 8 });
    assert!(short.to_string().contains("context + 1 = 9"), "{short}");
    assert_eq!(refused(&[(9, 9, 1.0)], 0.05, 0), SamplerError::NoContext);
    assert!(matches!(refused(&[(9, 9, 1.0)], 1.0, 8), SamplerError::HeldOut { .. }));
    assert!(matches!(refused(&[(9, 9, 1.0)], f64::NAN, 8), SamplerError::HeldOut { .. }));
    assert_eq!(refused(&[], 0.05, 8), SamplerError::NoSource);
    for weight in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e-5] {
        let name = SourceName::Listed(1);
        let refused = refused(&[(9, 9, 1.0), (9, 9, weight)], 0.05, 8);
        assert!(matches!(refused, SamplerError::Weight { name: named, .. } if named == name), "{refused}");
    }
    assert_eq!(refused(&[(9, 9, f64::MAX), (9, 9, f64::MAX)], 0.05, 8), SamplerError::WeightSum);
}

#[test]
fn messages_name_sources_and_remedies_by_their_keys() {
    let says = |error: SamplerError, parts: &[&str]| {
        let message = error.to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
    };
    let (name, generated) = (SourceName::Listed(3), SourceName::Generated);
    let split = "data.sources[3].split = \"line\"";
    says(
        SamplerError::AllEqual { name, documents: 1 },
        &["data.sources[3] has only one", "data.held_out = 0", split],
    );
    let copies = SamplerError::AllEqual { name, documents: 70 };
    assert!(!copies.to_string().contains(split));
    says(copies, &["all 70 documents of data.sources[3] are equal", "data.held_out = 0"]);
    says(
        SamplerError::AllEqual { name: generated, documents: 1 },
        &["the generated corpus has only one", "data.held_out = 0", "data.synthetic.documents"],
    );
    says(SamplerError::TooShort { name, tokens: 5, context: 8 }, &["data.sources[3] has 5", "model.context"]);
    says(
        SamplerError::TooShort { name: generated, tokens: 5, context: 8 },
        &["the generated corpus has 5", "data.synthetic.documents", "model.context"],
    );
    says(
        SamplerError::Weight { name, weight: 0.0 },
        &["data.sources[3] has weight 0", "data.sources[3].weight"],
    );
    says(SamplerError::Entangled { name }, &["data.sources[3]", "data.held_out = 0"]);
    says(SamplerError::HeldOut { fraction: 1.0 }, &["data.held_out = 1 ", "data.held_out = 0.05"]);
    says(SamplerError::NoContext, &["model.context"]);
}

#[test]
fn the_generated_corpus_is_named_as_such() {
    let folder = tempfile::tempdir().unwrap();
    let synthetic = SyntheticConfig { documents: 2, ..SyntheticConfig::default() };
    let config = DataConfig { synthetic: Some(synthetic), ..DataConfig::default() };
    let corpus = crate::corpus::open(&config, folder.path(), folder.path()).unwrap();
    let refused = Sampler::new(corpus, 0.05, 10_000, 5).unwrap_err();
    assert!(matches!(refused, SamplerError::TooShort { name: SourceName::Generated, .. }), "{refused}");
}

#[test]
fn a_text_that_is_listed_twice_is_not_trained_on_where_it_is_held_out() {
    let folder = tempfile::tempdir().unwrap();
    let lines: Vec<String> = (0..500).map(|line| format!("line {}", line % 400)).collect();
    std::fs::write(folder.path().join("a.txt"), lines.join("\n")).unwrap();
    std::fs::write(folder.path().join("b.txt"), lines[200..].join("\n")).unwrap();
    let source = |path: &str| SourceConfig { path: path.into(), weight: 1.0, split: Split::Line };
    let sources = vec![source("a.txt"), source("b.txt"), source("a.txt")];
    let config = DataConfig { sources, ..DataConfig::default() };
    let corpus = crate::corpus::open(&config, folder.path(), &folder.path().join("cache")).unwrap();
    let sampler = Sampler::new(corpus, 0.2, 8, 5).unwrap();
    let text = |source: usize, document: u64| {
        let shard = &sampler.corpus.sources[source].0;
        let mut tokens = Vec::new();
        shard.read(shard.document(document).unwrap(), &mut tokens);
        tokens
    };
    let mut sides: [BTreeSet<Vec<u32>>; 2] = Default::default();
    for source in 0..3 {
        sides[0].extend(sampler.training_documents(source).unwrap().map(|document| text(source, document)));
        sides[1].extend(sampler.held_out_documents(source).unwrap().map(|document| text(source, document)));
    }
    assert!(sides[0].is_disjoint(&sides[1]));
    assert_eq!(sides[0].len() + sides[1].len(), 400);
    assert!((50..110).contains(&sides[1].len()), "{}", sides[1].len());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn held_out_documents_are_never_trained_on(
        seed: u64, documents in 2usize..90, length in 3usize..20, fraction in 0.01f64..0.8, context in 1usize..4
    ) {
        let sampler = Sampler::new(corpus(&[(documents, length, 1.0)]), fraction, context, seed).unwrap();
        let tokens = |window: Window| window.tokens.into_iter().filter(|&token| token > 0);
        let trained: BTreeSet<u32> =
            (0..sampler.windows_per_epoch()).flat_map(|sample| tokens(sampler.window(sample))).collect();
        let held_out: BTreeSet<u32> =
            (0..sampler.held_out_windows()).flat_map(|index| tokens(sampler.held_out(index))).collect();
        prop_assert!(!trained.is_empty() && !held_out.is_empty() && trained.is_disjoint(&held_out));
        let listed: BTreeSet<u32> =
            sampler.held_out_documents(0).unwrap().map(|document| document as u32 + 1).collect();
        prop_assert!(held_out.is_subset(&listed) && listed.len() <= held_out.len() + 1);
    }

    #[test]
    fn a_window_does_not_depend_on_what_was_asked_before(seed: u64, samples in prop::collection::vec(0u64..1 << 40, 1..20)) {
        let sources = [(30, 9, 1.0), (20, 12, 2.5)];
        let sampler = Sampler::new(corpus(&sources), 0.1, 8, seed).unwrap();
        let again = Sampler::new(corpus(&sources), 0.1, 8, seed).unwrap();
        let forwards: Vec<Window> = samples.iter().map(|&sample| sampler.window(sample)).collect();
        let backwards: Vec<Window> = samples.iter().rev().map(|&sample| again.window(sample)).collect();
        prop_assert!(forwards.iter().eq(backwards.iter().rev()));
        for window in forwards {
            prop_assert_eq!((window.tokens.len(), window.documents.len()), (9, 9));
        }
    }
}

#[test]
fn into_how_many_shards_a_source_is_cut_does_not_matter() {
    let folder = tempfile::tempdir().unwrap();
    let documents: Vec<Vec<u32>> = (0..60).map(|index| vec![1 + index; 3 + index as usize % 11]).collect();
    let shard_of = |documents: &[Vec<u32>]| {
        let mut writer = ShardWriter::create(&folder.path().join("a.shard"), 1000).unwrap();
        documents.iter().for_each(|document| writer.push(document).unwrap());
        writer.finish().unwrap()
    };
    let sampler = |shards_of: usize| {
        let shards = Shards::new(documents.chunks(shards_of).map(shard_of).collect());
        let tokeniser = Tokeniser::Ids { vocabulary: 1000, end_of_text: 0 };
        Sampler::new(Corpus { tokeniser, sources: vec![(shards, 1.0)], synthetic: None }, 0.2, 8, 3).unwrap()
    };
    let whole = sampler(60);
    for shards_of in [1, 7, 59] {
        let cut = sampler(shards_of);
        assert_eq!(cut.windows_per_epoch(), whole.windows_per_epoch());
        assert_eq!(cut.held_out_windows(), whole.held_out_windows());
        assert!((0..whole.held_out_windows()).all(|index| cut.held_out(index) == whole.held_out(index)));
        assert!((0..2 * whole.windows_per_epoch()).all(|sample| cut.window(sample) == whole.window(sample)));
    }
}
