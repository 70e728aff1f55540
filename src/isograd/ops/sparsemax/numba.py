"""sparsemax on the CPU, one row of the axis after the other.

The elements within 1 of the row's maximum become integers. What is not above the threshold of those that are left is
thrown out until nothing is: each threshold is too low rather than too high, so the support is what remains, the same
that sorting would find. Integers make the sums and the comparisons exact.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.core.kernel import launcher
from isograd.numerics import constants as c
from isograd.numerics.numba_memory import (
    BLOCK,
    empty_work,
    load,
    load_block,
    pointer,
    row_offset,
    stack_block,
    store,
    store_block,
    work_nan,
    work_one,
    work_zero,
)
from isograd.numerics.numba_ops import fma, from_key, is_finite, lowest_key, magnitude_key, two_sum
from isograd.numerics.numba_sum import block_magnitude
from isograd.numerics.numba_wide import add_limbs, limb_shift, one_wide, split_term, term_bias, to_float, wide_to_pair
from isograd.rows.numba_rows import block_maximum, fill, stored_sum
from isograd.rows.walk import for_rows
from isograd.runtime.numba_compile import INLINED, device_function, kernel

_SCALE_32 = np.float32(2.0 ** (c.QUANTUM_BITS - c.LIMB_SHIFT_32))
_SCALE_64 = np.float64(2.0**c.QUANTUM_BITS)
_DIGIT, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_LONGEST = (1 << 31) - 1


def unit_scale(like: Any) -> Any:
    """The factor that split_term needs to cut a difference into units of 2**-44 (2**-88)."""
    raise NotImplementedError


@overload(unit_scale, jit_options=INLINED)
def _unit_scale(like):
    return (lambda like: _SCALE_64) if like == types.float64 else (lambda like: _SCALE_32)


def unit_bits(like: Any) -> Any:
    """The units of 1 as a power of two."""
    raise NotImplementedError


@overload(unit_bits, jit_options=INLINED)
def _unit_bits(like):
    bits = c.QUANTUM_BITS + (c.LIMB_SHIFT_64 if like == types.float64 else 0)
    return lambda like: np.int64(bits)


@device_function
def _add_units(hi, lo, d, zero):
    """Add rint(d / q) to a 128-bit integer, for |d| <= 1."""
    high, low = split_term(d, unit_scale(zero))
    bias = term_bias(zero)
    return add_limbs(hi, lo, np.int64(high) - bias, np.int64(low) - bias, limb_shift(zero))


@device_function
def _floor_divide(hi, lo, k):
    """Floor of a 128-bit integer over 0 < k < 2**31, digit by digit."""
    a = hi // k
    rest = hi - a * k
    b = np.int64((np.uint64(rest) << _HALF) | (lo >> _HALF))
    first = b // k
    rest = b - first * k
    b = np.int64((np.uint64(rest) << _HALF) | (lo & _DIGIT))
    second = b // k
    return a, np.uint64((np.uint64(first) << _HALF) | np.uint64(second))


@device_function
def _threshold(highs, lows, count, zero):
    """The threshold less the row's maximum, as an unevaluated pair, from the units of `count` candidates."""
    one_hi, one_lo = one_wide(zero)
    while True:
        # Less one, then plus every candidate.
        lo = np.uint64(~one_lo + np.uint64(1))
        hi = ~one_hi + (np.int64(1) if one_lo == np.uint64(0) else np.int64(0))
        for i in range(count):
            low = np.uint64(lo + lows[i])
            hi += highs[i] + (np.int64(1) if low < lo else np.int64(0))
            lo = low
        t_hi, t_lo = _floor_divide(hi, lo, count)
        left = 0
        for i in range(count):
            h, v = highs[i], lows[i]
            if h > t_hi or (h == t_hi and v > t_lo):
                highs[left], lows[left] = h, v
                left += 1
        if left == count:
            break
        count = left
    head, rest = wide_to_pair(hi, lo, -unit_bits(zero), zero)
    k = to_float(count, zero)
    high = head / k
    return high, (fma(-high, k, head) + rest) / k


@kernel
def sparsemax_rows(like, x_address, y_address, shape, x_strides, y_strides, n, x_stride, y_stride, start, stop):
    """Rows of the result; y may be x."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    zero = work_zero(like)
    one = work_one(zero)
    block = stack_block(zero)
    highs, lows = np.empty(n, np.int64), np.empty(n, np.uint64)
    for row in range(start, stop):
        xo, yo = row_offset(row, shape, x_strides), row_offset(row, shape, y_strides)
        key = lowest_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(x, xo + j * x_stride, x_stride, count, block)
            key = block_maximum(block, count, key)
        m = from_key(key)
        if not is_finite(m):
            fill(y, yo, y_stride, n, work_nan(zero), load(x, xo))
            continue
        found = 0
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                load_block(x, xo + j * x_stride, x_stride, count, block)
            for i in range(count):
                if load(block, i) - m >= -one:
                    d, error = two_sum(load(block, i), -m)
                    hi, lo = _add_units(np.int64(0), np.uint64(0), d, zero)
                    highs[found], lows[found] = _add_units(hi, lo, error, zero)
                    found += 1
        high, low = _threshold(highs, lows, found, zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                load_block(x, xo + j * x_stride, x_stride, count, block)
            for i in range(count):
                d, error = two_sum(load(block, i), -m)
                u, v = two_sum(d, -high)
                value = u + (v + (error - low))
                store(block, i, value if d >= -one and value > zero else zero)
            store_block(y, yo + j * y_stride, y_stride, count, block)


@device_function
def _supported(y, g, zero):
    """The upstream gradient on the support, 0 outside, and NaN where the result is."""
    return g if y > zero else (zero if y == y else y)


@kernel
def sparsemax_backward_rows(
    like, dy_address, y_address, dx_address, shape, dy_strides, y_strides, dx_strides, n, dy_stride, y_stride,
    dx_stride, start, stop,
):  # fmt: skip
    """Rows of the gradient; dx may be dy or y."""
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    zero = work_zero(like)
    a, block = stack_block(zero), stack_block(zero)
    scratch = empty_work(n if n > BLOCK else 0, zero)
    kept = pointer(scratch.ctypes.data, zero)
    for row in range(start, stop):
        dyo, yo = row_offset(row, shape, dy_strides), row_offset(row, shape, y_strides)
        dxo = row_offset(row, shape, dx_strides)
        key, support = magnitude_key(zero), np.int64(0)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(dy, dyo + j * dy_stride, dy_stride, count, block)
            load_block(y, yo + j * y_stride, y_stride, count, a)
            for i in range(count):
                store(block, i, _supported(load(a, i), load(block, i), zero))
                support += np.int64(load(a, i) > zero)
            key = block_magnitude(block, count, key)
            if n > BLOCK:
                store_block(kept, j, 1, count, block)
        mean = stored_sum(kept, n, key, block, zero) / to_float(support, zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(dy, dyo + j * dy_stride, dy_stride, count, block)
            load_block(y, yo + j * y_stride, y_stride, count, a)
            for i in range(count):
                store(block, i, _supported(load(a, i), load(block, i) - mean, zero))
            store_block(dx, dxo + j * dx_stride, dx_stride, count, block)


# --- launches --------------------------------------------------------------------------------------------------------
def _too_long(problem: Any) -> str | None:
    """Supports are counted in 31 bits."""
    n = problem.shape[problem.axis]
    return f"a row has {n} elements; at most {_LONGEST}" if n > _LONGEST else None


@launcher("sparsemax", _too_long)
def sparsemax(problem: Any, x: Any, y: Any) -> None:
    """Compute y; it may be x."""
    if y.size:
        for_rows(sparsemax_rows, problem.axis, (x, y))


@launcher("sparsemax_backward", _too_long)
def sparsemax_backward(problem: Any, dy: Any, y: Any, dx: Any) -> None:
    """Compute dx; it may be dy or y."""
    if dx.size:
        for_rows(sparsemax_backward_rows, problem.axis, (dy, y, dx))
