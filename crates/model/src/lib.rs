//! The model crate: placeholder head.
pub mod batch;
pub mod checkpoint;
pub mod config;
pub mod cut;
pub mod engine;
pub mod generate;
pub mod gpt2;
pub mod layout;
pub mod local;
pub mod lots;
pub mod optimiser;
pub mod random;
pub mod reduce;
pub mod reference;
pub mod run;
pub mod stage;
