//! Plain text to a shard of byte tokens: where documents begin and end. Works on bytes, in bounded memory.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::shard::{Shard, ShardError, ShardWriter};
use crate::tokeniser::{EncodeError, Tokeniser};

/// A document longer than this is cut, so that one long text still gives documents to hold out.
pub const LONGEST_DOCUMENT_BYTES: usize = 16 << 10;

/// The version of the rules below; part of the name of a cached shard.
pub(crate) const SPLIT_VERSION: u32 = 1;

/// What ends a document in a plain-text file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Split {
    /// Documents are separated by one or more blank lines.
    #[default]
    BlankLine,
    /// Every line that is not blank is a document.
    Line,
    /// The whole file is one document.
    File,
}

/// How much of a file [`Split::detect`] looks at.
pub(crate) const LOOK_BYTES: u64 = 1 << 20;

impl Split {
    /// How a text file seems to be divided, by its first MiB: by blank lines if one stands between two lines
    /// that are not blank, and otherwise by line.
    ///
    /// Blank lines before the first and after the last line of text separate nothing and do not count: a
    /// list of lines may well end in one, and would be a single document.
    pub fn detect(path: &Path) -> Result<Split, TextError> {
        let mut beginning = Vec::new();
        open(path)?
            .take(LOOK_BYTES)
            .read_to_end(&mut beginning)
            .map_err(|source| TextError::Unreadable { path: path.to_path_buf(), source })?;
        Ok(Split::of(&beginning))
    }

    /// The same for the first MiB of a text.
    pub(crate) fn of(beginning: &[u8]) -> Split {
        let mut blanks = beginning.split(|&byte| byte == b'\n').map(is_blank).skip_while(|blank| *blank);
        let text_after_a_blank = blanks.any(|blank| blank) && blanks.any(|blank| !blank);
        if text_after_a_blank { Split::BlankLine } else { Split::Line }
    }
}

/// Writes the documents of a text file to a shard of byte tokens at `out`.
///
/// Line ends at the end of a document are dropped, those inside are kept. A document of more than
/// [`LONGEST_DOCUMENT_BYTES`] is cut after its last whole line within the limit, or, inside a line that is
/// itself too long, between characters. Any bytes will do; broken UTF-8 is kept as it is.
pub fn shard_from_text(text: &Path, split: Split, out: &Path) -> Result<Shard, TextError> {
    build(text, split, &Tokeniser::Bytes, out).map(|(shard, _)| shard)
}

/// As [`shard_from_text`] with any tokeniser, and with the hash of the bytes that were read.
pub(crate) fn build(
    text: &Path,
    split: Split,
    tokeniser: &Tokeniser,
    out: &Path,
) -> Result<(Shard, blake3::Hash), TextError> {
    let unreadable = |source| TextError::Unreadable { path: text.to_path_buf(), source };
    let mut reader = BufReader::with_capacity(1 << 16, open(text)?);
    let mut writer = ShardWriter::create(out, tokeniser.vocabulary() as u32)?;
    let mut encoder = tokeniser.encoder();
    let mut hasher = blake3::Hasher::new();
    let mut documents = 0u64;
    let mut tokens = Vec::with_capacity(LONGEST_DOCUMENT_BYTES);
    let mut splitter = Splitter::new(split, LONGEST_DOCUMENT_BYTES, 0, |document: Found<'_>| {
        tokens.clear();
        match (tokeniser, str::from_utf8(document.bytes)) {
            (Tokeniser::Bytes, _) => tokens.extend(document.bytes.iter().copied().map(u32::from)),
            (_, Err(_)) => return Err(TextError::NotUtf8 { path: text.to_path_buf(), byte: document.start }),
            (_, Ok(document)) => encoder
                .encode(document, &mut tokens)
                .map_err(|error| TextError::Unencodable { path: text.to_path_buf(), error })?,
        }
        documents += 1;
        Ok(writer.push(&tokens)?)
    });
    loop {
        let bytes = reader.fill_buf().map_err(unreadable)?;
        if bytes.is_empty() {
            break;
        }
        hasher.update(bytes);
        splitter.push(bytes)?;
        let length = bytes.len();
        reader.consume(length);
    }
    splitter.finish()?;
    if documents == 0 {
        return Err(TextError::Empty { path: text.to_path_buf() });
    }
    Ok((writer.finish()?, hasher.finalize()))
}

/// Opens a text for reading. (Linux opens folders as well, and only fails when they are read.)
pub(crate) fn open(path: &Path) -> Result<File, TextError> {
    if path.is_dir() {
        return Err(TextError::Folder { path: path.to_path_buf() });
    }
    File::open(path).map_err(|source| TextError::Unreadable { path: path.to_path_buf(), source })
}

/// Why a text file could not be made into a shard.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The text could not be read.
    #[error("could not read the text file {}: {source}; check the path and its permissions", path.display())]
    Unreadable {
        /// Which file.
        path: PathBuf,
        /// The system's answer.
        source: std::io::Error,
    },
    /// It is no file.
    #[error(
        "{} is a folder, and a source is one file, so nothing was read; name the files in it, each as a \
         source of its own",
        path.display()
    )]
    Folder {
        /// Which folder.
        path: PathBuf,
    },
    /// There is nothing but white space in it.
    #[error("the text file {} holds no text, so there is nothing to train on; give a file with text", path.display())]
    Empty {
        /// Which file.
        path: PathBuf,
    },
    /// A tokeniser of characters cannot read it.
    #[error(
        "the text file {} is not UTF-8 in the document that begins at byte {byte}, and the corpus's tokeniser \
         reads characters; convert the file to UTF-8",
        path.display()
    )]
    NotUtf8 {
        /// Which file.
        path: PathBuf,
        /// Where the document begins.
        byte: u64,
    },
    /// The tokeniser has no ids for something in it.
    #[error("the text file {}: {error}", path.display())]
    Unencodable {
        /// Which file.
        path: PathBuf,
        /// What it has no ids for.
        error: EncodeError,
    },
    /// The shard could not be written.
    #[error(transparent)]
    Shard(#[from] ShardError),
}

/// A document as it is found in a stream.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found<'a> {
    /// Its bytes, without line ends at the end.
    pub(crate) bytes: &'a [u8],
    /// Where it begins in the stream.
    pub(crate) start: u64,
    /// Where a splitter that begins anew finds the documents that follow.
    pub(crate) next: u64,
}

/// Cuts a stream of bytes into documents; the result does not depend on how the stream arrives.
pub(crate) struct Splitter<Sink> {
    split: Split,
    /// Bytes of a document at the most.
    longest: usize,
    /// Where the document begins in the stream.
    start: u64,
    /// The stream's next byte.
    at: u64,
    /// The document so far; never more than the limit and one arriving piece.
    document: Vec<u8>,
    /// Where its last, unfinished line begins.
    line_start: usize,
    sink: Sink,
}

impl<E, Sink: FnMut(Found<'_>) -> Result<(), E>> Splitter<Sink> {
    /// A splitter of a stream of which the first `at` bytes are left out.
    pub(crate) fn new(split: Split, longest: usize, at: u64, sink: Sink) -> Self {
        Splitter { split, longest, start: at, at, document: Vec::new(), line_start: 0, sink }
    }

    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<(), E> {
        for piece in bytes.split_inclusive(|&byte| byte == b'\n') {
            let (text, ended) = match piece {
                [text @ .., b'\n'] => (text, true),
                text => (text, false),
            };
            self.document.extend_from_slice(text);
            self.at += piece.len() as u64;
            self.cut_to_limit()?;
            if ended {
                self.end_line()?;
            }
        }
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Result<(), E> {
        self.end_document(self.document.len())
    }

    fn end_line(&mut self) -> Result<(), E> {
        let blank = is_blank(&self.document[self.line_start..]);
        match self.split {
            Split::Line => {
                self.end_document(self.document.len())?;
                self.start = self.at;
                Ok(())
            }
            Split::BlankLine if blank => {
                self.document.truncate(self.line_start);
                self.end_document(self.line_start)?;
                self.start = self.at;
                Ok(())
            }
            Split::BlankLine | Split::File => {
                self.document.push(b'\n');
                self.line_start = self.document.len();
                Ok(())
            }
        }
    }

    fn cut_to_limit(&mut self) -> Result<(), E> {
        while self.document.len() > self.longest {
            let at = if self.line_start > 0 { self.line_start } else { self.character_bound() };
            self.end_document(at)?;
        }
        Ok(())
    }

    /// The last place within the limit that is not inside a UTF-8 character (if this is UTF-8 at all).
    fn character_bound(&self) -> usize {
        let inside = |at: &usize| self.document[*at] & 0b1100_0000 == 0b1000_0000;
        let mut candidates = (self.longest - 3..=self.longest).rev();
        candidates.find(|at| !inside(at)).unwrap_or(self.longest)
    }

    /// Hands over the first `length` bytes and keeps the rest as the start of the next document.
    fn end_document(&mut self, length: usize) -> Result<(), E> {
        let mut bytes = &self.document[..length];
        while let [text @ .., b'\n' | b'\r'] = bytes {
            bytes = text;
        }
        let found = Found { bytes, start: self.start, next: self.start + length as u64 };
        let handed_over = if is_blank(bytes) { Ok(()) } else { (self.sink)(found) };
        self.start = found.next;
        self.document.drain(..length);
        self.line_start = 0;
        handed_over
    }
}

/// Whether a line, or a document, has nothing to read: a line end of Windows counts as nothing.
fn is_blank(text: &[u8]) -> bool {
    text.iter().all(u8::is_ascii_whitespace)
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;

    fn documents(split: Split, pieces: &[&[u8]]) -> Vec<Vec<u8>> {
        let mut documents = Vec::new();
        let mut splitter = Splitter::new(split, LONGEST_DOCUMENT_BYTES, 0, |document: Found<'_>| {
            documents.push(document.bytes.to_vec());
            Ok::<(), Infallible>(())
        });
        for piece in pieces {
            splitter.push(piece).unwrap();
        }
        splitter.finish().unwrap();
        documents
    }

    #[test]
    fn blank_lines_separate_documents() {
        let text = b"\n\none\ntwo\n \t\n\nthree\r\n\r\nfour";
        assert_eq!(documents(Split::BlankLine, &[text]), [&b"one\ntwo"[..], b"three", b"four"]);
    }

    #[test]
    fn lines_are_documents_if_asked() {
        assert_eq!(documents(Split::Line, &[b"one\ntwo\n\n \nthree\r\n"]), [&b"one"[..], b"two", b"three"]);
    }

    #[test]
    fn a_long_document_is_cut_at_a_line_end() {
        let text = "0123456789\n".repeat(4000);
        let documents = documents(Split::BlankLine, &[text.as_bytes()]);
        assert_eq!(documents.len(), 3);
        assert!(documents.iter().all(|document| document.len() % 11 == 10));
    }

    #[test]
    fn a_long_line_is_cut_between_characters() {
        let text = "x".to_string() + &"é".repeat(20_000);
        let documents = documents(Split::Line, &[text.as_bytes()]);
        assert!(documents.iter().all(|document| str::from_utf8(document).is_ok()));
        assert_eq!(documents.concat(), text.as_bytes());
        assert_eq!(documents[0].len(), LONGEST_DOCUMENT_BYTES - 1);
    }

    #[test]
    fn a_shard_holds_the_bytes_of_the_text() {
        let folder = tempfile::tempdir().unwrap();
        let (text, out) = (folder.path().join("a.txt"), folder.path().join("a.shard"));
        std::fs::write(&text, b"caf\xC3\xA9\n\n\xFF\xFE").unwrap();
        let shard = shard_from_text(&text, Split::default(), &out).unwrap();
        let mut tokens = Vec::new();
        shard.read(shard.document(1).unwrap(), &mut tokens);
        assert_eq!((shard.documents(), tokens), (2, vec![0xFF, 0xFE]));
    }

    #[test]
    fn a_text_without_text_is_refused_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let (text, out) = (folder.path().join("a.txt"), folder.path().join("a.shard"));
        std::fs::write(&text, b" \n\n").unwrap();
        assert!(matches!(shard_from_text(&text, Split::Line, &out), Err(TextError::Empty { .. })));
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn the_split_is_seen_in_the_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("text");
        let detected = |text: &[u8]| {
            std::fs::write(&path, text).unwrap();
            Split::detect(&path).unwrap()
        };
        for text in ["a\n\nb", "a\r\n\r\nb\r\n", "a\n \t\nb", "\na\nb\n\n\nc"] {
            assert_eq!(detected(text.as_bytes()), Split::BlankLine, "{text:?}");
        }
        for text in ["", "a", "a\nb\n", "a\r\nb\r\n", "\n\na\nb", "a\nb\n\n", "a\nb\n  ", "\n\n"] {
            assert_eq!(detected(text.as_bytes()), Split::Line, "{text:?}");
        }
        let late = |before: usize| [&b"line\n".repeat(before / 5)[..], b"\nb"].concat();
        assert_eq!(detected(&late(1_000_000)), Split::BlankLine);
        assert_eq!(detected(&late(2_000_000)), Split::Line);
    }

    #[test]
    fn a_folder_is_not_a_text() {
        let folder = tempfile::tempdir().unwrap();
        assert!(matches!(Split::detect(folder.path()), Err(TextError::Folder { .. })));
        let out = folder.path().join("a.shard");
        let refused = shard_from_text(folder.path(), Split::Line, &out);
        assert!(matches!(refused, Err(TextError::Folder { .. })));
        assert!(matches!(Split::detect(&out), Err(TextError::Unreadable { .. })));
    }

    proptest! {
        #[test]
        fn a_detected_blank_line_is_one_that_the_splitter_splits_at(text in "[a \r\n\t]{0,12}") {
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("text");
            std::fs::write(&path, &text).unwrap();
            let splits = documents(Split::BlankLine, &[text.as_bytes()]).len() > 1;
            prop_assert_eq!(Split::detect(&path).unwrap() == Split::BlankLine, splits);
        }
    }

    fn lumpy_text() -> impl Strategy<Value = Vec<u8>> {
        let lump = prop_oneof![
            Just(b"\n".to_vec()),
            Just(b"\n\n".to_vec()),
            Just(b" ".to_vec()),
            "[a-z é]{1,9}".prop_map(String::into_bytes),
            (1usize..40_000, any::<u8>()).prop_map(|(length, byte)| vec![byte; length]),
        ];
        prop::collection::vec(lump, 0..12).prop_map(|lumps| lumps.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn documents_do_not_depend_on_how_the_text_arrives(
            text in lumpy_text(), split in prop_oneof![Just(Split::BlankLine), Just(Split::Line)], chunk in 1usize..5000
        ) {
            let chunks: Vec<&[u8]> = text.chunks(chunk).collect();
            prop_assert_eq!(documents(split, &[&text]), documents(split, &chunks));
        }

        #[test]
        fn a_splitter_that_begins_after_a_document_finds_the_rest(
            text in lumpy_text(), split in prop_oneof![Just(Split::BlankLine), Just(Split::Line), Just(Split::File)]
        ) {
            let mut found = Vec::new();
            let from = |at: u64| {
                let mut found = Vec::new();
                let mut splitter = Splitter::new(split, LONGEST_DOCUMENT_BYTES, at, |document: Found<'_>| {
                    found.push((document.start, document.next, document.bytes.to_vec()));
                    Ok::<(), Infallible>(())
                });
                splitter.push(&text[at as usize..]).unwrap();
                splitter.finish().unwrap();
                found
            };
            found.extend(from(0));
            for (index, (start, next, bytes)) in found.iter().enumerate() {
                prop_assert!(text[*start as usize..].starts_with(bytes));
                prop_assert_eq!(&from(*next)[..], &found[index + 1..]);
            }
        }

        #[test]
        fn documents_are_bounded_not_blank_and_lose_only_space(text in lumpy_text()) {
            let documents = documents(Split::BlankLine, &[&text]);
            for document in &documents {
                prop_assert!(!document.is_empty() && document.len() <= LONGEST_DOCUMENT_BYTES);
            }
            let visible = |bytes: &[u8]| -> Vec<u8> {
                bytes.iter().copied().filter(|byte| !byte.is_ascii_whitespace()).collect()
            };
            prop_assert_eq!(visible(&documents.concat()), visible(&text));
        }
    }
}
