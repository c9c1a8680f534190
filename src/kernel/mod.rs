//! Arithmetic on slices: scalar is the meaning, SIMD twins are only faster.
