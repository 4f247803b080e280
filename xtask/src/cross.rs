//! `cargo xtask cross`: what cannot be seen on this machine's processor and system. The kernels for aarch64 run under
//! an emulator; the program is checked for Windows, neither linked nor run. Not a part of the gate: it takes compilers
//! of its own, and a quarter of an hour.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;

use xtask::tool::{ensure, program, root, run as run_tool, tool, works};

/// The tests of everything that is written for one instruction set, and of the bits that it promises.
const TESTS: [&str; 3] = ["engines", "golden", "same_bits"];
const TARGET: &str = "aarch64-unknown-linux-gnu";
const WINDOWS: &str = "x86_64-pc-windows-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
/// Where Debian puts the target's libraries.
const LIBRARIES: &str = "/usr/aarch64-linux-gnu";

#[derive(clap::Args)]
pub struct Arguments {
    /// Check this alone
    #[arg(long, value_name = "WHAT")]
    only: Option<What>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum What {
    /// The kernels' tests, under an emulator
    Aarch64,
    /// The whole program; it is neither linked nor run
    Windows,
}

pub fn run(arguments: &Arguments) -> Result<()> {
    let what = match &arguments.only {
        Some(what) => std::slice::from_ref(what),
        None => What::value_variants(),
    };
    what.iter().try_for_each(|what| match what {
        What::Aarch64 => aarch64(),
        What::Windows => windows(),
    })
}

fn aarch64() -> Result<()> {
    let compiler = Compiler::find()?;
    let install = "apt-get install --yes --no-install-recommends gcc-aarch64-linux-gnu libc6-dev-arm64-cross";
    ensure("a linker for aarch64", &format!("{LINKER} --version"), install)?;
    let install = "apt-get install --yes --no-install-recommends qemu-user";
    ensure("an emulator of aarch64", "qemu-aarch64 --version", install)?;
    let mut test = tool("cargo test --locked --package starling-model --target-dir target/cross --target");
    test.arg(TARGET).args(TESTS.iter().flat_map(|name| ["--test", name]));
    test.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        .env("CC_aarch64_unknown_linux_gnu", LINKER);
    test.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER", format!("qemu-aarch64 -L {LIBRARIES}"));
    compiler.set(&mut test);
    run_tool(&mut test)
}

/// C in dependencies needs Windows's compiler, which Debian has; the standard library is rustup's.
fn windows() -> Result<()> {
    let install = "apt-get install --yes --no-install-recommends gcc-mingw-w64-x86-64-posix";
    ensure("a C compiler for Windows", "x86_64-w64-mingw32-gcc --version", install)?;
    run_tool(tool("rustup target add").arg(WINDOWS))?;
    run_tool(tool("cargo check --locked --package starling --target-dir target/cross --target").arg(WINDOWS))
}

/// A compiler that has the standard library for the target.
enum Compiler {
    /// The one that is in use, with the library that rustup brings.
    Usual,
    /// Debian's, unpacked into `target/`: for machines that can reach Debian's packages, but not rustup's.
    Debian(PathBuf),
}

impl Compiler {
    fn find() -> Result<Compiler> {
        if works(tool("rustup target add").arg(TARGET)) {
            return Ok(Compiler::Usual);
        }
        let folder = root().join("target/cross/debian");
        if !works(&mut Compiler::Debian(folder.clone()).rustc("--version")) {
            eprintln!(
                "rustup does not bring the library for {TARGET}; unpacking Debian's compiler into target/cross"
            );
            unpack(&folder).context("neither rustup nor apt-get has a compiler for aarch64")?;
        }
        let compiler = Compiler::Debian(folder);
        if !works(&mut compiler.rustc("--version")) {
            bail!(
                "Debian's compiler was unpacked into target/cross and does not run; remove that folder and try again"
            );
        }
        Ok(compiler)
    }

    fn rustc(&self, argument: &str) -> Command {
        let mut rustc = match self {
            Compiler::Usual => program("rustc"),
            Compiler::Debian(folder) => program(folder.join("usr/bin/rustc")),
        };
        self.set(rustc.arg(argument));
        rustc
    }

    /// Has a command use it.
    fn set(&self, command: &mut Command) {
        if let Compiler::Debian(folder) = self {
            let libraries = ["usr/lib/x86_64-linux-gnu", "usr/lib/llvm-22/lib"].map(|name| folder.join(name));
            let libraries = std::env::join_paths(libraries).unwrap_or_else(|_| OsString::new());
            command.env("RUSTC", folder.join("usr/bin/rustc")).env("LD_LIBRARY_PATH", libraries);
        }
    }
}

/// Debian's newest compiler with its library for this machine and for the target, beside what the system has.
fn unpack(folder: &std::path::Path) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    run_tool(&mut tool("dpkg --add-architecture arm64"))?;
    run_tool(&mut tool("apt-get update"))?;
    let packages = "rustc-web libstd-rust-web-1.96 libstd-rust-web-dev libstd-rust-web-dev:arm64 libllvm22";
    run_tool(tool("apt-get download").args(packages.split_whitespace()).current_dir(folder))?;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|extension| extension == "deb") {
            run_tool(program("dpkg").arg("--extract").arg(&path).arg(folder))?;
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}
