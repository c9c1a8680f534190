//! The test hub by hand: `cargo run --example testhub -- FOLDER ORG/NAME [plain]`.
//!
//! Prints its address and serves until it is stopped. `plain` leaves out the offer of Xet.

#[path = "../tests/support/mod.rs"]
mod support;

#[allow(clippy::print_stdout, reason = "a program for a person at a terminal")]
fn main() {
    let mut words = std::env::args().skip(1);
    let (Some(folder), Some(repo)) = (words.next(), words.next()) else {
        println!("usage: testhub FOLDER ORG/NAME");
        return;
    };
    let config = support::Config {
        xet: words.next().as_deref() != Some("plain"),
        ..support::Config::default()
    };
    let hub = support::TestHub::with(config, vec![support::Repo::folder(&repo, &folder)]);
    println!("{}", hub.url());
    println!("commit {}", hub.commit(&repo));
    loop {
        std::thread::park();
    }
}
