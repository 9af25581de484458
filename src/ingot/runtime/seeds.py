"""Random numbers that are pure functions of a seed, step, rank or position, and therefore the same on every machine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def permuted(places: NDArray[np.uint64], size: int, key: int) -> NDArray[np.uint64]:
    """Return the images of `places` under the pseudo-random permutation of range(size) for `key`, computed without a table.

    Four Feistel rounds permute range(n), where n is the next power of four; results >= size are permuted again.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    keys = [np.uint64(mix(key, i)) for i in range(4)]
    out = places.astype(np.uint64)
    outside = np.ones(out.shape, dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for k in keys:
            left, right = right, left ^ (scramble(right ^ k) & mask)
        out[outside] = (left << half) | right
        outside = out >= np.uint64(size)
    return out


def mix(*numbers: int) -> int:
    """Hash several integers to one 64-bit integer."""
    state = np.uint64(0x9E3779B97F4A7C15)
    for number in numbers:
        state = scramble(np.atleast_1d(state ^ np.uint64(number & 0xFFFFFFFFFFFFFFFF)))[0]
    return int(state)


def scramble(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's output function, a bijection of 64-bit integers whose results look random."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
