//! What breaks is noticed, told once, and can be mended.

use starling_transport::endpoint::{Event, Limits};
use starling_transport::letter::Lane;

use crate::world::{Node, letter, two, two_with};

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_that_is_gone_is_closed_once() {
    let (mut a, b) = two().await;
    let key = b.key;
    drop(b);
    assert!(matches!(a.next().await, Event::Closed { with, .. } if with == key));
    assert!(!a.endpoint.is_connected(key));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_orderly_end_still_delivers_the_control_lane() {
    let (mut a, b) = two().await;
    b.endpoint.send(a.key, letter(Lane::State, "too large for a goodbye", 256 << 20)).unwrap();
    for number in 0..500 {
        b.send(&a, Lane::Control, &number.to_string());
    }
    b.endpoint.close();
    let mut number = 0;
    let why = loop {
        match a.next().await {
            Event::Letter { letter, .. } if letter.lane == Lane::Control => {
                assert_eq!(letter.head, number.to_string());
                number += 1;
            }
            Event::Letter { .. } => {}
            Event::Closed { why, .. } => break why,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(number, 500);
    assert!(why.contains("the peer closed"), "{why}");
    tokio::time::timeout(crate::world::PATIENCE, b.endpoint.closed()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_peer_can_be_dialed_again_after_it_was_closed() {
    let (mut a, b) = two().await;
    drop(b);
    a.closed().await;
    let mut b = Node::new();
    a.dial(&b);
    a.connected().await;
    a.send(&b, Lane::Work, "again");
    assert_eq!(&b.letter().await.head[..], b"again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_drops_both_ways_and_heals() {
    let (mut a, mut b) = two().await;
    a.endpoint.cut(b.key, true);
    for lane in Lane::ALL {
        a.send(&b, lane, "lost");
        b.send(&a, lane, "lost");
    }
    a.until("all were dropped", |traffic| traffic.dropped_cut == 8).await;
    a.endpoint.cut(b.key, false);
    for lane in Lane::ALL {
        a.send(&b, lane, "after");
        assert_eq!(&b.letter().await.head[..], b"after");
        b.send(&a, lane, "after");
        assert_eq!(&a.letter().await.head[..], b"after");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_that_is_half_sent_when_the_way_is_cut_goes_on_after_it() {
    let (a, mut b) = two().await;
    a.endpoint.shape(b.key, Some(("slow".to_owned(), "200mbit,5ms".parse().unwrap())));
    a.endpoint.send(b.key, letter(Lane::State, "long", 4 << 20)).unwrap();
    a.until("it is on its way", |traffic| traffic.shaped_bytes > 0).await;
    a.endpoint.cut(b.key, true);
    a.send(&b, Lane::Control, "lost");
    a.endpoint.cut(b.key, false);
    assert_eq!(b.letter().await, letter(Lane::State, "long", 4 << 20));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_letter_over_the_receivers_limit_closes_the_connection_with_the_reason() {
    let of_b = Limits { body_bytes: 1000, ..Limits::default() };
    let (mut a, mut b) = two_with(Limits::default(), of_b).await;
    a.endpoint.send(b.key, letter(Lane::Work, "", 1001)).unwrap();
    let why = b.closed().await;
    assert!(why.contains("1001 bytes is over the limit of 1000"), "{why}");
    a.closed().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_at_an_address_is_unreachable_and_the_next_address_is_tried() {
    let (mut a, mut b) = (Node::new(), Node::new());
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut contact = b.contact();
    contact.addresses = vec![free.to_string(), "no such address".to_owned()];
    a.endpoint.dial(contact.clone(), vec![]);
    let why = a.unreachable().await;
    assert!(why.starts_with("no answer: ") && why.contains("no such address"), "{why}");
    contact.addresses.push(b.address().to_string());
    a.endpoint.dial(contact, vec![]);
    a.connected().await;
    b.connected().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_over_the_limit_are_refused_with_the_reason() {
    let mut full = Node::with(Limits { connections: 1, ..Limits::default() });
    let (mut first, mut second) = (Node::new(), Node::new());
    first.dial(&full);
    first.connected().await;
    full.connected().await;
    second.dial(&full);
    let why = second.unreachable().await;
    assert!(why.starts_with("refused: all 1 connections are taken"), "{why}");
    assert_eq!(full.refused().await.0, Some(second.key));
    drop(first);
    full.closed().await;
}
