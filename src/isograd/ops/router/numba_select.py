# mypy: ignore-errors
"""The largest elements of a row in the order of top_k, from integer keys.

Keys are in the order of the floats, with equal ones for the two zeros and the largest for NaN. Of equal keys the lower
index comes first, so an element that is met later has to be larger than the last one kept.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.numerics.numba_memory import load, store
from isograd.numerics.numba_ops import max_key
from isograd.runtime.numba_compile import INLINED, device_function

INSERTED = 48  # up to so many elements are kept sorted by insertion
_LEADING = 11  # bits that tell which elements may be among many largest
COUNTS = 1 << _LEADING


def selection_key(x: Any) -> Any:
    """The key of an element: adding +0 turns -0 into it."""
    raise NotImplementedError


@overload(selection_key, jit_options=INLINED)
def _selection_key(x):
    zero = np.float32(0) if x == types.float32 else np.float64(0)
    return lambda x: max_key(x + zero)


def empty_keys(count: Any, like: Any) -> Any:
    """An array for keys of the work type of `like`, the zero of that type."""
    raise NotImplementedError


@overload(empty_keys, jit_options=INLINED)
def _empty_keys(count, like):
    dtype = np.int32 if like == types.float32 else np.int64
    return lambda count, like: np.empty(count, dtype)


@device_function
def store_keys(x, n, keys):
    for j in range(n):
        store(keys, j, selection_key(load(x, j)))


@device_function
def _insert(key, index, last, top, where):
    """Put an element into the sorted ones before `last`, whose place is free."""
    p = last
    while p > 0 and load(top, p - 1) < key:
        store(top, p, load(top, p - 1))
        store(where, p, load(where, p - 1))
        p -= 1
    store(top, p, key)
    store(where, p, index)


# --- many of them: what may belong to them is found by its leading bits and sorted by radix ---------------------------
def _unsigned(key: Any) -> Any:
    """Bits in the opposite order of the keys."""
    raise NotImplementedError


@overload(_unsigned, jit_options=INLINED)
def _unsigned_overload(key):
    if key == types.int32:
        return lambda key: np.uint64(np.int64(0x7FFFFFFF) - np.int64(key))
    return lambda key: np.uint64(~key) ^ np.uint64(0x8000000000000000)


def _key_bits(key: Any) -> Any:
    raise NotImplementedError


@overload(_key_bits, jit_options=INLINED)
def _key_bits_overload(key):
    bits = 32 if key == types.int32 else 64
    return lambda key: np.uint64(bits)


@device_function
def _candidates(keys, n, k, counts, where):
    """Indices, in their order, of the elements whose leading bits are not above those of the k-th."""
    shift = _key_bits(load(keys, 0)) - np.uint64(_LEADING)
    counts[:] = 0
    for j in range(n):
        counts[_unsigned(load(keys, j)) >> shift] += 1
    last, total = 0, counts[0]
    while total < k:
        last += 1
        total += counts[last]
    found = np.int64(0)
    for j in range(n):
        store(where, found, np.int64(j))
        found += np.int64(1) if (_unsigned(load(keys, j)) >> shift) <= np.uint64(last) else np.int64(0)
    return found


@device_function
def _radix_pass(keys, count, shift, counts, source, target):
    """Sort indices by one byte of their keys, stably; whether they were moved."""
    counts[:256] = 0
    for j in range(count):
        counts[(_unsigned(load(keys, load(source, j))) >> shift) & np.uint64(255)] += 1
    total = 0
    for digit in range(256):
        if counts[digit] == count:
            return False
        total += counts[digit]
        counts[digit] = total - counts[digit]
    for j in range(count):
        index = load(source, j)
        digit = (_unsigned(load(keys, index)) >> shift) & np.uint64(255)
        store(target, counts[digit], index)
        counts[digit] += 1
    return True


@device_function
def _select_many(keys, n, k, where, spare, counts):
    count = _candidates(keys, n, k, counts, where)
    source, target, swapped = where, spare, False
    for shift in range(0, np.int64(_key_bits(load(keys, 0))), 8):
        if _radix_pass(keys, count, np.uint64(shift), counts, source, target):
            source, target, swapped = target, source, not swapped
    if swapped:
        for j in range(k):
            store(where, j, load(source, j))


@device_function
def select_largest(keys, n, k, top, where, spare, counts):
    """Indices of the k largest of n keys into `where`, the largest first.

    top: room for k keys. where, spare: room for n indices. counts: an array of COUNTS integers.
    """
    if k > INSERTED:
        _select_many(keys, n, k, where, spare, counts)
        return
    for j in range(k):
        _insert(load(keys, j), np.int64(j), np.int64(j), top, where)
    least = load(top, k - 1)
    for j in range(k, n):
        if load(keys, j) > least:
            _insert(load(keys, j), np.int64(j), np.int64(k - 1), top, where)
            least = load(top, k - 1)
