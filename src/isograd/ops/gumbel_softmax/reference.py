"""Gumbel-softmax in NumPy: the definition that every kernel returns bit for bit, and its oracle.

Formulas (rule 15 of `docs/arithmetic.md`), over one row of the axis, with the noise g of each element:

    gumbel_softmax           y = softmax((x + g) / tau); hard: 1 at the first largest of x + g, 0 elsewhere
    gumbel_softmax_backward  dx_j = y_j * (dy_j - sum_i y_i * dy_i) / tau

The noise belongs to the element's index in C order, whatever its memory: element i of a call takes number offset + i of
the sequence of `seed`.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.numerics.random import philox
from isograd.ops.softmax import reference as family

Floats = NDArray[Any]

# The last word of the counter: `isograd.numerics.random` counts attempts there, from 0, so no block is used twice.
LAST_WORD = 0xFFFFFFFF


def uniform(index: NDArray[np.uint64], seed: int, dtype: Any) -> Floats:
    """Variates in (0, 1) of a work type: odd multiples of 2^-24 (float64: 2^-53), symmetric about 1/2.

    float32 takes a word a number, four a block, and float64 two words.
    """
    wide = np.dtype(dtype) == np.float64
    each = np.uint64(1 if wide else 2)  # numbers a block, as a power of two
    block, part = index >> each, (index & np.uint64((1 << int(each)) - 1)).astype(np.int64)
    counter = np.zeros((*index.shape, 4), np.uint32)
    counter[..., 0] = block & np.uint64(0xFFFFFFFF)
    counter[..., 1] = block >> np.uint64(32)
    counter[..., 3] = LAST_WORD
    words = philox(counter, (seed & 0xFFFFFFFF, seed >> 32)).astype(np.uint64)
    if wide:
        pairs = words[..., 0::2] | (words[..., 1::2] << np.uint64(32))
        bits = np.take_along_axis(pairs, part[..., None], -1)[..., 0] >> np.uint64(12)
        return np.asarray(bits.astype(np.float64) * 2.0**-52 + 2.0**-53)
    bits = np.take_along_axis(words, part[..., None], -1)[..., 0] >> np.uint64(9)
    return np.asarray(bits.astype(np.float32) * np.float32(2.0**-23) + np.float32(2.0**-24))


def _variates(shape: tuple[int, ...], dtype: Any, seed: int, offset: int, batched: bool) -> Floats:
    """The uniform variates of the elements of a shape."""
    counted = shape[1:] if batched else shape
    with np.errstate(over="ignore"):
        index = np.arange(math.prod(counted), dtype=np.uint64) + np.uint64(offset)  # modulo 2^64
    return np.broadcast_to(uniform(index, seed, ref.work_dtype(dtype)).reshape(counted), shape)


def noise(shape: tuple[int, ...], dtype: Any, seed: int = 0, offset: int = 0, batched: bool = False) -> Floats:
    """The Gumbel variates -log(-log u) of the elements of a shape, in the work type of `dtype`."""
    return np.asarray(-ref.log(-ref.log(_variates(shape, dtype, seed, offset, batched))))


def perturbed(logits: Floats, tau: float, seed: int, offset: int, batched: bool = False) -> Floats:
    """(x + g) * (1 / tau) in the work type."""
    of = ref.work_dtype(logits.dtype)
    with np.errstate(all="ignore"):
        g = noise(logits.shape, logits.dtype, seed, offset, batched)
        return np.asarray((ref.widen(logits) + g) * (of(1) / of(tau)))


def gumbel_softmax(
    logits: Floats,
    axis: int = -1,
    tau: float = 1.0,
    hard: bool = False,
    seed: int = 0,
    offset: int = 0,
    batched: bool = False,
) -> Floats:
    """The bits of gumbel_softmax."""
    z = perturbed(logits, tau, seed, offset, batched)
    if not hard or logits.size == 0:
        return ref.narrow(family.softmax(z, axis), logits.dtype)
    m = np.max(z, axis=axis, keepdims=True)
    y = np.zeros(z.shape, z.dtype)
    np.put_along_axis(y, np.argmax(z, axis=axis, keepdims=True), 1, axis)
    return ref.narrow(np.where(np.isfinite(m), y, z.dtype.type(np.nan)), logits.dtype)


def gumbel_softmax_backward(dy: Floats, y: Floats, axis: int = -1, tau: float = 1.0) -> Floats:
    """The bits of the gradient of gumbel_softmax for its logits; y is the soft result."""
    if dy.size == 0:
        return np.empty_like(dy)
    of = ref.work_dtype(dy.dtype)
    g, p = (np.moveaxis(ref.widen(a), axis, -1) for a in (dy, y))
    with np.errstate(all="ignore"):
        terms = np.ascontiguousarray(p * g)
        s = ref.order_free_sum(terms.reshape(-1, terms.shape[-1])).reshape(*terms.shape[:-1], 1)
        dx = (p * (g - s)) * (of(1) / of(tau))
    return np.moveaxis(ref.narrow(dx, dy.dtype), -1, axis)


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
_WIDE = np.longdouble


def oracle_perturbed(logits: Floats, tau: float, seed: int, offset: int, batched: bool = False) -> Floats:
    """The exact perturbed logits for the same variates u, but for the rounding of the wide type."""
    u = _variates(logits.shape, logits.dtype, seed, offset, batched).astype(_WIDE)
    return np.asarray((logits.astype(_WIDE) - np.log(-np.log(u))) / _WIDE(tau))


def oracle_gumbel_softmax(
    logits: Floats,
    axis: int = -1,
    tau: float = 1.0,
    hard: bool = False,
    seed: int = 0,
    offset: int = 0,
    batched: bool = False,
) -> Floats:
    """The exact gumbel_softmax, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        z = oracle_perturbed(logits, tau, seed, offset, batched)
        if not hard:
            return family.oracle_softmax(z, axis)
        m = np.max(z, axis=axis, keepdims=True)
        y = np.zeros(z.shape, _WIDE)
        np.put_along_axis(y, np.argmax(z, axis=axis, keepdims=True), 1, axis)
        return np.where(np.isfinite(m), y, _WIDE(np.nan))


def oracle_gumbel_softmax_backward(dy: Floats, y: Floats, axis: int = -1, tau: float = 1.0) -> Floats:
    """The exact gradient of gumbel_softmax, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        return np.asarray(family.oracle_softmax_backward(dy, y, axis) / _WIDE(tau))
