# mypy: ignore-errors
"""The softmax family on the CPU for a reduction over a non-last axis.

A tile of neighbouring rows, the lanes, advances together along the reduced axis, so that memory is read in order. The
arithmetic is that of `numba_kernels.py`.
"""

import numpy as np

from isograd.numerics.numba_compile import device_function, kernel
from isograd.numerics.numba_memory import (
    LANES,
    load,
    load_block,
    multiply_part,
    pointer,
    row_offset,
    stack_lanes,
    store,
    store_block,
    work_nan,
    work_zero,
)
from isograd.numerics.numba_ops import fma, from_key, is_finite, lowest_key, magnitude_key, max_key
from isograd.numerics.numba_storage import widen
from isograd.numerics.numba_sum import PARTIAL, is_finite_key, signed_rest, special_value, sum_scale
from isograd.numerics.numba_wide import add_limbs, limb_shift, split_term, term_bias, wide_to_float
from isograd.softmax.numba_steps import (
    exponential,
    exponential_term,
    fits_word,
    is_short,
    largest_quotient,
    log_probability,
    log_sum,
    low_term_bias,
    mark,
    probability,
    quotient,
    reciprocal,
    row_shift,
    term_scale,
    word_log_sum,
    word_reciprocal,
)


@device_function
def tile_offset(index, lanes, shape, strides):
    """The offset of a tile; tiles of the contiguous dimension are counted fastest."""
    tiles = (lanes + LANES - 1) // LANES
    outer = index // tiles
    return row_offset(outer, shape, strides) + (index - outer * tiles) * LANES


@device_function
def tile_width(index, lanes):
    """How many lanes a tile has."""
    tiles = (lanes + LANES - 1) // LANES
    return min(lanes - (index - (index // tiles) * tiles) * LANES, LANES)


@device_function
def _fold_lanes(high, low, hi, lo, count, high_excess, low_excess, like):
    """Move the partial sums of every lane into its 128-bit sum, less the bias of the terms in them."""
    for i in range(count):
        a, b = signed_rest(load(high, i), high_excess), signed_rest(load(low, i), low_excess)
        h, v = add_limbs(load(hi, i), load(lo, i), a, b, limb_shift(like))
        store(hi, i, h)
        store(lo, i, v)
        store(high, i, load(high, i) ^ load(high, i))
        store(low, i, load(low, i) ^ load(low, i))


@device_function
def clear_lanes(high, low, hi, lo, zero, count):
    """Set the sums of a tile to zero."""
    for i in range(count):
        store(high, i, zero)
        store(low, i, zero)
        store(hi, i, np.int64(0))
        store(lo, i, np.uint64(0))


@device_function
def lane_maximum(x, offset, stride, n, count, block, key, m, base, floor, bias, like):
    """The maximum of every lane, and what the exponentials need to know of it."""
    for i in range(count):
        store(key, i, lowest_key(like))
    for j in range(n):
        load_block(x, offset + j * stride, 1, count, block)
        for i in range(count):
            k = max_key(load(block, i))
            store(key, i, k if k > load(key, i) else load(key, i))
    for i in range(count):
        store(m, i, from_key(load(key, i)))
        first, second, third = row_shift(load(m, i), like)
        store(base, i, first)
        store(floor, i, second)
        store(bias, i, third)


@device_function
def lane_exponential_sums(
    x, offset, stride, n, count, block, m, base, floor, bias, high, low, hi, lo, y, y_offset, y_stride, keep, like
):
    """Sum the exponentials of every lane; with `keep` they stay in y."""
    scale = term_scale(n, like)
    one, low_one = term_bias(work_zero(like)), low_term_bias(like)
    for j in range(n):
        load_block(x, offset + j * stride, 1, count, block)
        for i in range(count):
            x_i = load(block, i)
            e, error = exponential(x_i, load(base, i), load(floor, i), load(bias, i), like)
            store(block, i, mark(e, x_i, load(m, i), like))
            h, v = exponential_term(e, error, scale, like)
            store(high, i, h + load(high, i))
            store(low, i, v + load(low, i))
        if keep:
            store_block(y, y_offset + j * y_stride, 1, count, block)
        if j % PARTIAL == PARTIAL - 1:
            _fold_lanes(high, low, hi, lo, count, PARTIAL * one, PARTIAL * low_one, like)
    _fold_lanes(high, low, hi, lo, count, (n % PARTIAL) * one, (n % PARTIAL) * low_one, like)


@device_function
def lane_reciprocals(hi, lo, n, count, r, r_low, like):
    """1 / sum of every lane."""
    if fits_word(n, like):
        for i in range(count):
            first, second = word_reciprocal(np.int64(load(lo, i)), n, like)
            store(r, i, first)
            store(r_low, i, second)
    else:
        for i in range(count):
            first, second = reciprocal(load(hi, i), load(lo, i), n, like)
            store(r, i, first)
            store(r_low, i, second)


@device_function
def lane_log_sums(hi, lo, n, count, m, base, floor, bias, top, middle, rest, like):
    """The logarithm of the sum of every lane in the parts of `log_sum`; NaN for lanes without a finite maximum."""
    if fits_word(n, like):
        for i in range(count):
            first, second, third = word_log_sum(
                np.int64(load(lo, i)), n, load(m, i), load(base, i), load(floor, i), load(bias, i), like
            )
            store(top, i, first if is_finite(load(m, i)) else work_nan(like))
            store(middle, i, second)
            store(rest, i, third)
    else:
        for i in range(count):
            first, second, third = log_sum(
                load(hi, i), load(lo, i), n, load(m, i), load(base, i), load(floor, i), load(bias, i), like
            )
            store(top, i, first if is_finite(load(m, i)) else work_nan(like))
            store(middle, i, second)
            store(rest, i, third)


@kernel
def softmax_lanes(like, x_address, y_address, shape, x_strides, y_strides, lanes, n, x_stride, y_stride, start, stop):
    x, y = pointer(x_address, like), pointer(y_address, like)
    zero, integer = work_zero(like), lowest_key(like)
    block, m, largest = stack_lanes(zero), stack_lanes(zero), stack_lanes(zero)
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
            store_block(y, yo + j * y_stride, 1, count, block)


@kernel
def log_softmax_lanes(
    like, x_address, y_address, shape, x_strides, y_strides, lanes, n, x_stride, y_stride, start, stop
):
    x, y = pointer(x_address, like), pointer(y_address, like)
    zero, integer = work_zero(like), lowest_key(like)
    block, m = stack_lanes(zero), stack_lanes(zero)
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
            store_block(y, yo + j * y_stride, 1, count, block)


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
    p, s = stack_lanes(zero), stack_lanes(zero)
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
            multiply_part(dy, dyo + j * dy_stride, 1, y, yo + j * y_stride, 1, 0, count, p)
            _lane_magnitude(p, count, key)
        _lane_scales(key, first, second, exponent, count)
        finite = _all_finite(key, count)
        for j in range(n):
            multiply_part(dy, dyo + j * dy_stride, 1, y, yo + j * y_stride, 1, 0, count, p)
            _lane_terms(p, count, first, second, high, low)
            if not finite:
                _note_special(p, count, special)
            if j % PARTIAL == PARTIAL - 1:
                _fold_lanes(high, low, hi, lo, count, PARTIAL * one, PARTIAL * one, like)
        _fold_lanes(high, low, hi, lo, count, (n % PARTIAL) * one, (n % PARTIAL) * one, like)
        _lane_sums(key, special, hi, lo, exponent, s, count, zero)
        for j in range(n):
            dy_row, y_row = dyo + j * dy_stride, yo + j * y_stride
            for i in range(count):
                store(p, i, widen(load(y, y_row + i)) * (widen(load(dy, dy_row + i)) - load(s, i)))
            store_block(dx, dxo + j * dx_stride, 1, count, p)


@kernel
def log_softmax_backward_lanes(
    like, dy_address, y_address, dx_address, shape, dy_strides, y_strides, dx_strides, lanes, n,
    dy_stride, y_stride, dx_stride, start, stop,
):  # fmt: skip
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    zero, integer = work_zero(like), magnitude_key(work_zero(like))
    one = term_bias(zero)
    a, s = stack_lanes(zero), stack_lanes(zero)
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
                _fold_lanes(high, low, hi, lo, count, PARTIAL * one, PARTIAL * one, like)
        _fold_lanes(high, low, hi, lo, count, (n % PARTIAL) * one, (n % PARTIAL) * one, like)
        _lane_sums(key, special, hi, lo, exponent, s, count, zero)
        for j in range(n):
            dy_row, y_row = dyo + j * dy_stride, yo + j * y_stride
            for i in range(count):
                store(a, i, fma(-probability(widen(load(y, y_row + i)), like), load(s, i), widen(load(dy, dy_row + i))))
            store_block(dx, dxo + j * dx_stride, 1, count, a)
