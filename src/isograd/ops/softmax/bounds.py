"""The error bounds of the softmax family.

Notation: u is half an ulp of 1 in the work type (2**-24, or 2**-53 for float64), q the quantum of a sum, n the length
of the axis, η half of the smallest subnormal of the work type. Where a result or an intermediate term overflows, the
bound is infinite.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import constants as c
from isograd.numerics.bounds import LARGEST, limits, sum_error, ulp
from isograd.numerics.storage import compute_dtype
from isograd.ops.softmax import reference as ref

Floats = NDArray[Any]


def _exponential_error(n: int, dtype: str) -> float:
    """The absolute error that quanta cause in a sum of n exponentials: one rounding a term, two where its own
    rounding error is summed as well.
    """
    if dtype in ("float16", "bfloat16"):
        return n * 2.0 ** -((c.SHORT_QUANTUM_BITS if n <= c.SHORT_ROW else c.QUANTUM_BITS) + 1)
    return n * 2.0 ** -limits(dtype)[1]


_SHORT_RELATIVE = 2.0**-15


def softmax(dtype: str, x: Floats, axis: int = -1) -> Floats:
    """Of softmax."""
    y = ref.oracle_softmax(x, axis)
    quanta = _exponential_error(x.shape[axis], dtype) * y
    if dtype in ("float16", "bfloat16"):
        return ulp(y, dtype) / 2 + _SHORT_RELATIVE * y + quanta
    return 2 * ulp(y, dtype) + quanta


def log_softmax(dtype: str, x: Floats, axis: int = -1) -> Floats:
    """Of log_softmax."""
    y = ref.oracle_log_softmax(x, axis)
    quanta = _exponential_error(x.shape[axis], dtype)
    if dtype in ("float16", "bfloat16"):
        bound = ulp(y, dtype) / 2 + _SHORT_RELATIVE * np.abs(y) + quanta
    else:
        bound = 2 * ulp(y, dtype) + quanta
    return np.where(np.abs(y) > LARGEST[dtype], np.inf, bound)


def _sum_bound(terms: Floats, dtype: str, axis: int) -> Floats:
    """Of the sum of every row."""
    return np.expand_dims(sum_error(terms, compute_dtype(dtype), axis), axis)


def softmax_backward(dtype: str, dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """Of the gradient of softmax."""
    u, _, eta, largest = limits(dtype)
    with np.errstate(all="ignore"):
        a, b = np.abs(y.astype(np.longdouble)), np.abs(dy.astype(np.longdouble))
        total = (a * b).sum(axis=axis, keepdims=True)
        dx = ref.oracle_softmax_backward(dy, y, axis)
        bound = 4 * u * a * (b + total) + a * (_sum_bound(a * b, dtype, axis) + y.shape[axis] * eta)
        bound = bound + ulp(dx, dtype) / 2
        return np.where((b + total > largest) | (np.abs(dx) > LARGEST[dtype]), np.inf, bound)


def log_softmax_backward(dtype: str, dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """Of the gradient of log_softmax."""
    u, _, eta, largest = limits(dtype)
    with np.errstate(all="ignore"):
        e, b = np.exp(y.astype(np.longdouble)), np.abs(dy.astype(np.longdouble))
        total = b.sum(axis=axis, keepdims=True)
        dx = ref.oracle_log_softmax_backward(dy, y, axis)
        bound = 4 * u * (b + e * total) + e * _sum_bound(b, dtype, axis) + ulp(dx, dtype) / 2
        if dtype in ("float16", "bfloat16"):
            bound = bound + (_SHORT_RELATIVE * e + 2.0**-126) * total
        else:
            # An exp(y) below the smallest normal number is off by up to a spacing of the subnormals, 2η.
            bound = bound + 2 * eta * total
        large = (e > largest) | (e * total > largest) | (total > largest)
        return np.where(large | (np.abs(dx) > LARGEST[dtype]), np.inf, bound)
