"""Choices between values on the tape, as in `rules.py`: masks, maxima and minima.

All are exact. NaN wins, then +0 is above -0 (rule 3 of `docs/arithmetic.md`). With g for the upstream gradient:

    where              da = g where the mask is true, else 0; db the other way round
    maximum, minimum   g for the operand that is the result; RN(g / 2) for both where they are equal or both NaN
    max, min           RN(g / n) for each of the n elements that are equal to the result, or NaN like it; else 0
"""

import numpy as np

from isograd.errors import InvalidProblemError
from isograd.reduction import api as reduction
from isograd.reduction.axes import normalized
from isograd.tape.rules import Array, Axes, Result, _check_broadcast, _unbroadcast, stored, wide


def where(a: Array, b: Array, mask: Array) -> Result:
    """The elements of a where the mask is true, those of b elsewhere."""
    try:
        np.broadcast_shapes(mask.shape, a.shape, b.shape)
    except ValueError:
        raise InvalidProblemError(f"where: the shapes {mask.shape}, {a.shape} and {b.shape} do not broadcast") from None
    shape_a, shape_b, dtype = a.shape, b.shape, a.dtype
    zero = wide(np.zeros((), dtype))
    return np.where(mask, a, b), (
        lambda g: _unbroadcast(np.where(mask, wide(g), zero), shape_a, dtype),
        lambda g: _unbroadcast(np.where(mask, zero, wide(g)), shape_b, dtype),
    )


def _larger(a: Array, b: Array) -> Array:
    """The larger one of each pair, of zeros +0 if one of them is, in the work type."""
    zeros = (a == 0) & (b == 0)
    return np.where(zeros, a + b, np.maximum(a, b))


def _of_two(a: Array, b: Array, value: Array, sign: int) -> Result:
    def gradient(own: Array, other: Array, g: Array) -> Array:
        own_nan, other_nan = np.isnan(own), np.isnan(other)
        ahead = (own > other if sign > 0 else own < other) | own_nan
        tied = (own == other) | (own_nan & other_nan)
        p, dtype = wide(g), own.dtype
        share = np.where(tied, p * p.dtype.type(0.5), np.where(ahead, p, p.dtype.type(0)))
        return _unbroadcast(share, own.shape, dtype)

    return stored(value, a.dtype), (lambda g: gradient(a, b, g), lambda g: gradient(b, a, g))


def maximum(a: Array, b: Array) -> Result:
    """The larger one of two operands, element by element."""
    _check_broadcast("maximum", a, b)
    return _of_two(a, b, _larger(wide(a), wide(b)), 1)


def minimum(a: Array, b: Array) -> Result:
    """The smaller one of two operands, element by element."""
    _check_broadcast("minimum", a, b)
    return _of_two(a, b, -_larger(-wide(a), -wide(b)), -1)


def _of_axes(x: Array, kept: Array, axis: Axes, keepdims: bool) -> Result:
    axes = normalized("max", axis, x.ndim)

    def gradient(g: Array) -> Array:
        chosen = (x == kept) | (np.isnan(x) & np.isnan(kept))
        p = wide(g).reshape(kept.shape)
        share = p / np.sum(chosen, axis=axes, keepdims=True, dtype=np.int64).astype(p.dtype)
        return np.where(chosen, stored(share, x.dtype), x.dtype.type(0))

    return kept if keepdims else kept.squeeze(axes), (gradient,)


def max(x: Array, axis: Axes, keepdims: bool) -> Result:  # noqa: A001 - NumPy's name
    """The largest element over some axes."""
    return _of_axes(x, reduction.max(x, axis, keepdims=True), axis, keepdims)


def min(x: Array, axis: Axes, keepdims: bool) -> Result:  # noqa: A001 - NumPy's name
    """The smallest element over some axes."""
    return _of_axes(x, reduction.min(x, axis, keepdims=True), axis, keepdims)
