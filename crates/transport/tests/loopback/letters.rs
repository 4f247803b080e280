//! What is sent arrives, in the order of its urgency.

use bytes::Bytes;
use starling_transport::endpoint::{Event, Limits, NotSent, Standing};
use starling_transport::letter::{Lane, Letter, MAX_HEAD_BYTES};

use crate::world::{Node, letter, two, two_with};

#[tokio::test(flavor = "multi_thread")]
async fn letters_go_both_ways_in_all_lanes() {
    let (mut a, mut b) = two().await;
    for lane in Lane::ALL {
        let segments = vec![Bytes::from(vec![1; 300_000]), Bytes::new(), Bytes::from(vec![2; 5])];
        a.endpoint.send(b.key, Letter { lane, head: Bytes::from("to b"), body: segments.clone() }).unwrap();
        let got = b.letter().await;
        assert_eq!((got.lane, &got.head[..], got.body.len()), (lane, &b"to b"[..], 1));
        assert_eq!(got.body[0], segments.concat());
        b.send(&a, lane, "to a");
        assert_eq!(a.letter().await, letter(lane, "to a", 0));
    }
    let (sent, received) = (a.endpoint.traffic(), b.endpoint.traffic());
    assert_eq!((sent.sent_total().letters, received.received_total().letters), (4, 4));
    assert_eq!(received.received[Lane::Work.index()].bytes, 300_009);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_answer_of_the_gate_reaches_the_dialer_and_letters_wait_for_it() {
    let (mut a, mut b) = (Node::new(), Node::new());
    assert_eq!(a.endpoint.standing(b.key), Standing::Away);
    assert_eq!(a.endpoint.send(b.key, letter(Lane::Work, "x", 0)), Err(NotSent::NotConnected));
    a.dial(&b);
    a.send(&b, Lane::Work, "sent while dialing");
    assert_eq!(a.connected().await, (b.key, Some(b"welcome, alice".to_vec())));
    assert_eq!(b.connected().await, (a.key, None));
    assert!(a.endpoint.is_connected(b.key) && b.endpoint.is_connected(a.key));
    assert_eq!(&b.letter().await.head[..], b"sent while dialing");
    a.dial(&b); // does nothing
    a.send(&b, Lane::Work, "next");
    assert_eq!(&b.letter().await.head[..], b"next");
}

#[tokio::test(flavor = "multi_thread")]
async fn letters_of_one_lane_keep_their_order() {
    let (a, mut b) = two().await;
    for number in 0..1000 {
        let mut next = letter(Lane::Sum, "", number * 37 % 5000);
        next.head = Bytes::from(number.to_string());
        a.endpoint.send(b.key, next).unwrap();
    }
    for number in 0..1000 {
        assert_eq!(b.letter().await.head, number.to_string());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn control_and_work_overtake_a_large_state_on_a_slow_link() {
    let (a, mut b) = two().await;
    a.endpoint.shape(b.key, Some(("slow".to_owned(), "100mbit,1ms".parse().unwrap())));
    a.endpoint.send(b.key, letter(Lane::State, "state", 64 << 20)).unwrap();
    a.until("the state is on its way", |traffic| traffic.shaped_bytes > 100_000).await;
    a.send(&b, Lane::Work, "work");
    assert_eq!(b.letter().await.lane, Lane::Work);
    a.send(&b, Lane::Control, "control");
    assert_eq!(b.letter().await.lane, Lane::Control);
    assert_eq!(b.endpoint.traffic().received[Lane::State.index()].letters, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_shaped_letter_arrives_whole_and_after_its_time() {
    let (a, mut b) = two().await;
    a.endpoint.shape(b.key, Some(("slow".to_owned(), "80mbit,20ms".parse().unwrap())));
    let begun = std::time::Instant::now();
    a.endpoint.send(b.key, letter(Lane::Work, "slow", 1_000_000)).unwrap();
    assert_eq!(b.letter().await, letter(Lane::Work, "slow", 1_000_000));
    let took = begun.elapsed(); // 100 ms on the link and 20 ms of travel; no upper bound, the machine may be busy
    assert!(took.as_millis() >= 115, "{took:?}");
    a.endpoint.shape(b.key, None);
    a.send(&b, Lane::Work, "fast");
    assert_eq!(&b.letter().await.head[..], b"fast");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_lane_says_so_and_the_others_go_on() {
    let limits = Limits { queued_letters: 2, ..Limits::default() };
    let (a, silent) = (Node::with(limits), std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    let mut to = Node::new().contact();
    to.addresses = vec![silent.local_addr().unwrap().to_string()];
    a.endpoint.dial(to.clone(), vec![]); // never answered
    assert_eq!(a.endpoint.standing(to.key), Standing::Dialing);
    for expected in [Ok(()), Ok(()), Err(NotSent::Full)] {
        assert_eq!(a.endpoint.send(to.key, letter(Lane::Work, "", 0)), expected);
    }
    assert_eq!(a.endpoint.send(to.key, letter(Lane::Control, "", 0)), Ok(()));
    assert_eq!(a.endpoint.traffic().dropped_full, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_over_the_senders_own_limit_is_not_sent() {
    let limits = Limits { body_bytes: 100, ..Limits::default() };
    let (a, mut b) = two_with(limits, Limits::default()).await;
    assert_eq!(a.endpoint.send(b.key, letter(Lane::Work, "", 101)), Err(NotSent::TooLong));
    let head = Bytes::from(vec![0; MAX_HEAD_BYTES + 1]);
    assert_eq!(
        a.endpoint.send(b.key, Letter { lane: Lane::Work, head, body: vec![] }),
        Err(NotSent::TooLong)
    );
    let head = Bytes::from(vec![0; MAX_HEAD_BYTES]);
    a.endpoint.send(b.key, Letter { lane: Lane::Control, head, body: vec![] }).unwrap();
    assert_eq!(b.letter().await.head.len(), MAX_HEAD_BYTES);
}

#[tokio::test(flavor = "multi_thread")]
async fn when_both_dial_at_once_nothing_breaks() {
    let (mut a, mut b) = (Node::new(), Node::new());
    a.dial(&b);
    b.dial(&a);
    a.send(&b, Lane::Work, "early a");
    b.send(&a, Lane::Work, "early b");
    let (mut connected, mut letters) = (0, 0);
    for node in [&mut a, &mut b] {
        for _ in 0..3 {
            match node.next().await {
                Event::Connected { .. } => connected += 1,
                Event::Letter { .. } => letters += 1,
                other => panic!("{other:?}"),
            }
        }
    }
    assert_eq!((connected, letters), (4, 2));
    for number in 0..100 {
        a.send(&b, Lane::Sum, &number.to_string());
        b.send(&a, Lane::Sum, &number.to_string());
    }
    for number in 0..100 {
        assert_eq!(a.letter().await.head, number.to_string());
        assert_eq!(b.letter().await.head, number.to_string());
    }
}
