"""Random numbers as a function of where they are used: no state, nothing stored, the same in any order.

A cell is a class, or a tile of classes, and a sample within a row. Its 32 random bits are a keyed hash of the two, so
any program can ask for any cell at any time, and the twin in plain numpy (``tests/support/noise_field.py``) can compute
all cells.
"""

import triton
import triton.language as tl

# What the bits are for: the noise of a class, or that of a tile. They never share bits.
OWN_NOISE = tl.constexpr(0)
TILE_NOISE = tl.constexpr(1)


@triton.jit
def mix(x):
    """A bijection of 32 bits: each bit of the input flips about half of the output (Wellons, 2018)."""
    x = x ^ (x >> 16)
    x = x * tl.full([], 0x7FEB352D, tl.uint32)
    x = x ^ (x >> 15)
    x = x * tl.full([], 0x846CA68B, tl.uint32)
    return x ^ (x >> 16)


@triton.jit
def row_keys(seed, row, PURPOSE: tl.constexpr):
    """Two keys, one for positions and one for samples, both made of the seed, the row and the purpose."""
    first = tl.full([], 0x243F6A88 + 2 * PURPOSE, tl.uint32)
    second = tl.full([], 0x85A308D3 + 2 * PURPOSE, tl.uint32)
    first = mix(mix(first) ^ seed.to(tl.uint32))
    second = mix(mix(second) ^ seed.to(tl.uint32))
    first = mix(first ^ (seed >> 32).to(tl.uint32))
    second = mix(second ^ (seed >> 32).to(tl.uint32))
    return mix(first ^ row.to(tl.uint32)), mix(second ^ row.to(tl.uint32))


@triton.jit
def cell_bits(position, sample, keys):
    """The 32 bits of a cell; ``position`` is a class or a tile."""
    position_hash = mix(position.to(tl.uint32) * tl.full([], 0x9E3779B1, tl.uint32) ^ keys[0])
    return mix(position_hash ^ (sample.to(tl.uint32) * tl.full([], 0x85EBCA77, tl.uint32) + keys[1]))


@triton.jit
def next_bits(bits, step):
    """More bits of the same cell. The number of the step keeps them from repeating in a cycle."""
    return mix(bits + tl.full([], 0x68E31DA4, tl.uint32) + step * tl.full([], 0x9E3779B1, tl.uint32))


@triton.jit
def uniform(bits):
    """The centre of one of 2^32 equal intervals of (0, 1): never 0, and precise close to it."""
    return (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10


@triton.jit
def upper_tail(x):
    """P(Z > x) to three digits: good enough to decide where to look, not for values."""
    a = tl.abs(x)
    u = 1.0 / (1.0 + 0.3 * a)
    mills = u * (0.1182547 + u * (0.1372553 + u * (0.03589568 + u * 0.2087106)))
    tail = tl.exp(-0.5 * a * a) * mills
    return tl.where(x > 0, tail, 1.0 - tail)


@triton.jit
def at_upper_tail(p):
    """The z with P(Z > z) = p, to 5e-7 of its size for p from 1e-12 to 1/2 (and by symmetry above)."""
    w = -tl.log(4.0 * p * (1.0 - p))
    c = w - 2.75
    near = 4.73403342e-07
    near = near * c - 3.62480918e-06
    near = near * c - 1.20856684e-05
    near = near * c + 0.000295470938
    near = near * c - 0.00147198522
    near = near * c - 0.00712172431
    near = near * c + 0.345537288
    near = near * c + 2.21011827
    r = tl.sqrt(tl.maximum(w, 0.0)) - 3.9
    far = 3.69660739e-05
    far = far * r - 0.000133300317
    far = far * r + 0.000148493965
    far = far * r - 0.000139004483
    far = far * r + 0.000516058539
    far = far * r - 0.00147836884
    far = far * r + 0.00219109215
    far = far * r + 1.42725204
    far = far * r + 5.28752898
    return (1.0 - 2.0 * p) * tl.where(w < 5.4, near, far)


@triton.jit
def normal(bits):
    """A standard normal: 31 bits for the size and one for the sign, so both tails are equally precise."""
    size = at_upper_tail(((bits >> 1).to(tl.float32) + 0.5) * 2.3283064365386963e-10)
    return tl.where((bits & 1) == 0, size, -size)


@triton.jit
def largest_tail(u, n):
    """Upper-tail probability of the largest of n uniforms, ``1 - (1 - u)^(1/n)``, without cancellation."""
    log = tl.where(u < 0.015625, u * (1.0 + u * (0.5 + u * (0.33333334 + 0.25 * u))), -tl.log(1.0 - u))
    y = log / n
    series = y * (1.0 - y * (0.5 - y * (0.16666667 - y * 0.041666668)))
    return tl.where(y < 0.03, series, 1.0 - tl.exp(-y))
