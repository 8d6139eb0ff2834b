"""Words of 64 bits whose lower half is random and whose upper half counts.

The lower half of one of them is the seed of a call. The upper half of each begins at zero and tells the last of several
programs that it is the last. So one draw from a generator gives a kernel its seed and all of its counters.
"""

import triton
import triton.language as tl

SEED_BITS = 32
_SEED_BITS = tl.constexpr(SEED_BITS)
_ONE = tl.constexpr(1 << SEED_BITS)
_SEED_MASK = tl.constexpr((1 << SEED_BITS) - 1)


@triton.jit
def seed_of(word, key):
    """The seed in a word, told apart by a key from the seeds of others."""
    return (tl.load(word) & _SEED_MASK) ^ key


@triton.jit
def is_last(word, programs):
    """Whether so many programs have come here now; what the others stored before is there to be read."""
    tl.debug_barrier()
    return (tl.atomic_add(word, _ONE, sem="acq_rel") >> _SEED_BITS) == programs - 1
