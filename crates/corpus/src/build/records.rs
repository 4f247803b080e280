//! From the bytes of a document to its text, or what is wrong with it.

use std::borrow::Cow;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::inputs::Form;
use crate::folder::LeftOut;
use crate::tokeniser::EncodeError;

/// What is wrong with a document.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Trouble {
    /// It is not UTF-8.
    #[error("it is not UTF-8")]
    NotUtf8,
    /// The line is not a JSON object.
    #[error("the line is not a JSON object ({0})")]
    NotJson(String),
    /// The record lacks the field.
    #[error("the record has no field \"{0}\" (--field names another)")]
    NoField(String),
    /// The field is not text.
    #[error("the field \"{0}\" is not text")]
    NotText(String),
    /// The tokeniser has no ids for it.
    #[error("{0}")]
    Unencodable(EncodeError),
}

impl Trouble {
    /// One document that is left out because of this.
    pub(super) fn counted(&self) -> LeftOut {
        let mut left_out = LeftOut::default();
        match self {
            Trouble::NotUtf8 => left_out.not_utf8 = 1,
            Trouble::NotJson(_) => left_out.not_json = 1,
            Trouble::NoField(_) | Trouble::NotText(_) => left_out.no_text = 1,
            Trouble::Unencodable(_) => left_out.unencodable = 1,
        }
        left_out
    }
}

/// The text of a document: itself, or what stands in a field of its JSON.
pub(super) fn text_of<'a>(document: &'a [u8], form: Form, field: &str) -> Result<Cow<'a, str>, Trouble> {
    let text = str::from_utf8(document).map_err(|_| Trouble::NotUtf8)?;
    match form {
        Form::Text => Ok(Cow::Borrowed(text)),
        Form::Jsonl => field_of(text, field),
    }
}

/// One field of a JSON object, without building the others.
fn field_of<'a>(record: &'a str, field: &str) -> Result<Cow<'a, str>, Trouble> {
    let mut json = serde_json::Deserializer::from_str(record);
    let found = json.deserialize_map(Record { field }).and_then(|found| json.end().map(|()| found));
    match found.map_err(|error| Trouble::NotJson(error.to_string()))? {
        None => Err(Trouble::NoField(field.into())),
        Some(Value::Other) => Err(Trouble::NotText(field.into())),
        Some(Value::Text(text)) => Ok(text),
    }
}

struct Record<'f> {
    field: &'f str,
}

impl<'de> Visitor<'de> for Record<'_> {
    type Value = Option<Value<'de>>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a JSON object")
    }

    fn visit_map<Map: MapAccess<'de>>(self, mut map: Map) -> Result<Self::Value, Map::Error> {
        let mut found = None;
        while let Some(is_wanted) = map.next_key_seed(IsField(self.field))? {
            if is_wanted {
                found = Some(map.next_value_seed(AnyValue)?);
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        Ok(found)
    }
}

/// Whether a key is the field.
struct IsField<'f>(&'f str);

impl<'de> DeserializeSeed<'de> for IsField<'_> {
    type Value = bool;

    fn deserialize<D: Deserializer<'de>>(self, key: D) -> Result<bool, D::Error> {
        key.deserialize_str(self)
    }
}

impl Visitor<'_> for IsField<'_> {
    type Value = bool;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("a key")
    }

    fn visit_str<E>(self, key: &str) -> Result<bool, E> {
        Ok(key == self.0)
    }
}

/// What stands in the field.
enum Value<'de> {
    Text(Cow<'de, str>),
    Other,
}

struct AnyValue;

impl<'de> DeserializeSeed<'de> for AnyValue {
    type Value = Value<'de>;

    fn deserialize<D: Deserializer<'de>>(self, value: D) -> Result<Value<'de>, D::Error> {
        value.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for AnyValue {
    type Value = Value<'de>;

    fn expecting(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("any value")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Value<'de>, E> {
        Ok(Value::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Value<'de>, E> {
        Ok(Value::Text(Cow::Owned(text.to_string())))
    }

    fn visit_unit<E>(self) -> Result<Value<'de>, E> {
        Ok(Value::Other)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Value<'de>, E> {
        Ok(Value::Other)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Value<'de>, E> {
        Ok(Value::Other)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Value<'de>, E> {
        Ok(Value::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Value<'de>, E> {
        Ok(Value::Other)
    }

    fn visit_seq<Seq: serde::de::SeqAccess<'de>>(self, mut seq: Seq) -> Result<Value<'de>, Seq::Error> {
        while seq.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Value::Other)
    }

    fn visit_map<Map: MapAccess<'de>>(self, mut map: Map) -> Result<Value<'de>, Map::Error> {
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Value::Other)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn field(record: &str) -> Result<String, Trouble> {
        text_of(record.as_bytes(), Form::Jsonl, "text").map(Cow::into_owned)
    }

    #[test]
    fn the_field_is_found_among_others_and_unescaped() {
        assert_eq!(field(r#"{"id": 7, "text": "a\nb \u00e9", "meta": {"text": 1}}"#).unwrap(), "a\nb é");
        assert_eq!(field(r#"{"text": "x"}  "#).unwrap(), "x");
    }

    #[test]
    fn what_is_wrong_is_said() {
        assert!(matches!(field("{"), Err(Trouble::NotJson(_))));
        assert!(matches!(field("[1]"), Err(Trouble::NotJson(_))));
        assert!(matches!(field(r#"{"text": "a"} {"text": "b"}"#), Err(Trouble::NotJson(_))));
        assert!(matches!(field(r#"{"body": "a"}"#), Err(Trouble::NoField(_))));
        for other in ["null", "3", "-3", "1.5", "true", "[\"a\"]", "{\"a\": \"b\"}"] {
            assert!(matches!(field(&format!(r#"{{"text": {other}}}"#)), Err(Trouble::NotText(_))), "{other}");
        }
        assert_eq!(text_of(b"a\xFF", Form::Text, ""), Err(Trouble::NotUtf8));
        assert_eq!(text_of(b"\xFF{}", Form::Jsonl, "text"), Err(Trouble::NotUtf8));
    }

    proptest! {
        #[test]
        fn any_text_survives_being_a_record(text: String, other: String) {
            let record = serde_json::json!({"other": other, "text": text}).to_string();
            prop_assert_eq!(field(&record).unwrap(), text);
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes: Vec<u8>) {
            let _ = text_of(&bytes, Form::Jsonl, "text");
            let _ = text_of(&bytes, Form::Text, "text");
        }
    }
}
