//! Everything a `[data]` section names, opened: shards are built into a cache where needed.
//!
//! A cached shard is named by the hash of what it was made from (the input's bytes, the options, the
//! versions of the rules), so a second start reuses it, an edited text gets another, and nothing is ever
//! stale. Owns the cache folder; never changes a source.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::config::{DataConfig, FileKind, Problem, SourceConfig};
use crate::shard::{self, Shard, ShardError, ShardWriter};
use crate::synthetic::{self, SyntheticConfig, World};
use crate::text::{self, TextError};
use crate::tokeniser::Tokeniser;

/// An opened corpus: one vocabulary, and shards mixed by weight.
#[derive(Debug)]
pub struct Corpus {
    /// What the token ids stand for.
    pub tokeniser: Tokeniser,
    /// The shards and their weights.
    pub sources: Vec<(Shard, f64)>,
    /// The generator of the corpus, if it is generated: it knows the true probability of every text.
    pub synthetic: Option<World>,
}

impl Corpus {
    /// The hash of what is trained on (vocabulary, tokens, document bounds, weights), wherever it lies: part
    /// of the run's identity.
    pub fn content_hash(&self) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_derive_key("starling 2026 corpus contents");
        match &self.tokeniser {
            Tokeniser::Bytes => hasher.update(b"bytes"),
            Tokeniser::Words { words } => hasher.update(words.join(" ").as_bytes()),
        };
        for (shard, weight) in &self.sources {
            hasher.update(shard.content_hash().as_bytes()).update(&weight.to_bits().to_le_bytes());
        }
        hasher.finalize()
    }
}

/// Opens everything the section names. Paths are relative to `base`; shards that must be built go to `cache`,
/// which is created if it is missing, and cleared of what killed processes left half-built.
pub fn open(config: &DataConfig, base: &Path, cache: &Path) -> Result<Corpus, CorpusError> {
    let problems = config.problems();
    if !problems.is_empty() {
        return Err(CorpusError::Problems(problems));
    }
    std::fs::create_dir_all(cache)
        .map_err(|source| CorpusError::Cache { path: cache.to_path_buf(), source })?;
    shard::remove_abandoned(cache);
    if let Some(synthetic) = &config.synthetic {
        let world = World::new(synthetic);
        let shard = generated(&world, synthetic, cache)?;
        return Ok(Corpus {
            tokeniser: world.tokeniser(),
            sources: vec![(shard, 1.0)],
            synthetic: Some(world),
        });
    }
    let sources = config
        .sources
        .iter()
        .map(|source| Ok((open_source(source, base, cache)?, source.weight)))
        .collect::<Result<_, CorpusError>>()?;
    Ok(Corpus { tokeniser: Tokeniser::Bytes, sources, synthetic: None })
}

/// Why a corpus could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum CorpusError {
    /// The section itself cannot be meant.
    #[error("the [data] section cannot be used: {}", list(.0))]
    Problems(Vec<Problem>),
    /// The cache folder cannot be made.
    #[error(
        "could not create the folder {} for tokenised data: {source}; \
         make room, or choose another folder",
        path.display()
    )]
    Cache {
        /// Which folder.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// A text file could not be used.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A shard could not be used.
    #[error(transparent)]
    Shard(#[from] ShardError),
    /// A shard is not one of bytes.
    #[error(
        "the shard {} has a vocabulary of {found}, and files are trained on as bytes, a vocabulary of {}; \
         build the shard again from its text",
        path.display(),
        Tokeniser::Bytes.vocabulary()
    )]
    Vocabulary {
        /// Which shard.
        path: PathBuf,
        /// The size of its vocabulary.
        found: u32,
    },
    /// A text was written to while it was read.
    #[error(
        "the text file {} changed while it was being tokenised, so nothing was kept of it; start again \
         when it is complete",
        path.display()
    )]
    Changed {
        /// Which file.
        path: PathBuf,
    },
}

fn list(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; ")
}

fn open_source(source: &SourceConfig, base: &Path, cache: &Path) -> Result<Shard, CorpusError> {
    let path = base.join(&source.path);
    if path.is_dir() {
        return Err(TextError::Folder { path }.into());
    }
    let shard = match FileKind::of(&path) {
        FileKind::Shard => Shard::open(&path)?,
        FileKind::Text => tokenised(&path, source, cache)?,
    };
    if shard.vocabulary() as usize != Tokeniser::Bytes.vocabulary() {
        return Err(CorpusError::Vocabulary { path, found: shard.vocabulary() });
    }
    Ok(shard)
}

/// The shard of a text file, from the cache if it is there.
fn tokenised(path: &Path, source: &SourceConfig, cache: &Path) -> Result<Shard, CorpusError> {
    let text_hash = hash_of(text::open(path)?)
        .map_err(|error| TextError::Unreadable { path: path.to_path_buf(), source: error })?;
    let name = blake3::Hasher::new_derive_key("starling 2026 cached text shard")
        .update(&shard::VERSION.to_le_bytes())
        .update(&text::SPLIT_VERSION.to_le_bytes())
        .update(&[source.split as u8])
        .update(text_hash.as_bytes())
        .finalize();
    let cached = cache.join(format!("{}.shard", name.to_hex()));
    if let Ok(shard) = Shard::open(&cached) {
        return Ok(shard); // a missing or damaged one is built again
    }
    let (shard, read_hash) = text::build(path, source.split, &cached)?;
    if read_hash != text_hash {
        let _ = std::fs::remove_file(&cached); // its name would promise other contents
        return Err(CorpusError::Changed { path: path.to_path_buf() });
    }
    Ok(shard)
}

/// The shard of a generated corpus, from the cache if it is there.
fn generated(world: &World, config: &SyntheticConfig, cache: &Path) -> Result<Shard, CorpusError> {
    let name = blake3::Hasher::new_derive_key("starling 2026 cached synthetic shard")
        .update(&shard::VERSION.to_le_bytes())
        .update(&synthetic::GRAMMAR_VERSION.to_le_bytes())
        .update(&config.seed.to_le_bytes())
        .update(&config.languages.to_le_bytes())
        .update(&config.documents.to_le_bytes())
        .finalize();
    let cached = cache.join(format!("{}.shard", name.to_hex()));
    if let Ok(shard) = Shard::open(&cached) {
        return Ok(shard);
    }
    let mut writer = ShardWriter::create(&cached, world.tokeniser().vocabulary() as u32)?;
    for index in 0..u64::from(config.documents) {
        writer.push(&world.document(index))?;
    }
    Ok(writer.finish()?)
}

fn hash_of(mut file: File) -> io::Result<blake3::Hash> {
    let mut hasher = blake3::Hasher::new();
    io::copy(&mut file, &mut hasher)?;
    Ok(hasher.finalize())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Split;

    struct Desk {
        folder: tempfile::TempDir,
    }

    impl Desk {
        fn with(text: &str) -> Desk {
            let desk = Desk { folder: tempfile::tempdir().unwrap() };
            desk.write(text);
            desk
        }

        fn write(&self, text: &str) {
            std::fs::write(self.folder.path().join("a.txt"), text).unwrap();
        }

        fn open(&self, split: Split) -> Result<Corpus, CorpusError> {
            let sources = vec![SourceConfig { path: "a.txt".into(), weight: 2.0, split }];
            open(&DataConfig { sources, ..DataConfig::default() }, self.folder.path(), &self.cache())
        }

        fn cache(&self) -> PathBuf {
            self.folder.path().join("cache")
        }

        fn cached(&self) -> Vec<PathBuf> {
            let mut cached: Vec<PathBuf> =
                std::fs::read_dir(self.cache()).unwrap().map(|entry| entry.unwrap().path()).collect();
            cached.sort();
            cached
        }
    }

    #[test]
    fn a_second_start_reuses_the_shard() {
        let desk = Desk::with("one\n\ntwo");
        let first = desk.open(Split::BlankLine).unwrap();
        let built = std::fs::metadata(&desk.cached()[0]).unwrap().modified().unwrap();
        let second = desk.open(Split::BlankLine).unwrap();
        assert_eq!(std::fs::metadata(&desk.cached()[0]).unwrap().modified().unwrap(), built);
        assert_eq!(first.content_hash(), second.content_hash());
        assert_eq!((first.sources[0].0.documents(), first.sources[0].1), (2, 2.0));
    }

    #[test]
    fn an_edited_text_or_another_split_is_another_shard() {
        let desk = Desk::with("one\ntwo");
        let first = desk.open(Split::BlankLine).unwrap().content_hash();
        let by_line = desk.open(Split::Line).unwrap().content_hash();
        desk.write("one\nthree");
        let edited = desk.open(Split::BlankLine).unwrap().content_hash();
        assert!(first != by_line && first != edited);
        assert_eq!(desk.cached().len(), 3);
    }

    #[test]
    fn a_damaged_cached_shard_is_built_again() {
        let desk = Desk::with("one\n\ntwo");
        let hash = desk.open(Split::BlankLine).unwrap().content_hash();
        std::fs::write(&desk.cached()[0], b"STARSHRD and then nothing").unwrap();
        assert_eq!(desk.open(Split::BlankLine).unwrap().content_hash(), hash);
    }

    #[test]
    fn a_missing_text_is_named() {
        let desk = Desk::with("x");
        std::fs::remove_file(desk.folder.path().join("a.txt")).unwrap();
        assert!(desk.open(Split::Line).unwrap_err().to_string().contains("a.txt"));
    }

    #[test]
    fn a_text_may_have_any_name() {
        let desk = Desk::with("x");
        std::fs::write(desk.folder.path().join("README"), "one\n\ntwo").unwrap();
        let sources = vec![SourceConfig { path: "README".into(), weight: 1.0, split: Split::BlankLine }];
        let config = DataConfig { sources, ..DataConfig::default() };
        let corpus = open(&config, desk.folder.path(), &desk.cache()).unwrap();
        assert_eq!(corpus.sources[0].0.documents(), 2);
    }

    #[test]
    fn a_folder_is_refused_whatever_its_name() {
        for name in ["texts", "texts.shard"] {
            let desk = Desk::with("x");
            std::fs::create_dir(desk.folder.path().join(name)).unwrap();
            let sources = vec![SourceConfig { path: name.into(), weight: 1.0, split: Split::Line }];
            let config = DataConfig { sources, ..DataConfig::default() };
            let refused = open(&config, desk.folder.path(), &desk.cache()).unwrap_err().to_string();
            assert!(refused.contains(name) && refused.contains("is a folder"), "{refused}");
        }
    }

    #[test]
    fn a_section_with_problems_is_refused_before_anything_is_made() {
        let folder = tempfile::tempdir().unwrap();
        let cache = folder.path().join("cache");
        let refused = open(&DataConfig::default(), folder.path(), &cache);
        assert!(matches!(refused, Err(CorpusError::Problems(problems)) if problems.len() == 1));
        assert!(!cache.exists());
    }

    #[test]
    fn a_shard_of_words_is_not_taken_for_bytes() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = ShardWriter::create(&folder.path().join("w.shard"), 300).unwrap();
        writer.push(&[1, 2]).unwrap();
        writer.finish().unwrap();
        let sources = vec![SourceConfig { path: "w.shard".into(), weight: 1.0, split: Split::Line }];
        let config = DataConfig { sources, ..DataConfig::default() };
        let refused = open(&config, folder.path(), &folder.path().join("cache"));
        assert!(matches!(refused, Err(CorpusError::Vocabulary { found: 300, .. })));
    }

    #[test]
    fn synthetic_languages_are_generated_once_and_hold_what_the_world_says() {
        let folder = tempfile::tempdir().unwrap();
        let synthetic = SyntheticConfig { documents: 50, ..SyntheticConfig::default() };
        let config = DataConfig { synthetic: Some(synthetic), ..DataConfig::default() };
        let corpus = open(&config, folder.path(), folder.path()).unwrap();
        let world = corpus.synthetic.as_ref().unwrap();
        let shard = &corpus.sources[0].0;
        let mut tokens = Vec::new();
        shard.read(shard.document(7).unwrap(), &mut tokens);
        assert_eq!((shard.documents(), tokens), (50, world.document(7)));
        let again = open(&config, folder.path(), folder.path()).unwrap();
        assert_eq!(again.content_hash(), corpus.content_hash());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
