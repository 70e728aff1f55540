# mypy: ignore-errors
"""The auxiliary losses on the CPU: sums over tokens by columns, and squared logarithms of the tokens' sums."""

import numpy as np

from isograd.numerics.numba_memory import (
    empty_work,
    load,
    load_block,
    pointer,
    store,
    store_block,
    work_zero,
)
from isograd.numerics.numba_ops import is_finite, magnitude_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import PARTIAL, is_finite_key, signed_rest, special_value, sum_scale
from isograd.numerics.numba_wide import add_limbs, limb_shift, split_term, term_bias, wide_to_float
from isograd.ops.router.numba_scores import softmax_and_logsumexp
from isograd.ops.router.numba_select import empty_keys
from isograd.runtime.numba_compile import device_function, kernel


@kernel
def column_magnitudes(like, x_address, tokens, n, block, keys, start, stop):
    """keys[b, e] = the largest magnitude key of column e in block b of the tokens."""
    x = pointer(x_address, like)
    for b in range(start, stop):
        for t in range(b * block, min(b * block + block, tokens)):
            row = np.int64(t) * n
            for e in range(n):
                key = magnitude_key(widen(load(x, row + e)))
                keys[b, e] = key if key > keys[b, e] else keys[b, e]


@kernel
def column_terms(like, x_address, tokens, n, block, keys, hi, lo, special, start, stop):
    """Add up the integer terms of every column in block b of the tokens in hi, lo [b, e]; keys are those of all."""
    x = pointer(x_address, like)
    zero = work_zero(like)
    integer = magnitude_key(zero)
    scales, limbs = empty_work(2 * n, zero), empty_keys(2 * n, zero)
    first, second = pointer(scales.ctypes.data, zero), pointer(scales[n:].ctypes.data, zero)
    high, low = pointer(limbs.ctypes.data, integer), pointer(limbs[n:].ctypes.data, integer)
    finite = True
    for e in range(n):
        a, b, _ = sum_scale(keys[e])
        store(first, e, a)
        store(second, e, b)
        finite &= is_finite_key(keys[e])
        store(high, e, integer)
        store(low, e, integer)
    for b in range(start, stop):
        end = min(b * block + block, tokens)
        for begin in range(b * block, end, PARTIAL):
            last = min(begin + PARTIAL, end)
            for t in range(begin, last):
                _add_terms(x, np.int64(t) * n, n, first, second, high, low)
            excess = (last - begin) * term_bias(zero)
            for e in range(n):
                h, v = signed_rest(load(high, e), excess), signed_rest(load(low, e), excess)
                hi[b, e], lo[b, e] = add_limbs(hi[b, e], lo[b, e], h, v, limb_shift(zero))
                store(high, e, integer)
                store(low, e, integer)
        if not finite:
            for t in range(b * block, end):
                for e in range(n):
                    p = widen(load(x, np.int64(t) * n + e))
                    if not is_finite(p):
                        special[b, e] |= 1 if p > 0 else (2 if p < 0 else 3)


@device_function
def _add_terms(x, row, n, first, second, high, low):
    for e in range(n):
        h, v = split_term(widen(load(x, row + e)) * load(first, e), load(second, e))
        store(high, e, h + load(high, e))
        store(low, e, v + load(low, e))


@kernel
def column_means(zero, keys, hi, lo, special, divisor, means):
    """means[e] = the sum of the blocks' integers as a float, divided."""
    for e in range(keys.size):
        h, v, state = np.int64(0), np.uint64(0), np.int64(0)
        for b in range(hi.shape[0]):
            s = np.uint64(v + lo[b, e])
            h += hi[b, e] + (np.int64(1) if s < v else np.int64(0))
            v = s
            state |= special[b, e]
        _, _, exponent = sum_scale(keys[e])
        total = wide_to_float(h, v, exponent, zero) if is_finite_key(keys[e]) else special_value(state, zero)
        means[e] = total / divisor


@kernel
def fill_rows(like, row_address, row_bytes, y_address, n, tokens, start, stop):
    """Every row of y is that of its problem at row_address, of the work type; a problem has a number of tokens."""
    y, zero = pointer(y_address, like), work_zero(like)
    for t in range(start, stop):
        row = pointer(row_address + (np.int64(t) // tokens) * row_bytes, zero)
        store_block(y, np.int64(t) * n, 1, n, row)


@kernel
def square_logsumexp_rows(like, x_address, z_address, n, start, stop):
    """z[t] = the squared logarithm of the sum of the exponentials of row t, in the work type."""
    x, z = pointer(x_address, like), pointer(z_address, work_zero(like))
    zero = work_zero(like)
    array = empty_work(n, zero)
    kept = pointer(array.ctypes.data, zero)
    for t in range(start, stop):
        load_block(x, np.int64(t) * n, 1, n, kept)
        lse = softmax_and_logsumexp(kept, n, zero)
        store(z, np.int64(t), narrow(lse * lse, zero))


@kernel
def z_loss_backward_rows(like, x_address, y_address, n, dloss, tokens, divisor, start, stop):
    """y[t] = 2 lse dloss / divisor times the softmax of row t; a problem has a number of tokens and a dloss."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    zero = work_zero(like)
    array = empty_work(n, zero)
    kept = pointer(array.ctypes.data, zero)
    for t in range(start, stop):
        load_block(x, np.int64(t) * n, 1, n, kept)
        lse = softmax_and_logsumexp(kept, n, zero)
        factor = ((lse + lse) * dloss[np.int64(t) // tokens]) / divisor
        for e in range(n):
            store(kept, np.int64(e), factor * load(kept, np.int64(e)))
        store_block(y, np.int64(t) * n, 1, n, kept)
