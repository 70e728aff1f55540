# mypy: ignore-errors
"""Distillation from all of the teacher's logits on the CPU, one row after the other."""

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
)
from isograd.numerics.numba_ops import is_finite, magnitude_key, two_sum
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import block_magnitude
from isograd.rows.numba_exponentials import largest_quotient, log_sum, quotient, reciprocal, row_shift
from isograd.rows.numba_rows import fill, scaled, scaled_exponentials, scaled_maximum, stored_sum
from isograd.runtime.numba_compile import device_function, kernel


@device_function
def log_difference(top, middle, low, other_top, other_middle, other_low):
    """A logarithmic sum less another as an unevaluated pair."""
    high, error = two_sum(top, -other_top)
    return high, error + ((middle - other_middle) + (low - other_low))


@kernel
def distillation_rows(
    like, teacher_like, zero, x_address, t_address, loss_address, shape, x_strides, t_strides, loss_strides, n,
    x_stride, t_stride, factor, square, start, stop,
):  # fmt: skip
    """The loss of every row."""
    x, t, loss = pointer(x_address, like), pointer(t_address, teacher_like), pointer(loss_address, zero)
    a, b = stack_block(zero), stack_block(zero)
    scratch = empty_work(n if n > BLOCK else 0, zero)
    kept = pointer(scratch.ctypes.data, zero)
    for row in range(start, stop):
        xo, to = row_offset(row, shape, x_strides), row_offset(row, shape, t_strides)
        lo_ = row_offset(row, shape, loss_strides)
        xm = scaled_maximum(x, xo, x_stride, n, factor, a, zero)
        tm = scaled_maximum(t, to, t_stride, n, factor, b, zero)
        if not (is_finite(xm) and is_finite(tm)):
            store(loss, lo_, work_nan(zero))
            continue
        base, floor, bias = row_shift(xm, zero)
        hi, lo = scaled_exponentials(x, xo, x_stride, n, factor, a, kept, False, xm, base, floor, bias, zero)
        top, middle, low = log_sum(hi, lo, n, xm, base, floor, bias, zero)
        base, floor, bias = row_shift(tm, zero)
        hi, lo = scaled_exponentials(t, to, t_stride, n, factor, b, kept, True, tm, base, floor, bias, zero)
        r, r_low = reciprocal(hi, lo, n, zero)
        largest = largest_quotient(r, r_low, tm, base, floor, bias, zero)
        t_top, t_middle, t_low = log_sum(hi, lo, n, tm, base, floor, bias, zero)
        high, rest = log_difference(t_top, t_middle, t_low, top, middle, low)
        key = magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                load_block(kept, j, 1, count, b)
            xj, tj = xo + j * x_stride, to + j * t_stride
            for i in range(count):
                p = quotient(load(b, i), r, r_low, largest, zero)
                t_i = scaled(widen(load(t, tj + i * t_stride)), factor)
                x_i = scaled(widen(load(x, xj + i * x_stride)), factor)
                d, error = two_sum(t_i, -x_i)
                u, v = two_sum(d, -high)
                u = u + (v + (error - rest)) if is_finite(u) else u
                store(b, i, p * u if p != zero else zero)
            key = block_magnitude(b, count, key)
            if n > BLOCK:
                store_block(kept, j, 1, count, b)
        store(loss, lo_, narrow(square * stored_sum(kept, n, key, b, zero), zero))


@kernel
def distillation_gradient(
    like, teacher_like, zero, g_address, x_address, t_address, dx_address, shape, g_strides, x_strides, t_strides,
    dx_strides, n, x_stride, t_stride, dx_stride, factor, temperature, divisor, start, stop,
):  # fmt: skip
    """The gradient of every row for the student's logits; dx may be the student's logits."""
    g, x, t = pointer(g_address, zero), pointer(x_address, like), pointer(t_address, teacher_like)
    dx = pointer(dx_address, like)
    a, b = stack_block(zero), stack_block(zero)
    scratch = empty_work(2 * n if n > BLOCK else 0, zero)
    kept = pointer(scratch.ctypes.data, zero)
    t_kept = pointer(scratch.ctypes.data + n * scratch.itemsize, zero)
    for row in range(start, stop):
        xo, to = row_offset(row, shape, x_strides), row_offset(row, shape, t_strides)
        dxo = row_offset(row, shape, dx_strides)
        xm = scaled_maximum(x, xo, x_stride, n, factor, a, zero)
        tm = scaled_maximum(t, to, t_stride, n, factor, b, zero)
        if not (is_finite(xm) and is_finite(tm)):
            fill(dx, dxo, dx_stride, n, work_nan(zero), load(x, xo))
            continue
        upstream = (load(g, row_offset(row, shape, g_strides)) / divisor) * temperature
        base, floor, bias = row_shift(xm, zero)
        hi, lo = scaled_exponentials(x, xo, x_stride, n, factor, a, kept, True, xm, base, floor, bias, zero)
        r, r_low = reciprocal(hi, lo, n, zero)
        largest = largest_quotient(r, r_low, xm, base, floor, bias, zero)
        base, floor, bias = row_shift(tm, zero)
        hi, lo = scaled_exponentials(t, to, t_stride, n, factor, b, t_kept, True, tm, base, floor, bias, zero)
        tr, tr_low = reciprocal(hi, lo, n, zero)
        t_largest = largest_quotient(tr, tr_low, tm, base, floor, bias, zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                load_block(kept, j, 1, count, a)
                load_block(t_kept, j, 1, count, b)
            for i in range(count):
                q = quotient(load(a, i), r, r_low, largest, zero)
                p = quotient(load(b, i), tr, tr_low, t_largest, zero)
                store(a, i, upstream * (q - p))
            store_block(dx, dxo + j * dx_stride, dx_stride, count, a)
