//! The grammar of the languages as one probabilistic automaton: state → weighted (token, next state).
//!
//! Drawing a text, scoring one, listing what may come next, parsing and translating are all walks over
//! [`Grammar::choices`]; there is no second description of the grammar to disagree with. In every state the
//! choices have different tokens, so a text has one derivation and its probability is a plain product.
//!
//! A sentence reveals a [`Clause`] bit by bit, in the word order of its language. Where a token shows only
//! part of something (an auxiliary shows tense and class before time and subject are named), its weight is
//! summed over everything that it leaves open. So a clause is equally likely in every language.

use super::facts::{
    ADJECTIVE_WEIGHTS, ADJECTIVES, ADPOSITION_WEIGHTS, ADPOSITIONS, ANIMALS, CLASSES, Facts, OBJECTS,
    PLACE_WEIGHTS, PLACES, TENSES, TIME_WEIGHTS, TIMES, VERBS, class_of, tense_of,
};
use super::lexicon::{self, END, Form, STOP};

/// Languages with a word order; there are no more.
pub(super) const MOST_LANGUAGES: u8 = ORDERS.len() as u8;

/// Out of a hundred documents with so many sentences, those that end here.
const ENDS_OF_100: [u64; 6] = [0, 0, 25, 40, 60, 100];

/// Odds that a sentence stays with the animal of the one before (a pronoun) or names one.
const STAY: u64 = 3;
const NAME: u64 = 2;

/// One part of a sentence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Time,
    /// The subject's noun. The first of noun and adjective may be a pronoun instead of both.
    Noun,
    Adjective,
    /// Two circumstances, each a place and an adposition.
    Place(usize),
    Adposition(usize),
    Auxiliary,
    Verb,
    Object,
    Stop,
}

use Slot::{Adjective, Adposition, Auxiliary, Noun, Object, Place, Stop, Time, Verb};

/// The word orders. Apart from the adjective, what follows a subject and depends on it stands at least five
/// tokens after it; a 5-gram model sees four.
const ORDERS: [[Slot; 11]; 6] = [
    // Subject, verb, object; adjectives follow, prepositions.
    [Time, Noun, Adjective, Adposition(0), Place(0), Adposition(1), Place(1), Auxiliary, Verb, Object, Stop],
    // Subject, object, verb; adjectives precede, postpositions.
    [Time, Adjective, Noun, Place(0), Adposition(0), Place(1), Adposition(1), Object, Verb, Auxiliary, Stop],
    // Verb, subject, object; adjectives follow, prepositions, time last.
    [Auxiliary, Verb, Noun, Adjective, Adposition(0), Place(0), Adposition(1), Place(1), Object, Time, Stop],
    // Their three cousins.
    [Time, Adjective, Noun, Adposition(0), Place(0), Adposition(1), Place(1), Auxiliary, Verb, Object, Stop],
    [Time, Noun, Adjective, Place(0), Adposition(0), Place(1), Adposition(1), Object, Verb, Auxiliary, Stop],
    [Auxiliary, Verb, Adjective, Noun, Place(0), Adposition(0), Place(1), Adposition(1), Object, Time, Stop],
];

/// What is known of what a sentence says: nothing at its start, all of it before its full stop.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Clause {
    pub time: Option<u8>,
    pub tense: Option<u8>,
    /// Whether the subject is named; otherwise it is a pronoun.
    pub named: Option<bool>,
    pub class: Option<u8>,
    pub animal: Option<u8>,
    /// Only a named subject has one.
    pub adjective: Option<u8>,
    pub places: [Option<u8>; 2],
    pub adpositions: [Option<u8>; 2],
    pub verb: Option<u8>,
    pub object: Option<u8>,
}

impl Clause {
    /// Whether all that is known here is true of `other`.
    pub(super) fn is_part_of(&self, other: &Clause) -> bool {
        fn fits<T: PartialEq>(known: &Option<T>, other: &Option<T>) -> bool {
            known.is_none() || known == other
        }
        fits(&self.time, &other.time)
            && fits(&self.tense, &other.tense)
            && fits(&self.named, &other.named)
            && fits(&self.class, &other.class)
            && fits(&self.animal, &other.animal)
            && fits(&self.adjective, &other.adjective)
            && (0..2).all(|at| fits(&self.places[at], &other.places[at]))
            && (0..2).all(|at| fits(&self.adpositions[at], &other.adpositions[at]))
            && fits(&self.verb, &other.verb)
            && fits(&self.object, &other.object)
    }
}

/// Where in a document we are, and all of its past that matters.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State {
    /// The language, once the first token has told it.
    pub language: Option<u8>,
    /// Whole sentences so far.
    pub sentences: usize,
    /// The animal of the sentence before.
    pub protagonist: Option<u8>,
    /// What the sentence has said so far.
    pub clause: Clause,
    /// Whether end of text has been said.
    pub ended: bool,
    slot: usize,
}

/// One thing that can come next.
#[derive(Clone, Copy, Debug)]
pub(super) struct Choice {
    pub token: u32,
    /// Its probability, times the sum of the weights of all choices.
    pub weight: u64,
    pub next: State,
}

/// The automaton of one world's languages.
#[derive(Clone, Debug)]
pub(super) struct Grammar {
    pub facts: Facts,
    pub languages: u8,
}

impl Grammar {
    /// Everything that can come next, with different tokens and weights above 0; nothing after the end.
    pub(super) fn choices(&self, state: &State) -> Vec<Choice> {
        if state.ended {
            return Vec::new();
        }
        let Some(language) = state.language else {
            return (0..self.languages).map(open).collect();
        };
        let mut choices = self.in_sentence(state, language);
        if state.slot == 0 {
            let ends = ENDS_OF_100[state.sentences];
            let total: u64 = choices.iter().map(|choice| choice.weight).sum();
            choices.iter_mut().for_each(|choice| choice.weight *= 100 - ends);
            choices.push(Choice { token: END, weight: ends * total, next: State { ended: true, ..*state } });
        }
        choices.retain(|choice| choice.weight > 0);
        choices
    }

    fn in_sentence(&self, state: &State, language: u8) -> Vec<Choice> {
        let clause = &state.clause;
        let word = |form: Form, weight: u64, said: Clause| Choice {
            token: lexicon::token(language, form),
            weight,
            next: state.said(language, said),
        };
        match ORDERS[usize::from(language)][state.slot] {
            Time => (0..TIMES)
                .map(|time| {
                    let said = Clause { time: Some(time), tense: Some(tense_of(time)), ..*clause };
                    word(Form::Time(time), self.times(clause, time), said)
                })
                .collect(),
            Noun => {
                let named = (0..ANIMALS).map(|animal| {
                    let class = Some(class_of(animal));
                    let said = Clause { named: Some(true), animal: Some(animal), class, ..*clause };
                    word(Form::Subject { animal }, NAME * self.animals(clause, animal), said)
                });
                named.chain(self.pronoun(state, word)).collect()
            }
            Adjective => {
                let forms =
                    (0..ADJECTIVES).flat_map(|adjective| (0..CLASSES).map(move |class| (adjective, class)));
                let named = forms.map(|(adjective, class)| {
                    let animals: u64 = of_class(class).map(|animal| self.animals(clause, animal)).sum();
                    let weight = NAME * animals * ADJECTIVE_WEIGHTS[usize::from(adjective)];
                    let (adjective_said, class_said) = (Some(adjective), Some(class));
                    let said =
                        Clause { named: Some(true), adjective: adjective_said, class: class_said, ..*clause };
                    word(Form::Adjective { adjective, class }, weight, said)
                });
                let scale: u64 = ADJECTIVE_WEIGHTS.iter().sum();
                let pronoun = self.pronoun(state, word).into_iter();
                named
                    .chain(pronoun.map(|choice| Choice { weight: choice.weight * scale, ..choice }))
                    .collect()
            }
            Place(at) => (0..PLACES)
                .map(|place| {
                    let mut said = *clause;
                    said.places[at] = Some(place);
                    word(Form::Place(place), PLACE_WEIGHTS[usize::from(place)], said)
                })
                .collect(),
            Adposition(at) => (0..ADPOSITIONS)
                .map(|adposition| {
                    let mut said = *clause;
                    said.adpositions[at] = Some(adposition);
                    word(Form::Adposition(adposition), ADPOSITION_WEIGHTS[usize::from(adposition)], said)
                })
                .collect(),
            Auxiliary => (0..TENSES)
                .flat_map(|tense| (0..CLASSES).map(move |class| (tense, class)))
                .map(|(tense, class)| {
                    let times: u64 = (0..TIMES)
                        .filter(|&time| tense_of(time) == tense)
                        .map(|time| self.times(clause, time))
                        .sum();
                    let said = Clause { tense: Some(tense), class: Some(class), ..*clause };
                    word(Form::Auxiliary { tense, class }, times * self.subjects(state, class), said)
                })
                .collect(),
            Verb => (0..VERBS)
                .map(|verb| {
                    let said = Clause { verb: Some(verb), ..*clause };
                    word(Form::Verb(verb), self.verbs(clause, verb), said)
                })
                .collect(),
            Object => (0..OBJECTS)
                .map(|object| {
                    let said = Clause { object: Some(object), ..*clause };
                    word(Form::Object { object }, self.objects(clause, object), said)
                })
                .collect(),
            Stop => vec![Choice { token: STOP, weight: 1, next: state.next_sentence() }],
        }
    }
}

/// Weights: how likely a value is, given what the sentence has said; 0 if it contradicts that.
impl Grammar {
    fn times(&self, clause: &Clause, time: u8) -> u64 {
        let fits = clause.time.is_none_or(|said| said == time)
            && clause.tense.is_none_or(|said| said == tense_of(time));
        if fits { TIME_WEIGHTS[usize::from(time)] } else { 0 }
    }

    /// Of a named subject.
    fn animals(&self, clause: &Clause, animal: u8) -> u64 {
        let fits = clause.animal.is_none_or(|said| said == animal)
            && clause.class.is_none_or(|said| said == class_of(animal))
            && clause.named != Some(false);
        if fits { self.facts.animal(animal) } else { 0 }
    }

    /// Of a subject that is a pronoun.
    fn protagonist(&self, state: &State) -> Option<(u8, u64)> {
        let animal = state.protagonist?;
        let fits = state.clause.class.is_none_or(|said| said == class_of(animal))
            && state.clause.named != Some(true);
        let weight: u64 = (0..ANIMALS).map(|animal| self.facts.animal(animal)).sum();
        fits.then_some((animal, STAY * weight))
    }

    /// Of any subject of a class.
    fn subjects(&self, state: &State, class: u8) -> u64 {
        let named: u64 = of_class(class).map(|animal| NAME * self.animals(&state.clause, animal)).sum();
        let pronoun = self.protagonist(state).filter(|(animal, _)| class_of(*animal) == class);
        named + pronoun.map_or(0, |(_, weight)| weight)
    }

    fn pronoun(&self, state: &State, word: impl Fn(Form, u64, Clause) -> Choice) -> Option<Choice> {
        let (animal, weight) = self.protagonist(state)?;
        let class = class_of(animal);
        let said = Clause { named: Some(false), animal: Some(animal), class: Some(class), ..state.clause };
        Some(word(Form::Pronoun { class }, weight, said))
    }

    fn verbs(&self, clause: &Clause, verb: u8) -> u64 {
        match (clause.animal, clause.object) {
            (Some(animal), Some(object)) => self.done(animal, verb, object),
            _ => self.facts.verb(verb),
        }
    }

    /// The subject is always known before the object is.
    fn objects(&self, clause: &Clause, object: u8) -> u64 {
        let animal = clause.animal.unwrap_or(0);
        match clause.verb {
            Some(verb) => self.facts.object(animal, verb, object),
            None => (0..VERBS).map(|verb| self.done(animal, verb, object)).sum(),
        }
    }

    /// The joint weight of a verb and its object for an animal: the verb's, shared out over its objects.
    fn done(&self, animal: u8, verb: u8, object: u8) -> u64 {
        let others: u64 = (0..VERBS)
            .filter(|&other| other != verb)
            .map(|other| self.facts.objects(animal, other))
            .product();
        self.facts.verb(verb) * self.facts.object(animal, verb, object) * others
    }
}

impl State {
    /// The state after a word has said its part.
    fn said(&self, language: u8, clause: Clause) -> State {
        let order = &ORDERS[usize::from(language)];
        let mut slot = self.slot + 1;
        if clause.named == Some(false) && matches!(order[slot], Noun | Adjective) {
            slot += 1; // a pronoun stands for both
        }
        State { clause, slot, ..*self }
    }

    fn next_sentence(&self) -> State {
        State {
            sentences: self.sentences + 1,
            protagonist: self.clause.animal,
            clause: Clause::default(),
            slot: 0,
            ..*self
        }
    }
}

fn open(language: u8) -> Choice {
    let next = State { language: Some(language), ..State::default() };
    Choice { token: lexicon::token(language, Form::Opener), weight: 1, next }
}

fn of_class(class: u8) -> impl Iterator<Item = u8> {
    (0..ANIMALS).filter(move |&animal| class_of(animal) == class)
}
