# mypy: ignore-errors
"""The contract as Numba device functions. `reference.py` is the definition; the tests hold both to the same bits."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic, overload

from isograd.numerics import constants as c
from isograd.numerics.numba_vectors import Vector, element, int32, int64, select
from isograd.numerics.numba_vectors import fma as fma
from isograd.runtime.numba_compile import INLINED, device_function

_F32 = np.float32
_F64 = np.float64
_NAN_32 = np.float32(np.nan)
_NAN_64 = np.float64(np.nan)
_INF_32 = np.float32(np.inf)
_INF_64 = np.float64(np.inf)
_ONE_32, _ONE_64 = _F32(1), _F64(1)
_MAGIC_32, _MAGIC_64 = _F32(c.MAGIC_32), _F64(c.MAGIC_64)
_MAGIC_BITS_32 = int(_MAGIC_32.view(np.int32))
_MAGIC_BITS_64 = int(_MAGIC_64.view(np.int64))


# --- bits ------------------------------------------------------------------------------------------------------------
_INTEGER_OF = {types.float32: types.int32, types.float64: types.int64}
_FLOAT_OF = {types.int32: types.float32, types.int64: types.float64}


@intrinsic
def as_int(typingctx: Any, x: Any) -> Any:
    """The bits of a float as the signed integer of its width."""
    integer = _INTEGER_OF[element(x)]
    target = x.of(integer) if isinstance(x, Vector) else integer

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(target))

    return target(x), generate


@intrinsic
def as_float(typingctx: Any, b: Any) -> Any:
    """The float whose bits an int32 or int64 holds."""
    real = _FLOAT_OF[element(b)]
    target = b.of(real) if isinstance(b, Vector) else real

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(target))

    return target(b), generate


@device_function
def pow2_32(k):
    """2**k for -126 <= k <= 127."""
    return as_float(np.int32((k + 127) << 23))


@device_function
def pow2_64(k):
    """2**k for -1022 <= k <= 1023."""
    return as_float(np.int64((np.int64(k) + 1023) << 52))


@device_function
def two_sum(a, b):
    """A + b and its rounding error."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


def is_finite(x: Any) -> Any:
    """Whether x is neither infinite nor a NaN."""
    raise NotImplementedError


@overload(is_finite, jit_options=INLINED)
def _is_finite(x):
    # Compared in the type of x: a conversion to binary64 would halve the speed of a loop.
    if isinstance(x, Vector):
        return lambda x: is_finite_key(magnitude_key(x))
    infinity = _INF_32 if x == types.float32 else _INF_64
    return lambda x: abs(x) < infinity


def is_finite_key(key: Any) -> Any:
    """Whether a magnitude key belongs to a finite number."""
    raise NotImplementedError


def is_number_key(key: Any) -> Any:
    """Whether a magnitude key belongs to a number, an infinite one included."""
    raise NotImplementedError


@overload(is_number_key, jit_options=INLINED)
def _is_number_key(key):
    if element(key) == types.int32:
        return lambda key: key <= np.int32(0x7F800000)
    return lambda key: key <= np.int64(0x7FF0000000000000)


@overload(is_finite_key, jit_options=INLINED)
def _is_finite_key(key):
    if element(key) == types.int32:
        return lambda key: key < np.int32(0x7F800000)
    return lambda key: key < np.int64(0x7FF0000000000000)


# --- maximum over order-preserving keys; NaN above everything --------------------------------------------------------
def max_key(x: Any) -> Any:
    """An integer in the order of the float, NaN of either sign the largest."""
    raise NotImplementedError


@overload(max_key, jit_options=INLINED)
def _max_key(x):
    if element(x) == types.float32:

        def key_32(x):
            b = as_int(x)
            k = int32(b ^ int32((b >> 31) & 0x7FFFFFFF))
            return select(x == x, k, np.int32(0x7FFFFFFF))

        return key_32

    def key_64(x):
        b = as_int(x)
        k = b ^ ((b >> 63) & 0x7FFFFFFFFFFFFFFF)
        return select(x == x, k, np.int64(0x7FFFFFFFFFFFFFFF))

    return key_64


def from_key(k: Any) -> Any:
    """The float of a key; the key of a NaN gives the canonical NaN."""
    raise NotImplementedError


@overload(from_key, jit_options=INLINED)
def _from_key(k):
    if k == types.int32:

        def float_32(k):
            x = as_float(np.int32(k ^ np.int32(np.int32(k >> 31) & 0x7FFFFFFF)))
            return x if x == x else _NAN_32

        return float_32

    def float_64(k):
        x = as_float(np.int64(k ^ ((k >> 63) & 0x7FFFFFFFFFFFFFFF)))
        return x if x == x else _NAN_64

    return float_64


def lowest_key(like: Any) -> Any:
    """The key below all others, for the type that `like` is computed in."""
    raise NotImplementedError


@overload(lowest_key, jit_options=INLINED)
def _lowest_key(like):
    if like == types.float64:
        return lambda like: np.int64(-0x8000000000000000)
    return lambda like: np.int32(-0x80000000)


def magnitude_key(x: Any) -> Any:
    """The bits of |x|, an integer in the order of the magnitude, NaN above infinity."""
    raise NotImplementedError


@overload(magnitude_key, jit_options=INLINED)
def _magnitude_key(x):
    if element(x) == types.float32:
        return lambda x: int32(as_int(x) & 0x7FFFFFFF)
    return lambda x: as_int(x) & 0x7FFFFFFFFFFFFFFF


# --- the exponential (rule 6) ----------------------------------------------------------------------------------------
_LOG2E_32, _LOG2E_64 = _F32(c.LOG2E_32), _F64(c.LOG2E_64)
_LN2_32, _REST_32 = _F32(c.LN2_32), _F32(c.LN2_REST_32)
_LN2_64, _REST_64 = _F64(c.LN2_64), _F64(c.LN2_REST_64)
_E0, _E1, _E2, _E3, _E4 = (_F32(v) for v in c.EXP_POLY_32)
_D0, _D1, _D2, _D3, _D4, _D5, _D6, _D7, _D8, _D9, _D10 = (_F64(v) for v in c.EXP_POLY_64)
_S0, _S1, _S2, _S3 = (_F32(v) for v in c.EXP2_POLY_SHORT)
_SHORT_MIN = _F32(c.SHORT_MIN_EXPONENT)
_SHORT_BIAS = c.SHORT_QUANTUM_BITS << 23
_SHORT_LOW, _SHORT_HIGH = (_F32(v) for v in c.SHORT_NORMAL)
_FLOOR_32, _FLOOR_64 = _F32(c.EXP_FLOOR_32), _F64(c.EXP_FLOOR_64)
_CEIL_32, _CEIL_64 = _F32(c.EXP_CEIL_32), _F64(c.EXP_CEIL_64)
_DOWN_26, _UP_26 = _F32(2.0**-26), _F32(2.0**26)
_DOWN_55, _UP_55 = _F64(2.0**-55), _F64(2.0**55)
_DIRECT_32, _DIRECT_64 = _F32(c.EXP_DIRECT_32), _F64(c.EXP_DIRECT_64)


@device_function
def exp_parts_32(d):
    """exp(d) = (s + t) * 2**k; k stands in the low bits of z."""
    z = fma(d, _LOG2E_32, _MAGIC_32)
    k = z - _MAGIC_32
    r = fma(k, -_LN2_32, d)
    w = k * -_REST_32
    g = r + w
    square = g * g
    p = fma(fma(_E4, square, fma(_E3, g, _E2)), square, fma(_E1, g, _E0))
    t = fma(square, p, w)
    s = _ONE_32 + r
    return s, ((_ONE_32 - s) + r) + t, z


@device_function
def exp_parts_64(d):
    z = fma(d, _LOG2E_64, _MAGIC_64)
    k = z - _MAGIC_64
    r = fma(k, -_LN2_64, d)
    w = k * -_REST_64
    g = r + w
    square = g * g
    p = fma(fma(fma(fma(fma(_D10, g, _D9), g, _D8), g, _D7), g, _D6), g, _D5)
    p = fma(fma(fma(fma(fma(p, g, _D4), g, _D3), g, _D2), g, _D1), g, _D0)
    t = fma(square, p, w)
    s = _ONE_64 + r
    return s, ((_ONE_64 - s) + r) + t, z


def exp(x: Any) -> Any:
    """The exponential, at most 1.05 ulp off, underflow gradual; a NaN stays one, made canonical by `narrow`."""
    raise NotImplementedError


@overload(exp, jit_options=INLINED)
def _exp(x):
    if element(x) == types.float32:

        def exp_32(x):
            # Comparisons this way round let a NaN through.
            d = select(x < _FLOOR_32, _FLOOR_32, x)
            d = select(d > _CEIL_32, _CEIL_32, d)
            s, t, z = exp_parts_32(d)
            # 2**k in two factors, the second one constant: the first never leaves the range, the last rounds once.
            small = d < _F32(0)
            bias = select(small, np.int32((127 + 26) << 23), np.int32((127 - 26) << 23))
            first = as_float(int32(int32(as_int(z) << 23) + bias))
            return (s + t) * first * select(small, _DOWN_26, _UP_26)

        return exp_32

    def exp_64(x):
        d = select(x < _FLOOR_64, _FLOOR_64, x)
        d = select(d > _CEIL_64, _CEIL_64, d)
        s, t, z = exp_parts_64(d)
        small = d < _F64(0)
        bias = select(small, np.int64((1023 + 55) << 52), np.int64((1023 - 55) << 52))
        first = as_float(int64((as_int(z) << 52) + bias))
        return (s + t) * first * select(small, _DOWN_55, _UP_55)

    return exp_64


def exp_shift(m: Any) -> Any:
    """(base, floor, bias) of a row with the finite maximum m; see `reference.exp_shift`.

    bias is what `exp_shifted` adds to the exponent field: the scale of the exponentials less the row's exponent.
    """
    raise NotImplementedError


@overload(exp_shift, jit_options=INLINED)
def _exp_shift(m):
    if m == types.float32:

        def shift_32(m):
            if abs(m) < _DIRECT_32:
                k = np.int32(as_int(fma(m, _LOG2E_32, _MAGIC_32)) - _MAGIC_BITS_32)
                return _F32(0), m + _FLOOR_32, np.int32((127 + c.EXP_SCALE_32 - k) << 23)
            return m, _FLOOR_32, np.int32((127 + c.EXP_SCALE_32) << 23)

        return shift_32

    def shift_64(m):
        if abs(m) < _DIRECT_64:
            k = as_int(fma(m, _LOG2E_64, _MAGIC_64)) - _MAGIC_BITS_64
            return _F64(0), m + _FLOOR_64, np.int64((1023 + c.EXP_SCALE_64 - k) << 52)
        return m, _FLOOR_64, np.int64((1023 + c.EXP_SCALE_64) << 52)

    return shift_64


def exp_shifted(x: Any, base: Any, floor: Any, bias: Any) -> Any:
    """The exponential of a row's element as (e, rounding error of e), both times 2**EXP_SCALE."""
    raise NotImplementedError


@overload(exp_shifted, jit_options=INLINED)
def _exp_shifted(x, base, floor, bias):
    if element(x) == types.float32:

        def shifted_32(x, base, floor, bias):
            d = x - base
            d = select(d > floor, d, floor)
            s, t, z = exp_parts_32(d)
            # Shifted left, the bits of z keep k in the exponent field and nothing else.
            scale = as_float(int32(int32(as_int(z) << 23) + bias))
            e = s + t
            return e * scale, ((s - e) + t) * scale

        return shifted_32

    def shifted_64(x, base, floor, bias):
        d = x - base
        d = select(d > floor, d, floor)
        s, t, z = exp_parts_64(d)
        scale = as_float(int64((as_int(z) << 52) + bias))
        e = s + t
        return e * scale, ((s - e) + t) * scale

    return shifted_64


@device_function
def _exp2_short(t, bias):
    """2**t by the shorter polynomial, its exponent field raised by `bias`."""
    z = t + _MAGIC_32
    f = t - (z - _MAGIC_32)
    p = fma(fma(fma(fma(_S3, f, _S2), f, _S1), f, _S0), f, _ONE_32)
    return as_float(int32(as_int(p) + int32(as_int(z) << 23) + bias))


@device_function
def exp_short(d):
    """2**30 * exp(d) for d <= 0, for 16-bit softmax results: relative error under 2**-15."""
    t = d * _LOG2E_32
    return _exp2_short(select(t > _SHORT_MIN, t, _SHORT_MIN), _SHORT_BIAS)


@device_function
def exp_short_any(x):
    """exp(x) for any x, for 16-bit results: zero instead of subnormal numbers; a NaN stays one."""
    t = x * _LOG2E_32
    u = select(t < _SHORT_LOW, _SHORT_LOW, t)
    # 2**128, the upper end, has the bits of infinity.
    e = _exp2_short(select(u > _SHORT_HIGH, _SHORT_HIGH, u), 0)
    e = select(t < _SHORT_LOW, _F32(0), e)
    return select(x == x, e, x)


# --- the logarithm (rule 6) ------------------------------------------------------------------------------------------
_G0, _G1, _G2, _G3 = (_F32(v) for v in c.LOG_POLY_32)
_H0, _H1, _H2, _H3, _H4, _H5, _H6, _H7 = (_F64(v) for v in c.LOG_POLY_64)
_LN2_HI_32, _LN2_LO_32 = _F32(c.LN2_HI_32), _F32(c.LN2_LO_32)
_LN2_HI_64, _LN2_LO_64 = _F64(c.LN2_HI_64), _F64(c.LN2_LO_64)
_HALF_32, _HALF_64 = _F32(0.5), _F64(0.5)
_TWO_32, _TWO_64 = _F32(2), _F64(2)
_SUBNORMAL_SCALE_32, _SUBNORMAL_SCALE_64 = _F32(2.0**32), _F64(2.0**64)
_TINY_32, _TINY_64 = _F32(2.0**-126), _F64(2.0**-1022)
_LOG1P_LOW_32, _LOG1P_HIGH_32 = (_F32(v) for v in c.LOG1P_NEAR_32)
_LOG1P_LOW_64, _LOG1P_HIGH_64 = (_F64(v) for v in c.LOG1P_NEAR_64)


@device_function
def log_core_32(f, k, low):
    """log((1 + f) * 2**k) + low as an unevaluated pair."""
    s = f / (_TWO_32 + f)
    z = s * s
    h = _HALF_32 * f * f
    r = z * fma(fma(fma(_G3, z, _G2), z, _G1), z, _G0)
    rest = fma(s, h + r, fma(k, _LN2_LO_32, low)) - h
    a = k * _LN2_HI_32
    u = a + f
    w = ((a - u) + f) + rest
    y = u + w
    return y, (u - y) + w


@device_function
def log_core_64(f, k, low):
    s = f / (_TWO_64 + f)
    z = s * s
    h = _HALF_64 * f * f
    p = fma(fma(fma(fma(_H7, z, _H6), z, _H5), z, _H4), z, _H3)
    r = z * fma(fma(fma(p, z, _H2), z, _H1), z, _H0)
    rest = fma(s, h + r, fma(k, _LN2_LO_64, low)) - h
    a = k * _LN2_HI_64
    u = a + f
    w = ((a - u) + f) + rest
    y = u + w
    return y, (u - y) + w


@device_function
def split_32(x):
    """X = (1 + f) * 2**k with sqrt(1/2) <= 1 + f < sqrt(2), for positive normal x."""
    b = np.int32(as_int(x) - c.SQRT_HALF_BITS_32)
    k = np.int32(b >> 23)
    m = as_float(np.int32(np.int32(b & 0x7FFFFF) + c.SQRT_HALF_BITS_32))
    return m - _ONE_32, k


@device_function
def split_64(x):
    b = as_int(x) - c.SQRT_HALF_BITS_64
    k = b >> 52
    m = as_float(np.int64((b & 0xFFFFFFFFFFFFF) + c.SQRT_HALF_BITS_64))
    return m - _ONE_64, k


def log(x: Any) -> Any:
    """The natural logarithm, at most 1.05 ulp off; -inf at 0, NaN below."""
    raise NotImplementedError


@overload(log, jit_options=INLINED)
def _log(x):
    if x == types.float32:

        def log_32(x):
            small = x < _TINY_32
            f, k = split_32(x * _SUBNORMAL_SCALE_32 if small else x)
            y, _ = log_core_32(f, _F32(k - 32 if small else k), _F32(0))
            y = y if x < _INF_32 else x
            y = y if x != _F32(0) else -_INF_32
            return y if x >= _F32(0) else _NAN_32

        return log_32

    def log_64(x):
        small = x < _TINY_64
        f, k = split_64(x * _SUBNORMAL_SCALE_64 if small else x)
        y, _ = log_core_64(f, _F64(k - 64 if small else k), _F64(0))
        y = y if x < _INF_64 else x
        y = y if x != _F64(0) else -_INF_64
        return y if x >= _F64(0) else _NAN_64

    return log_64


def log1p_pair(x: Any, low: Any) -> Any:
    """The logarithm of 1 + x + low for finite x > -1 and low far below x, as an unevaluated pair."""
    raise NotImplementedError


@overload(log1p_pair, jit_options=INLINED)
def _log1p_pair(x, low):
    # Selections and no branches, so that a loop over rows is vectorised.
    if x == types.float32:

        def log1p_32(x, low):
            u, error = two_sum(_ONE_32, x)
            near = x > _LOG1P_LOW_32 and x < _LOG1P_HIGH_32
            f, k = split_32(u)
            return log_core_32(x if near else f, _F32(0 if near else k), (low if near else error + low) / u)

        return log1p_32

    def log1p_64(x, low):
        u, error = two_sum(_ONE_64, x)
        near = x > _LOG1P_LOW_64 and x < _LOG1P_HIGH_64
        f, k = split_64(u)
        return log_core_64(x if near else f, _F64(0 if near else k), (low if near else error + low) / u)

    return log1p_64


def log1p(x: Any) -> Any:
    """The logarithm of 1 + x, at most 1.05 ulp off; -inf at -1, NaN below."""
    raise NotImplementedError


@overload(log1p, jit_options=INLINED)
def _log1p(x):
    if x == types.float32:

        def log1p_32(x):
            if x > -_ONE_32 and x < _INF_32:
                # The sum of a zero and a zero would lose the sign.
                return log1p_pair(x, _F32(0))[0] if x != _F32(0) else x
            if x == _INF_32:
                return x
            return -_INF_32 if x == -_ONE_32 else _NAN_32

        return log1p_32

    def log1p_64(x):
        if x > -_ONE_64 and x < _INF_64:
            return log1p_pair(x, _F64(0))[0] if x != _F64(0) else x
        if x == _INF_64:
            return x
        return -_INF_64 if x == -_ONE_64 else _NAN_64

    return log1p_64
