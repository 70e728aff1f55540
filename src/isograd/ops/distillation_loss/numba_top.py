# mypy: ignore-errors
"""Distillation from a teacher's best classes on the CPU: their log-probabilities, and one bucket for the rest.

Indices are int64.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

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
    work_infinity,
    work_nan,
)
from isograd.numerics.numba_ops import exp, from_key, is_finite, log, lowest_key, magnitude_key
from isograd.numerics.numba_storage import narrow
from isograd.numerics.numba_sum import block_magnitude
from isograd.numerics.numba_wide import one_wide, wide_to_float
from isograd.ops.distillation_loss.numba_rows import log_difference
from isograd.ops.distillation_loss.reference import REST_BITS
from isograd.rows.numba_exponentials import (
    exponential,
    largest_quotient,
    log_probability,
    log_sum,
    mark,
    quantum_bits,
    quotient,
    reciprocal,
    row_shift,
    term_scale,
)
from isograd.rows.numba_rows import block_exponentials, block_maximum, fill, load_scaled, stored_sum
from isograd.runtime.numba_compile import INLINED, device_function, kernel

_BITS_64 = c.QUANTUM_BITS + c.LIMB_SHIFT_64


def rest_is_large(hi: Any, lo: Any, like: Any) -> Any:
    """Whether the rest of a row's exponentials is at least 2**-REST_BITS of the largest."""
    raise NotImplementedError


@overload(rest_is_large, jit_options=INLINED)
def _rest_is_large(hi, lo, like):
    if like == types.float64:
        return lambda hi, lo, like: hi >= np.int64(1 << (_BITS_64 - 64 - REST_BITS))
    return lambda hi, lo, like: hi > 0 or (hi == 0 and lo >= np.uint64(1 << (c.QUANTUM_BITS - REST_BITS)))


@kernel
def unfit_rows(i_address, shape, i_strides, n, k, i_stride, found, grain, start, stop):
    """The first row of a range, from 1, that names a class twice or one that there is not; 0 where there is none."""
    indices = pointer(i_address, n)
    seen = np.zeros(n, np.int64)
    for row in range(start, stop):
        io = row_offset(row, shape, i_strides)
        for j in range(k):
            index = load(indices, io + j * i_stride)
            if index < 0 or index >= n or seen[index] == row + 1:
                found[start // grain] = row + 1
                return
            seen[index] = row + 1


@device_function
def _negative(hi, lo):
    """A 128-bit integer with its sign changed."""
    low = np.uint64(~lo + np.uint64(1))
    return ~hi + (np.int64(1) if low == np.uint64(0) else np.int64(0)), low


@device_function
def _add(hi, lo, a, b):
    """The sum of two 128-bit integers."""
    low = np.uint64(lo + b)
    return hi + a + (np.int64(1) if low < lo else np.int64(0)), low


@device_function
def _scaled_row(x, offset, stride, n, factor, z, block, zero):
    """Write a scaled row to z; its maximum."""
    key = lowest_key(zero)
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        load_scaled(x, offset + j * stride, stride, count, factor, block)
        key = block_maximum(block, count, key)
        store_block(z, j, 1, count, block)
    return from_key(key)


@device_function
def _sum_of(z, n, block, m, base, floor, bias, zero):
    """The integer sum of the exponentials of z."""
    scale = term_scale(n, zero)
    hi, lo = np.int64(0), np.uint64(0)
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        load_block(z, j, 1, count, block)
        hi, lo = block_exponentials(block, count, hi, lo, m, base, floor, bias, scale, zero)
    return hi, lo


@device_function
def _maximum_of(z, n, block, zero):
    key = lowest_key(zero)
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        load_block(z, j, 1, count, block)
        key = block_maximum(block, count, key)
    return from_key(key)


@device_function
def _gather(z, indices, io, i_stride, k, named):
    """The elements of z that the teacher names."""
    for j in range(k):
        store(named, j, load(z, load(indices, io + j * i_stride)))


@device_function
def _rest_exponentials(z, n, indices, io, i_stride, named, k, block, hi, lo, m, zero):
    """(hi, lo, m) of the classes that the teacher does not name: the integer sum of their exponentials, relative to m.

    The arguments are those of all classes; z is the row and comes back unchanged. m is -inf where the rest is empty.
    """
    base, floor, bias = row_shift(m, zero)
    hi, lo = _add(hi, lo, *_negative(*_sum_of(named, k, block, m, base, floor, bias, zero)))
    if rest_is_large(hi, lo, zero):
        return hi, lo, m
    # Small beside the others, and known to few bits in their units: a sum in its own.
    for j in range(k):
        store(z, load(indices, io + j * i_stride), -work_infinity(zero))
    m = _maximum_of(z, n, block, zero)
    if m > -work_infinity(zero):
        base, floor, bias = row_shift(m, zero)
        hi, lo = _sum_of(z, n, block, m, base, floor, bias, zero)
    for j in range(k):
        store(z, load(indices, io + j * i_stride), load(named, j))
    return hi, lo, m


@device_function
def _teacher_rest(log_p, k, block, zero):
    """(whether these are log-probabilities, 1 less the sum of the teacher's probabilities)."""
    if not _maximum_of(log_p, k, block, zero) <= 0.5:
        return False, zero
    base, floor, bias = row_shift(zero, zero)
    hi, lo = _negative(*_sum_of(log_p, k, block, zero, base, floor, bias, zero))
    hi, lo = _add(hi, lo, *one_wide(zero))
    if hi < 0 or (hi == 0 and lo == np.uint64(0)):
        return True, zero
    return True, wide_to_float(hi, lo, -quantum_bits(k, zero), zero)


@kernel
def distillation_top_rows(
    like, teacher_like, zero, x_address, t_address, i_address, loss_address, shape, x_strides, t_strides,
    i_strides, loss_strides, n, k, x_stride, t_stride, i_stride, factor, square, start, stop,
):  # fmt: skip
    """The loss of every row."""
    x, t, loss = pointer(x_address, like), pointer(t_address, teacher_like), pointer(loss_address, zero)
    indices = pointer(i_address, n)
    block = stack_block(zero)
    scratch = empty_work(n + 3 * k + 1, zero)
    z, named = pointer(scratch.ctypes.data, zero), pointer(scratch.ctypes.data + n * scratch.itemsize, zero)
    log_p = pointer(scratch.ctypes.data + (n + k) * scratch.itemsize, zero)
    terms = pointer(scratch.ctypes.data + (n + 2 * k) * scratch.itemsize, zero)
    for row in range(start, stop):
        xo, to = row_offset(row, shape, x_strides), row_offset(row, shape, t_strides)
        io, out = row_offset(row, shape, i_strides), row_offset(row, shape, loss_strides)
        load_block(t, to, t_stride, k, log_p)
        valid, p_rest = _teacher_rest(log_p, k, block, zero)
        m = _scaled_row(x, xo, x_stride, n, factor, z, block, zero)
        if not (valid and is_finite(m)):
            store(loss, out, work_nan(zero))
            continue
        base, floor, bias = row_shift(m, zero)
        hi, lo = _sum_of(z, n, block, m, base, floor, bias, zero)
        top, middle, low = log_sum(hi, lo, n, m, base, floor, bias, zero)
        _gather(z, indices, io, i_stride, k, named)
        for j in range(k):
            p = exp(load(log_p, j))
            log_q = log_probability(load(named, j), m, top, middle, low, zero)
            store(terms, j, p * (load(log_p, j) - log_q) if p != zero else zero)
        store(terms, k, zero)
        if p_rest != zero:
            hi, lo, rm = _rest_exponentials(z, n, indices, io, i_stride, named, k, block, hi, lo, m, zero)
            # Where every other class is masked there is no rest, and what rounding leaves of the teacher's is dropped.
            if rm > -work_infinity(zero):
                base, floor, bias = row_shift(rm, zero)
                r_top, r_middle, r_low = log_sum(hi, lo, n, rm, base, floor, bias, zero)
                high, rest = log_difference(r_top, r_middle, r_low, top, middle, low)
                log_q_rest = high + rest if is_finite(high) else high
                store(terms, k, p_rest * (log(p_rest) - log_q_rest))
        key = magnitude_key(zero)
        for j in range(0, k + 1, BLOCK):
            count = min(k + 1 - j, BLOCK)
            load_block(terms, j, 1, count, block)
            key = block_magnitude(block, count, key)
        store(loss, out, narrow(square * stored_sum(terms, k + 1, key, block, zero), zero))


@kernel
def distillation_top_gradient(
    like, teacher_like, zero, g_address, x_address, t_address, i_address, dx_address, shape, g_strides,
    x_strides, t_strides, i_strides, dx_strides, n, k, x_stride, t_stride, i_stride, dx_stride, factor, temperature,
    divisor, start, stop,
):  # fmt: skip
    """The gradient of every row for the student's logits; dx may be the student's logits."""
    g, x, t = pointer(g_address, zero), pointer(x_address, like), pointer(t_address, teacher_like)
    indices, dx = pointer(i_address, n), pointer(dx_address, like)
    block = stack_block(zero)
    scratch = empty_work(n + 2 * k, zero)
    z, named = pointer(scratch.ctypes.data, zero), pointer(scratch.ctypes.data + n * scratch.itemsize, zero)
    log_p = pointer(scratch.ctypes.data + (n + k) * scratch.itemsize, zero)
    for row in range(start, stop):
        xo, to = row_offset(row, shape, x_strides), row_offset(row, shape, t_strides)
        io, dxo = row_offset(row, shape, i_strides), row_offset(row, shape, dx_strides)
        load_block(t, to, t_stride, k, log_p)
        valid, p_rest = _teacher_rest(log_p, k, block, zero)
        m = _scaled_row(x, xo, x_stride, n, factor, z, block, zero)
        if not (valid and is_finite(m)):
            fill(dx, dxo, dx_stride, n, work_nan(zero), load(x, xo))
            continue
        upstream = (load(g, row_offset(row, shape, g_strides)) / divisor) * temperature
        base, floor, bias = row_shift(m, zero)
        hi, lo = _sum_of(z, n, block, m, base, floor, bias, zero)
        r, r_low = reciprocal(hi, lo, n, zero)
        largest = largest_quotient(r, r_low, m, base, floor, bias, zero)
        _gather(z, indices, io, i_stride, k, named)
        rm, s_base, s_floor, s_bias, sr, sr_low, s_largest = m, base, floor, bias, r, r_low, zero
        shared = False
        if p_rest != zero:
            hi, lo, rm = _rest_exponentials(z, n, indices, io, i_stride, named, k, block, hi, lo, m, zero)
            shared = rm > -work_infinity(zero)
            if shared:
                s_base, s_floor, s_bias = row_shift(rm, zero)
                sr, sr_low = reciprocal(hi, lo, n, zero)
                s_largest = largest_quotient(sr, sr_low, rm, s_base, s_floor, s_bias, zero)
        for j in range(k):
            x_j = load(named, j)
            e, _ = exponential(x_j, base, floor, bias, zero)
            q = quotient(mark(e, x_j, m, zero), r, r_low, largest, zero)
            store(named, j, upstream * (q - exp(load(log_p, j))))
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(z, j, 1, count, block)
            if not shared:
                for i in range(count):
                    x_i = load(block, i)
                    e = mark(exponential(x_i, base, floor, bias, zero)[0], x_i, m, zero)
                    store(block, i, upstream * quotient(e, r, r_low, largest, zero))
            elif rm == m:
                for i in range(count):
                    x_i = load(block, i)
                    e = mark(exponential(x_i, base, floor, bias, zero)[0], x_i, m, zero)
                    share = quotient(e, sr, sr_low, s_largest, zero)
                    store(block, i, upstream * (quotient(e, r, r_low, largest, zero) - p_rest * share))
            else:
                for i in range(count):
                    x_i = load(block, i)
                    e = mark(exponential(x_i, base, floor, bias, zero)[0], x_i, m, zero)
                    s = mark(exponential(x_i, s_base, s_floor, s_bias, zero)[0], x_i, rm, zero)
                    share = quotient(s, sr, sr_low, s_largest, zero)
                    store(block, i, upstream * (quotient(e, r, r_low, largest, zero) - p_rest * share))
            store_block(dx, dxo + j * dx_stride, dx_stride, count, block)
        for j in range(k):
            index = load(indices, io + j * i_stride)
            store(dx, dxo + index * dx_stride, narrow(load(named, j), load(dx, dxo)))
