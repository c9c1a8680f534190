//! The room against its goldens, against f64, and against its own promises.

mod goldens;
mod invariance;
mod mathematics;
mod products;
mod routing;
mod sets;
mod support;
