//! A fast sum of an expert's bytes: tells rot from soundness at the speed of memory.
//!
//! SHA-256 at each first use would cost a token from disk more than its arithmetic where the
//! processor has no instructions for it. This sum proves nothing against anybody who wants to
//! deceive; it finds what disks do by accident. Each step is a bijection of the lane's state, so that
//! damage within one word of a lane always shows, and the rotation brings high bits down, so that two
//! flips of the same high bit do not cancel out.

const LANES: usize = 8;
const BLOCK: usize = LANES * 8;
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// A sum over bytes that come in pieces.
#[derive(Clone, Debug)]
pub(super) struct Quick {
    lanes: [u64; LANES],
    /// The beginning of a block that is not whole yet.
    held: [u8; BLOCK],
    held_len: usize,
    len: u64,
}

impl Quick {
    pub(super) fn new() -> Self {
        let mut lane = 0u64;
        Quick {
            lanes: [0; LANES].map(|_| {
                lane = lane.wrapping_add(ODD);
                lane
            }),
            held: [0; BLOCK],
            held_len: 0,
            len: 0,
        }
    }

    /// The sum of bytes that are all here.
    pub(super) fn of(bytes: &[u8]) -> u64 {
        let mut sum = Quick::new();
        sum.update(bytes);
        sum.finish()
    }

    pub(super) fn update(&mut self, mut bytes: &[u8]) {
        self.len += bytes.len() as u64;
        if self.held_len > 0 {
            let (fill, rest) = bytes.split_at(bytes.len().min(BLOCK - self.held_len));
            self.held[self.held_len..][..fill.len()].copy_from_slice(fill);
            self.held_len += fill.len();
            if self.held_len < BLOCK {
                return;
            }
            let block = self.held;
            self.block(&block);
            bytes = rest;
        }
        let (blocks, rest) = bytes.as_chunks::<BLOCK>();
        for block in blocks {
            self.block(block);
        }
        self.held[..rest.len()].copy_from_slice(rest);
        self.held_len = rest.len();
    }

    fn block(&mut self, block: &[u8; BLOCK]) {
        let (words, _) = block.as_chunks::<8>();
        for (lane, word) in self.lanes.iter_mut().zip(words) {
            *lane = step(*lane, u64::from_le_bytes(*word));
        }
    }

    /// The sum of everything so far.
    pub(super) fn finish(mut self) -> u64 {
        if self.held_len > 0 {
            self.held[self.held_len..].fill(0);
            let block = self.held;
            self.block(&block);
        }
        // The length tells a short last block from one that ends in zeros.
        let sum = self
            .lanes
            .iter()
            .fold(self.len, |sum, lane| step(sum, *lane));
        sum ^ (sum >> 32)
    }
}

fn step(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(ODD).rotate_left(29)
}

#[cfg(test)]
mod tests {
    use super::BLOCK;
    use super::Quick;

    fn bytes(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 131 % 251) as u8).collect()
    }

    #[test]
    fn pieces_of_any_length_give_the_sum_of_the_whole() {
        for len in [0, 1, 7, 63, 64, 65, 128, 1000] {
            let all = bytes(len);
            for piece in [1, 3, 63, 64, 65, 500] {
                let mut sum = Quick::new();
                all.chunks(piece).for_each(|piece| sum.update(piece));
                assert_eq!(sum.finish(), Quick::of(&all), "{len} in pieces of {piece}");
            }
        }
    }

    #[test]
    fn every_flipped_bit_every_cut_and_zeros_at_the_end_show() {
        let all = bytes(3 * BLOCK + 17);
        let sound = Quick::of(&all);
        for bit in 0..all.len() * 8 {
            let mut rotten = all.clone();
            rotten[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(Quick::of(&rotten), sound, "bit {bit}");
        }
        for cut in 0..all.len() {
            assert_ne!(Quick::of(&all[..cut]), sound, "cut at {cut}");
            let mut zeros = all[..cut].to_vec();
            zeros.resize(all.len(), 0);
            assert_ne!(Quick::of(&zeros), sound, "zeros from {cut}");
        }
        let mut longer = all.clone();
        longer.push(0);
        assert_ne!(Quick::of(&longer), sound);
    }

    #[test]
    fn the_same_bit_lost_twice_in_one_lane_does_not_cancel_out() {
        let all = bytes(8 * BLOCK);
        for bit in 0..64 {
            let mut rotten = all.clone();
            for block in [1, 4] {
                rotten[block * BLOCK + bit / 8] ^= 1 << (bit % 8);
            }
            assert_ne!(Quick::of(&rotten), Quick::of(&all), "bit {bit}");
        }
    }
}
