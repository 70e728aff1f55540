# mypy: ignore-errors
"""A token's scores in the work type, and sums over few terms."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.elementwise.numba_kernels import sigmoid_value
from isograd.numerics import constants as c
from isograd.numerics.numba_memory import load, store, work_nan
from isograd.numerics.numba_ops import from_key, is_finite, lowest_key, magnitude_key, max_key, pow2_32
from isograd.numerics.numba_sum import (
    PARTIAL,
    block_magnitude,
    block_special,
    is_finite_key,
    part_terms,
    special_value,
    sum_scale,
)
from isograd.numerics.numba_wide import add_limbs, limb_shift, term_bias, wide_to_float
from isograd.rows.numba_exponentials import (
    exponential_part,
    largest_quotient,
    log_sum,
    quotient,
    reciprocal,
    row_shift,
    term_scale,
)
from isograd.runtime.numba_compile import INLINED, device_function


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


def term_factors(key: Any) -> Any:
    """`sum_scale` with an exponent of the key's width, which is what vectorises."""
    raise NotImplementedError


@overload(term_factors, jit_options=INLINED)
def _term_factors(key):
    if key == types.int32:

        def narrow_factors(key):
            exponent = np.int32(max(np.int32(np.int32(key >> 23) - 127), np.int32(-126)))
            total = np.int32(c.QUANTUM_BITS - c.LIMB_SHIFT_32 - exponent)
            b = np.int32(min(total, np.int32(100)))
            return pow2_32(np.int32(total - b)), pow2_32(b), np.int32(exponent - c.QUANTUM_BITS)

        return narrow_factors
    return lambda key: sum_scale(key)


def finish_few(high: Any, low: Any, terms: Any, exponent: Any) -> Any:
    """The sum of at most PARTIAL terms from their limbs, which carry the bias of each, in units of 2**exponent."""
    raise NotImplementedError


@overload(finish_few, jit_options=INLINED)
def _finish_few(high, low, terms, exponent):
    if high == types.int32:

        def narrow_sum(high, low, terms, exponent):
            # At most 2**8 terms of 2**45: binary64 holds their sum exactly.
            excess = np.int32(terms * term_bias(np.float32(0)))
            h, v = np.float64(np.int32(high - excess)), np.float64(np.int32(low - excess))
            s = np.float32(h * np.float64(1 << c.LIMB_SHIFT_32) + v)
            half = np.int32(exponent >> 1)
            return s * pow2_32(half) * pow2_32(np.int32(exponent - half))

        return narrow_sum

    def wide_sum(high, low, terms, exponent):
        excess = terms * term_bias(np.float64(0))
        shift = limb_shift(np.float64(0))
        hi, lo = add_limbs(np.int64(0), np.uint64(0), high - excess, low - excess, shift)
        return wide_to_float(hi, lo, exponent, np.float64(0))

    return wide_sum


@device_function
def sum_row(p, n, zero):
    """The order-free sum of n terms of the work type (rule 4)."""
    key = block_magnitude(p, n, magnitude_key(zero))
    if not is_finite_key(key):
        return special_value(block_special(p, n, np.int64(0)), zero)
    first, second, exponent = sum_scale(key)
    hi, lo = np.int64(0), np.uint64(0)
    for start in range(0, n, PARTIAL):
        high, low = part_terms(p, start, min(start + PARTIAL, n), first, second)
        hi, lo = add_limbs(hi, lo, high, low, limb_shift(zero))
    return wide_to_float(hi, lo, exponent, zero)
