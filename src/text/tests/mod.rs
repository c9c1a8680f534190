//! Proofs of the room.
