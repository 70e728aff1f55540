"""The error bounds of sparsemax and its gradient; k is the size of the support."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.bounds import LARGEST, limits, stored_error, sum_error, ulp
from isograd.numerics.storage import compute_dtype
from isograd.ops.sparsemax import reference

Floats = NDArray[Any]
_WIDE = np.longdouble


def sparsemax(dtype: str, x: Floats, axis: int = -1) -> Floats:
    """Of the result."""
    y = reference.oracle_sparsemax(x, axis)
    # In float64 four quanta would be 2^-86, less than an oracle of 64 bits knows.
    return ulp(y, compute_dtype(dtype)) + (2.0**-62 if dtype == "float64" else 2.0**-42) + stored_error(y, dtype)


def sparsemax_backward(dtype: str, dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """Of the gradient."""
    u, _, _, largest = limits(dtype)
    with np.errstate(all="ignore"):
        dx = reference.oracle_sparsemax_backward(dy, y, axis)
        terms = np.where(y.astype(_WIDE) > 0, np.abs(dy.astype(_WIDE)), 0)
        k = np.maximum((y.astype(_WIDE) > 0).sum(axis=axis, keepdims=True), 1)
        total = terms.sum(axis=axis, keepdims=True)
        error = np.expand_dims(sum_error(terms, compute_dtype(dtype), axis), axis) if dy.size else total
        bound = 4 * u * (np.abs(dy.astype(_WIDE)) + total / k) + error / k + ulp(dx, dtype) / 2
        bound = np.where(y.astype(_WIDE) > 0, bound, 0)
        return np.where((total > largest) | (np.abs(dx) > LARGEST[dtype]), np.inf, bound)
