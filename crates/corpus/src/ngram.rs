//! An n-gram model with interpolated modified Kneser–Ney smoothing: the yardstick that a trained model must
//! beat, because it uses all that the last few tokens tell and nothing more.
//!
//! Chen and Goodman (1999): the highest order counts occurrences, lower orders count how many different
//! tokens a sequence follows, three discounts per order are taken from the counts of counts, and what they
//! set free goes to the next lower order, at last to all tokens evenly. Grams live in a trie of integers;
//! nothing depends on the order of a hash map.

use std::collections::HashMap;

/// The order that is meant by "a 5-gram model".
pub const DEFAULT_ORDER: usize = 5;
/// Longer grams than this are not worth their memory.
const HIGHEST_ORDER: usize = 16;
/// The node of the empty gram.
const ROOT: u32 = 0;
/// For orders with too few grams to estimate discounts.
const FALLBACK_DISCOUNTS: [f64; 3] = [0.5, 1.0, 1.5];

/// A trained n-gram model.
#[derive(Clone, Debug)]
pub struct NGram {
    order: usize,
    vocabulary: u32,
    end_of_text: u32,
    children: HashMap<(u32, u32), u32>,
    nodes: Vec<Node>,
    /// For grams of 1, 2, … tokens: what is taken from counts of 1, 2, and more.
    discounts: Vec<[f64; 3]>,
}

impl NGram {
    /// Counts documents (without end of text, which is added to each).
    ///
    /// An order outside 1 to 16 is taken as the nearest inside. Memory grows with the number of different
    /// grams, at most `order` per token.
    pub fn train<Document: AsRef<[u32]>>(
        order: usize,
        vocabulary: usize,
        end_of_text: u32,
        documents: impl IntoIterator<Item = Document>,
    ) -> NGram {
        let order = order.clamp(1, HIGHEST_ORDER);
        let mut model = NGram {
            order,
            vocabulary: u32::try_from(vocabulary).unwrap_or(u32::MAX),
            end_of_text,
            children: HashMap::new(),
            nodes: vec![Node::default()],
            discounts: Vec::new(),
        };
        for document in documents {
            let padded = model.padded(document.as_ref());
            for end in 1..padded.len() {
                model.count(&padded[..=end]);
            }
        }
        model.estimate();
        model
    }

    /// The natural logarithm of the probability of each token given those before it, and of end of text as
    /// one entry more. A token outside the vocabulary has probability 0.
    pub fn log_probability(&self, document: &[u32]) -> Vec<f64> {
        let padded = self.padded(document);
        let log_probability = |end: usize| libm::log(self.probability(&padded[..end], padded[end]));
        (1..padded.len()).map(log_probability).collect()
    }

    /// How many different grams were seen, of all lengths.
    pub fn grams(&self) -> usize {
        self.nodes.len() - 1
    }

    /// The probability of a token after a history that begins with the start of the document.
    fn probability(&self, history: &[u32], token: u32) -> f64 {
        if token >= self.vocabulary {
            return 0.0;
        }
        let mut probability = 1.0 / f64::from(self.vocabulary);
        for length in 0..self.order.min(history.len() + 1) {
            let context = &history[history.len() - length..];
            let Some(context) = self.find(context).filter(|&node| self.nodes[node as usize].total > 0) else {
                break; // longer contexts are unseen as well
            };
            let discounts = &self.discounts[length];
            let Node { total, followers, .. } = &self.nodes[context as usize];
            let seen =
                self.children.get(&(context, token)).map_or(0, |&gram| self.nodes[gram as usize].effective);
            let kept = if seen == 0 { 0.0 } else { seen as f64 - discounts[bucket(seen)] };
            let freed: f64 = (0..3).map(|bucket| discounts[bucket] * followers[bucket] as f64).sum();
            probability = (kept + freed * probability) / *total as f64;
        }
        probability
    }

    /// Start of document, tokens, end of text. The start is an id of its own and never predicted.
    fn padded(&self, document: &[u32]) -> Vec<u32> {
        let mut padded = Vec::with_capacity(document.len() + 2);
        padded.push(u32::MAX);
        padded.extend_from_slice(document);
        padded.push(self.end_of_text);
        padded
    }

    /// Counts all grams that end where `history` ends.
    fn count(&mut self, history: &[u32]) {
        let mut shorter = ROOT;
        for length in 1..=self.order.min(history.len()) {
            let gram = &history[history.len() - length..];
            let (node, is_new) = self.insert(gram);
            self.nodes[node as usize].occurrences += 1;
            if is_new && length > 1 {
                self.nodes[shorter as usize].followed += 1;
            }
            shorter = node;
        }
    }

    fn insert(&mut self, gram: &[u32]) -> (u32, bool) {
        let mut node = ROOT;
        let mut is_new = false;
        for &token in gram {
            let next = self.nodes.len() as u32;
            let child = *self.children.entry((node, token)).or_insert(next);
            if child == next {
                self.nodes.push(Node { parent: node, ..Node::default() });
            }
            is_new = child == next;
            node = child;
        }
        let length = gram.len();
        // Nothing precedes the start of a document, so its grams keep their occurrences at every order.
        let by_occurrence = length == self.order || gram[0] == u32::MAX;
        let node_data = &mut self.nodes[node as usize];
        node_data.length = length;
        node_data.by_occurrence = by_occurrence;
        (node, is_new)
    }

    fn find(&self, gram: &[u32]) -> Option<u32> {
        gram.iter().try_fold(ROOT, |node, &token| self.children.get(&(node, token)).copied())
    }

    /// Turns counts into effective counts, totals of contexts and discounts.
    fn estimate(&mut self) {
        let mut counts_of_counts = vec![[0u64; 4]; self.order];
        for index in 1..self.nodes.len() {
            let node = &mut self.nodes[index];
            node.effective = if node.by_occurrence { node.occurrences } else { node.followed };
            let (effective, parent) = (node.effective, node.parent as usize);
            if effective == 0 {
                continue; // the bare start of a document: a context, never predicted
            }
            if let Some(count) = counts_of_counts[node.length - 1].get_mut(effective as usize - 1) {
                *count += 1;
            }
            self.nodes[parent].total += effective;
            self.nodes[parent].followers[bucket(effective)] += 1;
        }
        self.discounts = counts_of_counts.iter().map(discounts).collect();
    }
}

/// One gram: as something that is predicted, and as a context.
#[derive(Clone, Debug, Default)]
struct Node {
    parent: u32,
    length: usize,
    by_occurrence: bool,
    occurrences: u64,
    /// Different tokens that stand before it.
    followed: u64,
    /// The one of the two that counts.
    effective: u64,
    /// As a context: the sum of the effective counts of what follows it.
    total: u64,
    /// As a context: how many followers have an effective count of 1, 2, more.
    followers: [u64; 3],
}

fn bucket(count: u64) -> usize {
    count.clamp(1, 3) as usize - 1
}

/// Chen and Goodman's estimate from how many grams have a count of 1, 2, 3 and 4.
fn discounts(counts: &[u64; 4]) -> [f64; 3] {
    let [ones, twos, threes, fours] = counts.map(|count| count as f64);
    let share = ones / (ones + 2.0 * twos);
    let estimated = [
        1.0 - 2.0 * share * twos / ones,
        2.0 - 3.0 * share * threes / twos,
        3.0 - 4.0 * share * fours / threes,
    ];
    let sound = (0..3).all(|at| estimated[at] > 0.0 && estimated[at] <= (at + 1) as f64);
    if sound { estimated } else { FALLBACK_DISCOUNTS }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn documents(vocabulary: u32) -> impl Strategy<Value = Vec<Vec<u32>>> {
        prop::collection::vec(prop::collection::vec(1..vocabulary, 0..30), 0..20)
    }

    proptest! {
        #[test]
        fn probabilities_add_up_to_one_after_any_history(
            documents in documents(12), order in 1usize..7, history in prop::collection::vec(1u32..14, 0..9)
        ) {
            let model = NGram::train(order, 12, 0, &documents);
            let history = [&[u32::MAX], &history[..]].concat();
            let sum: f64 = (0..12).map(|token| model.probability(&history, token)).sum();
            prop_assert!((sum - 1.0).abs() < 1e-12, "{sum}");
        }

        #[test]
        fn every_token_of_the_vocabulary_is_possible(documents in documents(9), document in prop::collection::vec(0u32..9, 0..20)) {
            let scores = NGram::train(4, 9, 0, &documents).log_probability(&document);
            prop_assert_eq!(scores.len(), document.len() + 1);
            prop_assert!(scores.iter().all(|score| score.is_finite() && *score <= 0.0));
        }
    }

    /// Documents `a b` and `a c` with end of text `e`, order 2, vocabulary of 4, fallback discounts.
    ///
    /// Bigrams: (start a) 2, (a b) 1, (a c) 1, (b e) 1, (c e) 1. Different predecessors: a 1, b 1, c 1, e 2;
    /// together 5, with three ones and a two.
    #[test]
    fn a_tiny_corpus_gives_what_the_pencil_gives() {
        let (end, a, b, c) = (0, 1, 2, 3);
        let model = NGram::train(2, 4, end, [[a, b], [a, c]]);
        assert_eq!(model.discounts, [FALLBACK_DISCOUNTS; 2]);
        let even = (3.0 * 0.5 + 1.0) / 5.0 / 4.0;
        let once = (1.0 - 0.5) / 5.0 + even;
        let twice = (2.0 - 1.0) / 5.0 + even;
        let expected = [
            (2.0 - 1.0) / 2.0 + 1.0 / 2.0 * once,
            (1.0 - 0.5) / 2.0 + 2.0 * 0.5 / 2.0 * once,
            (1.0 - 0.5) / 1.0 + 0.5 / 1.0 * twice,
        ];
        for (score, expected) in model.log_probability(&[a, b]).iter().zip(expected) {
            assert!((score.exp() - expected).abs() < 1e-15, "{} {expected}", score.exp());
        }
    }

    #[test]
    fn discounts_follow_chen_and_goodman() {
        let [one, two, more] = discounts(&[100, 40, 20, 12]);
        let share = 100.0 / 180.0;
        assert_eq!(
            [one, two, more],
            [1.0 - 80.0 * share / 100.0, 2.0 - 60.0 * share / 40.0, 3.0 - 48.0 * share / 20.0]
        );
        assert_eq!(discounts(&[0, 0, 0, 0]), FALLBACK_DISCOUNTS);
        assert_eq!(discounts(&[5, 0, 0, 0]), FALLBACK_DISCOUNTS);
    }

    #[test]
    fn a_longer_order_predicts_a_longer_pattern() {
        let pattern: Vec<u32> = [1, 1, 1, 2].repeat(20);
        let score =
            |order| NGram::train(order, 3, 0, [&pattern]).log_probability(&pattern).iter().sum::<f64>();
        assert!(score(4) > score(3) && score(3) > score(2) && score(2) > score(1));
    }

    #[test]
    fn a_token_outside_the_vocabulary_has_probability_zero() {
        assert_eq!(NGram::train(3, 4, 0, [[1, 2]]).log_probability(&[9])[0], f64::NEG_INFINITY);
    }
}
