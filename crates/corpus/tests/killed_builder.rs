//! What a process that was killed while it built a shard leaves behind is cleared away, and nothing else.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

use starling_corpus::{DataConfig, ShardWriter, SourceConfig, Split};

/// In the environment of this test's child: the shard that it begins to build.
const BUILD: &str = "STARLING_TEST_BUILD";

#[test]
fn partial_files_go_when_their_process_is_gone() {
    if let Some(path) = std::env::var_os(BUILD) {
        return build_until_killed(Path::new(&path));
    }
    let folder = tempfile::tempdir().unwrap();
    let cache = folder.path().join("cache");
    std::fs::create_dir(&cache).unwrap();
    std::fs::write(folder.path().join("a.txt"), "one\ntwo").unwrap();
    // As if left long ago by a killed process; and things that are not ours.
    let others = ["film.partial", "a.shard.partial", "a.shard.1-x.partial", "b.1-2.partial", "a.shard.1-2"];
    for name in ["a.shard.1-0.partial", "a.shard.1-0.bounds.partial"].iter().chain(&others) {
        std::fs::write(cache.join(name), "begun").unwrap();
    }
    std::fs::write(cache.join("just.shard.1-0.partial"), "begun, perhaps not yet locked").unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "partial_files_go_when_their_process_is_gone", "--nocapture"])
        .env(BUILD, cache.join("c.shard"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("building")));
    for name in files_in(&cache).iter().filter(|name| !name.starts_with("just")) {
        make_old(&cache.join(name));
    }

    let of_the_child = |names: &[String]| names.iter().filter(|name| name.starts_with("c.shard.")).count();
    open(folder.path(), &cache);
    let while_it_lives = files_in(&cache);
    child.kill().unwrap();
    child.wait().unwrap();
    open(folder.path(), &cache);
    let after = files_in(&cache);

    assert_eq!((of_the_child(&while_it_lives), of_the_child(&after)), (2, 0));
    for names in [while_it_lives, after] {
        assert!(!names.iter().any(|name| name.starts_with("a.shard.1-0")), "{names:?}");
        assert!(others.iter().all(|other| names.iter().any(|name| name == other)), "{names:?}");
        assert!(names.iter().any(|name| name == "just.shard.1-0.partial"), "{names:?}");
    }
}

fn build_until_killed(path: &Path) {
    let mut writer = ShardWriter::create(path, 9).unwrap();
    writer.push(&[1, 2]).unwrap();
    println!("\nbuilding");
    let _ = std::io::stdin().read(&mut [0]); // returns only if the parent is gone
}

fn open(base: &Path, cache: &Path) {
    let sources = vec![SourceConfig { path: "a.txt".into(), weight: 1.0, split: Split::Line }];
    starling_corpus::open(&DataConfig { sources, ..DataConfig::default() }, base, cache).unwrap();
}

fn files_in(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

fn make_old(path: &Path) {
    let file = std::fs::File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(3600)).unwrap();
}
