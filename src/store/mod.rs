//! Core, experts, metadata and digests on disk, within a budget, through crashes.
