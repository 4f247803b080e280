//! Every dependency must be usable under a licence that asks for no more than attribution.

use std::collections::{BTreeMap, VecDeque};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

use crate::spdx::Expression;
use xtask::tool::{output, tool};

/// Weak copyleft (MPL-2.0, LGPL) is left out on purpose: nothing needs it so far.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "Unlicense",
    "Zlib",
];

/// Checks all packages that Cargo.lock leads to, those of other platforms included.
pub fn check() -> Result<()> {
    let text = output(&mut tool("cargo metadata --format-version 1 --locked"))?;
    let metadata: Metadata =
        serde_json::from_str(&text).context("cannot read what `cargo metadata` printed")?;
    let objections = objections(&metadata);
    if objections.is_empty() {
        eprintln!("{} packages, all under allowed licences", metadata.packages.len());
        return Ok(());
    }
    bail!(
        "{} of {} packages cannot be used as they are:\n\n{}\n\nChoose another crate, or a version or feature \
         without it. If its licence asks for no more than attribution, add it to ALLOWED in \
         xtask/src/licences.rs and give the reason in the commit.",
        objections.len(),
        metadata.packages.len(),
        objections.join("\n")
    )
}

/// The part of `cargo metadata`'s answer that matters here.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    workspace_members: Vec<String>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    license_file: Option<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    dependencies: Vec<String>,
}

/// One line for each package that may not be used: which, why, and who brings it in.
fn objections(metadata: &Metadata) -> Vec<String> {
    let paths = paths_from_workspace(metadata);
    let mut lines = Vec::new();
    for package in &metadata.packages {
        if let Err(reason) = accept(package) {
            let path = paths.get(package.id.as_str()).map_or(package.name.clone(), |names| names.join(" → "));
            lines.push(format!("  {} {}: {reason}\n    through {path}", package.name, package.version));
        }
    }
    lines
}

fn accept(package: &Package) -> Result<(), String> {
    let Some(text) = &package.license else {
        return Err(match &package.license_file {
            Some(file) => format!("names no licence, only the file {file}: read it"),
            None => "names no licence".into(),
        });
    };
    match Expression::parse(text) {
        Ok(expression) if expression.satisfied_by(ALLOWED) => Ok(()),
        Ok(_) => Err(format!("its licence, `{text}`, is not on the list")),
        Err(error) => Err(format!("its licence, `{text}`, cannot be read: {error}")),
    }
}

/// For every package a shortest chain of names that leads to it from a crate of ours.
fn paths_from_workspace(metadata: &Metadata) -> BTreeMap<&str, Vec<&str>> {
    let names: BTreeMap<&str, &str> =
        metadata.packages.iter().map(|p| (p.id.as_str(), p.name.as_str())).collect();
    let nodes: BTreeMap<&str, &Node> = metadata.resolve.nodes.iter().map(|n| (n.id.as_str(), n)).collect();
    let mut paths: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    let mut waiting: VecDeque<&str> = VecDeque::new();
    for member in &metadata.workspace_members {
        paths.insert(member, vec![names[member.as_str()]]);
        waiting.push_back(member);
    }
    while let Some(id) = waiting.pop_front() {
        for dependency in &nodes[id].dependencies {
            if !paths.contains_key(dependency.as_str()) {
                let mut path = paths[id].clone();
                path.push(names[dependency.as_str()]);
                paths.insert(dependency, path);
                waiting.push_back(dependency);
            }
        }
    }
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    /// ours → serde → leaf, with the licences given for the last two.
    fn metadata(serde: Option<&str>, leaf: Option<&str>) -> Metadata {
        let package = |id: &str, license: Option<&str>| serde_json::json!({ "id": id, "name": id, "version": "1.0.0", "license": license, "license_file": null });
        let node =
            |id: &str, dependencies: &[&str]| serde_json::json!({ "id": id, "dependencies": dependencies });
        serde_json::from_value(serde_json::json!({
            "packages": [package("ours", Some("MIT")), package("serde", serde), package("leaf", leaf)],
            "workspace_members": ["ours"],
            "resolve": { "nodes": [node("ours", &["serde"]), node("serde", &["leaf"]), node("leaf", &[])] },
        }))
        .unwrap()
    }

    #[test]
    fn allowed_licences_raise_no_objection() {
        assert!(objections(&metadata(Some("MIT OR Apache-2.0"), Some("ISC"))).is_empty());
    }

    #[test]
    fn a_refused_licence_is_named_with_the_crate_that_brings_it_in() {
        let objections = objections(&metadata(Some("MIT"), Some("GPL-3.0-only")));
        assert_eq!(objections.len(), 1);
        assert!(objections[0].contains("leaf 1.0.0: its licence, `GPL-3.0-only`, is not on the list"));
        assert!(objections[0].contains("ours → serde → leaf"));
    }

    #[test]
    fn a_missing_or_unreadable_licence_is_an_objection() {
        let objections = objections(&metadata(None, Some("MIT OR")));
        assert_eq!(objections.len(), 2);
        assert!(objections[0].contains("names no licence"));
        assert!(objections[1].contains("cannot be read"));
    }
}
