use proptest::prelude::*;

use super::*;
use crate::frame::Cutter;

const LIMIT: u64 = 1 << 20;

fn assembler() -> Assembler {
    Assembler::new(&Lane::ALL, LIMIT)
}

fn letter(lane: Lane, head: &[u8], body: &[&[u8]]) -> Letter {
    let body = body.iter().map(|segment| Bytes::copy_from_slice(segment)).collect();
    Letter { lane, head: Bytes::copy_from_slice(head), body }
}

fn wire(letter: Letter, frame_bytes: usize) -> Vec<u8> {
    let mut cutter = Cutter::new(letter);
    std::iter::from_fn(|| cutter.next_frame(frame_bytes))
        .flat_map(|frame| frame.pieces().collect::<Vec<_>>().concat())
        .collect()
}

/// As it arrives: one segment at most.
fn joined(letter: &Letter) -> (Lane, Vec<u8>, Vec<u8>) {
    (letter.lane, letter.head.to_vec(), letter.body.concat())
}

#[test]
fn an_empty_letter_arrives() {
    let got = assembler().feed(&wire(letter(Lane::Control, b"", &[]), 100)).unwrap();
    assert_eq!(got, [letter(Lane::Control, b"", &[])]);
}

#[test]
fn a_more_urgent_letter_overtakes_between_frames() {
    let mut slow = Cutter::new(letter(Lane::State, b"slow", &[&[1; 100]]));
    let mut fast = Cutter::new(letter(Lane::Work, b"fast", &[&[2; 100]]));
    let mut stream = Vec::new();
    for frame in [slow.next_frame(50), fast.next_frame(500), slow.next_frame(500)] {
        stream.extend(frame.unwrap().pieces().flatten());
    }
    let got = assembler().feed(&stream).unwrap();
    assert_eq!(got.iter().map(|letter| letter.lane).collect::<Vec<_>>(), [Lane::Work, Lane::State]);
}

#[test]
fn a_body_over_the_limit_is_refused_before_anything_is_set_aside() {
    let mut stream = wire(letter(Lane::Work, b"h", &[]), 100);
    stream[HEADER_BYTES + 4..][..8].copy_from_slice(&u64::MAX.to_le_bytes());
    let error = assembler().feed(&stream).unwrap_err();
    assert_eq!(error, FrameError::TooLong { what: "body", got: u64::MAX, limit: LIMIT });
}

#[test]
fn what_is_announced_but_does_not_come_takes_no_memory() {
    let mut assembler = Assembler::new(&Lane::ALL, 1 << 40);
    let mut stream = wire(letter(Lane::Work, b"h", &[&[7; 1000]]), 100);
    stream[HEADER_BYTES + 4..][..8].copy_from_slice(&(1u64 << 40).to_le_bytes());
    let _ = assembler.feed(&stream[..90]);
    let capacity = assembler.letters[Lane::Work.index()].as_ref().unwrap().body.capacity();
    assert!(capacity <= FIRST_GROWTH_BYTES, "{capacity}");
}

#[test]
fn a_changed_payload_is_refused() {
    let mut stream = wire(letter(Lane::Sum, b"head", &[b"body"]), 100);
    *stream.last_mut().unwrap() ^= 1;
    assert_eq!(assembler().feed(&stream), Err(FrameError::Checksum));
}

#[test]
fn frames_out_of_order_are_refused() {
    let stream = wire(letter(Lane::Sum, &[0; 60], &[]), 40);
    let first = HEADER_BYTES + 40;
    assert!(matches!(assembler().feed(&stream[first..]), Err(FrameError::Order { .. })), "no beginning");
    let twice = [&stream[..first], &stream].concat();
    assert!(matches!(assembler().feed(&twice), Err(FrameError::Order { .. })), "two beginnings");
    let mut early = stream.clone();
    early[1] = 3;
    assert!(matches!(assembler().feed(&early), Err(FrameError::Order { .. })), "an early end");
    let mut late = stream;
    late[first + 1] = 0;
    assert!(matches!(assembler().feed(&late), Err(FrameError::Order { .. })), "no end");
}

#[test]
fn a_lane_of_the_other_connection_is_refused() {
    let stream = wire(letter(Lane::Control, b"h", &[]), 100);
    let error = Assembler::new(Lane::OF_BULK, LIMIT).feed(&stream).unwrap_err();
    assert!(matches!(error, FrameError::Unknown { .. }));
}

fn any_letter() -> impl Strategy<Value = Letter> {
    let bytes = || prop::collection::vec(any::<u8>(), 0..200).prop_map(Bytes::from);
    (0u8..4, bytes(), prop::collection::vec(bytes(), 0..4)).prop_map(|(lane, head, body)| Letter {
        lane: Lane::from_index(lane).unwrap(),
        head,
        body,
    })
}

proptest! {
    #[test]
    fn any_split_of_a_stream_of_letters_arrives_whole(
        letters in prop::collection::vec(any_letter(), 1..8),
        frame_bytes in 13usize..300,
        pieces in prop::collection::vec(1usize..64, 1..20),
    ) {
        let stream: Vec<u8> = letters.iter().flat_map(|letter| wire(letter.clone(), frame_bytes)).collect();
        let (mut assembler, mut got, mut rest) = (assembler(), Vec::new(), &stream[..]);
        for length in pieces.iter().cycle() {
            if rest.is_empty() { break }
            got.extend(assembler.feed(take(&mut rest, *length)).unwrap());
        }
        prop_assert_eq!(got.iter().map(joined).collect::<Vec<_>>(), letters.iter().map(joined).collect::<Vec<_>>());
        prop_assert!(got.iter().all(|letter| letter.body.len() <= 1));
    }

    #[test]
    fn any_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..2000), split in 1usize..100) {
        let mut assembler = assembler();
        let _ = bytes.chunks(split).try_for_each(|chunk| assembler.feed(chunk).map(drop));
    }

    #[test]
    fn a_stream_with_changed_bytes_never_panics_nor_gives_another_letter(
        letter in any_letter(),
        at in any::<prop::sample::Index>(),
        change in 1u8..,
    ) {
        let mut stream = wire(letter.clone(), 64);
        let at = at.index(stream.len());
        stream[at] ^= change;
        if let Ok(got) = assembler().feed(&stream) {
            // The lane and flags are not under the checksum: TLS protects them.
            for got in got {
                prop_assert_eq!((&got.head, got.body.concat()), (&letter.head, letter.body.concat()));
            }
        }
    }
}
