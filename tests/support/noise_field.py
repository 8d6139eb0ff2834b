"""The noise of the kernels, all of it, in plain numpy: their twin.

The kernels draw a small part of this noise. Here all of it is drawn, so the plain loss, given this noise, must agree
with them in value and gradient. Written from the description, not from the code of the kernels.
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


def cell_bits(positions: NDArray[np.int64], draw: int, keys: tuple[Bits, Bits]) -> Bits:
    with np.errstate(over="ignore"):
        position = mix(positions.astype(np.uint32) * np.uint32(0x9E3779B1) ^ keys[0])
        return mix(position ^ (np.uint32(draw) * np.uint32(0x85EBCA77) + keys[1]))


def uniform(bits: Bits) -> NDArray[np.float64]:
    return (bits.astype(np.float64) + 0.5) / 2**32


def own_normals(num_classes: int, seed: int, row: int, draw: int) -> NDArray[np.float64]:
    """One normal for each class: 31 bits for the size, one for the sign."""
    bits = cell_bits(np.arange(num_classes), draw, row_keys(seed, row, _OWN))
    size: NDArray[np.float64] = -ndtri(((bits >> np.uint32(1)).astype(np.float64) + 0.5) / 2**32)
    return np.where(bits & np.uint32(1), -size, size)


def tile_normals(num_classes: int, seed: int, row: int, draw: int) -> NDArray[np.float64]:
    """For each tile its normals from the largest down, assigned to its classes in random order."""
    normals: NDArray[np.float64] = _tile_normals(num_classes, seed, row, 1, first_draw=draw)[0]
    return normals


def _tile_normals(num_classes: int, seed: int, row: int, n_samples: int, first_draw: int = 0) -> NDArray[np.float64]:
    """``(B, L)``: all tiles of all draws at once."""
    num_tiles = -(-num_classes // T)
    keys = row_keys(seed, row, _TILE)
    starts = [cell_bits(np.arange(num_tiles), first_draw + draw, keys) for draw in range(n_samples)]
    bits = np.concatenate(starts)
    tile = np.arange(len(bits))
    field = np.empty((len(bits), T))
    is_taken = np.zeros((len(bits), T), bool)
    tail = -np.expm1(np.log1p(-uniform(bits)) / T)
    step = 0
    with np.errstate(over="ignore"):
        while not is_taken.all():
            step += 1
            onwards = np.uint32(0x68E31DA4) + np.uint32(step) * np.uint32(0x9E3779B1)
            bits = mix(bits + onwards)
            at = bits % np.uint32(T)
            is_fresh = ~is_taken[tile, at]
            field[tile[is_fresh], at[is_fresh]] = -ndtri(tail[is_fresh])
            is_taken[tile, at] = True
            bits = mix(bits + onwards)
            left = np.maximum(T - is_taken.sum(1), 1)
            following = tail + (1 - tail) * -np.expm1(np.log1p(-uniform(bits)) / left)
            tail = np.where(is_fresh, following, tail)
    return field.reshape(n_samples, num_tiles * T)[:, :num_classes]


def noise(
    scores: NDArray[np.float64], cutoffs: tuple[float, float] | None, seed: int, row: int, n_samples: int
) -> NDArray[np.float64]:
    """``(L, B)``: its own normal where a class is hot or the row is dense, that of its tile where it is cold.

    Args:
        scores: Those of a row.
        cutoffs: The level and, measured from it, the cold limit; None for a row that is sampled densely.
    """
    own = np.stack([own_normals(len(scores), seed, row, draw) for draw in range(n_samples)], -1)
    if cutoffs is None:
        return own
    level, cold_limit = cutoffs
    is_hot = scores - level > cold_limit
    return np.where(is_hot[:, None], own, _tile_normals(len(scores), seed, row, n_samples).T)
