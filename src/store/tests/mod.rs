//! What the store promises, held against real and simulated disks.

mod basics;
