# mypy: ignore-errors
# ruff: noqa: D103, D402, N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""The contract as Triton device functions; `reference.py` is the definition, and the tests hold both to the same bits.

Kernels are launched with `enable_fp_fusion=False`, so that an fma stands only where one is written. `NATIVE` selects
PTX spellings of an operation (NVIDIA, compute capability 9.0 and later) that return the same bits in fewer
instructions. The binary32 functions are also called from Gluon kernels, which is why their constants are plain numbers.
"""

import numpy as np
import triton
import triton.language as tl

from isograd.numerics import constants as c


def _f32(value: float) -> tl.constexpr:
    return tl.constexpr(float(np.float32(value)))


def _f64(value: float) -> tl.constexpr:
    return tl.constexpr(float(value))


MAGIC_32, MAGIC_64 = _f32(c.MAGIC_32), _f64(c.MAGIC_64)
MAGIC_BITS_32 = tl.constexpr(int(np.float32(c.MAGIC_32).view(np.int32)))
MAGIC_BITS_64 = tl.constexpr(int(np.float64(c.MAGIC_64).view(np.int64)))
EXP_SCALE_32, EXP_SCALE_64 = tl.constexpr(c.EXP_SCALE_32), tl.constexpr(c.EXP_SCALE_64)

_LOG2E_32, _LOG2E_64 = _f32(c.LOG2E_32), _f64(c.LOG2E_64)
_NEG_LN2_32, _NEG_REST_32 = _f32(-c.LN2_32), _f32(-c.LN2_REST_32)
_NEG_LN2_64, _NEG_REST_64 = _f64(-c.LN2_64), _f64(-c.LN2_REST_64)
_LN2_HI_32, _LN2_LO_32 = _f32(c.LN2_HI_32), _f32(c.LN2_LO_32)
_LN2_HI_64, _LN2_LO_64 = _f64(c.LN2_HI_64), _f64(c.LN2_LO_64)
_E0, _E1, _E2, _E3, _E4 = (_f32(v) for v in c.EXP_POLY_32)
_D0, _D1, _D2, _D3, _D4, _D5, _D6, _D7, _D8, _D9, _D10 = (_f64(v) for v in c.EXP_POLY_64)
_S0, _S1, _S2, _S3 = (_f32(v) for v in c.EXP2_POLY_SHORT)
_SHORT_MIN = _f32(c.SHORT_MIN_EXPONENT)
# Adding the exponent of the quantum to the magic constant puts it into the result for free.
_SHORT_MAGIC = _f32(c.MAGIC_32 + c.SHORT_QUANTUM_BITS)
_NORMAL_LOW, _NORMAL_HIGH = (_f32(v) for v in c.SHORT_NORMAL)
_FLOOR_32, _FLOOR_64 = _f32(c.EXP_FLOOR_32), _f64(c.EXP_FLOOR_64)
_DIRECT_32, _DIRECT_64 = _f32(c.EXP_DIRECT_32), _f64(c.EXP_DIRECT_64)
_CEIL_32, _CEIL_64 = _f32(c.EXP_CEIL_32), _f64(c.EXP_CEIL_64)
_EXPM1_FLOOR = _f32(c.EXPM1_FLOOR)
_G0, _G1, _G2, _G3 = (_f32(v) for v in c.LOG_POLY_32)
_H0, _H1, _H2, _H3, _H4, _H5, _H6, _H7 = (_f64(v) for v in c.LOG_POLY_64)
_SQRT_HALF_BITS_32, _SQRT_HALF_BITS_64 = tl.constexpr(c.SQRT_HALF_BITS_32), tl.constexpr(c.SQRT_HALF_BITS_64)
_TINY_32, _TINY_64 = _f32(2.0**-126), _f64(2.0**-1022)
# log1p reduces its argument only outside this interval; inside, f = x is exact.
_LOG1P_LOW_32, _LOG1P_HIGH_32 = (_f32(v) for v in c.LOG1P_NEAR_32)
_LOG1P_LOW_64, _LOG1P_HIGH_64 = (_f64(v) for v in c.LOG1P_NEAR_64)

NAN_32, NAN_64 = tl.constexpr(0x7FC00000), tl.constexpr(0x7FF8000000000000)
_NAN_F16, _NAN_BF16 = tl.constexpr(0x7E00), tl.constexpr(0x7FC0)
_INF_32, _INF_64 = tl.constexpr(0x7F800000), tl.constexpr(0x7FF0000000000000)
_MASK_32, _MASK_64 = tl.constexpr(0x7FFFFFFF), tl.constexpr(0x7FFFFFFFFFFFFFFF)

# Two packed halves become two floats; `later` hides the shift from the compiler in a register.
_WIDEN_BF16 = tl.constexpr("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
_WIDEN_BF16_LATER = tl.constexpr(
    "{ .reg .b32 s, m; add.u32 s, $3, 16; shl.b32 m, 0xffffffff, s; shl.b32 $0, $2, s; and.b32 $1, $2, m; }"
)
# Two floats become two packed halves; a minimum of signed integers turns the NaN 0x7fff into the canonical one.
_NARROW_BF16 = tl.constexpr(
    "{ .reg .b32 t, n; cvt.rn.bf16x2.f32 t, $2, $1; mov.b32 n, 0x7fc07fc0; min.s16x2 $0, t, n; }"
)
_NARROW_F16 = tl.constexpr("{ .reg .b32 t, n; cvt.rn.f16x2.f32 t, $2, $1; mov.b32 n, 0x7e007e00; min.s16x2 $0, t, n; }")


# --- bits ------------------------------------------------------------------------------------------------------------
@triton.jit
def as_int(x):
    """The bits of a float as the signed integer of its width."""
    if x.dtype == tl.float64:
        return x.to(tl.int64, bitcast=True)
    else:
        return x.to(tl.int32, bitcast=True)


@triton.jit
def as_float(b):
    """The float whose bits an int32 or int64 holds."""
    if b.dtype == tl.int64:
        return b.to(tl.float64, bitcast=True)
    else:
        return b.to(tl.float32, bitcast=True)


@triton.jit
def pow2_32(k):
    """2**k for -126 <= k <= 127, k an int32."""
    return as_float((k + 127) << 23)


@triton.jit
def pow2_64(k):
    """2**k for -1022 <= k <= 1023, k an int64."""
    return as_float((k + 1023) << 52)


@triton.jit
def negate(x):
    """-x with the sign of a zero, which Triton's unary minus, 0 - x, loses."""
    return x * -1.0


@triton.jit
def two_sum(a, b):
    """A + b and its rounding error."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@triton.jit
def divide(a, b):
    """A / b to nearest."""
    if b.dtype == tl.float64:
        return a / b
    else:
        return tl.math.div_rn(a, b)


@triton.jit
def root(x):
    """The square root, to nearest."""
    if x.dtype == tl.float64:
        return tl.sqrt(x)
    else:
        return tl.sqrt_rn(x)


# --- storage: widening is exact, narrowing rounds to nearest even and writes the canonical NaN -----------------------
# The instructions for pairs take tiles of two elements or more.
@triton.jit
def widen(x, NATIVE: tl.constexpr):
    """The exact value in the type that the contract computes in."""
    if x.dtype == tl.float64:
        return x
    elif NATIVE and x.dtype == tl.bfloat16 and x.numel > 1:
        return tl.inline_asm_elementwise(_WIDEN_BF16, "=r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)
    else:
        return x.to(tl.float32)


@triton.jit
def widen_later(x, zero):
    """`widen` for 16-bit types that starts only when `zero` is known, an int32 whose value the compiler cannot tell.

    A row that is used in several phases would otherwise be widened once and held in twice the registers.
    """
    if x.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _WIDEN_BF16_LATER, "=r,=r,r,r,r", [x, zero], dtype=tl.float32, is_pure=True, pack=2
        )
    elif x.dtype == tl.float16:
        x = tl.inline_asm_elementwise("xor.b32 $0, $1, $2;", "=r,r,r,r", [x, zero], dtype=x.dtype, is_pure=True, pack=2)
        return x.to(tl.float32)
    else:
        return x


@triton.jit
def narrow(x, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """Round `x` to `dtype`."""
    if dtype == tl.float64:
        return as_float(tl.where(x == x, as_int(x), NAN_64))
    elif dtype == tl.float32:
        if NATIVE:  # NVIDIA arithmetic writes every binary32 NaN as 0x7fffffff
            return as_float(tl.minimum(as_int(x), NAN_32))
        else:
            return as_float(tl.where(x == x, as_int(x), NAN_32))
    elif NATIVE and x.numel > 1:
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(_NARROW_BF16, "=r,r,r", [x], dtype=tl.bfloat16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(_NARROW_F16, "=r,r,r", [x], dtype=tl.float16, is_pure=True, pack=2)
    else:
        nan: tl.constexpr = _NAN_BF16 if dtype == tl.bfloat16 else _NAN_F16
        return tl.where(x == x, x.to(dtype).to(tl.int16, bitcast=True), nan).to(tl.int16).to(dtype, bitcast=True)


# --- the maximum in which NaN wins ------------------------------------------------------------------------------------
@triton.jit
def nan_maximum(a, b):
    """The larger, elementwise; of 16-bit types two at a time (NVIDIA)."""
    if a.dtype == tl.bfloat16:
        asm: tl.constexpr = "max.NaN.bf16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif a.dtype == tl.float16:
        asm: tl.constexpr = "max.NaN.f16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_minimum(a, b):
    """The smaller, likewise."""
    if a.dtype == tl.bfloat16:
        asm: tl.constexpr = "min.NaN.bf16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.bfloat16, is_pure=True, pack=2)
    elif a.dtype == tl.float16:
        asm: tl.constexpr = "min.NaN.f16x2 $0, $1, $2;"
        return tl.inline_asm_elementwise(asm, "=r,r,r", [a, b], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


# --- maximum over order-preserving keys; NaN above everything --------------------------------------------------------
@triton.jit
def max_key(x):
    """An integer in the order of the float, NaN of either sign the largest."""
    b = as_int(x)
    if x.dtype == tl.float64:
        return tl.where(x == x, b ^ ((b >> 63) & _MASK_64), _MASK_64)
    else:
        return tl.where(x == x, b ^ ((b >> 31) & _MASK_32), _MASK_32)


@triton.jit
def from_key(k):
    """The float of a key; the key of a NaN gives a NaN."""
    if k.dtype == tl.int64:
        return as_float(k ^ ((k >> 63) & _MASK_64))
    else:
        return as_float(k ^ ((k >> 31) & _MASK_32))


@triton.jit
def magnitude_key(x):
    """The bits of |x|, an integer in the order of the magnitude, NaN above infinity."""
    if x.dtype == tl.float64:
        return as_int(x) & _MASK_64
    else:
        return as_int(x) & _MASK_32


@triton.jit
def is_finite(x):
    if x.dtype == tl.float64:
        return magnitude_key(x) < _INF_64
    else:
        return magnitude_key(x) < _INF_32


# --- the exponential (rule 6) ----------------------------------------------------------------------------------------
@triton.jit
def exp_parts_32(d):
    """exp(d) = (s + t) * 2**k; k stands in the low bits of the third result."""
    z = tl.fma(d, _LOG2E_32, MAGIC_32)
    k = z - MAGIC_32
    r = tl.fma(k, _NEG_LN2_32, d)
    w = k * _NEG_REST_32
    g = r + w
    square = g * g
    p = tl.fma(tl.fma(square, _E4, tl.fma(g, _E3, _E2)), square, tl.fma(g, _E1, _E0))
    t = tl.fma(square, p, w)
    s = 1.0 + r
    return s, ((1.0 - s) + r) + t, as_int(z)


@triton.jit
def _fma_64(x, y, value: tl.constexpr):
    return tl.fma(x, y, tl.full(x.shape, value, tl.float64))


@triton.jit
def times_64(x, value: tl.constexpr, z):
    return tl.fma(x, tl.full(x.shape, value, tl.float64), z)


@triton.jit
def exp_parts_64(d):
    z = times_64(d, _LOG2E_64, tl.full(d.shape, MAGIC_64, tl.float64))
    k = z - MAGIC_64
    r = times_64(k, _NEG_LN2_64, d)
    w = k * _NEG_REST_64
    g = r + w
    square = g * g
    p = times_64(g, _D10, tl.full(g.shape, _D9, tl.float64))
    p = _fma_64(_fma_64(_fma_64(_fma_64(p, g, _D8), g, _D7), g, _D6), g, _D5)
    p = _fma_64(_fma_64(_fma_64(_fma_64(_fma_64(p, g, _D4), g, _D3), g, _D2), g, _D1), g, _D0)
    t = tl.fma(square, p, w)
    s = 1.0 + r
    return s, ((1.0 - s) + r) + t, as_int(z)


@triton.jit
def exp(x):
    """exp(x) for every x, at most 1.05 ulp off, with gradual underflow."""
    if x.dtype == tl.float64:
        d = tl.where(x > _FLOOR_64, x, _FLOOR_64)
        d = tl.where(d < _CEIL_64, d, _CEIL_64)
        s, t, z = exp_parts_64(d)
        k = z - MAGIC_BITS_64
        k1 = k >> 1
        y = (s + t) * pow2_64(k1) * pow2_64(k - k1)
    else:
        # A maximum that drops NaN and one that keeps it both serve: the last line looks at x again.
        d = tl.minimum(tl.maximum(x, _FLOOR_32), _CEIL_32)
        s, t, z = exp_parts_32(d)
        k = z - MAGIC_BITS_32
        k1 = k >> 1
        y = (s + t) * pow2_32(k1) * pow2_32(k - k1)
    return tl.where(x == x, y, x)


@triton.jit
def exp_shift(m):
    """(base, floor, bias) of a row with the finite maximum m; see `reference.exp_shift`.

    bias is what `exp_shifted` adds to the exponent field: the scale of the exponentials less the row's exponent.
    """
    if m.dtype == tl.float64:
        direct = tl.abs(m) < _DIRECT_64
        z = times_64(tl.where(direct, m, 0.0), _LOG2E_64, tl.full(m.shape, MAGIC_64, tl.float64))
        bias = (1023 + EXP_SCALE_64 + MAGIC_BITS_64 - as_int(z)) << 52
        return tl.where(direct, 0.0, m), tl.where(direct, m + _FLOOR_64, _FLOOR_64), bias
    else:
        direct = tl.abs(m) < _DIRECT_32
        z = tl.fma(tl.where(direct, m, 0.0), _LOG2E_32, MAGIC_32)
        bias = (127 + EXP_SCALE_32 + MAGIC_BITS_32 - as_int(z)) << 23
        return tl.where(direct, 0.0, m), tl.where(direct, m + _FLOOR_32, _FLOOR_32), bias


@triton.jit
def exp_shifted(x, base, floor, bias):
    """The exponential of a row's element as (e, rounding error of e), both times 2**EXP_SCALE."""
    d = tl.maximum(x - base, floor)
    # Shifted left, the bits of z keep k in the exponent field and nothing else.
    if x.dtype == tl.float64:
        s, t, z = exp_parts_64(d)
        scale = as_float((z << 52) + bias)
    else:
        s, t, z = exp_parts_32(d)
        scale = as_float((z << 23) + bias)
    e = s + t
    return e * scale, ((s - e) + t) * scale


@triton.jit
def exp2_short(t, magic: tl.constexpr):
    """2**(t + magic - MAGIC) by the shorter polynomial, for results that are normal numbers or infinity."""
    z = t + magic
    f = t - (z - magic)
    p = tl.fma(tl.fma(tl.fma(tl.fma(f, _S3, _S2), f, _S1), f, _S0), f, 1.0)
    return as_float(as_int(p) + (as_int(z) << 23))


@triton.jit
def exp_short(d):
    """2**30 * exp(d) for d <= 0, for results of 16 bits: relative error under 2**-16, 2**-126 for everything small."""
    return exp2_short(tl.maximum(d * _LOG2E_32, _SHORT_MIN), _SHORT_MAGIC)


@triton.jit
def exp_short_any(x):
    """exp(x) for every x, for results of 16 bits: zero instead of subnormal numbers."""
    t = x * _LOG2E_32
    e = exp2_short(tl.minimum(tl.maximum(t, _NORMAL_LOW), _NORMAL_HIGH), MAGIC_32)
    return tl.where(x == x, tl.where(t < _NORMAL_LOW, 0.0, e), x)


@triton.jit
def expm1_below(d):
    """exp(d) - 1 for binary32 d <= 0, relative error at most 1.5 u."""
    s, t, z = exp_parts_32(tl.where(d > _EXPM1_FLOOR, d, _EXPM1_FLOOR))
    scale = pow2_32(z - MAGIC_BITS_32)
    b = s * scale
    y = b - 1.0
    y = y + ((b - (y + 1.0)) + t * scale)
    return tl.where(d == d, y, d)


@triton.jit
def tanh_32(x):
    """The hyperbolic tangent of binary32."""
    e = expm1_below(tl.abs(x) * -2.0)
    size = as_int(divide(negate(e), 2.0 + e)) & 0x7FFFFFFF
    return as_float(size | (as_int(x) & -0x80000000))


# --- the logarithm (rule 6) ------------------------------------------------------------------------------------------
@triton.jit
def log_core(f, k, low):
    """log((1 + f) * 2**k) + low as an unevaluated pair."""
    s = divide(f, 2.0 + f)
    z = s * s
    h = 0.5 * f * f
    if f.dtype == tl.float64:
        p = times_64(z, _H7, tl.full(z.shape, _H6, tl.float64))
        p = _fma_64(_fma_64(_fma_64(p, z, _H5), z, _H4), z, _H3)
        r = z * _fma_64(_fma_64(_fma_64(p, z, _H2), z, _H1), z, _H0)
        rest = tl.fma(s, h + r, times_64(k, _LN2_LO_64, low)) - h
        a = k * _LN2_HI_64
    else:
        r = z * tl.fma(tl.fma(tl.fma(z, _G3, _G2), z, _G1), z, _G0)
        rest = tl.fma(s, h + r, tl.fma(k, _LN2_LO_32, low)) - h
        a = k * _LN2_HI_32
    u = a + f
    w = ((a - u) + f) + rest
    y = u + w
    return y, (u - y) + w


@triton.jit
def split_exponent(x):
    """X = (1 + f) * 2**k with sqrt(1/2) <= 1 + f < sqrt(2), for positive normal x; k as a float."""
    if x.dtype == tl.float64:
        b = as_int(x) - _SQRT_HALF_BITS_64
        m = as_float((b & 0xFFFFFFFFFFFFF) + _SQRT_HALF_BITS_64)
        k = (b >> 52).to(tl.float64)
    else:
        b = as_int(x) - _SQRT_HALF_BITS_32
        m = as_float((b & 0x7FFFFF) + _SQRT_HALF_BITS_32)
        k = (b >> 23).to(tl.float32)
    return m - 1.0, k


@triton.jit
def log_pair_32(x):
    """The logarithm of a positive finite binary32 x as an unevaluated pair."""
    small = x < _TINY_32
    f, k = split_exponent(tl.where(small, x * 4294967296.0, x))
    return log_core(f, tl.where(small, k - 32.0, k), 0.0)


@triton.jit
def log(x):
    """The natural logarithm, at most 1.05 ulp off; log(0) = -inf, NaN below 0."""
    if x.dtype == tl.float64:
        small = x < _TINY_64
        f, k = split_exponent(tl.where(small, x * 18446744073709551616.0, x))
        y, _ = log_core(f, tl.where(small, k - 64.0, k), tl.zeros_like(x))
    else:
        y, _ = log_pair_32(x)
    y = tl.where(x < float("inf"), y, x)
    y = tl.where(x == 0.0, float("-inf"), y)
    return tl.where(x >= 0.0, y, float("nan"))


@triton.jit
def log1p_pair(x, low):
    """log(1 + x + low) for finite x > -1 and low far below x, as an unevaluated pair."""
    u, error = two_sum(1.0, x)
    f, k = split_exponent(u)
    if x.dtype == tl.float64:
        near = (x > _LOG1P_LOW_64) & (x < _LOG1P_HIGH_64)
    else:
        near = (x > _LOG1P_LOW_32) & (x < _LOG1P_HIGH_32)
    return log_core(tl.where(near, x, f), tl.where(near, 0.0, k), divide(tl.where(near, low, error + low), u))


@triton.jit
def log1p(x):
    """log(1 + x), at most 1.05 ulp off; log1p(-1) = -inf, NaN below -1."""
    inside = (x > -1.0) & (x < float("inf"))
    y, _ = log1p_pair(tl.where(inside, x, 0.0), x * 0.0)
    y = tl.where(inside & (x != 0.0), y, x)  # a zero keeps its sign
    y = tl.where(x == -1.0, float("-inf"), y)
    return tl.where(x >= -1.0, y, float("nan"))
