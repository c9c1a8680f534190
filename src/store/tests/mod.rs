//! What the store promises, held against real and simulated disks.

mod basics;
mod faults;
mod install;
mod sim;
mod support;
