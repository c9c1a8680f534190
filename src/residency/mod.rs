//! What is in RAM, what comes next, from where.
