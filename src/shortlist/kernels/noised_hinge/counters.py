"""Counters that also hold the seed: words of 64 bits, the lower half random, the upper half a count from zero.

A counter tells the last of several programs that it is the last. The lower half of the first counter is the seed, so
one draw from a generator gives a kernel its seed and all its counters. Their order:

1. one for the rows that are done,
2. one for the samples of each row,
3. one for the parts of each row that are read,
4. one for the splits of each sample of each row.
"""

import triton
import triton.language as tl

SEED_BITS = 32
_SEED_BITS = tl.constexpr(SEED_BITS)
_ONE = tl.constexpr(1 << SEED_BITS)
_SEED_MASK = tl.constexpr((1 << SEED_BITS) - 1)


def counters_needed(num_rows: int, *, with_parts: bool, split_samples: int) -> int:
    """``split_samples`` is the number of samples, or 0 if they are not split."""
    return 1 + num_rows * (1 + with_parts + split_samples)


@triton.jit
def samples_counter(counters, row):
    return counters + 1 + row


@triton.jit
def parts_counter(counters, num_rows, row):
    return counters + 1 + num_rows + row


@triton.jit
def splits_counter(counters, num_rows, cell):
    return counters + 1 + 2 * num_rows + cell


@triton.jit
def seed_of(counters, key):
    """The seed, made different from that of other ranks or chunks by a key."""
    return (tl.load(counters) & _SEED_MASK) ^ key


@triton.jit
def is_last(counter, num_programs):
    """True for the last of the programs to call this. What the others stored before can then be read."""
    tl.debug_barrier()
    return (tl.atomic_add(counter, _ONE, sem="acq_rel") >> _SEED_BITS) == num_programs - 1
