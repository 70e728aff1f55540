# mypy: ignore-errors
"""Between storage types and the types computed in: widening is exact, narrowing rounds to nearest even.

A half travels as int16 and a bfloat16 as uint16, so that the type alone says how its bits are read.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.numerics.numba_ops import as_float, as_int, pow2_32
from isograd.numerics.numba_vectors import Vector, as_high_words, convert, element, from_high_words, int32, select
from isograd.runtime.numba_compile import INLINED

_NAN_32 = np.float32(np.nan)
_NAN_64 = np.float64(np.nan)


def widen(v: Any) -> Any:
    raise NotImplementedError


@overload(widen, jit_options=INLINED)
def _widen(v):
    if isinstance(v, Vector) and v.dtype == types.uint16:
        return lambda v: as_float(as_high_words(v))
    if v == types.uint16:
        return lambda v: as_float(int32(int32(v) << 16))
    if element(v) == types.int16:

        def half(v):
            # Placing the bits 112 exponents too low and multiplying by 2**112 also normalises subnormals.
            b = int32(v)
            magnitude = int32(b & 0x7FFF)
            x = as_float(int32(magnitude << 13)) * pow2_32(112)
            special = int32(int32(magnitude << 13) | 0x7F800000)
            u = select(magnitude >= 0x7C00, special, as_int(x))
            return as_float(int32(u | (b & -0x80000000)))

        return half
    return lambda v: v


def narrow(x: Any, like: Any) -> Any:
    """Round `x` to the storage type of `like`."""
    raise NotImplementedError


@overload(narrow, jit_options=INLINED)
def _narrow(x, like):
    if like == types.float64:
        return lambda x, like: select(x == x, x, _NAN_64)
    if like == types.float32:
        return lambda x, like: select(x == x, x, _NAN_32)
    nan = np.int32(0x7FC00000 if like == types.uint16 else 0x7E00)
    return lambda x, like: _stored(select(x == x, _rounded(x, like), nan), like)


def narrow_number(x: Any, like: Any) -> Any:
    """`narrow` for what is no NaN."""
    raise NotImplementedError


@overload(narrow_number, jit_options=INLINED)
def _narrow_number(x, like):
    if like in (types.float32, types.float64):
        return lambda x, like: x
    return lambda x, like: _stored(_rounded(x, like), like)


def _rounded(x: Any, like: Any) -> Any:
    """The bits of a number rounded to 16 bits; those of a bfloat16 stand above 16 others."""
    raise NotImplementedError


@overload(_rounded, jit_options=INLINED)
def _rounded_overload(x, like):
    if like == types.uint16:

        def bfloat16(x, like):
            u = as_int(x)
            return int32(u + select((u & 0x10000) == 0, np.int32(0x7FFF), np.int32(0x8000)))

        return bfloat16

    def half(x, like):
        u = as_int(x)
        a = int32(u & 0x7FFFFFFF)
        # Subnormal results: adding 0.5 puts the last bit of a half at the last bit of the float.
        small = int32(as_int(as_float(a) + np.float32(0.5)) - 0x3F000000)
        large = int32(int32(a - (0x38000000 - 0xFFF) + int32((a >> 13) & 1)) >> 13)
        r = select(a < 0x38800000, small, large)
        r = select(a < 0x477FF000, r, np.int32(0x7C00))
        return int32(r | int32((u >> 16) & 0x8000))

    return half


def _stored(r: Any, like: Any) -> Any:
    """What `_rounded` returns in the storage type."""
    raise NotImplementedError


@overload(_stored, jit_options=INLINED)
def _stored_overload(r, like):
    if like == types.int16:
        return lambda r, like: convert(r, like)
    if isinstance(r, Vector):
        return lambda r, like: from_high_words(r)
    return lambda r, like: convert(int32(r >> 16), like)
