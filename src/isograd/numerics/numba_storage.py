# mypy: ignore-errors
"""Between storage types and the types computed in: widening is exact, narrowing rounds to nearest even.

A half travels as int16 and a bfloat16 as uint16, so that the type alone says how its bits are read.
"""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.numerics.numba_ops import as_float, as_int, pow2_32
from isograd.runtime.numba_compile import INLINED

_NAN_32 = np.float32(np.nan)
_NAN_64 = np.float64(np.nan)


def widen(v: Any) -> Any:
    raise NotImplementedError


@overload(widen, jit_options=INLINED)
def _widen(v):
    if v == types.uint16:
        return lambda v: as_float(np.int32(np.int32(v) << 16))
    if v == types.int16:

        def half(v):
            # Placing the bits 112 exponents too low and multiplying by 2**112 also normalises subnormals.
            magnitude = np.int32(np.int32(v) & 0x7FFF)
            x = as_float(np.int32(magnitude << 13)) * pow2_32(112)
            special = np.int32((magnitude << 13) | 0x7F800000)
            u = special if magnitude >= 0x7C00 else as_int(x)
            return as_float(np.int32(u | (np.int32(v) & np.int32(-0x80000000))))

        return half
    return lambda v: v


def narrow(x: Any, like: Any) -> Any:
    """Round `x` to the storage type of `like`."""
    raise NotImplementedError


@overload(narrow, jit_options=INLINED)
def _narrow(x, like):
    if like == types.uint16:

        def bfloat16(x, like):
            u = np.uint32(as_int(x))
            r = np.uint32(np.uint32(u + np.uint32(0x7FFF)) + np.uint32(np.uint32(u >> np.uint32(16)) & np.uint32(1)))
            return np.uint16(np.uint32(r >> np.uint32(16)) if x == x else np.uint32(0x7FC0))

        return bfloat16
    if like == types.int16:

        def half(x, like):
            u = as_int(x)
            a = np.int32(u & 0x7FFFFFFF)
            # Subnormal results: adding 0.5 puts the last bit of a half at the last bit of the float.
            small = np.int32(as_int(as_float(a) + np.float32(0.5)) - 0x3F000000)
            large = np.int32(np.int32(a - 0x38000000 + 0xFFF + np.int32(np.int32(a >> 13) & 1)) >> 13)
            r = small if a < 0x38800000 else large
            r = r if a < 0x477FF000 else np.int32(0x7C00)
            r = np.int32(r | np.int32(np.int32(u >> 16) & 0x8000))
            return np.int16(r if a <= 0x7F800000 else np.int32(0x7E00))

        return half
    if like == types.float64:
        return lambda x, like: x if x == x else _NAN_64
    return lambda x, like: x if x == x else _NAN_32
