"""The noise of the lazy kernels laid out in full, cell by cell, in plain numpy: their twin.

The kernels look at a few cells of this field; here every cell is there, so that the plain loss, given this noise, must
agree with them in value and gradient. Written from the description, not from the kernels' way of going about it.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

Bits = NDArray[np.uint32]
T = 32
_OWN, _TILE = 0, 1


def mix(x: Bits) -> Bits:
    with np.errstate(over="ignore"):
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))


def row_keys(seed: int, row: int, purpose: int) -> tuple[Bits, Bits]:
    words = []
    for start in (0x243F6A88, 0x85A308D3):
        word = mix(np.array(start + 2 * purpose, np.uint32))
        for absorbed in (seed & 0xFFFFFFFF, seed >> 32, row):
            word = mix(word ^ np.uint32(absorbed))
        words.append(word)
    return words[0], words[1]


def cell_bits(places: NDArray[np.int64], draw: int, keys: tuple[Bits, Bits]) -> Bits:
    with np.errstate(over="ignore"):
        place = mix(places.astype(np.uint32) * np.uint32(0x9E3779B1) ^ keys[0])
        return mix(place ^ (np.uint32(draw) * np.uint32(0x85EBCA77) + keys[1]))


def uniform(bits: Bits) -> NDArray[np.float64]:
    return (bits.astype(np.float64) + 0.5) / 2**32


def own_normals(num_classes: int, seed: int, row: int, draw: int) -> NDArray[np.float64]:
    """One for each class: 31 bits for the size, one for the sign."""
    bits = cell_bits(np.arange(num_classes), draw, row_keys(seed, row, _OWN))
    size: NDArray[np.float64] = -ndtri(((bits >> np.uint32(1)).astype(np.float64) + 0.5) / 2**32)
    return np.where(bits & np.uint32(1), -size, size)


def tile_normals(num_classes: int, seed: int, row: int, draw: int) -> NDArray[np.float64]:
    """For each tile its normals from the largest down, at places in random order."""
    num_tiles = -(-num_classes // T)
    starts = cell_bits(np.arange(num_tiles), draw, row_keys(seed, row, _TILE))
    field = np.empty(num_tiles * T)
    with np.errstate(over="ignore"):
        for tile, bits in enumerate(starts):
            taken: set[int] = set()
            step = 0
            tail = -np.expm1(np.log1p(-uniform(bits)) / T)
            while len(taken) < T:
                step += 1
                onwards = np.uint32(0x68E31DA4) + np.uint32(step) * np.uint32(0x9E3779B1)
                bits = mix(bits + onwards)
                at = int(bits % T)
                fresh = at not in taken
                if fresh:
                    taken.add(at)
                    field[tile * T + at] = -ndtri(tail)
                bits = mix(bits + onwards)
                if fresh and len(taken) < T:
                    tail += (1 - tail) * -np.expm1(np.log1p(-uniform(bits)) / (T - len(taken)))
    return field[:num_classes]


def noise(
    scores: NDArray[np.float64], cold: tuple[float, float] | None, seed: int, row: int, num_draws: int
) -> NDArray[np.float64]:
    """``(L, B)``: its tile's normals where a class is cold, its own where it is hot or the row is short.

    Args:
        scores: Those of a row.
        cold: A level, and what scores of cold classes do not exceed, measured from it; None for a short row.
    """
    columns = []
    for draw in range(num_draws):
        own = own_normals(len(scores), seed, row, draw)
        if cold is None:
            columns.append(own)
        else:
            level, limit = cold
            hot = scores - level > limit
            columns.append(np.where(hot, own, tile_normals(len(scores), seed, row, draw)))
    return np.stack(columns, -1)
