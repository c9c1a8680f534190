//! The test hub by hand: `cargo run --example testhub -- FOLDER ORG/NAME`.
//!
//! Prints its address and serves until it is stopped.

#[path = "../tests/support/mod.rs"]
mod support;

#[allow(clippy::print_stdout, reason = "a program for a person at a terminal")]
fn main() {
    let mut words = std::env::args().skip(1);
    let (Some(folder), Some(repo)) = (words.next(), words.next()) else {
        println!("usage: testhub FOLDER ORG/NAME");
        return;
    };
    let hub = support::TestHub::folder(&repo, &folder);
    println!("{}", hub.url());
    println!("commit {}", hub.commit(&repo));
    loop {
        std::thread::park();
    }
}
