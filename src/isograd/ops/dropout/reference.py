"""Dropout in NumPy: the definition that every kernel returns bit for bit, and its oracle.

    y = RN(x * RN(1 / (1 - p))) where the word of an element is at least rint(p * 2^32), else +0

rounded to the storage type once. The word belongs to the element's index in C order, whatever its memory: element i of
a call takes number offset + i of the sequence of `seed`, in every dtype the same.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.numerics.random import philox

Floats = NDArray[Any]
LAST_WORD = 0x64726F70  # of the counter: no other random stream uses it
_LOW = np.uint64(0xFFFFFFFF)


def threshold(p: float) -> int:
    """An element is dropped whose word is smaller: none for p = 0, all for p = 1."""
    return round(p * 2.0**32)


def factor(p: float, dtype: Any) -> Any:
    """What kept elements are multiplied by: computed in binary64, rounded to the work type; 0 where none are."""
    return ref.work_dtype(dtype)(1 / (1 - p) if p < 1 else 0.0)


def words(index: NDArray[np.uint64], seed: int) -> NDArray[np.uint32]:
    """The random words of numbers, four of a block."""
    counter = np.zeros((*index.shape, 4), np.uint32)
    counter[..., 0] = (index >> np.uint64(2)) & _LOW
    counter[..., 1] = index >> np.uint64(34)
    counter[..., 3] = LAST_WORD
    part = (index & np.uint64(3)).astype(np.int64)
    return np.take_along_axis(philox(counter, (seed & 0xFFFFFFFF, seed >> 32)), part[..., None], -1)[..., 0]


def kept(shape: tuple[int, ...], p: float, seed: int, offset: int, batched: bool) -> NDArray[np.bool_]:
    """Which elements stay."""
    counted = shape[1:] if batched else shape
    with np.errstate(over="ignore"):
        index = np.arange(math.prod(counted), dtype=np.uint64) + np.uint64(offset)  # modulo 2^64
    found = words(index, seed).astype(np.uint64) >= np.uint64(threshold(p))
    return np.broadcast_to(found.reshape(counted), shape)


def dropout(x: Floats, p: float = 0.5, seed: int = 0, offset: int = 0, batched: bool = False) -> Floats:
    """The bits of y."""
    with np.errstate(all="ignore"):
        scaled = ref.widen(x) * factor(p, x.dtype)
        return ref.narrow(np.where(kept(x.shape, p, seed, offset, batched), scaled, scaled.dtype.type(0)), x.dtype)


def oracle_dropout(x: Floats, p: float = 0.5, seed: int = 0, offset: int = 0, batched: bool = False) -> Floats:
    """The exact y, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        scaled = x.astype(np.longdouble) / (1 - np.longdouble(p))
        return np.where(kept(x.shape, p, seed, offset, batched), scaled, np.longdouble(0))
