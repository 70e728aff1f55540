"""Random numbers that are the same on every machine.

The generator is Philox-4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011): a
bijection of 128-bit counters under a 64-bit key. Number i of a stream is a function of (seed, stream, i) alone, so any
part of it can be had without the rest. Integers become floats by exact operations only; normal variates use division,
square root and the contract's own logarithm, never that of NumPy or of the C library, which differ between machines.
"""

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from isograd.errors import InvalidProblemError
from isograd.numerics import reference as ref
from isograd.runtime.fenv import default_environment

Words = NDArray[np.uint32]

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_MASK: Final = np.uint64(0xFFFFFFFF)
_HALF: Final = np.uint64(32)
_CHUNK: Final = 1 << 15  # variates made at a time, so that intermediate results stay in the cache


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox-4x32-10: the block of four words of each counter, which the last axis (of size 4) holds."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key
    for _ in range(_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            (p1 >> _HALF) ^ c1 ^ np.uint64(k0),
            p1 & _MASK,
            (p0 >> _HALF) ^ c3 ^ np.uint64(k1),
            p0 & _MASK,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & 0xFFFFFFFF, (k1 + _KEY_STEPS[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def _checked(name: str, value: int, bits: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 1 << bits:
        raise InvalidProblemError(f"random: {name} is {value!r}; expected an integer from 0 to 2^{bits} - 1")
    return int(value)


def _blocks(index: NDArray[np.uint64], attempt: int, seed: int, stream: int) -> Words:
    """The blocks of some numbers of a stream; `attempt` tells several blocks of one number apart."""
    counter = np.empty((*index.shape, 4), np.uint32)
    counter[..., 0] = index & _MASK
    counter[..., 1] = index >> _HALF
    counter[..., 2] = stream
    counter[..., 3] = attempt
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32))


def _chunks(count: int) -> Iterator[tuple[slice, NDArray[np.uint64]]]:
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        yield slice(start, stop), np.arange(start, stop, dtype=np.uint64)


def _pairs(words: Words) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Two 64-bit integers of each block."""
    wide = words.astype(np.uint64)
    return (wide[..., 1] << _HALF) | wide[..., 0], (wide[..., 3] << _HALF) | wide[..., 2]


def integers(shape: int | tuple[int, ...], seed: int, stream: int = 0) -> NDArray[np.uint64]:
    """Uniform 64-bit integers. seed: 0 to 2^64 - 1; stream: 0 to 2^32 - 1, each an independent sequence."""
    seed, stream = _checked("seed", seed, 64), _checked("stream", stream, 32)
    out = np.empty(shape, np.uint64)
    flat = out.reshape(-1)
    for part, index in _chunks(flat.size):
        flat[part] = _pairs(_blocks(index, 0, seed, stream))[0]
    return out


def uniform(shape: int | tuple[int, ...], seed: int, stream: int = 0, dtype: Any = np.float32) -> NDArray[Any]:
    """Uniform variates in [0, 1): multiples of 2^-24 in float32, of 2^-53 in float64.

    The float32 variates are the float64 ones cut to 24 bits. seed and stream as in `integers`.
    """
    bits = {np.dtype(np.float32): 24, np.dtype(np.float64): 53}.get(np.dtype(dtype))
    if bits is None:
        raise InvalidProblemError(f"uniform: dtype is {np.dtype(dtype)}; accepted: float32, float64")
    top = integers(shape, seed, stream) >> np.uint64(64 - bits)
    with default_environment():
        return np.asarray(top.astype(np.float64) * 2.0**-bits, dtype)


def _polar(index: NDArray[np.uint64], seed: int, stream: int) -> NDArray[np.float64]:
    """Marsaglia's polar method; a number whose point misses the unit disc takes the block of its next attempt."""
    u, s = np.empty(index.shape), np.empty(index.shape)
    missing = np.arange(index.size)
    attempt = 0
    while missing.size:
        first, second = _pairs(_blocks(index[missing], attempt, seed, stream))
        # Odd multiples of 2^-53 around zero: symmetric, and never zero.
        a = (first >> np.uint64(11)).astype(np.float64) * 2.0**-52 + (2.0**-53 - 1.0)
        b = (second >> np.uint64(11)).astype(np.float64) * 2.0**-52 + (2.0**-53 - 1.0)
        square = a * a + b * b
        hit = square < 1.0
        u[missing[hit]], s[missing[hit]] = a[hit], square[hit]
        missing = missing[~hit]
        attempt += 1
    return np.asarray(u * np.sqrt(-2.0 * ref.log(s) / s))


def normal(shape: int | tuple[int, ...], seed: int, stream: int = 0, dtype: Any = np.float32) -> NDArray[Any]:
    """Standard normal variates, computed in float64; float32 rounds them. seed and stream as in `integers`."""
    if np.dtype(dtype) not in (np.dtype(np.float32), np.dtype(np.float64)):
        raise InvalidProblemError(f"normal: dtype is {np.dtype(dtype)}; accepted: float32, float64")
    seed, stream = _checked("seed", seed, 64), _checked("stream", stream, 32)
    out = np.empty(shape, np.float64)
    flat = out.reshape(-1)
    with default_environment():
        for part, index in _chunks(flat.size):
            flat[part] = _polar(index, seed, stream)
        return out.astype(dtype, copy=False)


def permutation(count: int, seed: int, stream: int = 0) -> NDArray[np.int64]:
    """A random order of range(count). seed and stream as in `integers`."""
    return np.argsort(integers(count, seed, stream), kind="stable").astype(np.int64, copy=False)


# --- numbers of elements ---------------------------------------------------------------------------------------------
def number_strides(shape: tuple[int, ...], batched: bool) -> tuple[int, ...]:
    """The strides of the elements' numbers, which count in C order; anew at every place of a batch."""
    steps = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return (0 if batched else steps[0], *steps[1:])
