# mypy: ignore-errors
"""Rows whose classes are spread over ranks, on the CPU: what a rank adds to a sum, and what follows from the sum.

Maxima travel as the keys of rule 3 and sums as integers in three words, which ranks add without a carry between them.
A part has the rows of all ranks and some of their classes; `step` leads to its next row, `stride` to its next class.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.losses.numba_cross_entropy import IGNORED
from isograd.numerics.numba_memory import (
    BLOCK,
    empty_stored,
    load,
    load_block,
    multiply_part,
    pointer,
    stack_block,
    stack_vector,
    store,
    store_block,
    work_nan,
    work_one,
    work_zero,
)
from isograd.numerics.numba_ops import fma, from_key, is_finite, magnitude_key, max_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import (
    block_magnitude,
    block_special,
    block_terms,
    is_finite_key,
    special_value,
    sum_scale,
)
from isograd.numerics.numba_wide import add_limbs, limb_shift, wide_to_float
from isograd.rows.numba_exponentials import (
    exponential,
    is_short,
    largest_quotient,
    log_probability,
    log_sum,
    mark,
    probability,
    quotient,
    reciprocal,
    row_shift,
    term_scale,
)
from isograd.rows.numba_rows import fill_row
from isograd.rows.numba_vector_rows import contiguous, exponential_sum, row_maximum
from isograd.runtime.numba_compile import INLINED, device_function, kernel
from isograd.torch.distributed.vocab_layout import LOG_PROBABILITIES, PRODUCTS, WORDS


def _work_key(key: Any, zero: Any) -> Any:
    """A key of the work type from an int64."""
    raise NotImplementedError


@overload(_work_key, jit_options=INLINED)
def _work_key_overload(key, zero):
    return (lambda key, zero: key) if zero == types.float64 else (lambda key, zero: np.int32(key))


@device_function
def _store_words(words, row, hi, lo):
    """A 128-bit integer in words that leave room for the additions of 2**31 ranks."""
    store(words, row * WORDS, hi)
    store(words, row * WORDS + 1, np.int64(lo >> np.uint64(32)))
    store(words, row * WORDS + 2, np.int64(lo & np.uint64(0xFFFFFFFF)))


@device_function
def _load_words(words, row):
    """The 128-bit integer of words that ranks have added up."""
    at = row * WORDS
    return add_limbs(load(words, at), np.uint64(0), load(words, at + 1), load(words, at + 2), np.int64(32))


# --- the sum of exponentials -----------------------------------------------------------------------------------------
@kernel
def maxima(like, x_address, keys_address, n, step, stride, start, stop):
    """The key of the maximum of a part of every row."""
    x, keys = pointer(x_address, like), pointer(keys_address, np.int64(0))
    copy, tail = empty_stored(0 if stride == 1 else n, like), stack_vector(like)
    for row in range(start, stop):
        given = contiguous(x, row * step, stride, n, pointer(copy.ctypes.data, like))
        store(keys, row, np.int64(max_key(row_maximum(given, n, tail, like))))


@kernel
def exponentials(like, x_address, keys_address, words_address, n, step, stride, classes, start, stop):
    """The exact sums of a part's exponentials, relative to the maxima of whole rows of so many classes."""
    zero = work_zero(like)
    x, keys, words = pointer(x_address, like), pointer(keys_address, np.int64(0)), pointer(words_address, np.int64(0))
    unused = stack_vector(zero)  # no exponential is kept
    copy, tail = empty_stored(0 if stride == 1 else n, like), stack_vector(like)
    for row in range(start, stop):
        m = from_key(_work_key(load(keys, row), zero))
        hi, lo = np.int64(0), np.uint64(0)
        if is_finite(m):
            base, floor, bias = row_shift(m, like)
            given = contiguous(x, row * step, stride, n, pointer(copy.ctypes.data, like))
            hi, lo = exponential_sum(
                given, n, unused, False, False, term_scale(classes, like), m, base, floor, bias, like,
                tail,
            )  # fmt: skip
        _store_words(words, row, hi, lo)


@kernel
def statistics(like, keys_address, words_address, statistics_address, rows, classes, start, stop):
    """What maximum and sum of a row give, NaN where the maximum is not finite."""
    zero = work_zero(like)
    keys, words = pointer(keys_address, np.int64(0)), pointer(words_address, np.int64(0))
    about = pointer(statistics_address, zero)
    nan = work_nan(like)
    for row in range(start, stop):
        m = from_key(_work_key(load(keys, row), zero))
        r, r_low, top, middle, rest = nan, nan, nan, nan, nan
        if is_finite(m):
            base, floor, bias = row_shift(m, like)
            hi, lo = _load_words(words, row)
            r, r_low = reciprocal(hi, lo, classes, like)
            top, middle, rest = log_sum(hi, lo, classes, m, base, floor, bias, like)
        else:
            m = nan
        store(about, row, m)
        store(about, rows + row, r)
        store(about, 2 * rows + row, r_low)
        store(about, 3 * rows + row, top)
        store(about, 4 * rows + row, middle)
        store(about, 5 * rows + row, rest)


# --- sums of terms (rule 4) ------------------------------------------------------------------------------------------
@device_function
def _fill_terms(mode, x, xo, x_stride, y, yo, y_stride, about, rows, row, count, block, like):
    if mode == PRODUCTS:
        multiply_part(x, xo, x_stride, y, yo, y_stride, 0, count, block)
        return
    load_block(x, xo, x_stride, count, block)
    if mode == LOG_PROBABILITIES:
        m, top = load(about, row), load(about, 3 * rows + row)
        middle, rest = load(about, 4 * rows + row), load(about, 5 * rows + row)
        for i in range(count):
            store(block, i, log_probability(load(block, i), m, top, middle, rest, like))


@kernel
def magnitudes(
    like, x_address, y_address, statistics_address, keys_address, mode, rows, n, x_step, x_stride, y_step, y_stride,
    start, stop,
):  # fmt: skip
    """The key of the largest magnitude among a part's terms."""
    zero = work_zero(like)
    x, y, about = pointer(x_address, like), pointer(y_address, like), pointer(statistics_address, zero)
    keys = pointer(keys_address, np.int64(0))
    block = stack_block(zero)
    for row in range(start, stop):
        key = magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            xo, yo = row * x_step + j * x_stride, row * y_step + j * y_stride
            _fill_terms(mode, x, xo, x_stride, y, yo, y_stride, about, rows, row, count, block, like)
            key = block_magnitude(block, count, key)
        store(keys, row, np.int64(key))


@kernel
def terms(
    like, x_address, y_address, statistics_address, keys_address, words_address, mode, rows, n, x_step, x_stride,
    y_step, y_stride, start, stop,
):  # fmt: skip
    """The exact sums of a part's terms, relative to the largest magnitudes of whole rows."""
    zero = work_zero(like)
    x, y, about = pointer(x_address, like), pointer(y_address, like), pointer(statistics_address, zero)
    keys, words = pointer(keys_address, np.int64(0)), pointer(words_address, np.int64(0))
    block = stack_block(zero)
    for row in range(start, stop):
        key = _work_key(load(keys, row), zero)
        finite = is_finite_key(key)
        first, second, _ = sum_scale(key)
        hi, lo, special = np.int64(0), np.uint64(0), np.int64(0)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            xo, yo = row * x_step + j * x_stride, row * y_step + j * y_stride
            _fill_terms(mode, x, xo, x_stride, y, yo, y_stride, about, rows, row, count, block, like)
            if finite:
                high, low = block_terms(block, count, first, second)
                hi, lo = add_limbs(hi, lo, high, low, limb_shift(like))
            else:
                special = block_special(block, count, special)
        _store_words(words, row, hi, lo)
        # How many ranks have seen an infinity of either sign.
        store(words, row * WORDS + 3, (special & 1) + ((special >> 1) << 32))


@kernel
def totals(like, keys_address, words_address, sums_address, start, stop):
    """The sums of whole rows, rounded once."""
    zero = work_zero(like)
    keys, words = pointer(keys_address, np.int64(0)), pointer(words_address, np.int64(0))
    sums = pointer(sums_address, zero)
    for row in range(start, stop):
        key = _work_key(load(keys, row), zero)
        if is_finite_key(key):
            _, _, exponent = sum_scale(key)
            hi, lo = _load_words(words, row)
            store(sums, row, wide_to_float(hi, lo, exponent, zero))
        else:
            seen = load(words, row * WORDS + 3)
            special = (1 if seen & 0xFFFFFFFF else 0) | (2 if seen >> 32 else 0)
            store(sums, row, special_value(special, zero))


# --- results ---------------------------------------------------------------------------------------------------------
@kernel
def losses(
    like, statistics_address, own_address, target_address, everything_address, loss_address, state_address, rows,
    smooth, keep, spread, z, z_twice, start, stop,
):  # fmt: skip
    """The losses of rows from the logits of their targets, and the states that their gradients start from."""
    zero = work_zero(like)
    about, own = pointer(statistics_address, zero), pointer(own_address, like)
    targets = pointer(target_address, np.int64(0))
    everything, loss = pointer(everything_address, zero), pointer(loss_address, zero)
    state = pointer(state_address, zero)
    for row in range(start, stop):
        value, factor, m, r, r_low = zero, zero, zero, zero, zero
        if load(targets, row) != IGNORED:
            m, r, r_low = load(about, row), load(about, rows + row), load(about, 2 * rows + row)
            value, factor = work_nan(like), work_nan(like)
            if is_finite(m):
                top, middle = load(about, 3 * rows + row), load(about, 4 * rows + row)
                rest = load(about, 5 * rows + row)
                value = zero - log_probability(widen(load(own, row)), m, top, middle, rest, like)
                factor = work_one(like)
                if smooth:
                    value = keep * value + spread * (zero - load(everything, row))
                if z != zero:
                    total = m + top if is_short(like) else top + (middle + rest)
                    value = value + z * (total * total)
                    factor = factor + z_twice * total
        store(loss, row, narrow(value, zero))
        store(state, row, narrow(m, zero))
        store(state, rows + row, narrow(r, zero))
        store(state, 2 * rows + row, narrow(r_low, zero))
        store(state, 3 * rows + row, narrow(factor, zero))


@kernel
def outputs(like, x_address, statistics_address, y_address, logarithm, rows, n, step, stride, start, stop):
    """A part's softmax, or the logarithm of it; y is contiguous."""
    zero = work_zero(like)
    x, y, about = pointer(x_address, like), pointer(y_address, like), pointer(statistics_address, zero)
    block = stack_block(zero)
    for row in range(start, stop):
        m = load(about, row)
        if not is_finite(m):
            fill_row(y, row * n, np.int64(1), n, block, work_nan(like))
            continue
        base, floor, bias = row_shift(m, like)
        r, r_low = load(about, rows + row), load(about, 2 * rows + row)
        top, middle, rest = load(about, 3 * rows + row), load(about, 4 * rows + row), load(about, 5 * rows + row)
        largest = largest_quotient(r, r_low, m, base, floor, bias, like)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(x, row * step + j * stride, stride, count, block)
            if logarithm:
                for i in range(count):
                    store(block, i, log_probability(load(block, i), m, top, middle, rest, like))
            else:
                for i in range(count):
                    v = load(block, i)
                    e, _ = exponential(v, base, floor, bias, like)
                    store(block, i, quotient(mark(e, v, m, like), r, r_low, largest, like))
            store_block(y, row * n + j, np.int64(1), count, block)


@kernel
def gradients(
    like, dy_address, y_address, sums_address, dx_address, logarithm, n, step, stride, start, stop
):  # fmt: skip
    """The gradients of `outputs` from the sums of y_j dy_j, or of dy_j; y and dx are contiguous."""
    zero = work_zero(like)
    dy, y, dx = pointer(dy_address, like), pointer(y_address, like), pointer(dx_address, like)
    sums = pointer(sums_address, zero)
    block = stack_block(zero)
    for row in range(start, stop):
        s = load(sums, row)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            at = row * n + j
            load_block(dy, row * step + j * stride, stride, count, block)
            if logarithm:
                for i in range(count):
                    store(block, i, fma(-probability(widen(load(y, at + i)), like), s, load(block, i)))
            else:
                for i in range(count):
                    store(block, i, widen(load(y, at + i)) * (load(block, i) - s))
            store_block(dx, at, np.int64(1), count, block)
