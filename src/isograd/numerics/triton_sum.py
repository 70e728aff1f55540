# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Order-free sums as Triton device functions (rules 4 and 5 of the contract): integer terms, 128-bit integers."""

import triton
import triton.language as tl

from isograd.numerics import constants as c
from isograd.numerics import triton_ops as ops

MAGIC_32, MAGIC_64 = ops.MAGIC_32, ops.MAGIC_64
MAGIC_BITS_32, MAGIC_BITS_64 = ops.MAGIC_BITS_32, ops.MAGIC_BITS_64
LIMB_SHIFT_32, LIMB_SHIFT_64 = tl.constexpr(c.LIMB_SHIFT_32), tl.constexpr(c.LIMB_SHIFT_64)


@triton.jit
def split_term_bits(p, scale, magic, low_scale):
    """The integer rint(p * scale * low_scale) in two limbs: high on top of the bits of `magic`, low on MAGIC_BITS.

    Its value is high * 2**SHIFT + low. Leaving the magic bits in saves an instruction a term; they are subtracted from
    a sum of limbs, count times.
    """
    t = tl.fma(p, scale, magic)
    r = tl.fma(p, scale, magic - t)
    if p.dtype == tl.float64:
        u = tl.fma(r, low_scale, tl.full(p.shape, MAGIC_64, tl.float64))
    else:
        u = tl.fma(r, low_scale, MAGIC_32)
    return ops.as_int(t), ops.as_int(u)


@triton.jit
def round_term_bits(p, scale: tl.constexpr):
    """rint(p * scale) on top of MAGIC_BITS, for a value within half of the magic constant's range."""
    if p.dtype == tl.float64:
        return ops.as_int(ops.times_64(p, scale, tl.full(p.shape, MAGIC_64, tl.float64)))
    else:
        return ops.as_int(tl.fma(p, scale, MAGIC_32))


@triton.jit
def round_to_int32(x, NATIVE: tl.constexpr):
    """rint(x) for |x| <= 2**30; NATIVE: larger numbers give the int32 that is nearest, NaN gives 0."""
    if NATIVE:
        return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)
    else:
        t = tl.fma(x, 0.000030517578125, MAGIC_32)  # 2**-15
        r = tl.fma(MAGIC_32 - t, 32768.0, x)
        return ((ops.as_int(t) - MAGIC_BITS_32) << 15) + (ops.as_int(r + MAGIC_32) - MAGIC_BITS_32)


@triton.jit
def term_scale(key):
    """(exponent E of the largest term, at least the smallest; scale, magic, low_scale of its row's terms).

    `key` is the magnitude key of the largest term. Where the scale would leave the range, the magic constant is made
    smaller instead: its ulp stays the unit of the high limb.
    """
    if key.dtype == tl.int64:
        exponent = tl.maximum((key >> 52) - 1023, -1022)
        k = 44 - exponent  # quantum 2**(E - 88), unit of the high limb 2**(E - 44)
        over = tl.maximum(k - 1023, 0)
        return (
            exponent,
            ops.pow2_64(k - over),
            ops.as_float((over << 52) * -1 + MAGIC_BITS_64),
            ops.pow2_64(over + LIMB_SHIFT_64),
        )
    else:
        exponent = tl.maximum((key >> 23) - 127, -126)
        k = 21 - exponent  # quantum 2**(E - 44), unit of the high limb 2**(E - 21)
        over = tl.maximum(k - 127, 0)
        return (
            exponent,
            ops.pow2_32(k - over),
            ops.as_float((over << 23) * -1 + MAGIC_BITS_32),
            ops.pow2_32(over + LIMB_SHIFT_32),
        )


@triton.jit
def _below(a, b):
    """A < b as unsigned 64-bit integers."""
    return a.to(tl.uint64, bitcast=True) < b.to(tl.uint64, bitcast=True)


@triton.jit
def add_wide(hi, lo, value):
    """Add an int64 to the 128-bit integer (hi, lo), both words in int64."""
    s = lo + value
    return hi + (value >> 63) + _below(s, lo).to(tl.int64), s


@triton.jit
def add_words(hi, lo, a, b):
    """(hi, lo) + (a, b), both 128-bit integers."""
    s = lo + b
    return hi + a + _below(s, lo).to(tl.int64), s


@triton.jit
def shifted_wide(value, shift: tl.constexpr):
    """Value * 2**shift as a 128-bit integer, 0 < shift < 64."""
    return value >> (64 - shift), value << shift


@triton.jit
def fold_wide(high, low):
    """High * 2**32 + low as a 128-bit integer."""
    hi, lo = shifted_wide(high, 32)
    return add_wide(hi, lo, low)


@triton.jit
def compress(hi, lo):
    """The 128-bit integer as (n, e): n * 2**e, n of at most 63 bits, any lost bits kept as a sticky last bit."""
    fits = hi == (lo >> 62)
    top = tl.where(hi >= 0, hi, ~hi)
    e = tl.full(hi.shape, 2, tl.int64)  # bits of the high word that spill over, and the sign
    for step in tl.static_range(6):
        large = (top >> (32 >> step)) > 0
        e += tl.where(large, 32 >> step, 0)
        top = tl.where(large, top >> (32 >> step), top)
    e += (top > 0).to(tl.int64)
    unsigned = lo.to(tl.uint64, bitcast=True)
    n = (unsigned >> e.to(tl.uint64)).to(tl.int64, bitcast=True) | (hi << (64 - e))
    n = n | ((lo << (64 - e)) != 0).to(tl.int64)
    return tl.where(fits, lo, n), tl.where(fits, 0, e)


@triton.jit
def scale_pow2(x, k):
    """X * 2**k in two exact steps, rounded once if the result is subnormal; k an int32 or int64."""
    k1 = k >> 1
    if x.dtype == tl.float64:
        return x * ops.pow2_64(k1.to(tl.int64)) * ops.pow2_64((k - k1).to(tl.int64))
    else:
        return x * ops.pow2_32(k1.to(tl.int32)) * ops.pow2_32((k - k1).to(tl.int32))


@triton.jit
def wide_to_float(hi, lo, k, dtype: tl.constexpr):
    """The 128-bit integer times 2**k, rounded once."""
    n, e = compress(hi, lo)
    return scale_pow2(n.to(dtype), k + e)


@triton.jit
def wide_to_pair(hi, lo, k, dtype: tl.constexpr):
    """The 128-bit integer times 2**k as an unevaluated pair: rounded once, and what that left, rounded once."""
    n, e = compress(hi, lo)
    head = n.to(dtype)
    back = head.to(tl.int64)
    high, low = back >> tl.where(e == 0, 63, 64 - e), back << e
    rest = wide_to_float(hi - high - _below(lo, low).to(tl.int64), lo - low, k, dtype)
    return scale_pow2(head, k + e), rest
