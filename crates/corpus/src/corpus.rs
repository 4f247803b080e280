//! Everything a `[data]` section names, opened: shards are built into a cache where needed.
//!
//! A cached shard is named by the hash of what it was made from (the input's bytes, the options, the
//! versions of the rules), so a second start reuses it, an edited text gets another, and nothing is ever
//! stale. Owns the cache folder; never changes a source.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use crate::config::{DataConfig, FileKind, Problem, SourceConfig};
use crate::folder::{CorpusFolder, FolderError};
use crate::shard::{self, Shard, ShardError, ShardWriter};
use crate::shards::Shards;
use crate::synthetic::{self, SyntheticConfig, World};
use crate::text::{self, TextError};
use crate::tokeniser::Tokeniser;

/// An opened corpus: one vocabulary, and sources mixed by weight.
#[derive(Debug)]
pub struct Corpus {
    /// What the token ids stand for.
    pub tokeniser: Tokeniser,
    /// The shards of each source, and its weight.
    pub sources: Vec<(Shards, f64)>,
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
            Tokeniser::HuggingFace(file) => hasher
                .update(b"tokenizer.json")
                .update(blake3::hash(file.json().as_bytes()).as_bytes())
                .update(&self.tokeniser.end_of_text().to_le_bytes()),
            Tokeniser::Ids { vocabulary, end_of_text } => {
                hasher.update(b"ids").update(&vocabulary.to_le_bytes()).update(&end_of_text.to_le_bytes())
            }
        };
        for (shards, weight) in &self.sources {
            hasher.update(shards.content_hash().as_bytes()).update(&weight.to_bits().to_le_bytes());
        }
        hasher.finalize()
    }
}

/// Opens everything the section names. Paths are relative to `base`; shards that must be built go to `cache`,
/// which is created if it is missing, and cleared of what killed processes left half-built.
///
/// Text files are tokenised as the corpus folders beside them are, and as bytes if there are none.
pub fn open(config: &DataConfig, base: &Path, cache: &Path) -> Result<Corpus, CorpusError> {
    open_as(config, base, cache, None)
}

/// As [`open`], but text files are tokenised with this tokeniser, and every other source must have it already:
/// for judging a model by a text that it was not trained on.
pub fn open_as(
    config: &DataConfig,
    base: &Path,
    cache: &Path,
    tokeniser: Option<&Tokeniser>,
) -> Result<Corpus, CorpusError> {
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
            sources: vec![(shard.into(), 1.0)],
            synthetic: Some(world),
        });
    }
    let (folders, tokeniser) = folders(config, base, tokeniser)?;
    let sources = config.sources.iter().zip(folders).map(|(source, folder)| {
        let shards = match folder {
            Some(folder) => folder.shards()?,
            None => open_file(source, base, cache, &tokeniser)?.into(),
        };
        Ok((shards, source.weight))
    });
    Ok(Corpus { sources: sources.collect::<Result<_, CorpusError>>()?, tokeniser, synthetic: None })
}

/// The sources that are folders, opened, and the one tokeniser of all sources.
fn folders(
    config: &DataConfig,
    base: &Path,
    given: Option<&Tokeniser>,
) -> Result<(Vec<Option<CorpusFolder>>, Tokeniser), CorpusError> {
    let mut tokeniser = given.cloned();
    let mut folders = Vec::new();
    for source in &config.sources {
        let path = base.join(&source.path);
        if !path.is_dir() {
            folders.push(None);
            continue;
        }
        let folder = CorpusFolder::open(&path)?;
        if *tokeniser.get_or_insert_with(|| folder.tokeniser.clone()) != folder.tokeniser {
            return Err(CorpusError::Tokenisers { path });
        }
        folders.push(Some(folder));
    }
    Ok((folders, tokeniser.unwrap_or(Tokeniser::Bytes)))
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
    /// A corpus folder could not be used.
    #[error(transparent)]
    Folder(#[from] FolderError),
    /// A shard is not one of the corpus's tokeniser.
    #[error(
        "the shard {} has a vocabulary of {found}, and the corpus's tokeniser one of {wanted}; name the folder \
         that the shard was built in, with its tokeniser, or build it again from its text",
        path.display()
    )]
    Vocabulary {
        /// Which shard.
        path: PathBuf,
        /// The size of its vocabulary.
        found: u32,
        /// The size of the tokeniser's.
        wanted: usize,
    },
    /// A run has one vocabulary.
    #[error(
        "the corpus {} was built with another tokeniser than the sources before it, and a run has one \
         vocabulary; build it again with --tokeniser and the tokenizer.json of the others",
        path.display()
    )]
    Tokenisers {
        /// Which folder.
        path: PathBuf,
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

fn open_file(
    source: &SourceConfig,
    base: &Path,
    cache: &Path,
    tokeniser: &Tokeniser,
) -> Result<Shard, CorpusError> {
    let path = base.join(&source.path);
    let shard = match FileKind::of(&path) {
        FileKind::Shard => Shard::open(&path)?,
        FileKind::Text => tokenised(&path, source, cache, tokeniser)?,
    };
    let wanted = tokeniser.vocabulary();
    if shard.vocabulary() as usize != wanted {
        return Err(CorpusError::Vocabulary { path, found: shard.vocabulary(), wanted });
    }
    Ok(shard)
}

/// The shard of a text file, from the cache if it is there.
fn tokenised(
    path: &Path,
    source: &SourceConfig,
    cache: &Path,
    tokeniser: &Tokeniser,
) -> Result<Shard, CorpusError> {
    let text_hash = hash_of(text::open(path)?)
        .map_err(|error| TextError::Unreadable { path: path.to_path_buf(), source: error })?;
    let mut name = blake3::Hasher::new_derive_key("starling 2026 cached text shard");
    name.update(&shard::VERSION.to_le_bytes())
        .update(&text::SPLIT_VERSION.to_le_bytes())
        .update(&[source.split as u8])
        .update(text_hash.as_bytes());
    if let Tokeniser::HuggingFace(file) = tokeniser {
        name.update(file.json().as_bytes());
    }
    let name = name.finalize();
    let cached = cache.join(format!("{}.shard", name.to_hex()));
    if let Ok(shard) = Shard::open(&cached) {
        return Ok(shard); // a missing or damaged one is built again
    }
    let (shard, read_hash) = text::build(path, source.split, tokeniser, &cached)?;
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
    fn a_folder_that_is_no_corpus_is_refused_whatever_its_name() {
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
