"""A token's scores in the work type, and sums over few terms."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.elementwise.numba_kernels import sigmoid_value
from isograd.numerics.numba_compile import device_function
from isograd.numerics.numba_memory import load, store
from isograd.numerics.numba_ops import from_key, is_finite, magnitude_key, max_key
from isograd.numerics.numba_sum import (
    PARTIAL,
    block_magnitude,
    block_special,
    is_finite_key,
    part_terms,
    special_value,
    sum_scale,
)
from isograd.numerics.numba_wide import add_limbs, limb_shift, scale_pow2, to_float, wide_to_float
from isograd.softmax.numba_steps import (
    exponential_part,
    largest_quotient,
    log_sum,
    lowest_key,
    quotient,
    reciprocal,
    row_shift,
    term_scale,
    work_nan,
)

_FORCE = {"forceinline": True}


@device_function
def _maximum(x, n, zero):
    key = lowest_key(zero)
    for i in range(n):
        k = max_key(load(x, i))
        key = k if k > key else key
    return from_key(key)


@device_function
def _exponentials(x, n, m, base, floor, bias, zero):
    """Turn a row into marked exponentials; their sum as an integer is returned."""
    scale = term_scale(n, zero)
    hi, lo = np.int64(0), np.uint64(0)
    for start in range(0, n, PARTIAL):
        high, low = exponential_part(x, start, min(start + PARTIAL, n), m, base, floor, bias, scale, zero)
        hi, lo = add_limbs(hi, lo, high, low, limb_shift(zero))
    return hi, lo


@device_function
def _divided(x, n, hi, lo, m, base, floor, bias, zero):
    """Turn marked exponentials into probabilities."""
    r, r_low = reciprocal(hi, lo, n, zero)
    largest = largest_quotient(r, r_low, m, base, floor, bias, zero)
    for i in range(n):
        store(x, i, quotient(load(x, i), r, r_low, largest, zero))


@device_function
def softmax_scores(x, n, zero):
    """Softmax of a row in place; a row without a finite maximum becomes NaN."""
    m = _maximum(x, n, zero)
    if not is_finite(m):
        for i in range(n):
            store(x, i, work_nan(zero))
        return
    base, floor, bias = row_shift(m, zero)
    hi, lo = _exponentials(x, n, m, base, floor, bias, zero)
    _divided(x, n, hi, lo, m, base, floor, bias, zero)


@device_function
def softmax_and_logsumexp(x, n, zero):
    """Softmax of a row in place, and log Σ exp of what it was."""
    m = _maximum(x, n, zero)
    if not is_finite(m):
        for i in range(n):
            store(x, i, work_nan(zero))
        return m
    base, floor, bias = row_shift(m, zero)
    hi, lo = _exponentials(x, n, m, base, floor, bias, zero)
    _divided(x, n, hi, lo, m, base, floor, bias, zero)
    top, middle, low = log_sum(hi, lo, n, m, base, floor, bias, zero)
    return top + (middle + low)


@device_function
def sigmoid_scores(x, n, zero):
    """Sigmoid of a row in place."""
    for i in range(n):
        s = sigmoid_value(load(x, i))
        store(x, i, s if s == s else work_nan(zero))


def finish_few(high: Any, low: Any, zero: Any, exponent: Any) -> Any:
    """The sum of at most PARTIAL terms from their limbs in int64, in units of 2**exponent."""
    raise NotImplementedError


@overload(finish_few, jit_options=_FORCE)
def _finish_few(high, low, zero, exponent):
    if zero == types.float32:
        # 2**8 terms of at most 2**45.
        return lambda high, low, zero, exponent: scale_pow2(to_float((high << limb_shift(zero)) + low, zero), exponent)

    def wide(high, low, zero, exponent):
        hi, lo = add_limbs(np.int64(0), np.uint64(0), high, low, limb_shift(zero))
        return wide_to_float(hi, lo, exponent, zero)

    return wide


@device_function
def sum_row(p, n, zero):
    """The order-free sum of n terms of the work type (rule 4)."""
    key = block_magnitude(p, n, magnitude_key(zero))
    if not is_finite_key(key):
        return special_value(block_special(p, n, np.int64(0)), zero)
    first, second, exponent = sum_scale(key)
    if n <= PARTIAL:
        high, low = part_terms(p, 0, n, first, second)
        return finish_few(high, low, zero, exponent)
    hi, lo = np.int64(0), np.uint64(0)
    for start in range(0, n, PARTIAL):
        high, low = part_terms(p, start, min(start + PARTIAL, n), first, second)
        hi, lo = add_limbs(hi, lo, high, low, limb_shift(zero))
    return wide_to_float(hi, lo, exponent, zero)
