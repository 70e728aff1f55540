# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""silu and both forms of gelu, and their slopes, in Triton; see `reference.py`."""

import triton
import triton.language as tl

from isograd.elementwise import reference as ref
from isograd.numerics import constants as c
from isograd.numerics import triton_ops as ops

_CLAMP, _GELU_CLAMP = tl.constexpr(ref.SILU_CLAMP), tl.constexpr(ref.GELU_CLAMP)
_T32, _T64 = tl.constexpr(ref.GELU_TANH_32), tl.constexpr(ref.GELU_TANH_64)
_REACH_32, _REACH_64 = tl.constexpr(c.NORMAL_REACH_32), tl.constexpr(c.NORMAL_REACH_64)
_DENSITY_32, _DENSITY_64 = tl.constexpr(-c.NORMAL_DENSITY_32), tl.constexpr(-c.NORMAL_DENSITY_64)
_FLOOR_32, _FLOOR_64 = tl.constexpr(c.EXP_FLOOR_32), tl.constexpr(c.EXP_FLOOR_64)
_SHIFT, _SLOPE = tl.constexpr(c.NORMAL_SHIFT), tl.constexpr(c.NORMAL_SLOPE)
_P32, _P64 = tl.constexpr(tuple(c.NORMAL_POLY_32)), tl.constexpr(tuple(c.NORMAL_POLY_64))
_TERMS_32, _TERMS_64 = tl.constexpr(len(c.NORMAL_POLY_32)), tl.constexpr(len(c.NORMAL_POLY_64))


@triton.jit
def _number(x, of_32: tl.constexpr, of_64: tl.constexpr):
    """A constant of the type and shape of x."""
    if x.dtype == tl.float64:
        return tl.full(x.shape, of_64, tl.float64)
    else:
        return tl.full(x.shape, of_32, tl.float32)


@triton.jit
def silu_value(x):
    """The product x * sigmoid(x)."""
    z = ops.exp(tl.where(x < 0.0, x, ops.negate(x)))
    n = tl.where(x >= 0.0, x, tl.where(x > -_CLAMP, x, -_CLAMP) * z)
    return ops.divide(n, 1.0 + z)


@triton.jit
def silu_slope(x):
    """The derivative of x * sigmoid(x)."""
    z = ops.exp(tl.where(x < 0.0, x, ops.negate(x)))
    d = 1.0 + z
    w = tl.where(x > -_CLAMP, x, -_CLAMP)
    w = tl.where(w < _CLAMP, w, _CLAMP)
    return ops.divide(tl.where(x >= 0.0, tl.fma(w, z, d), z * (d + w)), d * d)


@triton.jit
def _exp_of_pair(x, low):
    """exp(x + low) for x <= 0 and a finite low far below 1."""
    if x.dtype == tl.float64:
        s, t, z = ops.exp_parts_64(tl.where(x > _FLOOR_64, x, _FLOOR_64))
        k = z - ops.MAGIC_BITS_64
        k1 = k >> 1
        first, second = ops.pow2_64(k1), ops.pow2_64(k - k1)
    else:
        s, t, z = ops.exp_parts_32(tl.where(x > _FLOOR_32, x, _FLOOR_32))
        k = z - ops.MAGIC_BITS_32
        k1 = k >> 1
        first, second = ops.pow2_32(k1), ops.pow2_32(k - k1)
    e = s + t
    return tl.where(x == x, (e + tl.fma(low, e, (s - e) + t)) * first * second, x)


@triton.jit
def _normal(x):
    """(a, E, R) of the normal distribution at a = |x|, held within its reach."""
    reach = _number(x, _REACH_32, _REACH_64)
    a = tl.where(tl.abs(x) > reach, reach, tl.abs(x))
    square = a * a
    e = _exp_of_pair(square * -0.5, tl.fma(a, a, ops.negate(square)) * -0.5)
    t = ops.divide(a - _SHIFT, a + _SHIFT)
    if x.dtype == tl.float64:
        p = tl.full(x.shape, _P64[_TERMS_64 - 1], tl.float64)
        for i in tl.static_range(1, _TERMS_64):
            p = tl.fma(p, t, tl.full(x.shape, _P64[_TERMS_64 - 1 - i], tl.float64))
    else:
        p = tl.full(x.shape, _P32[_TERMS_32 - 1], tl.float32)
        for i in tl.static_range(1, _TERMS_32):
            p = tl.fma(p, t, tl.full(x.shape, _P32[_TERMS_32 - 1 - i], tl.float32))
    return a, e, ops.divide(p, tl.fma(_number(x, _SLOPE, _SLOPE), a, _number(x, 1.0, 1.0)))


@triton.jit
def gelu_value(x):
    """The product x * Phi(x)."""
    a, e, r = _normal(x)
    return tl.where(x >= 0.0, x * tl.fma(ops.negate(e), r, _number(x, 1.0, 1.0)), ops.negate(e * (a * r)))


@triton.jit
def gelu_slope(x):
    """The derivative of x * Phi(x)."""
    a, e, r = _normal(x)
    h = tl.fma(_number(x, _DENSITY_32, _DENSITY_64), a, r)
    return tl.where(x >= 0.0, tl.fma(ops.negate(e), h, _number(x, 1.0, 1.0)), e * h)


@triton.jit
def _tanh_parts(x):
    """(a, z, d, w) of the tanh form."""
    clamp = _number(x, _GELU_CLAMP, _GELU_CLAMP)
    a = tl.where(tl.abs(x) > clamp, clamp, tl.abs(x))
    p = a * a
    c0 = _number(x, _T32[0], _T64[0])
    z = ops.exp(ops.negate(a * tl.fma(_number(x, _T32[1], _T64[1]), p, c0)))
    return a, z, 1.0 + z, a * tl.fma(_number(x, _T32[2], _T64[2]), p, c0)


@triton.jit
def gelu_tanh_value(x):
    """The tanh form of gelu."""
    a, z, d, _ = _tanh_parts(x)
    return ops.divide(tl.where(x >= 0.0, x, ops.negate(a * z)), d)


@triton.jit
def gelu_tanh_slope(x):
    """The derivative of the tanh form."""
    _, z, d, w = _tanh_parts(x)
    return ops.divide(tl.where(x >= 0.0, tl.fma(w, z, d), z * (d - w)), d * d)


@triton.jit
def value(x, FORM: tl.constexpr):
    """silu, or a form of gelu."""
    if FORM == "silu":
        y = silu_value(x)
    elif FORM == "none":
        y = gelu_value(x)
    else:
        y = gelu_tanh_value(x)
    return y


@triton.jit
def slope(x, FORM: tl.constexpr):
    """Its derivative."""
    if FORM == "silu":
        y = silu_slope(x)
    elif FORM == "none":
        y = gelu_slope(x)
    else:
        y = gelu_tanh_slope(x)
    return y
