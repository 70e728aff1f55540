# mypy: ignore-errors
"""Integer terms of order-free sums and 128-bit integers as Numba device functions (rules 4 and 5)."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.numerics import constants as c
from isograd.numerics.numba_ops import as_int, fma, pow2_32, pow2_64
from isograd.numerics.numba_vectors import element, int32
from isograd.runtime.numba_compile import INLINED, device_function

_F32 = np.float32
_F64 = np.float64
_MAGIC_32 = np.float32(c.MAGIC_32)
_MAGIC_64 = np.float64(c.MAGIC_64)
_MAGIC_BITS_32 = int(_MAGIC_32.view(np.int32))
_MAGIC_BITS_64 = int(_MAGIC_64.view(np.int64))


def term_bias(like: Any) -> Any:
    """What every part of a term carries on top: the bits of the magic constant. Sums take it out count times."""
    raise NotImplementedError


@overload(term_bias, jit_options=INLINED)
def _term_bias(like):
    bits = _MAGIC_BITS_32 if like == types.float32 else _MAGIC_BITS_64
    return lambda like: np.int64(bits)


def limb_shift(like: Any) -> Any:
    """SHIFT of the terms of a storage type: their value is high * 2**SHIFT + low."""
    raise NotImplementedError


@overload(limb_shift, jit_options=INLINED)
def _limb_shift(like):
    shift = c.LIMB_SHIFT_64 if like == types.float64 else c.LIMB_SHIFT_32
    return lambda like: np.int64(shift)


def split_term(p: Any, scale: Any) -> Any:
    """The integer rint(p * scale * 2**SHIFT) as (high, low), each with the term bias on top.

    Its value is (high - bias) * 2**SHIFT + (low - bias). SHIFT is LIMB_SHIFT_32, the parts are int32 and within 2**22
    of the bias; or LIMB_SHIFT_64, int64 and 2**45.
    """
    raise NotImplementedError


@overload(split_term, jit_options=INLINED)
def _split_term(p, scale):
    if element(p) == types.float32:

        def term_32(p, scale):
            t = fma(p, scale, _MAGIC_32)
            r = fma(p, scale, -(t - _MAGIC_32))
            return as_int(t), as_int(fma(r, _F32(1 << c.LIMB_SHIFT_32), _MAGIC_32))

        return term_32

    def term_64(p, scale):
        t = fma(p, scale, _MAGIC_64)
        r = fma(p, scale, -(t - _MAGIC_64))
        return as_int(t), as_int(fma(r, _F64(1 << c.LIMB_SHIFT_64), _MAGIC_64))

    return term_64


def split_pair(p: Any, error: Any, scale: Any, error_scale: Any) -> Any:
    """As split_term, with rint(error * error_scale) added to the low part, which then carries the bias twice."""
    raise NotImplementedError


@overload(split_pair, jit_options=INLINED)
def _split_pair(p, error, scale, error_scale):
    if element(p) == types.float32:

        def pair_32(p, error, scale, error_scale):
            t = fma(p, scale, _MAGIC_32)
            r = fma(p, scale, -(t - _MAGIC_32))
            u = fma(r, _F32(1 << c.LIMB_SHIFT_32), _MAGIC_32)
            return as_int(t), int32(as_int(u) + as_int(fma(error, error_scale, _MAGIC_32)))

        return pair_32

    def pair_64(p, error, scale, error_scale):
        t = fma(p, scale, _MAGIC_64)
        r = fma(p, scale, -(t - _MAGIC_64))
        u = fma(r, _F64(1 << c.LIMB_SHIFT_64), _MAGIC_64)
        return as_int(t), as_int(u) + as_int(fma(error, error_scale, _MAGIC_64))

    return pair_64


@device_function
def add_wide(hi, lo, value):
    """Add an int64 to the 128-bit integer (hi: int64, lo: uint64)."""
    s = np.uint64(lo + np.uint64(value))
    carry = np.int64(1) if s < lo else np.int64(0)
    return hi + (value >> np.int64(63)) + carry, s


@device_function
def add_limbs(hi, lo, high, low, shift):
    """Add high * 2**shift + low (both int64) to the 128-bit integer (hi, lo)."""
    hi, lo = add_wide(hi, lo, low)
    s = np.uint64(lo + np.uint64(high << shift))
    carry = np.int64(1) if s < lo else np.int64(0)
    return hi + (high >> (np.int64(64) - shift)) + carry, s


@device_function
def compress(hi, lo):
    """The 128-bit integer as (n, e): n * 2**e, n of at most 63 bits, any lost bits kept as a sticky last bit."""
    sign = np.int64(lo) >> np.int64(63)
    if hi == sign and (np.int64(lo) >> np.int64(62)) == sign:
        return np.int64(lo), np.int64(0)
    top = hi if hi >= 0 else ~hi
    e = np.int64(2)  # bits of the high word that spill over, and the sign
    while top > 0:
        top >>= 1
        e += 1
    n = np.int64(np.uint64(lo) >> np.uint64(e)) | np.int64(hi << (np.int64(64) - e))
    lost = np.uint64(lo) << np.uint64(np.int64(64) - e)
    return n | (np.int64(1) if lost != np.uint64(0) else np.int64(0)), e


def to_float(n: Any, like: Any) -> Any:
    """An int64 rounded once to the type of `like`."""
    raise NotImplementedError


@overload(to_float, jit_options=INLINED)
def _to_float(n, like):
    return (lambda n, like: np.float32(n)) if like == types.float32 else (lambda n, like: np.float64(n))


def one_wide(like: Any) -> Any:
    """One in units of 2**-44 (2**-88), as a 128-bit integer."""
    raise NotImplementedError


@overload(one_wide, jit_options=INLINED)
def _one_wide(like):
    if like == types.float64:
        return lambda like: (np.int64(1 << (c.QUANTUM_BITS + c.LIMB_SHIFT_64 - 64)), np.uint64(0))
    return lambda like: (np.int64(0), np.uint64(1 << c.QUANTUM_BITS))


def scale_pow2(x: Any, k: Any) -> Any:
    """X * 2**k in two exact steps, rounded once if the result is subnormal."""
    raise NotImplementedError


@overload(scale_pow2, jit_options=INLINED)
def _scale_pow2(x, k):
    if x == types.float32:
        return lambda x, k: x * pow2_32(np.int32(k >> 1)) * pow2_32(np.int32(k - (k >> 1)))
    return lambda x, k: x * pow2_64(k >> 1) * pow2_64(k - (k >> 1))


@device_function
def wide_to_float(hi, lo, k, like):
    """The 128-bit integer times 2**k, rounded once to the type of `like`."""
    n, e = compress(hi, lo)
    return scale_pow2(to_float(n, like), k + e)


@device_function
def wide_to_pair(hi, lo, k, like):
    """The 128-bit integer times 2**k as an unevaluated pair: rounded once, and what that left."""
    n, e = compress(hi, lo)
    head = to_float(n, like)
    # head * 2**e as a 128-bit integer, taken away
    back = np.int64(head)
    high = back >> (np.int64(63) if e == 0 else np.int64(64) - e)
    low = np.uint64(back) << np.uint64(e)
    borrow = np.int64(1) if np.uint64(lo) < low else np.int64(0)
    rest = wide_to_float(hi - high - borrow, np.uint64(np.uint64(lo) - low), k, like)
    return scale_pow2(head, k + e), rest


@device_function
def word_to_pair(n, k, like):
    """As `wide_to_pair` for an integer of at most 62 bits, in a form that loops over rows are vectorised with."""
    head = to_float(n, like)
    return scale_pow2(head, k), scale_pow2(to_float(n - np.int64(head), like), k)
