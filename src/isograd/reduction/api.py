"""sum, mean, max and min over any axes, with the same bits in every order (rules 3 and 4 of `docs/arithmetic.md`).

NumPy arrays of float16, bfloat16, float32 or float64 of any shape and strides; the result has the same dtype. Where the
reduced axes are not the last ones of a C-contiguous array, the array is copied.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.errors import InvalidProblemError
from isograd.numerics.reference import narrow, widen, work_dtype
from isograd.numerics.storage import address, kernel_type, require_array
from isograd.reduction import numba_kernels
from isograd.reduction.axes import Axes, normalized
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment


def _reduce(operation: str, x: NDArray[Any], axis: Axes, keepdims: bool) -> NDArray[Any]:
    x = require_array(operation, "x", x)
    axes = normalized(operation, axis, x.ndim)
    kept = tuple(d for d in range(x.ndim) if d not in axes)
    shape = tuple(1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes)
    terms = np.ascontiguousarray(x.transpose(kept + axes))
    count = math.prod(x.shape[d] for d in axes)
    out = np.empty(shape, x.dtype)
    with default_environment():
        divisor = work_dtype(x.dtype)(count if operation == "mean" else 1)
    grain = parallel.grain(out.size, count)
    parallel.for_ranges(
        numba_kernels.sum_rows, out.size, grain, kernel_type(x.dtype), address(terms), address(out), count, divisor
    )
    return out


def sum(x: NDArray[Any], axis: Axes = None, keepdims: bool = False) -> NDArray[Any]:  # noqa: A001 - NumPy's name
    """The sum over an axis, a tuple of axes, or all; zero where there are no terms.

    Off by at most `count * q / 2` plus half an ulp of the result, q = 2^(E - 44) (float64: 2^(E - 88)) with E the
    exponent of the largest term, plus half an ulp of a 16-bit result. Not-finite terms give what IEEE addition gives
    in any order: NaN for a NaN or both infinities, else the infinity.

    Raises InvalidProblemError for an axis out of range or named twice and for anything that is no array,
    UnsupportedError for other dtypes.
    """
    return _reduce("sum", x, axis, keepdims)


def mean(x: NDArray[Any], axis: Axes = None, keepdims: bool = False) -> NDArray[Any]:
    """The mean over an axis, a tuple of axes, or all: RN(sum / count) in the work type; NaN without terms.

    The sum is formed first, so a mean whose sum overflows is infinite. Errors as for `sum`.
    """
    return _reduce("mean", x, axis, keepdims)


def _largest(operation: str, x: NDArray[Any], axis: Axes, keepdims: bool, sign: int) -> NDArray[Any]:
    x = require_array(operation, "x", x)
    axes = normalized(operation, axis, x.ndim)
    if math.prod(x.shape[d] for d in axes) == 0:
        raise InvalidProblemError(
            f"{operation}: shape {x.shape} has no elements along axis {axis}; expected one at least"
        )
    with default_environment(), np.errstate(all="ignore"):
        v = widen(x) * work_dtype(x.dtype)(sign)
        m = np.max(v, axis=axes, keepdims=keepdims)
        if np.any(m == 0):  # NumPy returns either zero, depending on the places of both
            positive = np.any((v == 0) & ~np.signbit(v), axis=axes, keepdims=keepdims)
            m = np.where((m == 0) & positive, m.dtype.type(0), m)
        return narrow(np.asarray(m * m.dtype.type(sign)), x.dtype)


def max(x: NDArray[Any], axis: Axes = None, keepdims: bool = False) -> NDArray[Any]:  # noqa: A001 - NumPy's name
    """The largest element over an axis, a tuple of axes, or all; NaN if there is one, and +0 over -0.

    Raises InvalidProblemError for no elements, and otherwise as `sum`.
    """
    return _largest("max", x, axis, keepdims, 1)


def min(x: NDArray[Any], axis: Axes = None, keepdims: bool = False) -> NDArray[Any]:  # noqa: A001 - NumPy's name
    """The smallest element over an axis, a tuple of axes, or all; NaN if there is one, and -0 under +0.

    Errors as for `max`.
    """
    return _largest("min", x, axis, keepdims, -1)
