//! Pairs of texts with a known relation: translations, and premises with hypotheses.

use super::World;
use super::facts::{ANIMALS, OBJECTS, PLACES, TIMES, class_of, tense_of};
use super::grammar::{Choice, Clause, State};
use super::lexicon::{END, STOP};
use crate::random::{Draws, Key};

/// A document and the same meaning in another language.
#[derive(Clone, Debug, PartialEq)]
pub struct Translation {
    /// The document that was drawn, without end of text.
    pub source: Vec<u32>,
    /// Its translation: sentence by sentence the same clauses.
    pub target: Vec<u32>,
    /// Natural logarithm of the probability of the pair: of the source, and of the target's language (evenly
    /// any other); the rest of the target follows from them.
    pub log_probability: f64,
}

/// Two sentences, and what the first says of the second.
#[derive(Clone, Debug, PartialEq)]
pub struct Inference {
    /// The beginning of a document: its opening word and one sentence.
    pub premise: Vec<u32>,
    /// A sentence that could stand next in the same document.
    pub hypothesis: Vec<u32>,
    /// Whether the hypothesis must be true, cannot be, or may be, if the premise is true.
    pub label: Label,
    /// Natural logarithm of the probability of the pair and its label: of the premise, of the label (evenly
    /// one of three), and of the hypothesis (evenly one of those with this label).
    pub log_probability: f64,
}

/// What a premise says of a hypothesis. The rule of the world: at one time an animal is at one spot, near two
/// landmarks whose order does not matter, and does one thing to one object. Of other times and other
/// animals a sentence says nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Label {
    /// It must be true.
    Entailment,
    /// It cannot be true.
    Contradiction,
    /// It may be true.
    Neutral,
}

impl Label {
    /// All labels, in the order of the classes that a model tells apart.
    pub const ALL: [Label; 3] = [Label::Entailment, Label::Contradiction, Label::Neutral];
}

impl World {
    /// A document and its translation: a function of the seed and the index alone. In a world with one
    /// language the translation is the document itself.
    pub fn translation(&self, index: u64) -> Translation {
        let mut draws = Key::new(self.seed, "translation").with(index).draws();
        let source = self.draw(&mut draws);
        let (language, clauses) = self.parse(&source);
        let others: Vec<u8> = (0..self.grammar.languages).filter(|&other| other != language).collect();
        let (target_language, choices) = match others.as_slice() {
            [] => (language, 1),
            others => (others[draws.below(others.len() as u64) as usize], others.len()),
        };
        let (opener, opened) = self.opening(target_language);
        let target = [vec![opener], self.render(opened, &clauses)].concat();
        let source_score: f64 = self.score(&source).into_iter().flatten().sum();
        Translation { source, target, log_probability: source_score - libm::log(choices as f64) }
    }

    /// A premise, a hypothesis and their label: a function of the seed and the index alone.
    pub fn inference(&self, index: u64) -> Inference {
        let mut draws = Key::new(self.seed, "inference").with(index).draws();
        let (premise, state, premise_score) = self.first_sentence(&mut draws);
        let (_, clauses) = self.parse(&premise);
        let label = Label::ALL[draws.below(3) as usize];
        let hypotheses: Vec<Clause> =
            clauses.iter().flat_map(|clause| self.hypotheses(clause, label)).collect();
        let drawn = draws.below(hypotheses.len().max(1) as u64) as usize;
        let hypothesis = self.render(state, &hypotheses[drawn..drawn + 1]);
        let log_probability = premise_score - libm::log(3.0 * hypotheses.len() as f64);
        Inference { premise, hypothesis, label, log_probability }
    }

    /// An opening word and one sentence; the state after it; the logarithm of its probability.
    fn first_sentence(&self, draws: &mut Draws) -> (Vec<u32>, State, f64) {
        let mut state = State::default();
        let (mut tokens, mut score) = (Vec::new(), 0.0);
        while tokens.last() != Some(&STOP) {
            let Some(choice) = self.pick(&state, draws) else { break };
            score += self.step(&state, choice.token).map_or(0.0, |(_, score)| score);
            tokens.push(choice.token);
            state = choice.next;
        }
        (tokens, state, score)
    }

    /// All sentences that stand in this relation to a clause.
    fn hypotheses(&self, premise: &Clause, label: Label) -> Vec<Clause> {
        match label {
            Label::Entailment => entailed(premise),
            Label::Contradiction => self.contradicting(premise),
            Label::Neutral => self.unrelated(premise),
        }
    }

    /// Another object of the same deed, or another spot.
    fn contradicting(&self, premise: &Clause) -> Vec<Clause> {
        let (animal, verb) = (premise.animal.unwrap_or(0), premise.verb.unwrap_or(0));
        let objects = (0..OBJECTS)
            .filter(|&object| self.grammar.facts.object(animal, verb, object) > 0)
            .filter(|&object| premise.object != Some(object))
            .map(|object| Clause { object: Some(object), ..*premise });
        let places = (0..PLACES).filter(|&place| !premise.places.contains(&Some(place)));
        objects
            .chain(places.map(|place| Clause { places: [Some(place), premise.places[1]], ..*premise }))
            .collect()
    }

    /// The same at another time, or of another animal (one that does such a thing at all).
    fn unrelated(&self, premise: &Clause) -> Vec<Clause> {
        let times = (0..TIMES).filter(|&time| premise.time != Some(time));
        let (verb, object) = (premise.verb.unwrap_or(0), premise.object.unwrap_or(0));
        let animals = (0..ANIMALS)
            .filter(|&animal| premise.animal != Some(animal))
            .filter(|&animal| self.grammar.facts.object(animal, verb, object) > 0);
        times
            .map(|time| Clause { time: Some(time), tense: Some(tense_of(time)), ..*premise })
            .chain(animals.map(|animal| Clause {
                animal: Some(animal),
                class: Some(class_of(animal)),
                ..*premise
            }))
            .collect()
    }

    /// The language and the clauses of a text; of a text that is not of the grammar, what comes before that.
    pub(super) fn parse(&self, tokens: &[u32]) -> (u8, Vec<Clause>) {
        let mut state = State::default();
        let mut clauses = Vec::new();
        for &token in tokens {
            let Some((choice, _)) = self.step(&state, token) else { break };
            if token == STOP {
                clauses.push(state.clause);
            }
            state = choice.next;
        }
        (state.language.unwrap_or(0), clauses)
    }

    /// The tokens that say these clauses from a state on: at each step the one choice that fits.
    fn render(&self, mut state: State, clauses: &[Clause]) -> Vec<u32> {
        let mut tokens = Vec::new();
        for clause in clauses {
            let fits = |choice: &Choice| choice.token != END && choice.next.clause.is_part_of(clause);
            while let Some(choice) = self.grammar.choices(&state).into_iter().find(fits) {
                tokens.push(choice.token);
                state = choice.next;
                if choice.token == STOP {
                    break;
                }
            }
        }
        tokens
    }

    /// The opening word of a language, and the state after it.
    fn opening(&self, language: u8) -> (u32, State) {
        let choices = self.grammar.choices(&State::default());
        let choice = choices[usize::from(language)];
        (choice.token, choice.next)
    }
}

/// The same with the landmarks in the other order, with a pronoun for the subject, or both. Two landmarks
/// that are the same have no other order.
fn entailed(premise: &Clause) -> Vec<Clause> {
    let ([first, second], [first_side, second_side]) = (premise.places, premise.adpositions);
    let swapped = Clause { places: [second, first], adpositions: [second_side, first_side], ..*premise };
    let pronoun = |clause: Clause| Clause { named: Some(false), adjective: None, ..clause };
    if swapped == *premise {
        return vec![pronoun(*premise)];
    }
    vec![swapped, pronoun(*premise), pronoun(swapped)]
}
