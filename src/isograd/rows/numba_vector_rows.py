# mypy: ignore-errors
"""Contiguous rows on the CPU in vectors: maxima, exact sums, exponentials.

A row that has gaps in memory is copied first. What a row's length leaves of the last vector stands in a vector on the
stack, filled up with an element that changes nothing.
"""

import numpy as np

from isograd.numerics.numba_memory import AHEAD, BLOCK, advance, load, store, work_infinity, work_nan
from isograd.numerics.numba_ops import from_key, is_finite_key, is_number_key, lowest_key, magnitude_key, max_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import note_special, special_value, sum_scale
from isograd.numerics.numba_vectors import (
    in_order,
    int64,
    lanes_maximum,
    lanes_sum,
    load_kept,
    load_vector,
    prefetch_vector,
    select,
    spread,
    store_vector,
    vector_lanes,
)
from isograd.numerics.numba_wide import add_limbs, limb_shift, split_term, term_bias, wide_to_float
from isograd.rows.numba_exponentials import exponential, exponential_term, low_term_bias, mark
from isograd.runtime.numba_compile import device_function


@device_function
def contiguous(x, offset, stride, n, copy):
    """The pointer to a row; one with gaps is copied."""
    if stride == 1:
        return advance(x, offset)
    for i in range(n):
        store(copy, i, load(x, offset + i * stride))
    return copy


@device_function
def last_vector(row, start, n, other, tail):
    """The elements of a row from `start` on, fewer than a vector has lanes, and another one in the lanes behind."""
    for i in range(vector_lanes(row)):
        store(tail, i, other)
    for i in range(start, n):
        store(tail, i - start, load(row, i))
    return load_vector(tail, 0)


@device_function
def whole_vectors(row, n):
    """How many elements of a row stand in whole vectors."""
    return n // vector_lanes(row) * vector_lanes(row)


@device_function
def largest(keys, others):
    return select(others > keys, others, keys)


@device_function
def total(parts, excess):
    """The sum of the lanes of biased parts; `excess` is what every lane carries too much."""
    return lanes_sum(int64(parts - excess))


# --- maxima ----------------------------------------------------------------------------------------------------------
@device_function
def row_maximum(x, n, tail, like):
    """The maximum of a row, NaN if it holds one."""
    lanes, whole = vector_lanes(x), whole_vectors(x, n)
    best = spread(-work_infinity(like), x)
    magnitude = magnitude_key(best)
    for i in range(0, whole, lanes):
        v = widen(load_vector(x, i))
        best = select(v > best, v, best)
        magnitude = largest(magnitude, magnitude_key(v))
    if whole < n:
        v = widen(last_vector(x, whole, n, narrow(-work_infinity(like), like), tail))
        best = select(v > best, v, best)
        magnitude = largest(magnitude, magnitude_key(v))
    if not is_number_key(lanes_maximum(magnitude)):
        return work_nan(like)
    found = from_key(lanes_maximum(max_key(best)))
    if found == 0:  # the comparisons above do not tell the zeros apart
        zero, key = max_key(found - found), lowest_key(like)
        for i in range(n):
            key = max(key, max_key(widen(load(x, i))))
            if key == zero:
                break
        found = from_key(key)
    return found


# --- exact sums ------------------------------------------------------------------------------------------------------
@device_function
def products_magnitude(a, b, n, kept, keep, zero, tail):
    """The largest magnitude key of the products of two rows, which `kept` takes, in whole vectors, if `keep` is set."""
    whole = whole_vectors(a, n)
    keys = magnitude_key(spread(widen(zero), a))
    for i in range(0, whole, vector_lanes(a)):
        prefetch_vector(a, i + AHEAD)
        prefetch_vector(b, i + AHEAD)
        v = widen(load_vector(a, i)) * widen(load_vector(b, i))
        keys = largest(keys, magnitude_key(v))
        if keep:
            store_vector(kept, i, v)
    if whole < n:
        v = widen(last_vector(a, whole, n, zero, tail)) * widen(last_vector(b, whole, n, zero, tail))
        keys = largest(keys, magnitude_key(v))
        if keep:
            store_vector(kept, whole, v)
    return lanes_maximum(keys)


@device_function
def _sum_of(term, last_term, n, key, a, b, zero, tail):
    """The order-free sum of n terms in the work type; `key` is the largest magnitude's.

    `term` makes a vector of them from the operands and a place, `last_term` the last one.
    """
    first, second, exponent = sum_scale(key)
    lanes, whole = vector_lanes(a), n // vector_lanes(a) * vector_lanes(a)
    direct = first == 1  # but for tiny terms
    hi, lo, j = np.int64(0), np.uint64(0), 0
    high, low = split_term(spread(widen(zero), a), second)
    while True:
        stop = min(j + BLOCK, whole)
        for i in range(j, stop, lanes):
            v = term(a, b, i, zero)
            h, t = split_term(v if direct else v * first, second)
            high = high + h
            low = low + t
        vectors = (stop - j) // lanes + 1
        last = stop == whole
        if last and whole < n:
            h, t = split_term(last_term(a, b, whole, n, zero, tail) * first, second)
            high = high + h
            low = low + t
            vectors += 1
        excess = vectors * term_bias(first)
        hi, lo = add_limbs(hi, lo, total(high, excess), total(low, excess), limb_shift(widen(zero)))
        if last:
            return wide_to_float(hi, lo, exponent, widen(zero))
        high, low = split_term(spread(widen(zero), a), second)
        j = stop


@device_function
def _product(a, b, i, zero):
    return widen(load_vector(a, i)) * widen(load_vector(b, i))


@device_function
def _last_product(a, b, whole, n, zero, tail):
    return widen(last_vector(a, whole, n, zero, tail)) * widen(last_vector(b, whole, n, zero, tail))


@device_function
def _kept(a, b, i, zero):
    return load_kept(b, i, zero)


@device_function
def _last_kept(a, b, whole, n, zero, tail):
    return load_kept(b, whole, zero)


@device_function
def _element(a, b, i, zero):
    return widen(load_vector(a, i))


@device_function
def _last_element(a, b, whole, n, zero, tail):
    return widen(last_vector(a, whole, n, zero, tail))


@device_function
def products_sum(a, b, n, kept, keep, key, zero, tail):
    """The order-free sum of the products of two rows, in the work type; they are in `kept` if `keep` is set."""
    if not is_finite_key(key):
        state = np.int64(0)
        for i in range(n):
            state = note_special(widen(load(a, i)) * widen(load(b, i)), state)
        return special_value(state, widen(zero))
    if keep:
        return _sum_of(_kept, _last_kept, n, key, a, kept, zero, tail)
    return _sum_of(_product, _last_product, n, key, a, b, zero, tail)


@device_function
def row_sum(a, n, key, zero, tail):
    """The order-free sum of a row in the work type; `key` is the largest magnitude's."""
    if not is_finite_key(key):
        state = np.int64(0)
        for i in range(n):
            state = note_special(widen(load(a, i)), state)
        return special_value(state, widen(zero))
    return _sum_of(_element, _last_element, n, key, a, a, zero, tail)


# --- exponentials ----------------------------------------------------------------------------------------------------
@device_function
def _no_terms(scale, x, like):
    """The parts of terms that are zero."""
    nothing = spread(scale - scale, x)
    return exponential_term(nothing, nothing, scale, like)


@device_function
def _exponentials(v, kept, i, keep, ordered, scale, m, base, floor, bias, like):
    """The terms of a vector's exponentials, which `kept` takes from place i on if they are to be kept."""
    e, error = exponential(v, base, floor, bias, like)
    if keep:
        marked = mark(e, v, m, like)
        store_vector(kept, i, in_order(marked, like) if ordered else marked)
    return exponential_term(e, error, scale, like)


@device_function
def exponential_sum(x, n, kept, keep, ordered, scale, m, base, floor, bias, like, tail):
    """The integer sum of a row's exponentials, which `kept` takes, marked and in whole vectors, if `keep` is set.

    Where `ordered` is not set, only `load_kept` finds them in their order. scale: `term_scale` of the row, or of the
    one that it is a part of.
    """
    lanes, whole = vector_lanes(x), whole_vectors(x, n)
    hi, lo, j = np.int64(0), np.uint64(0), 0
    high, low = _no_terms(scale, x, like)
    while True:
        stop = min(j + BLOCK, whole)
        for i in range(j, stop, lanes):
            prefetch_vector(x, i + max(n, AHEAD))  # the next row, where rows lie together
            v = widen(load_vector(x, i))
            h, t = _exponentials(v, kept, i, keep, ordered, scale, m, base, floor, bias, like)
            high = high + h
            low = low + t
        vectors = (stop - j) // lanes + 1
        last = stop == whole
        if last and whole < n:
            v = widen(last_vector(x, whole, n, narrow(-work_infinity(like), like), tail))
            h, t = _exponentials(v, kept, whole, keep, ordered, scale, m, base, floor, bias, like)
            high = high + h
            low = low + t
            vectors += 1
        hi, lo = add_limbs(
            hi, lo, total(high, vectors * term_bias(scale)), total(low, vectors * low_term_bias(like)), limb_shift(like)
        )
        if last:
            return hi, lo
        high, low = _no_terms(scale, x, like)
        j = stop
