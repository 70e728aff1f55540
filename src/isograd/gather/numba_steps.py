# mypy: ignore-errors
"""Steps of the gather family's CPU kernels: indices of any type, and integer sums of single destination elements.

A sum is kept as top * 2**88 + mid * 2**44 + low, three int64. Terms of binary32 go to `low`, terms of binary64 to `mid`
and `low`; FOLD of them fit before `carry` has to be called. `key` is the largest magnitude's key of the destination.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.numerics import constants as c
from isograd.numerics.numba_memory import load, pointer, store
from isograd.numerics.numba_ops import as_int, fma, is_finite, pow2_64
from isograd.numerics.numba_sum import is_finite_key, special_value, sum_scale
from isograd.numerics.numba_wide import add_limbs, scale_pow2, split_term, wide_to_float
from isograd.runtime.numba_compile import INLINED, device_function

FOLD = 1 << 17  # terms that an int64 holds
_LIMB = c.LIMB_SHIFT_64
_LIMB_MASK = (1 << _LIMB) - 1
_LIMB_SCALE = np.float64(2.0**_LIMB)
_MAGIC_64 = np.float64(c.MAGIC_64)
_MAGIC_BITS_64 = int(_MAGIC_64.view(np.int64))
_EXACT = 1 << 53  # integers up to here are binary64 numbers
_NEARLY_FULL = 1 << 61


# --- indices ---------------------------------------------------------------------------------------------------------
WIDE, SIGNED, UNSIGNED = 0, 1, 2  # int64, int32, uint32


@device_function
def raw_index(address, kind, offset):
    """One index as it stands."""
    if kind == WIDE:
        return load(pointer(address, np.int64(0)), offset)
    if kind == SIGNED:
        return np.int64(load(pointer(address, np.int32(0)), offset))
    return np.int64(load(pointer(address, np.uint32(0)), offset))


@device_function
def _store_index(v, size, out, i):
    """Store an index counted from the front, 0 for one out of range; whether it was."""
    v += size if v < 0 else np.int64(0)
    outside = np.uint64(v) >= np.uint64(size)
    store(out, i, np.int64(0) if outside else v)
    return outside


@device_function
def load_indices(address, kind, offset, stride, count, size, out):
    """Indices counted from the front into out[:count]; whether one was out of range, which 0 stands for.

    They were found in range before, but another thread may have changed one since.
    """
    outside = False
    if kind == WIDE:
        wide = pointer(address, np.int64(0))
        for i in range(count):
            outside |= _store_index(load(wide, offset + i * stride), size, out, i)
    elif kind == SIGNED:
        signed = pointer(address, np.int32(0))
        for i in range(count):
            outside |= _store_index(np.int64(load(signed, offset + i * stride)), size, out, i)
    else:
        unsigned = pointer(address, np.uint32(0))
        for i in range(count):
            outside |= _store_index(np.int64(load(unsigned, offset + i * stride)), size, out, i)
    return outside


@device_function
def row_offsets(row, shape, a, b, c, d):
    """The offsets of a row in four operands; see `numba_memory.row_offset`."""
    ao, bo, co, do = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for e in range(len(shape) - 1, 0, -1):
        quotient = row // shape[e]
        index = row - quotient * shape[e]
        ao += index * a[e]
        bo += index * b[e]
        co += index * c[e]
        do += index * d[e]
        row = quotient
    return ao + row * a[0], bo + row * b[0], co + row * c[0], do + row * d[0]


# --- one destination element -----------------------------------------------------------------------------------------
def term(p: Any, key: Any) -> Any:
    """A finite destination's term in units of its quantum, as (mid, low)."""
    raise NotImplementedError


@overload(term, jit_options=INLINED)
def _term(p, key):
    if p == types.float32:

        def term_32(p, key):
            return np.int64(0), as_int(fma(np.float64(p), quantum_scale(key), _MAGIC_64)) - _MAGIC_BITS_64

        return term_32

    def term_64(p, key):
        a, b, _ = sum_scale(key)
        mid, low = split_term(p * a, b)
        return mid - _MAGIC_BITS_64, low - _MAGIC_BITS_64

    return term_64


@device_function
def quantum_scale(key):
    """1 / quantum of a binary32 destination, in binary64: a product with it and its sum with 1.5 * 2**52 are exact."""
    return pow2_64(np.int64(c.QUANTUM_BITS) - max(np.int64(key >> 23) - 127, np.int64(-126)))


def term_scales(key: Any) -> Any:
    """The factors that `biased_term` takes for terms of a destination with this key."""
    raise NotImplementedError


@overload(term_scales, jit_options=INLINED)
def _term_scales(key):
    if key == types.int32:
        return lambda key: (quantum_scale(key), np.float64(0))
    return lambda key: sum_scale(key)[:2]


def biased_term(p: Any, scale: Any, step: Any) -> Any:
    """As `term`, with the constants of `term_biases` on top."""
    raise NotImplementedError


@overload(biased_term, jit_options=INLINED)
def _biased_term(p, scale, step):
    if p == types.float32:
        return lambda p, scale, step: (np.int64(0), as_int(fma(np.float64(p), scale, _MAGIC_64)))
    return lambda p, scale, step: split_term(p * scale, step)


def term_biases(like: Any) -> Any:
    """What (mid, low) of every biased term carry; modulo 2**64 sums of them take it out exactly."""
    raise NotImplementedError


@overload(term_biases, jit_options=INLINED)
def _term_biases(like):
    high = 0 if like == types.float32 else _MAGIC_BITS_64
    return lambda like: (np.int64(high), np.int64(_MAGIC_BITS_64))


def spread_fits(largest: Any, least: Any) -> Any:
    """Whether numbers with these largest and smallest keys (zeros apart) are multiples of the largest's quantum."""
    raise NotImplementedError


@overload(spread_fits, jit_options=INLINED)
def _spread_fits(largest, least):
    if largest == types.int32:
        return lambda largest, least: max(largest >> 23, 1) - max(least >> 23, 1) <= c.QUANTUM_BITS - 23
    return lambda largest, least: max(largest >> 52, 1) - max(least >> 52, 1) <= c.QUANTUM_BITS + _LIMB - 52


@device_function
def carry(top, mid, low):
    """The same sum with small mid and low, so that FOLD more terms fit."""
    mid += low >> _LIMB
    return top + (mid >> _LIMB), mid & _LIMB_MASK, low & _LIMB_MASK


@device_function
def _clear(a, b, n):
    for d in range(n):
        store(a, d, np.int64(0))
        store(b, d, np.int64(0))


def clear_sums(mid: Any, low: Any, n: Any, like: Any) -> Any:
    """Set n sums to zero, but for what `add_term` clears itself."""
    raise NotImplementedError


@overload(clear_sums, jit_options=INLINED)
def _clear_sums(mid, low, n, like):
    if like == types.float32:
        return lambda mid, low, n, like: _clear(low, low, n)
    return lambda mid, low, n, like: _clear(mid, low, n)


def add_term(p: Any, key: Any, top: Any, mid: Any, low: Any, d: Any, n: Any, ready: Any) -> Any:
    """Add a finite term to sum d of n and carry where that is due; returns whether anything was carried yet.

    What only a carry fills (`top`, and `mid` of binary32) is cleared by the first one, unless `ready` says it was.
    """
    raise NotImplementedError


@overload(add_term, jit_options=INLINED)
def _add_term(p, key, top, mid, low, d, n, ready):
    if p == types.float32:

        def add_32(p, key, top, mid, low, d, n, ready):
            _, q = term(p, key)
            b = load(low, d) + q
            if abs(b) >= _NEARLY_FULL:
                if not ready:
                    _clear(top, mid, n)
                ready = True
                t, m, b = carry(load(top, d), load(mid, d), b)
                store(top, d, t)
                store(mid, d, m)
            store(low, d, b)
            return ready

        return add_32

    def add_64(p, key, top, mid, low, d, n, ready):
        h, q = term(p, key)
        a, b = load(mid, d) + h, load(low, d) + q
        if abs(a) >= _NEARLY_FULL or abs(b) >= _NEARLY_FULL:
            if not ready:
                _clear(top, top, n)
            ready = True
            t, a, b = carry(load(top, d), a, b)
            store(top, d, t)
        store(mid, d, a)
        store(low, d, b)
        return ready

    return add_64


def stored_total(top: Any, mid: Any, low: Any, d: Any, key: Any, ready: Any, like: Any) -> Any:
    """The total of sum d; `ready` is what the last `add_term` returned."""
    raise NotImplementedError


@overload(stored_total, jit_options=INLINED)
def _stored_total(top, mid, low, d, key, ready, like):
    if like == types.float32:

        def total_32(top, mid, low, d, key, ready, like):
            if ready:
                return total(load(top, d), load(mid, d), load(low, d), key, like)
            return total(np.int64(0), np.int64(0), load(low, d), key, like)

        return total_32
    return lambda top, mid, low, d, key, ready, like: total(
        load(top, d) if ready else np.int64(0), load(mid, d), load(low, d), key, like
    )


@device_function
def special_code(p):
    """What `special_value` needs to know of a term: 1 or 2 for an infinity, 3 for a NaN."""
    if is_finite(p):
        return np.int64(0)
    return np.int64(1) if p > 0 else (np.int64(2) if p < 0 else np.int64(3))


def total(top: Any, mid: Any, low: Any, key: Any, like: Any) -> Any:
    """The sum rounded once to the work type of `like`; `low` holds the codes of a destination that is not finite."""
    raise NotImplementedError


@overload(total, jit_options=INLINED)
def _total(top, mid, low, key, like):
    if like == types.float32:

        def total_32(top, mid, low, key, like):
            if not is_finite_key(key):
                return special_value(low, like)
            exponent = max(np.int64(key >> 23) - 127, np.int64(-126)) - c.QUANTUM_BITS
            if top == 0 and mid == 0:
                return scale_pow2(np.float32(low), exponent)
            return wide_total(top, mid, low, exponent, like)

        return total_32

    def total_64(top, mid, low, key, like):
        if not is_finite_key(key):
            return special_value(low, like)
        _, _, exponent = sum_scale(key)
        if top == 0 and abs(mid) < _EXACT and abs(low) < _EXACT:
            # Both are exact, so that this sum is the one rounding.
            return scale_pow2(np.float64(mid) * _LIMB_SCALE + np.float64(low), exponent)
        return wide_total(top, mid, low, exponent, like)

    return total_64


def short_total(mid: Any, low: Any, key: Any, like: Any) -> Any:
    """As `total` for a finite destination and at most FOLD terms that were not carried."""
    raise NotImplementedError


@overload(short_total, jit_options=INLINED)
def _short_total(mid, low, key, like):
    if like == types.float32:
        # Without a branch, so that loops are vectorised.
        return lambda mid, low, key, like: scale_pow2(
            np.float32(low), max(np.int64(key >> 23) - 127, np.int64(-126)) - c.QUANTUM_BITS
        )
    return lambda mid, low, key, like: total(np.int64(0), mid, low, key, like)


@device_function
def wide_total(top, mid, low, exponent, like):
    hi, lo = add_limbs(np.int64(0), np.uint64(0), mid, low, np.int64(_LIMB))
    return wide_to_float(hi + (top << (2 * _LIMB - 64)), lo, exponent, like)
