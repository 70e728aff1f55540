"""The arithmetic contract in NumPy: what every backend must return, bit for bit.

Nothing here is fast. Each function works on arrays of binary32 or binary64 and does the operations of
`docs/arithmetic.md` one by one; sums are Python integers, which are exact by nature.
"""

import functools
import math
from fractions import Fraction
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from isograd.numerics import constants as c

Floats = NDArray[Any]

_WORK: dict[np.dtype[Any], Any] = {
    np.dtype(np.float16): np.float32,
    np.dtype(ml_dtypes.bfloat16): np.float32,
    np.dtype(np.float32): np.float32,
    np.dtype(np.float64): np.float64,
}


class Format(NamedTuple):
    """The constants of one width."""

    dtype: Any
    integer: Any
    bits: int
    precision: int
    min_exponent: int
    bias: int
    magic: float
    log2e: float
    ln2: float
    ln2_rest: float
    ln2_hi: float
    ln2_lo: float
    exp_poly: tuple[float, ...]
    exp_floor: float
    exp_ceil: float
    exp_direct: float
    exp_scale: int
    log_poly: tuple[float, ...]
    log1p_near: tuple[float, float]
    sqrt_half_bits: int
    quantum_bits: int
    normal_poly: tuple[float, ...]
    normal_reach: float
    normal_density: float


FORMATS = {
    np.dtype(np.float32): Format(
        np.float32,
        np.int32,
        32,
        24,
        -126,
        127,
        c.MAGIC_32,
        c.LOG2E_32,
        c.LN2_32,
        c.LN2_REST_32,
        c.LN2_HI_32,
        c.LN2_LO_32,
        c.EXP_POLY_32,
        c.EXP_FLOOR_32,
        c.EXP_CEIL_32,
        c.EXP_DIRECT_32,
        c.EXP_SCALE_32,
        c.LOG_POLY_32,
        c.LOG1P_NEAR_32,
        c.SQRT_HALF_BITS_32,
        c.QUANTUM_BITS,
        c.NORMAL_POLY_32,
        c.NORMAL_REACH_32,
        c.NORMAL_DENSITY_32,
    ),
    np.dtype(np.float64): Format(
        np.float64,
        np.int64,
        64,
        53,
        -1022,
        1023,
        c.MAGIC_64,
        c.LOG2E_64,
        c.LN2_64,
        c.LN2_REST_64,
        c.LN2_HI_64,
        c.LN2_LO_64,
        c.EXP_POLY_64,
        c.EXP_FLOOR_64,
        c.EXP_CEIL_64,
        c.EXP_DIRECT_64,
        c.EXP_SCALE_64,
        c.LOG_POLY_64,
        c.LOG1P_NEAR_64,
        c.SQRT_HALF_BITS_64,
        c.QUANTUM_BITS + c.LIMB_SHIFT_64,
        c.NORMAL_POLY_64,
        c.NORMAL_REACH_64,
        c.NORMAL_DENSITY_64,
    ),
}


def work_dtype(dtype: Any) -> Any:
    """The type a storage type is computed in (rule 1)."""
    return _WORK[np.dtype(dtype)]


def widen(x: Floats) -> Floats:
    """Convert to the work type, which is exact."""
    return x.astype(work_dtype(x.dtype))


def narrow(x: Floats, dtype: Any) -> Floats:
    """Round to `dtype` once, to nearest even; every NaN becomes the canonical one."""
    x = np.asarray(x)
    invalid = np.isnan(x)
    if x.dtype == dtype:
        y = x.copy(order="K")
    else:
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            y = x.astype(dtype)
    if np.count_nonzero(invalid):
        y[invalid] = np.nan
    return y


# --- elementary operations (rule 2) ----------------------------------------------------------------------------------
def _to_odd(s: Floats, error: Floats) -> Floats:
    """S + error rounded to odd: rounding the result again gives what a single rounding would have given."""
    b = s.view(np.int64)
    even = (b & 1) == 0
    up = (error > 0) == (s > 0)
    fix = (error != 0) & even & np.isfinite(s)
    return np.where(fix, np.where(up, b + 1, b - 1), b).view(np.float64)


def two_sum(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """The rounded sum and its exact error."""
    with np.errstate(invalid="ignore", over="ignore"):
        s = a + b
        t = s - a
        return s, (a - (s - t)) + (b - t)


def _two_product(a: Floats, b: Floats) -> tuple[Floats, Floats]:
    """Dekker's product with Veltkamp's splitting, for values whose products neither overflow nor underflow."""
    factor = 134217729.0  # 2**27 + 1
    p = a * b
    ah = a * factor
    ah = ah - (ah - a)
    bh = b * factor
    bh = bh - (bh - b)
    al, bl = a - ah, b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


@functools.lru_cache
def _exact_fma(a: Any, b: Any, d: Any) -> float:
    """One binary64 fma where splitting a factor would leave the range; a division of integers rounds once."""
    exact = Fraction(float(a)) * Fraction(float(b)) + Fraction(float(d))
    if exact == 0:
        return float(a * b + d)
    try:
        return float(exact)
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def fma(a: Any, b: Any, d: Any) -> Floats:
    """`a * b + d` with one rounding (Boldo and Melquiond, 2008, "Emulation of a FMA and correctly rounded sums")."""
    a, b, d = np.broadcast_arrays(a, b, d)
    with np.errstate(all="ignore"):
        if a.dtype == np.float32:
            product = a.astype(np.float64) * b.astype(np.float64)  # exact: 48 bits
            wide = d.astype(np.float64)
            s, error = two_sum(product, wide)
            odd = _to_odd(s, error)
            return np.where(np.isfinite(s), odd, s).astype(np.float32)
        high, low = _two_product(a, b)
        t, e1 = two_sum(d, low)
        s, e2 = two_sum(high, t)
        odd = _to_odd(*two_sum(e1, e2))
        result = s + odd
        # An exact zero has the sign of the plain expression, which is exact there; so has what is not finite.
        result = np.where(np.isfinite(result) & (result != 0), result, a * b + d)
        small, large = 2.0**-900, 2.0**900
        inside = (np.abs(a) < large) & (np.abs(b) < large) & (np.abs(high) > small) & (np.abs(high) < large)
        finite = np.isfinite(a) & np.isfinite(b) & np.isfinite(d)
        for index in map(tuple, np.argwhere(finite & ~inside & (a != 0) & (b != 0))):
            result[index] = _exact_fma(a[index], b[index], d[index])
        return result


def pow2(k: Any, form: Format) -> Floats:
    """2**k for exponents of normal numbers."""
    k = np.asarray(k, np.int64)
    return np.asarray(((k + form.bias) << (form.precision - 1)).astype(form.integer).view(form.dtype))


def scale_pow2(x: Any, k: Any, form: Format) -> Floats:
    """X * 2**k in two steps, so that neither factor leaves the range."""
    k = np.asarray(k, np.int64)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(x, form.dtype) * pow2(k >> 1, form) * pow2(k - (k >> 1), form)


# --- exp, log, log1p (rule 6) ----------------------------------------------------------------------------------------
def _horner(x: Floats, coefficients: tuple[float, ...]) -> Floats:
    values = [x.dtype.type(v) for v in coefficients]
    p = np.full_like(x, values[-1])
    for v in reversed(values[:-1]):
        p = fma(p, x, v)
    return p


def _exp_polynomial(g: Floats, square: Floats, form: Format) -> Floats:
    if form.bits == 64:
        return _horner(g, form.exp_poly)
    a0, a1, a2, a3, a4 = (form.dtype(v) for v in form.exp_poly)
    return fma(fma(a4, square, fma(a3, g, a2)), square, fma(a1, g, a0))


def _exp_parts(d: Floats) -> tuple[Floats, Floats, Floats]:
    """exp(d) = (s + t) * 2**k."""
    form = FORMATS[d.dtype]
    of = form.dtype
    k = fma(d, of(form.log2e), of(form.magic)) - of(form.magic)
    r = fma(k, -of(form.ln2), d)
    w = k * -of(form.ln2_rest)
    g = r + w
    square = g * g
    t = fma(square, _exp_polynomial(g, square, form), w)
    s = of(1) + r
    return s, ((of(1) - s) + r) + t, k.astype(np.int64)


def exp(x: Floats) -> Floats:
    """The exponential, at most 1.05 ulp off."""
    form = FORMATS[x.dtype]
    of = form.dtype
    with np.errstate(all="ignore"):
        d = np.where(x > of(form.exp_floor), x, of(form.exp_floor))
        d = np.where(d < of(form.exp_ceil), d, of(form.exp_ceil))
        s, t, k = _exp_parts(d)
        y = scale_pow2(s + t, k, form)
    return np.where(np.isnan(x), of(np.nan), y)


def exp_of_pair(x: Floats, low: Floats) -> Floats:
    """exp(x + low) for a finite low far below 1."""
    form = FORMATS[x.dtype]
    of = form.dtype
    with np.errstate(all="ignore"):
        d = np.where(x > of(form.exp_floor), x, of(form.exp_floor))
        d = np.where(d < of(form.exp_ceil), d, of(form.exp_ceil))
        s, t, k = _exp_parts(d)
        e = s + t
        y = scale_pow2(e + fma(low, e, (s - e) + t), k, form)
    return np.where(np.isnan(x), of(np.nan), y)


def expm1_below(d: Floats) -> Floats:
    """exp(d) - 1 for d <= 0, relative error at most 1.5 u."""
    form = FORMATS[d.dtype]
    of = form.dtype
    with np.errstate(all="ignore"):
        s, t, k = _exp_parts(np.where(d > of(c.EXPM1_FLOOR), d, of(c.EXPM1_FLOOR)))
        scale = pow2(k, form)
        b = s * scale
        y = b - of(1)
        y = y + ((b - (y + of(1))) + t * scale)
    return np.asarray(np.where(np.isnan(d), of(np.nan), y))


def tanh(x: Floats) -> Floats:
    """The hyperbolic tangent in the work type, at most 3.5 u of it off."""
    of = x.dtype.type
    with np.errstate(all="ignore"):
        e = expm1_below(np.abs(x) * of(-2))
        return np.asarray(np.copysign(-e / (of(2) + e), x))


def normal_tail(a: Floats) -> tuple[Floats, Floats]:
    """(E, R) with E = exp(-a^2 / 2) and E * R the normal distribution's share below -a, for 0 <= a <= normal_reach."""
    form = FORMATS[a.dtype]
    of = form.dtype
    with np.errstate(all="ignore"):
        square = a * a
        e = exp_of_pair(square * of(-0.5), fma(a, a, -square) * of(-0.5))
        t = (a - of(c.NORMAL_SHIFT)) / (a + of(c.NORMAL_SHIFT))
        return e, _horner(t, form.normal_poly) / fma(of(c.NORMAL_SLOPE), a, of(1))


def exp_shift(m: Floats) -> tuple[Floats, Floats, Floats]:
    """(base, floor, exponent) of a row with the finite maximum m: exponentials are exp(x - base) / 2**exponent.

    Rounding x - m would cost the tail |x - m| / 2 ulp. A small m is not subtracted at all but taken out as a power of
    two; for a large one the difference is exact wherever its exponential is not negligible.
    """
    form = FORMATS[m.dtype]
    of = form.dtype
    direct = np.abs(m) < of(form.exp_direct)
    base = np.where(direct, of(0), m)
    floor = np.where(direct, m + of(form.exp_floor), of(form.exp_floor))
    with np.errstate(all="ignore"):
        k = fma(np.where(direct, m, of(0)), of(form.log2e), of(form.magic)) - of(form.magic)
    return base, floor, k.astype(np.int64)


def exp_shifted(x: Floats, base: Floats, floor: Floats, exponent: Floats) -> tuple[Floats, Floats]:
    """exp(x - base) / 2**exponent as e and its own rounding error, both times 2**exp_scale."""
    form = FORMATS[x.dtype]
    with np.errstate(all="ignore"):
        d = x - base
        d = np.where(d > floor, d, floor)
        s, t, k = _exp_parts(d)
        scale = pow2(k - exponent + form.exp_scale, form)
        e = s + t
        return e * scale, ((s - e) + t) * scale


def _exp2_short(t: Floats, scale: int) -> Floats:
    """2**(t + scale) by the shorter polynomial, for results that are normal numbers."""
    of = np.float32
    k = (t + of(c.MAGIC_32)) - of(c.MAGIC_32)
    f = t - k
    p = fma(_horner(f, c.EXP2_POLY_SHORT), f, of(1))
    return (p.view(np.int32).astype(np.int64) + ((k.astype(np.int64) + scale) << 23)).astype(np.int32).view(of)


def exp_short(d: Floats) -> Floats:
    """2**30 * exp(d) for binary32 d <= 0: the exponential of 16-bit softmax results."""
    of = np.float32
    with np.errstate(all="ignore"):
        t = d * of(c.LOG2E_32)
        t = np.where(t > of(c.SHORT_MIN_EXPONENT), t, of(c.SHORT_MIN_EXPONENT))
        return _exp2_short(t, c.SHORT_QUANTUM_BITS)


def exp_short_any(x: Floats) -> Floats:
    """exp(x) for any binary32 x, for 16-bit results: zero instead of subnormal numbers."""
    of = np.float32
    low, high = (of(v) for v in c.SHORT_NORMAL)
    with np.errstate(all="ignore"):
        t = x * of(c.LOG2E_32)
        e = _exp2_short(np.clip(np.where(np.isnan(t), low, t), low, high), 0)
        e = np.where(t < low, of(0), e)
    return np.where(np.isnan(x), of(np.nan), e)


def _log_core(f: Floats, k: Floats, low: Floats) -> tuple[Floats, Floats]:
    """log((1 + f) * 2**k) + low as an unevaluated pair."""
    form = FORMATS[f.dtype]
    of = form.dtype
    with np.errstate(all="ignore"):
        s = f / (of(2) + f)
        z = s * s
        h = of(0.5) * f * f
        r = z * _horner(z, form.log_poly)
        rest = fma(s, h + r, fma(k, of(form.ln2_lo), low)) - h
        a = k * of(form.ln2_hi)
        u = a + f
        w = ((a - u) + f) + rest
        y = u + w
        return y, (u - y) + w


def _split(x: Floats) -> tuple[Floats, Floats]:
    """X = (1 + f) * 2**k with sqrt(1/2) <= 1 + f < sqrt(2)."""
    form = FORMATS[x.dtype]
    b = x.view(form.integer).astype(np.int64) - form.sqrt_half_bits
    k = b >> (form.precision - 1)
    m = ((b & ((1 << (form.precision - 1)) - 1)) + form.sqrt_half_bits).astype(form.integer).view(form.dtype)
    return m - form.dtype(1), k.astype(form.dtype)


def log_pair(x: Floats) -> tuple[Floats, Floats]:
    """The logarithm of a positive finite x as an unevaluated pair."""
    form = FORMATS[x.dtype]
    of = form.dtype
    shift = 32 if form.bits == 32 else 64
    with np.errstate(all="ignore"):
        small = x < pow2(form.min_exponent, form)
        f, k = _split(np.where(small, x * of(2.0**shift), x))
        return _log_core(f, np.where(small, k - of(shift), k), np.zeros_like(x))


def log(x: Floats) -> Floats:
    """The natural logarithm, at most 1.05 ulp off."""
    of = x.dtype.type
    with np.errstate(all="ignore"):
        y, _ = log_pair(x)
        y = np.where(x < of(np.inf), y, x)
        y = np.where(x == 0, -of(np.inf), y)
        return np.where(x >= 0, y, of(np.nan))


def log1p_pair(x: Floats, low: Floats) -> tuple[Floats, Floats]:
    """log(1 + x + low) for finite x > -1 and low far below x, as an unevaluated pair."""
    of = x.dtype.type
    zero = np.zeros_like(x)
    with np.errstate(all="ignore"):
        u, error = two_sum(np.full_like(x, 1), x)
        f, k = _split(u)
        low_end, high_end = FORMATS[x.dtype].log1p_near
        near = (x > of(low_end)) & (x < of(high_end))
        rest = np.where(near, low, error + low) / u
        return _log_core(np.where(near, x, f), np.where(near, zero, k), rest)


def log1p(x: Floats) -> Floats:
    """log(1 + x), at most 1.05 ulp off."""
    of = x.dtype.type
    with np.errstate(all="ignore"):
        inside = (x > of(-1)) & (x < of(np.inf))
        y = log1p_pair(np.where(inside, x, of(0)), np.zeros_like(x))[0]
        y = np.where(x == 0, x, y)
        return np.where(inside, y, np.where(x == of(-1), -of(np.inf), np.where(x == of(np.inf), x, of(np.nan))))


# --- exact integer sums (rules 4 and 5) ------------------------------------------------------------------------------
def round_integer(value: int, exponent: int, form: Format) -> Any:
    """Value * 2**exponent: the integer rounded once to the format's precision, ties to even, then scaled."""
    excess = abs(value).bit_length() - form.precision
    if excess > 0:
        magnitude = abs(value)
        quotient, rest = magnitude >> excess, magnitude & ((1 << excess) - 1)
        half = 1 << (excess - 1)
        quotient += rest > half or (rest == half and quotient & 1)
        value, exponent = (quotient if value > 0 else -quotient), exponent + excess
    return scale_pow2(form.dtype(value), exponent, form)


def integer_terms(p: Floats, exponent: Any) -> list[list[int]]:
    """rint(p * 2**exponent) per row of a finite 2-D array, as Python integers."""
    if p.dtype == np.float32:
        # binary64 holds the scaled value exactly, and rint rounds ties to even.
        scaled = np.rint(np.ldexp(p.astype(np.float64), exponent))
        return [[int(v) for v in row] for row in scaled]
    high_bits = np.asarray(exponent) - c.LIMB_SHIFT_64
    high = np.rint(np.ldexp(p, high_bits))
    low = np.rint(np.ldexp(np.ldexp(p, high_bits) - high, c.LIMB_SHIFT_64))
    return [
        [(int(h) << c.LIMB_SHIFT_64) + int(v) for h, v in zip(*rows, strict=True)]
        for rows in zip(high, low, strict=True)
    ]


def order_free_sum(p: Floats) -> Floats:
    """The sum over the last axis of a 2-D array (rule 4)."""
    form = FORMATS[p.dtype]
    out = np.zeros(p.shape[0], form.dtype)
    for row in range(p.shape[0]):
        terms = p[row]
        largest = np.max(np.abs(terms), initial=0)
        if not np.isfinite(largest):
            out[row] = special_sum(terms)
        elif largest > 0:
            exponent = max(int(np.frexp(largest)[1]) - 1, form.min_exponent)
            quantum = exponent - form.quantum_bits
            out[row] = round_integer(sum(integer_terms(terms[None], -quantum)[0]), quantum, form)
    return out


def special_sum(terms: Floats) -> Any:
    """What IEEE addition gives in any order when a term is not finite."""
    of = terms.dtype.type
    positive, negative = bool(np.any(terms == np.inf)), bool(np.any(terms == -np.inf))
    if np.any(np.isnan(terms)) or (positive and negative):
        return of(np.nan)
    return of(np.inf) if positive else of(-np.inf)


def row_maximum(x: Floats) -> Floats:
    """The maximum over the last axis; NaN wins, and +0 over -0 (rule 3)."""
    m = np.max(x, axis=-1)
    # NumPy returns either zero, depending on the places of both.
    positive = np.any((x == 0) & ~np.signbit(x), axis=-1)
    return np.asarray(np.where((m == 0) & positive, x.dtype.type(0), m))


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
