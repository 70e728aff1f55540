"""The error bounds that plans of gumbel_softmax promise, as formulas that can be evaluated.

u is half an ulp of 1 in the work type, q the quantum of a sum, n the length of the axis.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.losses import gumbel_reference as gumbel
from isograd.numerics.bounds import LARGEST, limits, stored_error, ulp
from isograd.numerics.storage import compute_dtype
from isograd.plan import ErrorBound
from isograd.softmax import bounds as family
from isograd.softmax import reference as softmax

Floats = NDArray[Any]
_WIDE = np.longdouble


def _gumbel_softmax(
    dtype: str,
    logits: Floats,
    tau: float = 1.0,
    hard: bool = False,
    axis: int = -1,
    seed: int = 0,
    offset: int = 0,
    batched: bool = False,
) -> Floats:
    u, bits, _, _ = limits(dtype)
    with np.errstate(all="ignore"):
        problems = logits if batched else logits[None]
        z = np.stack([gumbel.oracle_perturbed(x, 1.0, seed, offset) for x in problems]).reshape(logits.shape)
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


def _gumbel_softmax_backward(dtype: str, dy: Floats, y: Floats, tau: float = 1.0, axis: int = -1) -> Floats:
    u, _, eta, _ = limits(dtype)
    with np.errstate(all="ignore"):
        inner = family._softmax_backward(compute_dtype(dtype), dy, y, axis)
        dx = gumbel.oracle_gumbel_softmax_backward(dy, y, tau, axis)
        bound = inner * 1.01 / _WIDE(tau) + 4 * u * np.abs(dx) + 2 * eta + ulp(dx, dtype) / 2
        return np.where(np.abs(dx) > LARGEST[dtype], np.inf, bound)


_EVALUATE: dict[str, Callable[..., Floats]] = {
    "gumbel_softmax": _gumbel_softmax,
    "gumbel_softmax_backward": _gumbel_softmax_backward,
}
_FORMULAS = {
    "gumbel_softmax": "2 ulp(y) + y·(n·q + δ + Σ y·δ), δ = (3u·(1 + |g|) + 4u·|x + g|) / tau",
    "gumbel_softmax_backward": "(4u·|y|·(|dy| + Σ|y·dy|) + |y|·n·q/2) / tau + 4u·|dx| + ulp(dx)/2",
}


def error_bound(operation: str, dtype: str) -> ErrorBound:
    """The bound of an operation; call it with the operation's inputs and options."""
    return ErrorBound(_FORMULAS[operation], functools.partial(_EVALUATE[operation], dtype))
