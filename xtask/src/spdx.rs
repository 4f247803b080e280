//! SPDX licence expressions, as far as crates use them: `MIT OR (Apache-2.0 WITH LLVM-exception AND ISC)`,
//! and the older `MIT/Apache-2.0`.

use anyhow::{Result, bail};

/// A parsed expression.
#[derive(Debug, PartialEq, Eq)]
pub enum Expression {
    /// One licence, with its exception if it has one: `Apache-2.0 WITH LLVM-exception`.
    Licence(String),
    /// Both must be obeyed.
    And(Box<Expression>, Box<Expression>),
    /// Either may be chosen.
    Or(Box<Expression>, Box<Expression>),
}

impl Expression {
    /// Reads an expression. `AND` binds closer than `OR`; `/` is an old way to write `OR`.
    pub fn parse(text: &str) -> Result<Self> {
        let mut parser = Parser { words: words(text), next: 0 };
        let expression = parser.either()?;
        match parser.peek() {
            None => Ok(expression),
            Some(word) => bail!("`{word}` stands where the licence expression `{text}` should end"),
        }
    }

    /// Whether some choice of licences, all of them on the list, obeys the expression.
    pub fn satisfied_by(&self, allowed: &[&str]) -> bool {
        match self {
            // Identifiers are compared without regard to case, as SPDX says; `X+` allows X itself.
            Self::Licence(id) => {
                let id = id.strip_suffix('+').unwrap_or(id);
                allowed.iter().any(|licence| licence.eq_ignore_ascii_case(id))
            }
            Self::And(left, right) => left.satisfied_by(allowed) && right.satisfied_by(allowed),
            Self::Or(left, right) => left.satisfied_by(allowed) || right.satisfied_by(allowed),
        }
    }
}

/// Recursive descent: either = both (OR both)*, both = single (AND single)*, single = id (WITH id)? | ( either ).
struct Parser {
    words: Vec<String>,
    next: usize,
}

impl Parser {
    fn either(&mut self) -> Result<Expression> {
        let mut left = self.both()?;
        while self.eat("OR") || self.eat("/") {
            left = Expression::Or(Box::new(left), Box::new(self.both()?));
        }
        Ok(left)
    }

    fn both(&mut self) -> Result<Expression> {
        let mut left = self.single()?;
        while self.eat("AND") {
            left = Expression::And(Box::new(left), Box::new(self.single()?));
        }
        Ok(left)
    }

    fn single(&mut self) -> Result<Expression> {
        if self.eat("(") {
            let inner = self.either()?;
            if !self.eat(")") {
                bail!("a parenthesis is not closed");
            }
            return Ok(inner);
        }
        let mut licence = self.identifier()?;
        if self.eat("WITH") {
            licence = format!("{licence} WITH {}", self.identifier()?);
        }
        Ok(Expression::Licence(licence))
    }

    fn identifier(&mut self) -> Result<String> {
        match self.peek() {
            Some("(" | ")" | "/" | "AND" | "OR" | "WITH") | None => {
                bail!(
                    "a licence is expected, but there is {}",
                    self.peek().map_or("nothing".into(), |w| format!("`{w}`"))
                )
            }
            Some(word) => {
                let word = word.to_owned();
                self.next += 1;
                Ok(word)
            }
        }
    }

    fn eat(&mut self, word: &str) -> bool {
        let found = self.peek() == Some(word);
        self.next += usize::from(found);
        found
    }

    fn peek(&self) -> Option<&str> {
        self.words.get(self.next).map(String::as_str)
    }
}

/// Parentheses and slashes are words of their own; the rest is cut at spaces.
fn words(text: &str) -> Vec<String> {
    let spaced: String =
        text.chars().flat_map(|c| if "()/".contains(c) { vec![' ', c, ' '] } else { vec![c] }).collect();
    spaced.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWED: &[&str] = &["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception", "Unicode-3.0"];

    fn allowed(text: &str) -> bool {
        Expression::parse(text).unwrap().satisfied_by(ALLOWED)
    }

    #[test]
    fn one_licence_must_be_on_the_list() {
        assert!(allowed("MIT"));
        assert!(allowed("mit"));
        assert!(!allowed("GPL-3.0-only"));
    }

    #[test]
    fn of_alternatives_one_suffices_and_of_a_conjunction_all_are_needed() {
        assert!(allowed("GPL-3.0-only OR MIT"));
        assert!(!allowed("GPL-3.0-only AND MIT"));
        assert!(!allowed("GPL-3.0-only OR MPL-2.0"));
    }

    #[test]
    fn and_binds_closer_than_or() {
        assert!(allowed("MIT OR GPL-3.0-only AND MPL-2.0"));
        assert!(!allowed("(MIT OR GPL-3.0-only) AND MPL-2.0"));
        assert!(allowed("(MIT OR Apache-2.0) AND Unicode-3.0"));
    }

    #[test]
    fn an_exception_belongs_to_its_licence() {
        assert!(allowed("Apache-2.0 WITH LLVM-exception"));
        assert!(!allowed("MIT WITH LLVM-exception"));
        assert!(allowed("Apache-2.0 WITH LLVM-exception OR GPL-3.0-only"));
    }

    #[test]
    fn the_old_slash_is_a_choice() {
        assert!(allowed("GPL-3.0/MIT"));
        assert!(allowed("GPL-3.0 / MIT"));
        assert!(!allowed("GPL-3.0/MPL-2.0"));
    }

    #[test]
    fn or_later_includes_the_licence_itself() {
        assert!(allowed("Apache-2.0+"));
        assert!(!allowed("GPL-2.0+"));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in ["", "MIT OR", "OR MIT", "(MIT", "MIT)", "MIT Apache-2.0", "MIT WITH", "AND", "()"] {
            assert!(Expression::parse(text).is_err(), "`{text}` was accepted");
        }
    }
}
