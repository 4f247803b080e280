//! What a stage refuses: work of another version, doubles, shapes of another model, garbage. Nothing changes then.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::Arc;

use starling_model::config::{Architecture, ModelConfig};
use starling_model::engine::naive::Naive;
use starling_model::engine::{Dtype, Shape};
use starling_model::local::LocalStage;
use starling_model::lots::{Lots, Node};
use starling_model::optimiser::{OptimiserConfig, Update};
use starling_model::reduce::{add_bytes, settle_shared};
use starling_model::stage::{
    Commit, Folded, Hidden, Input, Keep, Meta, Microbatch, Output, Pending, Reduction, Stage, StageError,
    State, Want,
};

const LOTS: Lots = Lots { microbatches: 4, lots: 2 };

fn architecture() -> Architecture {
    ModelConfig { context: 4, width: 4, layers: 2, heads: 1, ..Default::default() }.architecture(9)
}

fn stage(units: std::ops::Range<usize>) -> LocalStage<Naive<f32>> {
    let engine = Arc::new(Naive::new(1).unwrap());
    LocalStage::new(engine, architecture(), units, OptimiserConfig::default().rule(), 1)
}

fn microbatch(index: u32, version: u64) -> Microbatch {
    Microbatch { step: version, index, version }
}

fn meta() -> Meta {
    Meta {
        shape: Shape { rows: 1, columns: 3 },
        samples: vec![7],
        positions: vec![0, 1, 2],
        documents: vec![0; 3],
        targets: vec![1, 2, 3],
    }
}

fn tokens() -> Input {
    Input::Tokens(vec![8, 1, 2])
}

/// Forward and backward of one microbatch through a whole model.
fn pending(stage: &mut LocalStage<Naive<f32>>, index: u32) -> Pending {
    let at = microbatch(index, stage.version());
    let (_, ticket) = stage.forward(at, tokens(), meta(), Keep::All).unwrap();
    stage.backward(ticket, None).unwrap().1
}

fn refusal<T>(result: Result<T, StageError>) -> StageError {
    result.err().expect("it must be refused")
}

#[test]
fn a_microbatch_is_counted_once() {
    let mut stage = stage(0..4);
    let first = pending(&mut stage, 0);
    assert_eq!(stage.fold(first, LOTS).unwrap(), Folded::Open);
    let again = pending(&mut stage, 0);
    assert!(matches!(refusal(stage.fold(again, LOTS)), StageError::Twice { microbatch: 0, lot: 0 }));
    let second = pending(&mut stage, 1);
    assert_eq!(stage.fold(second, LOTS).unwrap(), Folded::Sealed);
    let late = pending(&mut stage, 1);
    assert!(matches!(refusal(stage.fold(late, LOTS)), StageError::Twice { .. }));
    let early = pending(&mut stage, 3);
    assert_eq!(stage.fold(early, LOTS).unwrap(), Folded::Open);
    let early_again = pending(&mut stage, 3);
    assert!(matches!(refusal(stage.fold(early_again, LOTS)), StageError::Twice { microbatch: 3, .. }));
}

#[test]
fn a_revoked_lot_can_be_done_again() {
    let mut stage = stage(0..4);
    for index in 0..4 {
        let gradient = pending(&mut stage, index);
        stage.fold(gradient, LOTS).unwrap();
    }
    let whole = stage.read_sum(0, Node::root(2), 0..stage.gradient_len()).unwrap();
    assert_eq!(stage.revoke(0, 1), [0, 1]); // Both lots were merged, so both are gone.
    assert!(stage.held(0).is_empty());
    for index in [3, 2, 1, 0] {
        let gradient = pending(&mut stage, index);
        stage.fold(gradient, LOTS).unwrap();
    }
    assert_eq!(stage.read_sum(0, Node::root(2), 0..stage.gradient_len()).unwrap(), whole);
}

#[test]
fn merged_lots_are_one_sum_and_go_together() {
    let mut stage = stage(0..4);
    let all = 0..stage.gradient_len();
    assert!(matches!(refusal(stage.read_merged(0, all.clone())), StageError::Unknown(_)));
    let fold = |stage: &mut LocalStage<Naive<f32>>, index| {
        let gradient = pending(stage, index);
        stage.fold(gradient, LOTS).unwrap()
    };
    for index in [2, 3] {
        fold(&mut stage, index);
    }
    let second = stage.read_sum(0, Node::lot(1), all.clone()).unwrap();
    stage.merge(0);
    assert_eq!((stage.merged(0), stage.held(0)), (vec![1], Vec::new()));
    assert_eq!(stage.read_merged(0, all.clone()).unwrap(), second);
    for index in [0, 1] {
        fold(&mut stage, index);
    }
    let first = stage.read_sum(0, Node::lot(0), all.clone()).unwrap();
    stage.merge(0);
    let mut both = second;
    add_bytes(Dtype::F32, &mut both, &first);
    assert_eq!((stage.merged(0), stage.held(0)), (vec![0, 1], Vec::new()));
    assert_eq!(stage.read_merged(0, all).unwrap(), both);
    let again = pending(&mut stage, 2);
    assert!(matches!(refusal(stage.fold(again, LOTS)), StageError::Twice { microbatch: 2, lot: 1 }));
    assert_eq!(stage.revoke(0, 1), [0, 1]);
    assert!(stage.merged(0).is_empty());
}

#[test]
fn other_lots_than_the_steps_are_refused() {
    let mut stage = stage(0..4);
    let gradient = pending(&mut stage, 0);
    stage.fold(gradient, LOTS).unwrap();
    let gradient = pending(&mut stage, 1);
    let other = Lots { microbatches: 8, lots: 2 };
    assert!(matches!(refusal(stage.fold(gradient, other)), StageError::Lots { microbatches: 8, lots: 2 }));
    assert_eq!(stage.fold(gradient, LOTS).unwrap(), Folded::Sealed); // It is still there.
    let beyond = pending(&mut stage, 4);
    assert!(matches!(refusal(stage.fold(beyond, LOTS)), StageError::Lots { .. }));
}

#[test]
fn a_refused_fold_fixes_nothing() {
    let mut stage = stage(0..4);
    let gradient = pending(&mut stage, 0);
    for impossible in [(4, 0), (1, 3), (0, 0), (u32::MAX, u32::MAX)] {
        let lots = Lots { microbatches: impossible.0, lots: impossible.1 };
        assert!(matches!(refusal(stage.fold(gradient, lots)), StageError::Lots { .. }), "{impossible:?}");
    }
    assert_eq!(stage.fold(gradient, LOTS).unwrap(), Folded::Open);
    assert!(matches!(refusal(stage.fold(gradient, LOTS)), StageError::Pending(_)));
}

#[test]
fn work_of_a_distant_step_is_refused() {
    let mut stage = stage(0..4);
    let later = Microbatch { step: 2, index: 0, version: 0 };
    let error = refusal(stage.forward(later, tokens(), meta(), Keep::All));
    assert!(matches!(error, StageError::Step { step: 2, version: 0 }));
    assert!(matches!(
        refusal(stage.begin_reduce(Reduction { step: 2, attempt: 0 })),
        StageError::Step { .. }
    ));
    // The step after the next may begin, and survives the commit of the next.
    let next = Microbatch { step: 1, index: 0, version: 0 };
    let (_, ticket) = stage.forward(next, tokens(), meta(), Keep::All).unwrap();
    let (_, gradient) = stage.backward(ticket, None).unwrap();
    stage.fold(gradient, LOTS).unwrap();
    stage.apply(&Commit { step: 0, version: 0, update: None }).unwrap();
    assert_eq!(stage.revoke(1, 0), [0]);
}

#[test]
fn a_backward_refused_for_its_gradient_can_be_tried_again() {
    let mut first = stage(0..2);
    let (output, ticket) = first.forward(microbatch(0, 0), tokens(), meta(), Keep::All).unwrap();
    let Output::Hidden(hidden) = output else { panic!("the first stage gives hidden states") };
    let short = Hidden { bytes: vec![0; 4], ..hidden.clone() };
    assert!(matches!(refusal(first.backward(ticket, Some(short))), StageError::Hidden { .. }));
    assert!(first.backward(ticket, Some(hidden.clone())).is_ok());
    assert!(matches!(refusal(first.backward(ticket, Some(hidden))), StageError::Ticket(_)));
}

#[test]
fn work_of_another_version_is_refused() {
    let mut stage = stage(0..4);
    let error = refusal(stage.forward(microbatch(0, 1), tokens(), meta(), Keep::All));
    assert!(matches!(error, StageError::Version { asked: 1, have: 0 }));
    let gradient = pending(&mut stage, 0);
    let (_, ticket) = stage.forward(microbatch(1, 0), tokens(), meta(), Keep::All).unwrap();
    assert_eq!(stage.apply(&Commit { step: 0, version: 0, update: None }).unwrap(), 1);
    assert!(matches!(refusal(stage.fold(gradient, LOTS)), StageError::Pending(_)));
    assert!(matches!(refusal(stage.backward(ticket, None)), StageError::Ticket(_)));
}

#[test]
fn a_commit_is_applied_once_and_only_with_a_whole_gradient() {
    let mut stage = stage(0..4);
    let update = Update { lr: 0.1, gradient_scale: 1.0, bias1: 0.1, bias2: 0.05 };
    let commit = Commit { step: 0, version: 0, update: Some(update) };
    let before = stage.weight_hashes();
    assert!(matches!(refusal(stage.apply(&commit)), StageError::Incomplete { .. }));
    let reduction = Reduction { step: 0, attempt: 2 };
    stage.begin_reduce(reduction).unwrap();
    stage.write_reduced(reduction, 0, &vec![0; 4 * (stage.gradient_len() - 1)]).unwrap();
    assert!(matches!(refusal(stage.apply(&commit)), StageError::Incomplete { missing: 1 }));
    stage.write_reduced(reduction, stage.gradient_len() - 1, &1f32.to_le_bytes()).unwrap();
    let void = Reduction { step: 0, attempt: 1 };
    assert!(matches!(refusal(stage.begin_reduce(void)), StageError::Reduction(_)));
    assert!(matches!(refusal(stage.write_reduced(void, 0, &[0; 4])), StageError::Reduction(_)));
    // The embedding is used twice, and the sum over its uses has not arrived.
    assert!(matches!(refusal(stage.apply(&commit)), StageError::Incomplete { .. }));
    assert_eq!(stage.weight_hashes(), before);
    settle_shared(&mut [vec![&mut stage]], reduction).unwrap();
    assert_eq!(stage.apply(&commit).unwrap(), 1);
    let after = stage.weight_hashes();
    assert_ne!(after, before);
    assert_eq!(stage.apply(&commit).unwrap(), 1);
    assert_eq!(stage.weight_hashes(), after);
    assert!(matches!(
        refusal(stage.apply(&Commit { step: 5, version: 5, update: None })),
        StageError::Version { .. }
    ));
}

#[test]
fn a_microbatch_that_does_not_fit_the_model_is_refused() {
    let mut stage = stage(0..4);
    let mut try_with = |input: Input, change: fn(&mut Meta)| {
        let mut meta = meta();
        change(&mut meta);
        refusal(stage.forward(microbatch(0, 0), input, meta, Keep::All)).to_string()
    };
    assert!(try_with(Input::Tokens(vec![9, 0, 0]), |_| ()).contains("token 9 is not below 9"));
    assert!(try_with(Input::Tokens(vec![0]), |_| ()).contains("tokens of the microbatch has 1"));
    assert!(try_with(tokens(), |m| m.positions[2] = 4).contains("position 4"));
    assert!(try_with(tokens(), |m| m.targets[2] = 9).contains("target 9"));
    assert!(try_with(tokens(), |m| m.samples.clear()).contains("samples"));
    assert!(try_with(tokens(), |m| m.documents.clear()).contains("documents"));
    assert!(try_with(tokens(), |m| m.shape.columns = 5).contains("columns 5"));
    assert!(try_with(tokens(), |m| m.shape.columns = 0).contains("no tokens"));
    assert!(try_with(tokens(), |m| m.shape.rows = 0).contains("no tokens"));
    assert!(try_with(tokens(), |m| m.shape.rows = usize::MAX).contains("rows"));
    let hidden = Hidden { shape: meta().shape, width: 4, dtype: Dtype::F32, bytes: vec![0; 48] };
    assert!(
        try_with(Input::Hidden(hidden), |_| ())
            .contains("hidden states arrived where this stage takes tokens")
    );
}

#[test]
fn hidden_states_of_another_model_are_refused() {
    let mut last = stage(2..4);
    let hidden = |width, dtype, bytes| Hidden { shape: meta().shape, width, dtype, bytes: vec![0; bytes] };
    for wrong in [hidden(8, Dtype::F32, 96), hidden(4, Dtype::F64, 96), hidden(4, Dtype::F32, 47)] {
        let error = refusal(last.forward(microbatch(0, 0), Input::Hidden(wrong), meta(), Keep::All));
        assert!(error.to_string().contains("1 × 3 × 4 F32 in 48 bytes are expected"), "{error}");
    }
    let mut first = stage(0..2);
    let (_, ticket) = first.forward(microbatch(0, 0), tokens(), meta(), Keep::Input).unwrap();
    let error = refusal(first.backward(ticket, None));
    assert!(matches!(error, StageError::Kind { expected: "a gradient", .. }));
}

#[test]
fn pieces_outside_a_vector_are_refused() {
    let mut stage = stage(0..4);
    let len = stage.layout().len();
    assert!(matches!(refusal(stage.read(0, State::Weights, len..len + 1)), StageError::Piece { .. }));
    assert!(matches!(refusal(stage.read(0, State::Moment(2), 0..1)), StageError::Unknown(_)));
    assert!(matches!(refusal(stage.write(State::Weights, usize::MAX, &[0; 4])), StageError::Piece { .. }));
    assert!(matches!(refusal(stage.write(State::Weights, 0, &[0; 3])), StageError::Length { .. }));
    let reduction = Reduction { step: 0, attempt: 0 };
    stage.begin_reduce(reduction).unwrap();
    assert!(matches!(refusal(stage.write_reduced(reduction, len * 9, &[0; 4])), StageError::Piece { .. }));
    assert!(matches!(
        refusal(stage.read_sum(0, Node { level: 200, index: u32::MAX }, 0..1)),
        StageError::Node(_)
    ));
    assert!(matches!(refusal(stage.uses(reduction, "ln_f.weight")), StageError::Unknown(_)));
}

#[test]
fn inference_leaves_no_trace() {
    let stage = stage(0..4);
    let before = stage.weight_hashes();
    let loss = stage.infer(tokens(), &meta(), Want::Loss).unwrap();
    assert_eq!(stage.infer(tokens(), &meta(), Want::Loss).unwrap(), loss);
    let Output::Logits(logits) = stage.infer(tokens(), &meta(), Want::NextToken).unwrap() else {
        panic!("logits were asked for")
    };
    assert_eq!(logits.len(), 9);
    assert_eq!(stage.weight_hashes(), before);
}
