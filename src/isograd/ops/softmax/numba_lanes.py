# mypy: ignore-errors
"""The softmax family on the CPU for a reduction over a non-last axis.

A tile of neighbouring rows, the lanes, advances together along the reduced axis, so that memory is read in order. The
arithmetic is that of `numba.py`.
"""

import numpy as np

from isograd.numerics.numba_memory import (
    end_stream,
    is_streamed,
    load,
    load_block,
    multiply_part,
    narrow_and_put,
    pointer,
    put,
    stack_lanes,
    store,
    work_nan,
    work_zero,
)
from isograd.numerics.numba_ops import fma, is_finite, lowest_key, magnitude_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import PARTIAL, is_finite_key, special_value, sum_scale
from isograd.numerics.numba_wide import split_term, term_bias, wide_to_float
from isograd.rows.numba_exponentials import (
    exponential,
    is_short,
    largest_quotient,
    log_probability,
    probability,
    quotient,
)
from isograd.rows.numba_lanes import (
    clear_lanes,
    fold_lanes,
    lane_exponential_sums,
    lane_log_sums,
    lane_maximum,
    lane_reciprocals,
    tile_offset,
    tile_width,
)
from isograd.runtime.numba_compile import device_function, kernel


@kernel
def softmax_lanes(like, x_address, y_address, shape, x_strides, y_strides, lanes, n, x_stride, y_stride, start, stop):
    x, y = pointer(x_address, like), pointer(y_address, like)
    zero, integer = work_zero(like), lowest_key(like)
    block, m, largest = stack_lanes(zero), stack_lanes(zero), stack_lanes(zero)
    # Wide types keep their exponentials in y, which is in a cache then.
    results, streamed = stack_lanes(like), is_short(like) and is_streamed(y, shape, n * lanes, 1)
    r, r_low = stack_lanes(zero), stack_lanes(zero)
    base, floor, bias = stack_lanes(zero), stack_lanes(zero), stack_lanes(integer)
    key, high, low = stack_lanes(integer), stack_lanes(integer), stack_lanes(integer)
    hi, lo = stack_lanes(np.int64(0)), stack_lanes(np.uint64(0))
    for index in range(start, stop):
        xo, yo = tile_offset(index, lanes, shape, x_strides), tile_offset(index, lanes, shape, y_strides)
        count = tile_width(index, lanes)
        lane_maximum(x, xo, x_stride, n, count, block, key, m, base, floor, bias, like)
        clear_lanes(high, low, hi, lo, integer ^ integer, count)
        keep = not is_short(like)
        lane_exponential_sums(
            x, xo, x_stride, n, count, block, m, base, floor, bias, high, low, hi, lo, y, yo, y_stride, keep, like
        )
        lane_reciprocals(hi, lo, n, count, r, r_low, like)
        for i in range(count):
            valid = is_finite(load(m, i))
            first = load(r, i) if valid else work_nan(like)
            second = load(r_low, i)
            third = largest_quotient(first, second, load(m, i), load(base, i), load(floor, i), load(bias, i), like)
            store(r, i, first)
            store(largest, i, third if valid else work_nan(like))
        for j in range(n):
            if is_short(like):
                load_block(x, xo + j * x_stride, 1, count, block)
                for i in range(count):
                    store(block, i, exponential(load(block, i), load(base, i), load(floor, i), load(bias, i), like)[0])
            else:
                load_block(y, yo + j * y_stride, 1, count, block)
            for i in range(count):
                store(block, i, quotient(load(block, i), load(r, i), load(r_low, i), load(largest, i), like))
            narrow_and_put(y, yo + j * y_stride, 1, count, block, results, streamed)
    end_stream(streamed)


@kernel
def log_softmax_lanes(
    like, x_address, y_address, shape, x_strides, y_strides, lanes, n, x_stride, y_stride, start, stop
):
    x, y = pointer(x_address, like), pointer(y_address, like)
    zero, integer = work_zero(like), lowest_key(like)
    block, m = stack_lanes(zero), stack_lanes(zero)
    results, streamed = stack_lanes(like), is_streamed(y, shape, n * lanes, 1)
    top, middle, rest = stack_lanes(zero), stack_lanes(zero), stack_lanes(zero)
    base, floor, bias = stack_lanes(zero), stack_lanes(zero), stack_lanes(integer)
    key, high, low = stack_lanes(integer), stack_lanes(integer), stack_lanes(integer)
    hi, lo = stack_lanes(np.int64(0)), stack_lanes(np.uint64(0))
    for index in range(start, stop):
        xo, yo = tile_offset(index, lanes, shape, x_strides), tile_offset(index, lanes, shape, y_strides)
        count = tile_width(index, lanes)
        lane_maximum(x, xo, x_stride, n, count, block, key, m, base, floor, bias, like)
        clear_lanes(high, low, hi, lo, integer ^ integer, count)
        lane_exponential_sums(
            x, xo, x_stride, n, count, block, m, base, floor, bias, high, low, hi, lo, y, yo, y_stride, False, like
        )
        lane_log_sums(hi, lo, n, count, m, base, floor, bias, top, middle, rest, like)
        for j in range(n):
            load_block(x, xo + j * x_stride, 1, count, block)
            for i in range(count):
                store(
                    block,
                    i,
                    log_probability(load(block, i), load(m, i), load(top, i), load(middle, i), load(rest, i), like),
                )
            narrow_and_put(y, yo + j * y_stride, 1, count, block, results, streamed)
    end_stream(streamed)


@device_function
def _lane_scales(key, first, second, exponent, count):
    for i in range(count):
        a, b, k = sum_scale(load(key, i))
        store(first, i, a)
        store(second, i, b)
        store(exponent, i, k)


@device_function
def _lane_terms(p, count, first, second, high, low):
    for i in range(count):
        h, v = split_term(load(p, i) * load(first, i), load(second, i))
        store(high, i, h + load(high, i))
        store(low, i, v + load(low, i))


@device_function
def _note_special(p, count, special):
    for i in range(count):
        x = load(p, i)
        state = load(special, i)
        state = state if is_finite(x) else state | np.int64(1 if x > 0 else (2 if x < 0 else 3))
        store(special, i, state)


@device_function
def _lane_sums(key, special, hi, lo, exponent, s, count, zero):
    for i in range(count):
        if is_finite_key(load(key, i)):
            store(s, i, wide_to_float(load(hi, i), load(lo, i), load(exponent, i), zero))
        else:
            store(s, i, special_value(load(special, i), zero))


@device_function
def _lane_magnitude(p, count, key):
    for i in range(count):
        k = magnitude_key(load(p, i))
        store(key, i, k if k > load(key, i) else load(key, i))


@device_function
def _all_finite(key, count):
    finite = True
    for i in range(count):
        finite &= is_finite_key(load(key, i))
    return finite


@kernel
def softmax_backward_lanes(
    like, dy_address, y_address, dx_address, shape, dy_strides, y_strides, dx_strides, lanes, n,
    dy_stride, y_stride, dx_stride, start, stop,
):  # fmt: skip
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    zero, integer = work_zero(like), magnitude_key(work_zero(like))
    one = term_bias(zero)
    results, p, s = stack_lanes(like), stack_lanes(zero), stack_lanes(zero)
    streamed = is_streamed(dx, shape, n * lanes, 1)
    first, second = stack_lanes(zero), stack_lanes(zero)
    key, high, low = stack_lanes(integer), stack_lanes(integer), stack_lanes(integer)
    exponent, special = stack_lanes(np.int64(0)), stack_lanes(np.int64(0))
    hi, lo = stack_lanes(np.int64(0)), stack_lanes(np.uint64(0))
    for index in range(start, stop):
        dyo, yo = tile_offset(index, lanes, shape, dy_strides), tile_offset(index, lanes, shape, y_strides)
        dxo, count = tile_offset(index, lanes, shape, dx_strides), tile_width(index, lanes)
        clear_lanes(high, low, hi, lo, integer, count)
        for i in range(count):
            store(key, i, integer)
            store(special, i, np.int64(0))
        for j in range(n):
            dy_row, y_row = dyo + j * dy_stride, yo + j * y_stride
            for i in range(count):
                k = magnitude_key(widen(load(dy, dy_row + i)) * widen(load(y, y_row + i)))
                store(key, i, k if k > load(key, i) else load(key, i))
        _lane_scales(key, first, second, exponent, count)
        finite = _all_finite(key, count)
        for j in range(n):
            dy_row, y_row = dyo + j * dy_stride, yo + j * y_stride
            for i in range(count):
                v = widen(load(dy, dy_row + i)) * widen(load(y, y_row + i))
                h, t = split_term(v * load(first, i), load(second, i))
                store(high, i, h + load(high, i))
                store(low, i, t + load(low, i))
            if not finite:
                multiply_part(dy, dy_row, 1, y, y_row, 1, 0, count, p)
                _note_special(p, count, special)
            if j % PARTIAL == PARTIAL - 1:
                fold_lanes(high, low, hi, lo, count, PARTIAL * one, PARTIAL * one, like)
        fold_lanes(high, low, hi, lo, count, (n % PARTIAL) * one, (n % PARTIAL) * one, like)
        _lane_sums(key, special, hi, lo, exponent, s, count, zero)
        for j in range(n):
            dy_row, y_row = dyo + j * dy_stride, yo + j * y_stride
            for i in range(count):
                v = widen(load(y, y_row + i)) * (widen(load(dy, dy_row + i)) - load(s, i))
                store(results, i, narrow(v, like))
            put(dx, dxo + j * dx_stride, 1, count, results, streamed)
    end_stream(streamed)


@kernel
def log_softmax_backward_lanes(
    like, dy_address, y_address, dx_address, shape, dy_strides, y_strides, dx_strides, lanes, n,
    dy_stride, y_stride, dx_stride, start, stop,
):  # fmt: skip
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    zero, integer = work_zero(like), magnitude_key(work_zero(like))
    one = term_bias(zero)
    a, s = stack_lanes(zero), stack_lanes(zero)
    results, streamed = stack_lanes(like), is_streamed(dx, shape, n * lanes, 1)
    first, second = stack_lanes(zero), stack_lanes(zero)
    key, high, low = stack_lanes(integer), stack_lanes(integer), stack_lanes(integer)
    exponent, special = stack_lanes(np.int64(0)), stack_lanes(np.int64(0))
    hi, lo = stack_lanes(np.int64(0)), stack_lanes(np.uint64(0))
    for index in range(start, stop):
        dyo, yo = tile_offset(index, lanes, shape, dy_strides), tile_offset(index, lanes, shape, y_strides)
        dxo, count = tile_offset(index, lanes, shape, dx_strides), tile_width(index, lanes)
        clear_lanes(high, low, hi, lo, integer, count)
        for i in range(count):
            store(key, i, integer)
            store(special, i, np.int64(0))
        for j in range(n):
            load_block(dy, dyo + j * dy_stride, 1, count, a)
            _lane_magnitude(a, count, key)
        _lane_scales(key, first, second, exponent, count)
        finite = _all_finite(key, count)
        for j in range(n):
            load_block(dy, dyo + j * dy_stride, 1, count, a)
            _lane_terms(a, count, first, second, high, low)
            if not finite:
                _note_special(a, count, special)
            if j % PARTIAL == PARTIAL - 1:
                fold_lanes(high, low, hi, lo, count, PARTIAL * one, PARTIAL * one, like)
        fold_lanes(high, low, hi, lo, count, (n % PARTIAL) * one, (n % PARTIAL) * one, like)
        _lane_sums(key, special, hi, lo, exponent, s, count, zero)
        for j in range(n):
            dy_row, y_row = dyo + j * dy_stride, yo + j * y_stride
            for i in range(count):
                store(a, i, fma(-probability(widen(load(y, y_row + i)), like), load(s, i), widen(load(dy, dy_row + i))))
            narrow_and_put(dx, dxo + j * dx_stride, 1, count, a, results, streamed)
    end_stream(streamed)
