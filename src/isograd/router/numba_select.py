"""The largest elements of a row in the order of top_k, from integer keys.

Keys are in the order of the floats, with equal ones for the two zeros and the largest for NaN. Of equal keys the lower
index comes first, so an element that is met later has to be larger than the last one kept.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.numerics.numba_compile import device_function
from isograd.numerics.numba_memory import load, store
from isograd.numerics.numba_ops import max_key

INSERTED = 48  # up to so many elements are kept sorted by insertion, more of them in a heap
_FORCE = {"forceinline": True}


def selection_key(x: Any) -> Any:
    """The key of an element: adding +0 turns -0 into it."""
    raise NotImplementedError


@overload(selection_key, jit_options=_FORCE)
def _selection_key(x):
    zero = np.float32(0) if x == types.float32 else np.float64(0)
    return lambda x: max_key(x + zero)


def empty_keys(count: Any, like: Any) -> Any:
    """An array for keys of the work type of `like`, the zero of that type."""
    raise NotImplementedError


@overload(empty_keys, jit_options=_FORCE)
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


@device_function
def _worse(top, where, i, j):
    a, b = load(top, i), load(top, j)
    return a < b or (a == b and load(where, i) > load(where, j))


@device_function
def _sift(top, where, root, count):
    """Restore the heap below `root`; the worst element is on top."""
    while 2 * root + 1 < count:
        child = 2 * root + 1
        if child + 1 < count and _worse(top, where, child + 1, child):
            child += 1
        if not _worse(top, where, child, root):
            break
        _swap(top, where, child, root)
        root = child


@device_function
def _swap(top, where, i, j):
    key, index = load(top, i), load(where, i)
    store(top, i, load(top, j))
    store(where, i, load(where, j))
    store(top, j, key)
    store(where, j, index)


@device_function
def select_largest(keys, n, k, top, where):
    """Indices of the k largest of n keys into `where`, their keys into `top`, the largest first."""
    if k <= INSERTED:
        for j in range(k):
            _insert(load(keys, j), np.int64(j), np.int64(j), top, where)
        least = load(top, k - 1)
        for j in range(k, n):
            if load(keys, j) > least:
                _insert(load(keys, j), np.int64(j), np.int64(k - 1), top, where)
                least = load(top, k - 1)
        return
    for j in range(k):
        store(top, j, load(keys, j))
        store(where, j, np.int64(j))
    for j in range(k // 2 - 1, -1, -1):
        _sift(top, where, np.int64(j), k)
    for j in range(k, n):
        if load(keys, j) > load(top, 0):
            store(top, 0, load(keys, j))
            store(where, 0, np.int64(j))
            _sift(top, where, np.int64(0), k)
    for count in range(k - 1, 0, -1):
        _swap(top, where, np.int64(0), np.int64(count))
        _sift(top, where, np.int64(0), count)
