"""Words of 64 bits whose lower half is random and whose upper half counts.

The lower half of one of them is the seed of a call. The upper half of each begins at zero and tells the last of several
programs that it is the last. So one draw from a generator gives a kernel its seed and all of its counters: the first
word counts rows that are done, and has the seed; then come the draws of each row, the parts of each row that are read,
and the parts of each draw of each row.
"""

import triton
import triton.language as tl

SEED_BITS = 32
_SEED_BITS = tl.constexpr(SEED_BITS)
_ONE = tl.constexpr(1 << SEED_BITS)
_SEED_MASK = tl.constexpr((1 << SEED_BITS) - 1)


def words_needed(num_rows: int, *, parts: bool, split_draws: int) -> int:
    """For the counters of so many rows: with parts or without, and with so many draws, if these are split."""
    return 1 + num_rows * (1 + parts + split_draws)


@triton.jit
def draws_counter(words, row):
    return words + 1 + row


@triton.jit
def parts_counter(words, num_rows, row):
    return words + 1 + num_rows + row


@triton.jit
def splits_counter(words, num_rows, cell):
    return words + 1 + 2 * num_rows + cell


@triton.jit
def seed_of(word, key):
    """The seed in a word, told apart by a key from the seeds of others."""
    return (tl.load(word) & _SEED_MASK) ^ key


@triton.jit
def is_last(word, programs):
    """Whether so many programs have come here now; what the others stored before is there to be read."""
    tl.debug_barrier()
    return (tl.atomic_add(word, _ONE, sem="acq_rel") >> _SEED_BITS) == programs - 1
