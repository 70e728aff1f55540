"""The softmax family on the CPU, one row of the reduced axis after the other.

A row is worked on in blocks that stay in the first-level cache and costs two or three passes over memory; the later
ones find it in the cache. `numba_lanes.py` has the same operations for a reduction over a non-last axis.
"""

from typing import Any

import numpy as np

from isograd.core.kernel import launcher
from isograd.numerics.numba_memory import (
    BLOCK,
    empty_work,
    load,
    load_block,
    multiply_part,
    pointer,
    prefetch_read,
    prefetch_write,
    row_offset,
    stack_block,
    store,
    store_block,
    work_nan,
    work_zero,
)
from isograd.numerics.numba_ops import fma, is_finite, magnitude_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import (
    PARTIAL,
    block_magnitude,
    block_special,
    block_terms,
    is_finite_key,
    part_terms,
    special_value,
    sum_scale,
)
from isograd.numerics.numba_wide import add_limbs, limb_shift, wide_to_float
from isograd.ops.softmax import numba_lanes as lanes
from isograd.rows.numba_exponentials import (
    largest_quotient,
    log_probability,
    log_sum,
    probability,
    quotient,
    reciprocal,
    row_shift,
)
from isograd.rows.numba_rows import exponential_sum, fill_row, row_maximum
from isograd.rows.walk import for_rows_or_lanes
from isograd.runtime.numba_compile import device_function, kernel


@kernel
def softmax_rows(like, x_address, y_address, shape, x_strides, y_strides, n, x_stride, y_stride, start, stop):
    """Rows of softmax; y may be x."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    zero = work_zero(like)
    block = stack_block(zero)
    # A row that is longer than a block keeps its exponentials here, in the second-level cache.
    scratch = empty_work(n if n > BLOCK else 0, like)
    kept = pointer(scratch.ctypes.data, zero)
    for row in range(start, stop):
        xo, yo = row_offset(row, shape, x_strides), row_offset(row, shape, y_strides)
        x_ahead = row_offset(min(row + 1, stop - 1), shape, x_strides)
        m = row_maximum(x, xo, x_stride, n, block, like)
        if not is_finite(m):
            fill_row(y, yo, y_stride, n, block, work_nan(like))
            continue
        base, floor, bias = row_shift(m, like)
        hi, lo = exponential_sum(
            x, xo, x_ahead, x_stride, y, yo, y_stride, n, block, kept, True, m, base, floor, bias, like
        )  # fmt: skip
        r, r_low = reciprocal(hi, lo, n, like)
        largest = largest_quotient(r, r_low, m, base, floor, bias, like)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                load_block(kept, j, 1, count, block)
            offset = yo + j * y_stride
            if y_stride == 1:
                for i in range(count):
                    store(y, offset + i, narrow(quotient(load(block, i), r, r_low, largest, like), like))
            else:
                for i in range(count):
                    store(y, offset + i * y_stride, narrow(quotient(load(block, i), r, r_low, largest, like), like))


@kernel
def log_softmax_rows(like, x_address, y_address, shape, x_strides, y_strides, n, x_stride, y_stride, start, stop):
    """Rows of log_softmax; y may be x."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    block = stack_block(work_zero(like))
    for row in range(start, stop):
        xo, yo = row_offset(row, shape, x_strides), row_offset(row, shape, y_strides)
        x_ahead = row_offset(min(row + 1, stop - 1), shape, x_strides)
        m = row_maximum(x, xo, x_stride, n, block, like)
        if not is_finite(m):
            fill_row(y, yo, y_stride, n, block, work_nan(like))
            continue
        base, floor, bias = row_shift(m, like)
        hi, lo = exponential_sum(
            x, xo, x_ahead, x_stride, y, yo, y_stride, n, block, y, False, m, base, floor, bias, like
        )  # fmt: skip
        top, middle, rest = log_sum(hi, lo, n, m, base, floor, bias, like)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            # Through the block, so that the loop over memory is the same when y is x.
            load_block(x, xo + j * x_stride, x_stride, count, block)
            offset = yo + j * y_stride
            if y_stride == 1:
                for i in range(count):
                    v = log_probability(load(block, i), m, top, middle, rest, like)
                    store(y, offset + i, narrow(v, like))
            else:
                for i in range(count):
                    v = log_probability(load(block, i), m, top, middle, rest, like)
                    store(y, offset + i * y_stride, narrow(v, like))


@device_function
def _softmax_gradient(dy, dy_offset, dy_stride, y, y_offset, y_stride, start, stop, s, block):
    if dy_stride == 1 and y_stride == 1:
        for i in range(start, stop):
            store(block, i, widen(load(y, y_offset + i)) * (widen(load(dy, dy_offset + i)) - s))
    else:
        for i in range(start, stop):
            v = widen(load(y, y_offset + i * y_stride))
            store(block, i, v * (widen(load(dy, dy_offset + i * dy_stride)) - s))


@kernel
def softmax_backward_rows(
    like, dy_address, y_address, dx_address, shape, dy_strides, y_strides, dx_strides, n,
    dy_stride, y_stride, dx_stride, start, stop,
):  # fmt: skip
    """Rows of softmax's gradient; dx may be dy or y."""
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    zero = work_zero(like)
    block = stack_block(zero)
    for row in range(start, stop):
        after = min(row + 1, stop - 1)
        dyo, dy_ahead = row_offset(row, shape, dy_strides), row_offset(after, shape, dy_strides)
        yo, y_ahead = row_offset(row, shape, y_strides), row_offset(after, shape, y_strides)
        dxo = row_offset(row, shape, dx_strides)
        # Each pass has little arithmetic, so each asks for one of the three streams only.
        key = magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            dyj, yj = dyo + j * dy_stride, yo + j * y_stride
            for i in range(0, count, PARTIAL):
                end = min(i + PARTIAL, count)
                prefetch_write(dx, dxo + (j + i) * dx_stride, dx_stride, end - i)
                multiply_part(dy, dyj, dy_stride, y, yj, y_stride, i, end, block)
            key = block_magnitude(block, count, key)
        finite = is_finite_key(key)
        first, second, exponent = sum_scale(key)
        hi, lo, special = np.int64(0), np.uint64(0), np.int64(0)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                multiply_part(dy, dyo + j * dy_stride, dy_stride, y, yo + j * y_stride, y_stride, 0, count, block)
            if not finite:
                special = block_special(block, count, special)
                continue
            for i in range(0, count, PARTIAL):
                end = min(i + PARTIAL, count)
                prefetch_read(dy, dy_ahead + (j + i) * dy_stride, dy_stride, end - i)
                high, low = part_terms(block, i, end, first, second)
                hi, lo = add_limbs(hi, lo, high, low, limb_shift(like))
        s = wide_to_float(hi, lo, exponent, zero) if finite else special_value(special, zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            dyj, yj = dyo + j * dy_stride, yo + j * y_stride
            # Through the block, so that the loop over memory is the same when dx is dy or y.
            for i in range(0, count, PARTIAL):
                end = min(i + PARTIAL, count)
                prefetch_read(y, y_ahead + (j + i) * y_stride, y_stride, end - i)
                _softmax_gradient(dy, dyj, dy_stride, y, yj, y_stride, i, end, s, block)
            store_block(dx, dxo + j * dx_stride, dx_stride, count, block)


@device_function
def _load_and_exponentiate(dy, dy_offset, dy_stride, y, y_offset, y_stride, start, stop, block, e, like):
    """Dy and exp(y), read side by side: the arithmetic of one hides the wait for the other."""
    if dy_stride == 1 and y_stride == 1:
        for i in range(start, stop):
            store(block, i, widen(load(dy, dy_offset + i)))
            store(e, i, probability(widen(load(y, y_offset + i)), like))
    else:
        for i in range(start, stop):
            store(block, i, widen(load(dy, dy_offset + i * dy_stride)))
            store(e, i, probability(widen(load(y, y_offset + i * y_stride)), like))


@kernel
def log_softmax_backward_rows(
    like, dy_address, y_address, dx_address, shape, dy_strides, y_strides, dx_strides, n,
    dy_stride, y_stride, dx_stride, start, stop,
):  # fmt: skip
    """Rows of log_softmax's gradient; dx may be dy or y."""
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    zero = work_zero(like)
    block, e = stack_block(zero), stack_block(zero)
    # A row that is longer than a block keeps its exponentials here, in the second-level cache.
    scratch = empty_work(n if n > BLOCK else 0, like)
    kept = pointer(scratch.ctypes.data, zero)
    for row in range(start, stop):
        after = min(row + 1, stop - 1)
        dyo, dy_ahead = row_offset(row, shape, dy_strides), row_offset(after, shape, dy_strides)
        yo, y_ahead = row_offset(row, shape, y_strides), row_offset(after, shape, y_strides)
        dxo = row_offset(row, shape, dx_strides)
        key = magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            dy_block, y_block = dyo + j * dy_stride, yo + j * y_stride
            for i in range(0, count, PARTIAL):
                end = min(i + PARTIAL, count)
                prefetch_read(dy, dy_ahead + (j + i) * dy_stride, dy_stride, end - i)
                prefetch_read(y, y_ahead + (j + i) * y_stride, y_stride, end - i)
                prefetch_write(dx, dxo + (j + i) * dx_stride, dx_stride, end - i)
                _load_and_exponentiate(dy, dy_block, dy_stride, y, y_block, y_stride, i, end, block, e, like)
            key = block_magnitude(block, count, key)
            if n > BLOCK:
                store_block(kept, j, 1, count, e)
        finite = is_finite_key(key)
        first, second, exponent = sum_scale(key)
        hi, lo, special = np.int64(0), np.uint64(0), np.int64(0)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                load_block(dy, dyo + j * dy_stride, dy_stride, count, block)
            if finite:
                high, low = block_terms(block, count, first, second)
                hi, lo = add_limbs(hi, lo, high, low, limb_shift(like))
            else:
                special = block_special(block, count, special)
        s = wide_to_float(hi, lo, exponent, zero) if finite else special_value(special, zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                load_block(dy, dyo + j * dy_stride, dy_stride, count, block)
                load_block(kept, j, 1, count, e)
            offset = dxo + j * dx_stride
            if dx_stride == 1:
                for i in range(count):
                    store(dx, offset + i, narrow(fma(-load(e, i), s, load(block, i)), like))
            else:
                for i in range(count):
                    store(dx, offset + i * dx_stride, narrow(fma(-load(e, i), s, load(block, i)), like))


# --- launches --------------------------------------------------------------------------------------------------------
@launcher("softmax")
def softmax(problem: Any, x: Any, y: Any) -> None:
    """Compute y, which may be x."""
    for_rows_or_lanes(softmax_rows, lanes.softmax_lanes, problem.axis, x, y)


@launcher("log_softmax")
def log_softmax(problem: Any, x: Any, y: Any) -> None:
    """Compute y, which may be x."""
    for_rows_or_lanes(log_softmax_rows, lanes.log_softmax_lanes, problem.axis, x, y)


@launcher("softmax_backward")
def softmax_backward(problem: Any, dy: Any, y: Any, dx: Any) -> None:
    """Compute dx, which may be dy or y."""
    for_rows_or_lanes(softmax_backward_rows, lanes.softmax_backward_lanes, problem.axis, dy, y, dx)


@launcher("log_softmax_backward")
def log_softmax_backward(problem: Any, dy: Any, y: Any, dx: Any) -> None:
    """Compute dx, which may be dy or y."""
    for_rows_or_lanes(log_softmax_backward_rows, lanes.log_softmax_backward_lanes, problem.axis, dy, y, dx)
