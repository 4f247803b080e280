//! What the generator says of its texts is true, and the corpus is what the quickstart needs.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::ngram::NGram;

fn world(seed: u64, languages: u32) -> World {
    World::new(&SyntheticConfig { seed, languages, ..SyntheticConfig::default() })
}

fn log_probability(world: &World, document: &[u32]) -> f64 {
    world.score(document).unwrap().iter().sum()
}

#[test]
fn a_document_is_a_function_of_seed_and_index() {
    let (first, again) = (world(1, 3), world(1, 3));
    assert_eq!(first.document(5), again.document(5));
    assert_ne!(first.document(5), first.document(6));
    assert_ne!(first.document(5), world(2, 3).document(5));
}

#[test]
fn documents_are_the_same_on_every_machine() {
    let world = world(1, 3);
    assert_eq!(
        world.tokeniser().decode(&world.document(0)),
        "kovo sivain labu geba dagoin noma siro puno siro gadu lupo . \
         sivain bera gelu sepain noma pona puno siro tovuir lupo . \
         pidoin nito likein puno pona noma siro luse vuba . \
         sivain bevu geba sepain noma pona puno siro meri lupo ."
    );
}

#[test]
fn documents_are_almost_never_repeated() {
    let world = world(1, 3);
    let documents: BTreeSet<Vec<u32>> = (0..5000).map(|index| world.document(index)).collect();
    assert_eq!(documents.len(), 5000);
}

#[test]
fn a_text_that_the_grammar_does_not_produce_is_refused_where_it_goes_wrong() {
    let world = world(1, 3);
    let document = world.document(3);
    let end = document.len();
    assert_eq!(world.score(&document[..end - 1]), Err(ScoreError { position: end - 1, token: 0 }));
    let mut swapped = document.clone();
    swapped.swap(4, 5);
    assert_eq!(world.score(&swapped).unwrap_err().position, 4);
    assert_eq!(world.score(&[u32::MAX]), Err(ScoreError { position: 0, token: u32::MAX }));
    assert_eq!(world.score(&[]), Err(ScoreError { position: 0, token: 0 }));
}

#[test]
fn probabilities_match_how_often_things_are_drawn() {
    let world = world(4, 2);
    let opener = world.document(0)[0];
    let documents: Vec<Vec<u32>> =
        (0..20_000).map(|index| world.document(index)).filter(|document| document[0] == opener).collect();
    for (token, probability) in world.next(&[opener]).unwrap() {
        let seen = documents.iter().filter(|document| document[1] == token).count() as f64;
        let expected = probability * documents.len() as f64;
        assert!((seen - expected).abs() < 5.0 * expected.sqrt(), "{seen} of {expected}");
    }
}

#[test]
fn a_translation_says_the_same_with_the_same_probability() {
    let world = world(9, 6);
    for index in 0..200 {
        let pair = world.translation(index);
        assert_ne!(pair.source[0], pair.target[0]);
        assert_eq!(pair.source.len(), pair.target.len());
        let (source, target) = (log_probability(&world, &pair.source), log_probability(&world, &pair.target));
        assert!((source - target).abs() < 1e-9, "{source} {target}");
        assert!((pair.log_probability - (source - 5f64.ln())).abs() < 1e-9);
    }
}

#[test]
fn a_world_with_one_language_translates_to_itself() {
    let pair = world(1, 1).translation(3);
    assert_eq!(pair.source, pair.target);
}

#[test]
fn a_hypothesis_continues_its_premise_and_all_labels_occur() {
    let world = world(3, 6);
    let mut seen = [0; 3];
    for index in 0..300 {
        let pair = world.inference(index);
        assert!(world.next(&[&pair.premise[..], &pair.hypothesis].concat()).is_ok());
        assert_ne!(&pair.premise[1..], &pair.hypothesis[..]);
        assert!(pair.hypothesis.ends_with(&[lexicon::STOP]));
        assert!(pair.log_probability < 0.0 && pair.log_probability.is_finite());
        seen[pair.label as usize] += 1;
    }
    assert!(seen.iter().all(|&count| count > 60), "{seen:?}");
}

#[test]
fn labels_follow_from_what_the_sentences_say() {
    let world = world(3, 6);
    for index in 0..300 {
        let pair = world.inference(index);
        let (_, clauses) = world.parse(&[&pair.premise[..], &pair.hypothesis].concat());
        let [premise, hypothesis] = clauses[..] else { panic!("two sentences") };
        let spot = |clause: &grammar::Clause| -> BTreeSet<_> {
            (0..2).map(|at| (clause.places[at], clause.adpositions[at])).collect()
        };
        let same_event = premise.animal == hypothesis.animal && premise.time == hypothesis.time;
        let same_deed = premise.verb == hypothesis.verb
            && premise.object == hypothesis.object
            && spot(&premise) == spot(&hypothesis);
        let expected = match (same_event, same_deed) {
            (true, true) => Label::Entailment,
            (true, false) => Label::Contradiction,
            (false, _) => Label::Neutral,
        };
        assert_eq!(pair.label, expected);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_can_come_next_adds_up_to_one_and_contains_what_comes(seed: u64, languages in 1u32..7, index: u64) {
        let world = world(seed, languages);
        let document = world.document(index);
        let scores = world.score(&document).unwrap();
        for position in 0..=document.len() {
            let next = world.next(&document[..position]).unwrap();
            let sum: f64 = next.iter().map(|(_, probability)| probability).sum();
            prop_assert!((sum - 1.0).abs() < 1e-12, "{sum}");
            let distinct: BTreeSet<u32> = next.iter().map(|(token, _)| *token).collect();
            prop_assert_eq!(distinct.len(), next.len());
            let comes = document.get(position).copied().unwrap_or(lexicon::END);
            let (_, probability) = next.iter().find(|(token, _)| *token == comes).unwrap();
            prop_assert!((probability.ln() - scores[position]).abs() < 1e-12);
        }
        prop_assert!(world.next(&[&document[..], &[lexicon::END]].concat()).unwrap().is_empty());
    }

    #[test]
    fn any_tokens_are_scored_or_refused(tokens: Vec<u32>, index: u64, cut: prop::sample::Index) {
        let world = world(1, 3);
        let _ = world.score(&tokens);
        let mut document = world.document(index);
        let at = cut.index(document.len());
        document.splice(at.., tokens.iter().map(|token| token % 240));
        let _ = world.score(&document);
    }
}

/// The quickstart's corpus: an attentive model can be much better than any 5-gram model.
#[test]
fn a_five_gram_model_stays_far_above_the_entropy_bound() {
    let config = SyntheticConfig::default();
    let world = World::new(&config);
    let documents: Vec<Vec<u32>> =
        (0..u64::from(config.documents)).map(|index| world.document(index)).collect();
    let (held_out, training) = documents.split_at(1000);
    let vocabulary = world.tokeniser().vocabulary();
    let model = NGram::train(5, vocabulary, lexicon::END, training);
    let per_token = |score: &dyn Fn(&[u32]) -> Vec<f64>| {
        let scores: Vec<f64> = held_out.iter().flat_map(|document| score(document)).collect();
        -scores.iter().sum::<f64>() / scores.len() as f64
    };
    let bound = per_token(&|document| world.score(document).unwrap());
    let five_gram = per_token(&|document| model.log_probability(document));
    let tokens: usize = documents.iter().map(|document| document.len() + 1).sum();
    println!(
        "bound {bound:.4}, 5-gram {five_gram:.4}, gap {:.4} nats per token; {vocabulary} words, {tokens} tokens, \
         {} grams",
        five_gram - bound,
        model.grams()
    );
    assert!(five_gram - bound >= 0.2);
    assert!(vocabulary <= 300 && (600_000..1_000_000).contains(&tokens));
}
