# mypy: ignore-errors
"""Counting and sorting entries by expert, and moving the tokens' rows there and back, on the CPU."""

import numpy as np

from isograd.numerics.numba_memory import (
    LANES,
    empty_work,
    load,
    pointer,
    raise_flag,
    stack_lanes,
    store,
    store_block,
    work_zero,
)
from isograd.numerics.numba_ops import is_finite, magnitude_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import PARTIAL, is_finite_key, signed_rest, special_value
from isograd.numerics.numba_wide import add_limbs, limb_shift, split_term, term_bias, wide_to_float
from isograd.ops.router.numba_scores import finish_few, sum_row, term_factors
from isograd.runtime.numba_compile import device_function, kernel

_INT64 = np.int64(0)


# --- counting sort: one pass that counts, one that places ------------------------------------------------------------
@kernel
def count_experts(like, address, count, bound, block, counts, found, start, stop):
    """counts[b, e] = the entries of expert e in block b; found[b] = its first index outside range(bound), or -1."""
    experts = pointer(address, like)
    for b in range(start, stop):
        found[b] = -1
        for i in range(b * block, min(b * block + block, count)):
            expert = np.int64(load(experts, np.int64(i)))
            if expert < 0 or expert >= bound:
                found[b] = i
                break
            counts[b, expert] += 1


@kernel
def place_entries(like, address, count, bound, block, places, order, flag, start, stop):
    """order[p] = the entry that comes to p; places[b, e] is where block b goes on with expert e.

    Indices were found within range(bound) when they were counted. One that was changed since and has no place is left
    out and sets the byte at `flag`, here and in `copy_rows`.
    """
    experts = pointer(address, like)
    outside = False
    for b in range(start, stop):
        for i in range(b * block, min(b * block + block, count)):
            expert = np.int64(load(experts, np.int64(i)))
            place = places[b, expert] if 0 <= expert < bound else np.int64(count)
            if place < count:
                order[place] = i
                places[b, expert] = place + 1
            else:
                outside = True
    raise_flag(flag, outside)


@kernel
def invert(order, positions, count):
    """Fill `positions`, all -1 before, with the inverse of `order`; the first entry that spoils it, or -1."""
    for i in range(count):
        entry = order[i]
        if entry < 0 or entry >= count or positions[entry] >= 0:
            return i
        positions[entry] = i
    return -1


@kernel
def first_outside(like, address, count, bound):
    """The first of the indices that is not within range(bound), or -1."""
    indices = pointer(address, like)
    for i in range(count):
        index = np.int64(load(indices, np.int64(i)))
        if index < 0 or index >= bound:
            return i
    return -1


# --- rows of tokens and of entries -----------------------------------------------------------------------------------
@kernel
def copy_rows(like, x_address, y_address, order, k, width, flag, start, stop):
    """y[i] = x[order[i] // k]."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    outside = False
    for i in range(start, stop):
        entry = order[i]
        if 0 <= entry < order.size:
            xo, yo = (entry // k) * width, np.int64(i) * width
            for j in range(width):
                store(y, yo + j, load(x, xo + j))
        else:
            outside = True
    raise_flag(flag, outside)


@device_function
def _load_terms(x, offset, count, weight, weighted, block):
    if weighted:
        for i in range(count):
            store(block, i, weight * widen(load(x, offset + i)))
    else:
        for i in range(count):
            store(block, i, widen(load(x, offset + i)))


@device_function
def _lane_magnitudes(block, count, key):
    for i in range(count):
        k = magnitude_key(load(block, i))
        store(key, i, k if k > load(key, i) else load(key, i))


@device_function
def _note_special(block, count, special):
    for i in range(count):
        x = load(block, i)
        state = load(special, i)
        store(special, i, state if is_finite(x) else state | np.int64(1 if x > 0 else (2 if x < 0 else 3)))


@kernel
def combine_rows(like, x_address, w_address, y_address, positions, k, width, weighted, start, stop):
    """y[t] = Σ_i w[t, i] x[positions[t k + i]], or without weights the sum of the rows."""
    zero = work_zero(like)
    integer = magnitude_key(zero)
    x, y, weights = pointer(x_address, like), pointer(y_address, like), pointer(w_address, zero)
    block, s, first, second = stack_lanes(zero), stack_lanes(zero), stack_lanes(zero), stack_lanes(zero)
    key, high, low = stack_lanes(integer), stack_lanes(integer), stack_lanes(integer)
    exponent, special = stack_lanes(integer), stack_lanes(_INT64)
    hi, lo = stack_lanes(_INT64), stack_lanes(np.uint64(0))
    bias = term_bias(zero)
    for t in range(start, stop):
        for j in range(0, width, LANES):
            count = min(width - j, LANES)
            for i in range(count):
                store(key, i, integer)
                store(high, i, integer)
                store(low, i, integer)
            for e in range(k):
                w = load(weights, np.int64(t * k + e)) if weighted else zero
                _load_terms(x, positions[t * k + e] * width + j, count, w, weighted, block)
                _lane_magnitudes(block, count, key)
            finite = True
            for i in range(count):
                a, b, power = term_factors(load(key, i))
                store(first, i, a)
                store(second, i, b)
                store(exponent, i, power)
                finite &= is_finite_key(load(key, i))
            for i in range(count if k > PARTIAL else 0):
                store(hi, i, np.int64(0))
                store(lo, i, np.uint64(0))
            for i in range(0 if finite else count):
                store(special, i, np.int64(0))
            for e in range(k):
                w = load(weights, np.int64(t * k + e)) if weighted else zero
                _load_terms(x, positions[t * k + e] * width + j, count, w, weighted, block)
                for i in range(count):
                    h, v = split_term(load(block, i) * load(first, i), load(second, i))
                    store(high, i, h + load(high, i))
                    store(low, i, v + load(low, i))
                if not finite:
                    _note_special(block, count, special)
                if k > PARTIAL and (e % PARTIAL == PARTIAL - 1 or e == k - 1):
                    excess = (e % PARTIAL + 1) * bias
                    for i in range(count):
                        h, v = signed_rest(load(high, i), excess), signed_rest(load(low, i), excess)
                        a, b = add_limbs(load(hi, i), load(lo, i), h, v, limb_shift(zero))
                        store(hi, i, a)
                        store(lo, i, b)
                        store(high, i, integer)
                        store(low, i, integer)
            if k > PARTIAL:
                for i in range(count):
                    store(s, i, wide_to_float(load(hi, i), load(lo, i), np.int64(load(exponent, i)), zero))
            else:
                for i in range(count):
                    store(s, i, finish_few(load(high, i), load(low, i), k, load(exponent, i)))
            if not finite:
                for i in range(count):
                    if not is_finite_key(load(key, i)):
                        store(s, i, special_value(load(special, i), zero))
            store_block(y, np.int64(t) * width + j, 1, count, s)


@kernel
def combine_backward_rows(
    like, dy_address, x_address, w_address, dx_address, dw_address, positions, k, width, start, stop
):
    """dx[positions[t k + i]] = w[t, i] dy[t]; dw[t, i] = Σ_d dy[t, d] x[positions[t k + i], d]."""
    zero = work_zero(like)
    dy, x, dx = pointer(dy_address, like), pointer(x_address, like), pointer(dx_address, like)
    weights, dweights = pointer(w_address, zero), pointer(dw_address, zero)
    array = empty_work(2 * width, zero)
    g, p = pointer(array.ctypes.data, zero), pointer(array[width:].ctypes.data, zero)
    for t in range(start, stop):
        offset = np.int64(t) * width
        for i in range(width):
            store(g, i, widen(load(dy, offset + i)))
        for e in range(k):
            entry = np.int64(t * k + e)
            row = positions[entry] * width
            for i in range(width):
                store(p, i, load(g, i) * widen(load(x, row + i)))
            store(dweights, entry, narrow(sum_row(p, width, zero), zero))
            w = load(weights, entry)
            for i in range(width):
                store(dx, row + i, narrow(w * load(g, i), load(dx, row + i)))
