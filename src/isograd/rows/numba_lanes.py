# mypy: ignore-errors
"""Rows that advance together on the CPU, for a reduction over a non-last axis.

A tile of neighbouring rows, the lanes, is read in the order of memory. The arithmetic is that of `numba_rows.py`.
"""

import numpy as np

from isograd.numerics.numba_memory import (
    LANES,
    load,
    load_block,
    row_offset,
    store,
    store_block,
    work_nan,
    work_zero,
)
from isograd.numerics.numba_ops import from_key, is_finite, lowest_key, max_key
from isograd.numerics.numba_sum import PARTIAL, signed_rest
from isograd.numerics.numba_wide import add_limbs, limb_shift, term_bias
from isograd.rows.numba_exponentials import (
    exponential,
    exponential_term,
    fits_word,
    log_sum,
    low_term_bias,
    mark,
    reciprocal,
    row_shift,
    term_scale,
    word_log_sum,
    word_reciprocal,
)
from isograd.runtime.numba_compile import device_function


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
def fold_lanes(high, low, hi, lo, count, high_excess, low_excess, like):
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
            fold_lanes(high, low, hi, lo, count, PARTIAL * one, PARTIAL * low_one, like)
    fold_lanes(high, low, hi, lo, count, (n % PARTIAL) * one, (n % PARTIAL) * low_one, like)


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
