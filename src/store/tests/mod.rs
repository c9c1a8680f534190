//! What the store promises, held against real and simulated disks.

mod basics;
mod compact;
mod damage;
mod dice;
mod faults;
mod growth;
mod heat;
mod install;
mod names;
mod sim;
mod support;
