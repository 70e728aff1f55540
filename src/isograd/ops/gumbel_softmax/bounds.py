"""The error bounds of gumbel_softmax and its gradient.

u is half an ulp of 1 in the work type, q the quantum of a sum, n the length of the axis.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.bounds import LARGEST, limits, stored_error, ulp
from isograd.numerics.storage import compute_dtype
from isograd.ops.gumbel_softmax import reference as gumbel
from isograd.ops.softmax import bounds as family
from isograd.ops.softmax import reference as softmax

Floats = NDArray[Any]
_WIDE = np.longdouble


def gumbel_softmax(
    dtype: str,
    logits: Floats,
    axis: int = -1,
    tau: float = 1.0,
    hard: bool = False,
    seed: int = 0,
    offset: int = 0,
    batched: bool = False,
) -> Floats:
    """Of y; of a hard one 0, or 1 where nothing is said of which element is the largest."""
    u, bits, _, _ = limits(dtype)
    with np.errstate(all="ignore"):
        z = gumbel.oracle_perturbed(logits, 1.0, seed, offset, batched)
        noise = np.abs(z - logits.astype(_WIDE))
        delta = np.where(np.isfinite(z), (3 * u * (1 + noise) + 4 * u * np.abs(z)) / _WIDE(tau), 0)
        z = z / _WIDE(tau)
        large = (np.isfinite(z) & (np.abs(z) > LARGEST[compute_dtype(dtype)])).any(axis=axis, keepdims=True)
        if hard:
            # Nothing is said where two elements are closer than they are known.
            top = np.max(z, axis=axis, keepdims=True)
            close = (z + 2 * delta >= top - 2 * np.max(delta, axis=axis, keepdims=True, initial=0)).sum(
                axis=axis, keepdims=True
            )
            unsaid = np.where(large, np.inf, np.where(close > 1, _WIDE(1), _WIDE(0)))
            return np.asarray(np.broadcast_to(unsaid, z.shape))
        y = softmax.oracle_softmax(z, axis) if z.size else z
        shift = delta + np.where(y > 0, y * delta, 0).sum(axis=axis, keepdims=True)
        quanta = z.shape[axis] * 2.0**-bits
        bound = 2 * ulp(y, compute_dtype(dtype)) + y * (quanta + np.expm1(np.minimum(shift, 50)))
        return np.asarray(np.where(large, np.inf, bound + stored_error(y, dtype)))


def gumbel_softmax_backward(dtype: str, dy: Floats, y: Floats, axis: int = -1, tau: float = 1.0) -> Floats:
    """Of dx."""
    u, _, eta, _ = limits(dtype)
    with np.errstate(all="ignore"):
        inner = family.softmax_backward(compute_dtype(dtype), dy, y, axis)
        dx = gumbel.oracle_gumbel_softmax_backward(dy, y, axis, tau)
        bound = inner * 1.01 / _WIDE(tau) + 4 * u * np.abs(dx) + 2 * eta + ulp(dx, dtype) / 2
        return np.where(np.abs(dx) > LARGEST[dtype], np.inf, bound)
