# mypy: ignore-errors
"""More functions of the contract as Numba device functions, made of those in `numba_ops.py`; see `reference.py`."""

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.numerics import constants as c
from isograd.numerics.numba_ops import (
    as_float,
    as_int,
    exp_parts_32,
    exp_parts_64,
    fma,
    log_core_64,
    pow2_32,
    pow2_64,
    split_64,
)
from isograd.runtime.numba_compile import INLINED, device_function

_F32 = np.float32
_F64 = np.float64
_FLOOR_32, _FLOOR_64 = _F32(c.EXP_FLOOR_32), _F64(c.EXP_FLOOR_64)
_CEIL_32, _CEIL_64 = _F32(c.EXP_CEIL_32), _F64(c.EXP_CEIL_64)
_MAGIC_BITS_32 = int(_F32(c.MAGIC_32).view(np.int32))
_MAGIC_BITS_64 = int(_F64(c.MAGIC_64).view(np.int64))
_SUBNORMAL_SCALE, _TINY = _F64(2.0**64), _F64(2.0**-1022)


# --- the exponential -------------------------------------------------------------------------------------------------
def exp_of_pair(x: Any, low: Any) -> Any:
    """exp(x + low) for a finite low far below 1; a NaN stays one."""
    raise NotImplementedError


@overload(exp_of_pair, jit_options=INLINED)
def _exp_of_pair(x, low):
    # As `numba_ops.exp`, with low in the sum.
    if x == types.float32:

        def exp_32(x, low):
            d = _FLOOR_32 if x < _FLOOR_32 else x
            d = _CEIL_32 if d > _CEIL_32 else d
            s, t, z = exp_parts_32(d)
            small = d < _F32(0)
            bias = np.int32((127 + 26) << 23) if small else np.int32((127 - 26) << 23)
            first = as_float(np.int32(np.int32(as_int(z) << 23) + bias))
            e = s + t
            return (e + fma(low, e, (s - e) + t)) * first * (_F32(2.0**-26) if small else _F32(2.0**26))

        return exp_32

    def exp_64(x, low):
        d = _FLOOR_64 if x < _FLOOR_64 else x
        d = _CEIL_64 if d > _CEIL_64 else d
        s, t, z = exp_parts_64(d)
        small = d < _F64(0)
        bias = np.int64((1023 + 55) << 52) if small else np.int64((1023 - 55) << 52)
        first = as_float(np.int64((as_int(z) << 52) + bias))
        e = s + t
        return (e + fma(low, e, (s - e) + t)) * first * (_F64(2.0**-55) if small else _F64(2.0**55))

    return exp_64


def expm1_below(d: Any) -> Any:
    """exp(d) - 1 for d <= 0, relative error at most 1.5 u; a NaN stays one."""
    raise NotImplementedError


@overload(expm1_below, jit_options=INLINED)
def _expm1_below(d):
    if d == types.float32:

        def expm1_32(d):
            s, t, z = exp_parts_32(_F32(c.EXPM1_FLOOR) if d < _F32(c.EXPM1_FLOOR) else d)
            scale = pow2_32(np.int32(as_int(z) - _MAGIC_BITS_32))
            b = s * scale
            y = b - _F32(1)
            return y + ((b - (y + _F32(1))) + t * scale)

        return expm1_32

    def expm1_64(d):
        s, t, z = exp_parts_64(_F64(c.EXPM1_FLOOR) if d < _F64(c.EXPM1_FLOOR) else d)
        scale = pow2_64(as_int(z) - _MAGIC_BITS_64)
        b = s * scale
        y = b - _F64(1)
        return y + ((b - (y + _F64(1))) + t * scale)

    return expm1_64


# --- the logarithm ---------------------------------------------------------------------------------------------------
@device_function
def log_pair_64(x):
    """The logarithm of a positive finite binary64 number as an unevaluated pair."""
    small = x < _TINY
    f, k = split_64(x * _SUBNORMAL_SCALE if small else x)
    return log_core_64(f, _F64(k - 64 if small else k), _F64(0))


# --- the normal distribution -----------------------------------------------------------------------------------------
_P = tuple([_F32(v) for v in c.NORMAL_POLY_32])
_Q = tuple([_F64(v) for v in c.NORMAL_POLY_64])


@device_function
def _ratio_32(a):
    t = (a - _F32(c.NORMAL_SHIFT)) / (a + _F32(c.NORMAL_SHIFT))
    p = fma(fma(fma(fma(fma(_P[10], t, _P[9]), t, _P[8]), t, _P[7]), t, _P[6]), t, _P[5])
    p = fma(fma(fma(fma(fma(p, t, _P[4]), t, _P[3]), t, _P[2]), t, _P[1]), t, _P[0])
    return p / fma(_F32(c.NORMAL_SLOPE), a, _F32(1))


@device_function
def _ratio_64(a):
    t = (a - _F64(c.NORMAL_SHIFT)) / (a + _F64(c.NORMAL_SHIFT))
    p = fma(fma(fma(fma(_Q[24], t, _Q[23]), t, _Q[22]), t, _Q[21]), t, _Q[20])
    p = fma(fma(fma(fma(fma(p, t, _Q[19]), t, _Q[18]), t, _Q[17]), t, _Q[16]), t, _Q[15])
    p = fma(fma(fma(fma(fma(p, t, _Q[14]), t, _Q[13]), t, _Q[12]), t, _Q[11]), t, _Q[10])
    p = fma(fma(fma(fma(fma(p, t, _Q[9]), t, _Q[8]), t, _Q[7]), t, _Q[6]), t, _Q[5])
    p = fma(fma(fma(fma(fma(p, t, _Q[4]), t, _Q[3]), t, _Q[2]), t, _Q[1]), t, _Q[0])
    return p / fma(_F64(c.NORMAL_SLOPE), a, _F64(1))


def normal_tail(a: Any) -> Any:
    """(E, R) with E = exp(-a^2 / 2) and E * R the normal distribution's share below -a, for 0 <= a <= NORMAL_REACH."""
    raise NotImplementedError


@overload(normal_tail, jit_options=INLINED)
def _normal_tail(a):
    of = _F32 if a == types.float32 else _F64
    ratio = _ratio_32 if a == types.float32 else _ratio_64
    minus_half = of(-0.5)

    def tail(a):
        square = a * a
        return exp_of_pair(square * minus_half, fma(a, a, -square) * minus_half), ratio(a)

    return tail


# --- tanh ------------------------------------------------------------------------------------------------------------
def tanh_value(x: Any) -> Any:
    """The hyperbolic tangent, at most 3.5 u of it off."""
    raise NotImplementedError


@overload(tanh_value, jit_options=INLINED)
def _tanh_value(x):
    two = _F32(2) if x == types.float32 else _F64(2)

    def value(x):
        e = expm1_below(abs(x) * -two)
        return math.copysign(-e / (two + e), x)

    return value
