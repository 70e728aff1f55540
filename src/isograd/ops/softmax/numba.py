"""The softmax family on the CPU, one row of the reduced axis after the other.

A row is walked through in vectors, for its maximum, for its sum and for its results, which are written in pieces; the
first walk brings it into the caches. One that has gaps in memory is copied first, n elements for each thread and input.
`numba_lanes.py` has the same operations for a reduction over a non-last axis.
"""

from typing import Any

import numpy as np

from isograd.core.kernel import launcher
from isograd.numerics.numba_memory import (
    AHEAD,
    BLOCK,
    STEP,
    advance,
    empty_stored,
    empty_work,
    end_stream,
    is_streamed,
    pointer,
    put,
    row_offset,
    stack_block,
    stack_step,
    stack_vector,
    work_nan,
    work_zero,
)
from isograd.numerics.numba_ops import fma, is_finite, is_finite_key, magnitude_key
from isograd.numerics.numba_storage import narrow, narrow_number, widen
from isograd.numerics.numba_vectors import LANES as LANES_OF_VECTOR
from isograd.numerics.numba_vectors import (
    lanes_maximum,
    load_kept,
    load_vector,
    prefetch_vector,
    spread,
    store_vector,
    vector_lanes,
)
from isograd.ops.softmax import numba_lanes as lanes
from isograd.rows.numba_exponentials import (
    is_short,
    largest_quotient,
    log_probability,
    log_sum,
    probability,
    quotient,
    reciprocal,
    row_shift,
    term_scale,
)
from isograd.rows.numba_rows import fill
from isograd.rows.numba_vector_rows import (
    contiguous,
    exponential_sum,
    largest,
    last_vector,
    products_magnitude,
    products_sum,
    row_maximum,
    row_sum,
    whole_vectors,
)
from isograd.rows.walk import for_rows_or_lanes
from isograd.runtime.numba_compile import kernel

_SMALL = np.float32(2.0**100)  # a sum below takes no finite number out of the range


@kernel
def softmax_rows(like, x_address, y_address, shape, x_strides, y_strides, n, x_stride, y_stride, start, stop):
    """Rows of softmax; y may be x."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    results, tail, zero = stack_step(like), stack_vector(like), work_zero(like)
    # The exponentials of a row; those of one that is longer than a block are hardly in the first-level cache.
    block, scratch = stack_block(zero), empty_work(n + LANES_OF_VECTOR if n > BLOCK else 0, like)
    kept = block if n <= BLOCK else pointer(scratch.ctypes.data, zero)
    copy = empty_stored(0 if x_stride == 1 else n, like)
    streamed = is_streamed(y, shape, n, y_stride)
    for row in range(start, stop):
        yo = row_offset(row, shape, y_strides)
        given = contiguous(x, row_offset(row, shape, x_strides), x_stride, n, pointer(copy.ctypes.data, like))
        m = row_maximum(given, n, tail, like)
        if not is_finite(m):
            fill(y, yo, y_stride, n, work_nan(like), like)
            continue
        base, floor, bias = row_shift(m, like)
        hi, lo = exponential_sum(given, n, kept, True, False, term_scale(n, like), m, base, floor, bias, like, tail)
        r, r_low = reciprocal(hi, lo, n, like)
        top = largest_quotient(r, r_low, m, base, floor, bias, like)
        for j in range(0, n, STEP):
            count = min(n - j, STEP)
            for i in range(0, count, vector_lanes(y)):
                v = quotient(load_kept(kept, j + i, like), r, r_low, top, like)
                store_vector(results, i, narrow_number(v, like))
            put(y, yo + j * y_stride, y_stride, count, results, streamed)
    end_stream(streamed)


@kernel
def log_softmax_rows(like, x_address, y_address, shape, x_strides, y_strides, n, x_stride, y_stride, start, stop):
    """Rows of log_softmax; y may be x."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    results, tail, zero = stack_step(like), stack_vector(like), work_zero(like)
    unused = stack_vector(zero)  # no exponential is kept
    copy = empty_stored(0 if x_stride == 1 else n, like)
    streamed = is_streamed(y, shape, n, y_stride)
    for row in range(start, stop):
        yo = row_offset(row, shape, y_strides)
        given = contiguous(x, row_offset(row, shape, x_strides), x_stride, n, pointer(copy.ctypes.data, like))
        m = row_maximum(given, n, tail, like)
        if not is_finite(m):
            fill(y, yo, y_stride, n, work_nan(like), like)
            continue
        base, floor, bias = row_shift(m, like)
        hi, lo = exponential_sum(given, n, unused, False, False, term_scale(n, like), m, base, floor, bias, like, tail)
        top, middle, rest = log_sum(hi, lo, n, m, base, floor, bias, like)
        for j in range(0, n, STEP):
            count = min(n - j, STEP)
            whole = whole_vectors(given, count)
            for i in range(0, whole, vector_lanes(y)):
                v = log_probability(widen(load_vector(given, j + i)), m, top, middle, rest, like)
                store_vector(results, i, narrow_number(v, like))
            if whole < count:
                v = widen(last_vector(given, j + whole, n, narrow(zero, like), tail))
                store_vector(results, whole, narrow_number(log_probability(v, m, top, middle, rest, like), like))
            put(y, yo + j * y_stride, y_stride, count, results, streamed)
    end_stream(streamed)


@kernel
def softmax_backward_rows(
    like, dy_address, y_address, dx_address, shape, dy_strides, y_strides, dx_strides, n,
    dy_stride, y_stride, dx_stride, start, stop,
):  # fmt: skip
    """Rows of softmax's gradient; dx may be dy or y."""
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    results, tail, zero = stack_step(like), stack_vector(like), narrow(work_zero(like), like)
    # Products are kept, in a block, where they are in the first-level cache beside the rows.
    kept, keep = stack_block(work_zero(like)), n <= (BLOCK if is_short(like) else BLOCK // 2)
    copy = empty_stored((0 if dy_stride == 1 else n) + (0 if y_stride == 1 else n), like)
    dy_copy = pointer(copy.ctypes.data, like)
    y_copy = dy_copy if dy_stride == 1 else advance(dy_copy, n)
    streamed = is_streamed(dx, shape, n, dx_stride)
    for row in range(start, stop):
        dxo = row_offset(row, shape, dx_strides)
        g = contiguous(dy, row_offset(row, shape, dy_strides), dy_stride, n, dy_copy)
        p = contiguous(y, row_offset(row, shape, y_strides), y_stride, n, y_copy)
        key = products_magnitude(g, p, n, kept, keep, zero, tail)
        s = products_sum(g, p, n, kept, keep, key, zero, tail)
        # Finite products have finite factors, and dy - s does not overflow: the results may, but none is a NaN.
        numbers = is_finite_key(key) and abs(s) < _SMALL
        for j in range(0, n, STEP):
            count = min(n - j, STEP)
            whole = whole_vectors(g, count)
            for i in range(0, whole, vector_lanes(dx)):
                v = widen(load_vector(p, j + i)) * (widen(load_vector(g, j + i)) - s)
                store_vector(results, i, narrow_number(v, like) if numbers else narrow(v, like))
            if whole < count:
                v = widen(last_vector(g, j + whole, n, zero, tail)) - s
                v = widen(last_vector(p, j + whole, n, zero, tail)) * v
                store_vector(results, whole, narrow(v, like))
            put(dx, dxo + j * dx_stride, dx_stride, count, results, streamed)
    end_stream(streamed)


@kernel
def log_softmax_backward_rows(
    like, dy_address, y_address, dx_address, shape, dy_strides, y_strides, dx_strides, n,
    dy_stride, y_stride, dx_stride, start, stop,
):  # fmt: skip
    """Rows of log_softmax's gradient; dx may be dy or y."""
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    results, tail, zero = stack_step(like), stack_vector(like), narrow(work_zero(like), like)
    # The probabilities of a row.
    block, scratch = stack_block(work_zero(like)), empty_work(n + LANES_OF_VECTOR if n > BLOCK else 0, like)
    kept = block if n <= BLOCK else pointer(scratch.ctypes.data, work_zero(like))
    copy = empty_stored((0 if dy_stride == 1 else n) + (0 if y_stride == 1 else n), like)
    dy_copy = pointer(copy.ctypes.data, like)
    y_copy = dy_copy if dy_stride == 1 else advance(dy_copy, n)
    streamed = is_streamed(dx, shape, n, dx_stride)
    for row in range(start, stop):
        dxo = row_offset(row, shape, dx_strides)
        g = contiguous(dy, row_offset(row, shape, dy_strides), dy_stride, n, dy_copy)
        p = contiguous(y, row_offset(row, shape, y_strides), y_stride, n, y_copy)
        whole = whole_vectors(g, n)
        keys = magnitude_key(spread(work_zero(like), g))
        for i in range(0, whole, vector_lanes(dx)):
            prefetch_vector(g, i + AHEAD)
            prefetch_vector(p, i + AHEAD)
            keys = largest(keys, magnitude_key(widen(load_vector(g, i))))
            store_vector(kept, i, probability(widen(load_vector(p, i)), like))
        if whole < n:
            keys = largest(keys, magnitude_key(widen(last_vector(g, whole, n, zero, tail))))
            store_vector(kept, whole, probability(widen(last_vector(p, whole, n, zero, tail)), like))
        s = row_sum(g, n, lanes_maximum(keys), zero, tail)
        for j in range(0, n, STEP):
            count = min(n - j, STEP)
            whole = whole_vectors(g, count)
            for i in range(0, whole, vector_lanes(dx)):
                v = fma(-load_kept(kept, j + i, like), s, widen(load_vector(g, j + i)))
                store_vector(results, i, narrow(v, like))
            if whole < count:
                v = fma(-load_kept(kept, j + whole, like), s, widen(last_vector(g, j + whole, n, zero, tail)))
                store_vector(results, whole, narrow(v, like))
            put(dx, dxo + j * dx_stride, dx_stride, count, results, streamed)
    end_stream(streamed)


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
