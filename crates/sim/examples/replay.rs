//! Replays one seed of the fuzzer, tells what happened, and shrinks it if it fails:
//! `cargo run -p starling-sim --example replay -- SEED`, or `FROM..TO` to hunt.

use starling_sim::fuzz;

fn main() {
    let argument = std::env::args().nth(1).unwrap_or("0".into());
    let mut numbers = argument.split("..").map(|number| number.parse::<u64>());
    let (Some(Ok(from)), to) = (numbers.next(), numbers.next()) else {
        return eprintln!("usage: replay SEED | FROM..TO");
    };
    if let Some(Ok(to)) = to {
        let mut events = 0;
        for seed in from..to {
            match fuzz::replay(seed) {
                Ok(outcome) => events += outcome.events,
                Err(violation) => println!("{seed}: {violation}"),
            }
        }
        return println!("{} scenarios, {events} events", to - from);
    }
    let scenario = fuzz::scenario(from);
    println!("{scenario:#?}");
    match starling_sim::world::World::new(&scenario).run_with_log() {
        (Ok(outcome), told) => {
            told.iter().for_each(|(at, what)| println!("{:>9.3} s  {what}", *at as f64 / 1e6));
            println!("done after {:.3} s, {} events", outcome.done_us as f64 / 1e6, outcome.events);
        }
        (Err(violation), told) => {
            told.iter().for_each(|(at, what)| println!("{:>9.3} s  {what}", *at as f64 / 1e6));
            let smallest = fuzz::shrink(scenario);
            println!("{}", fuzz::Failure { seed: from, violation, smallest });
        }
    }
}
