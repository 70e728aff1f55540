# mypy: ignore-errors
# ruff: noqa: N803, RET505, SIM108
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Rows of logits in Triton: exponentials and sums of one tile, and what follows from the sums of a row.

A tile has the shape [q, rows, p, v]. The reduced axis is split in three: v is one memory access, p the accesses of a
thread, q the threads. This order is the one in which Triton hands out axes to lanes and warps, so that p stays in
registers. What a thread holds is reduced first, in float or in int32, which has room for 256 limbs of 22 bits; what
crosses threads are keys and int64 sums, one a thread. The functions of binary32 rows serve the Gluon kernels as well.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums

SOFTMAX, LOG_SOFTMAX = tl.constexpr(0), tl.constexpr(1)
_MAGIC_BITS_32, _MAGIC_BITS_64 = ops.MAGIC_BITS_32, ops.MAGIC_BITS_64
_INF_32, _INF_64 = tl.constexpr(0x7F800000), tl.constexpr(0x7FF0000000000000)
# Keys of minus infinity.
_NEG_INF_32, _NEG_INF_64 = tl.constexpr(-0x7F800001), tl.constexpr(-0x7FF0000000000001)
_WORD = tl.constexpr(0xFFFFFFFF)

# Scales between exponentials, which carry a factor of 2**64, 2**512 or (short rows) 2**30, and units of a limb.
_HIGH_LONG = tl.constexpr(2.0 ** (44 - 30 - 23))
_HIGH_32, _LOW_32 = tl.constexpr(2.0 ** (44 - 64 - 23)), tl.constexpr(2.0 ** (44 - 64))
_HIGH_64, _LOW_64 = tl.constexpr(2.0 ** (88 - 512 - 44)), tl.constexpr(2.0 ** (88 - 512))
_LIMB_32, _LIMB_64 = tl.constexpr(2.0**23), tl.constexpr(2.0**44)
_QUANTUM_32, _QUANTUM_SHORT = tl.constexpr(2.0**-44), tl.constexpr(2.0**-30)
_DOWN_32, _DOWN_64 = tl.constexpr(2.0**-64), tl.constexpr(2.0**-512)


# --- sums within a tile ----------------------------------------------------------------------------------------------
@triton.jit
def _nan_maximum(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def nan_extremes(a, b, c, d):
    """The larger of a and c, the lesser of b and d; NaN wins."""
    return _nan_maximum(a, c), tl.minimum(b, d, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def thread_maximum(v):
    """Maximum of what every thread holds; NaN wins."""
    return tl.reduce(tl.reduce(v, 3, _nan_maximum), 2, _nan_maximum)


@triton.jit
def thread_extremes(a, b):
    """Maximum of a and minimum of b over what every thread holds; NaN wins.

    One reduction for both, so that a term is needed in one place only.
    """
    a, b = tl.reduce((a, b), 3, nan_extremes)
    return tl.reduce((a, b), 2, nan_extremes)


@triton.jit
def _key_extremes(a, b, c, d):
    return tl.maximum(a, c), tl.minimum(b, d)


@triton.jit
def row_extremes(a, b):
    """Keys of the largest of a and the least of b over the threads of a row."""
    return tl.reduce((ops.max_key(a), ops.max_key(b)), 0, _key_extremes)


@triton.jit
def thread_sum(v):
    """Integer sum of what every thread holds."""
    return tl.sum(tl.sum(v, axis=3), axis=2)


@triton.jit
def limb_sums(high, low, magic, LOW_TERMS: tl.constexpr):
    """int64 sums a thread of limbs: `high` still stands on the bits of `magic`, `low` on LOW_TERMS times MAGIC_BITS.

    `magic` holds the constant of every thread's row.
    """
    count: tl.constexpr = high.shape[2] * high.shape[3]
    if high.dtype == tl.int64:
        # The low limb of binary64 may be a sum of two already, which had its second constant taken out.
        return thread_sum(high) - count * ops.as_int(magic), thread_sum(low - _MAGIC_BITS_64)
    else:
        # Modulo 2**32 the surplus may be removed at the end.
        surplus: tl.constexpr = (LOW_TERMS * count * _MAGIC_BITS_32 + 2**31) % 2**32 - 2**31
        high = thread_sum(high) - count * ops.as_int(magic)
        low = thread_sum(low) - surplus
        return high.to(tl.int64), low.to(tl.int64)


@triton.jit
def _exponential_limb_sums(high, low, LOW_TERMS: tl.constexpr):
    """The same for limbs on the unchanged constant."""
    count: tl.constexpr = high.shape[2] * high.shape[3]
    if high.dtype == tl.int64:
        return thread_sum(high - _MAGIC_BITS_64), thread_sum(low - _MAGIC_BITS_64)
    else:
        surplus: tl.constexpr = (count * _MAGIC_BITS_32 + 2**31) % 2**32 - 2**31
        low_surplus: tl.constexpr = (LOW_TERMS * count * _MAGIC_BITS_32 + 2**31) % 2**32 - 2**31
        return (thread_sum(high) - surplus).to(tl.int64), (thread_sum(low) - low_surplus).to(tl.int64)


@triton.jit
def _split_exponential(e, scale: tl.constexpr):
    if e.dtype == tl.float64:
        magic = tl.full(e.shape, ops.MAGIC_64, tl.float64)
        return sums.split_term_bits(
            e, tl.full(e.shape, scale, tl.float64), magic, tl.full(e.shape, _LIMB_64, tl.float64)
        )
    else:
        return sums.split_term_bits(e, scale, ops.MAGIC_32, _LIMB_32)


@triton.jit
def row_shift(m, short: tl.constexpr):
    """(base, floor, bias): what `exponential` needs to know of a row's maximum."""
    if short:
        return m, m, m
    else:
        return ops.exp_shift(m)


@triton.jit
def exponential(x, base, floor, bias, short: tl.constexpr):
    """The scaled exponential of an element, and its rounding error (short rows have none)."""
    if short:
        e = ops.exp_short(x - base)
        return e, e
    else:
        return ops.exp_shifted(x, base, floor, bias)


@triton.jit
def exponential_terms(e, error, short: tl.constexpr, long_row: tl.constexpr, NATIVE: tl.constexpr):
    """Integer terms of exponentials as limbs on MAGIC_BITS; short rows that are not long: the term, twice."""
    if short:
        if long_row:
            return _split_exponential(e, _HIGH_LONG)
        else:
            term = sums.round_to_int32(e, NATIVE)
            return term, term
    elif e.dtype == tl.float64:
        high, low = _split_exponential(e, _HIGH_64)
        # The error of e is below 2**-53 and fits the low limb.
        return high, low + (sums.round_term_bits(error, _LOW_64) - _MAGIC_BITS_64)
    else:
        high, low = _split_exponential(e, _HIGH_32)
        return high, low + sums.round_term_bits(error, _LOW_32)


@triton.jit
def exponential_sums(high, low, short: tl.constexpr, long_row: tl.constexpr):
    """int64 sums a thread of `exponential_terms`."""
    if short and not long_row:
        # Two terms of at most 2**30 fit a word.
        pairs: tl.constexpr = high.shape[3] // 2
        if pairs > 0:
            high = tl.reshape(high, (high.shape[0], high.shape[1], high.shape[2], pairs, 2))
            high = tl.sum(high.to(tl.uint32, bitcast=True), axis=4)
        s = thread_sum(high.to(tl.uint32, bitcast=True).to(tl.int64))
        return s, s
    else:
        return _exponential_limb_sums(high, low, 1 if short else 2)


# --- from the sums of a row to its constants -------------------------------------------------------------------------
@triton.jit
def wide_sum(high, low, dtype: tl.constexpr):
    """Sums of limbs over the threads of a row as one 128-bit integer; `dtype` is the type of the terms."""
    if dtype == tl.float64:
        # Partial sums of up to 2**17 terms of 45 bits are folded before they are added up.
        hi, lo = sums.fold_wide(tl.sum(low >> 32, axis=0), tl.sum(low & _WORD, axis=0))
        a, b = sums.shifted_wide(tl.sum(high & _WORD, axis=0), 44)
        return sums.add_words(hi, lo, a + (tl.sum(high >> 32, axis=0) << 12), b)
    else:
        hi, lo = sums.shifted_wide(tl.sum(high, axis=0), 23)
        return sums.add_wide(hi, lo, tl.sum(low, axis=0))


@triton.jit
def narrow_sum(high, low):
    """The same as one int64, for rows of at most 2**17 binary32 terms: |sum| < 2**62."""
    return tl.sum((high << 23) + low, axis=0)


@triton.jit
def wide_pair(hi, lo, short: tl.constexpr, long_row: tl.constexpr, wide: tl.constexpr, dtype: tl.constexpr):
    """The exact sum as an unevaluated pair."""
    if dtype == tl.float64:
        return sums.wide_to_pair(hi, lo, -88, tl.float64)
    elif wide:
        return sums.wide_to_pair(hi, lo, -44, tl.float32)
    else:
        quantum: tl.constexpr = _QUANTUM_SHORT if short else _QUANTUM_32
        head = lo.to(tl.float32)
        return head * quantum, (lo - head.to(tl.int64)).to(tl.float32) * quantum


@triton.jit
def softmax_factors(
    hi, lo, valid, short: tl.constexpr, long_row: tl.constexpr, wide: tl.constexpr, dtype: tl.constexpr
):
    """1 / sum as the factors (r, r_low) of y = fma(e, r, e * r_low); NaN in rows that are not valid.

    (hi, lo) is the exact sum; without `wide` it is lo alone.
    """
    if short:
        if wide:
            s = sums.wide_to_float(hi, lo, -14 if long_row else 0, tl.float32)
        else:
            s = lo.to(tl.float32)
        r = tl.where(valid, ops.divide(1.0, s), float("nan"))
        return r, r
    else:
        s, s_low = wide_pair(hi, lo, short, long_row, wide, dtype)
        r = ops.divide(1.0, s)
        minus = ops.negate(r)
        residual = tl.fma(minus, s_low, tl.fma(minus, s, 1.0))
        r_low = residual * r
        r = tl.where(valid, r, float("nan"))
        if dtype != tl.float64:
            r, r_low = r * _DOWN_32, r_low * _DOWN_32
        return r, r_low


@triton.jit
def largest_flag(thread_max, m, valid, short: tl.constexpr):
    """Whether a thread holds one of the row's largest elements, or its row is not valid, as an int32 a thread."""
    if short:
        return valid
    else:
        return tl.where(valid, thread_max == m, True).to(tl.int32)


@triton.jit
def largest_output(m, base, floor, bias, r, r_low, valid, short: tl.constexpr):
    """The quotient of a row's largest elements, which carry their rounding error: equal ones give exactly 1 / n."""
    if short:
        return r
    else:
        e, error = exponential(m, base, floor, bias, short)
        return tl.where(valid, tl.fma(e, r, tl.fma(error, r, e * r_low)), float("nan"))


def _find_text(pack: int) -> str:
    """$0, and every other output: a bit for each x that equals its maximum; x, maximum, flag `pack` times.

    Most warps hold no such element and branch past the search. `equ` is true of a maximum that is NaN.
    """
    x, m, flag = (range(i * pack, (i + 1) * pack) for i in range(1, 4))
    lines = ["{ .reg .pred p; .reg .b32 c, d; mov.b32 c, 0; mov.b32 d, 0;"]
    lines += [f"or.b32 c, c, ${i};" for i in flag]
    lines.append("setp.ne.u32 p, c, 0; @!p bra done;")
    lines += [f"setp.equ.f32 p, ${x[i]}, ${m[i]}; @p or.b32 d, d, {1 << i};" for i in range(pack)]
    lines.append("done:")
    return "\n".join([*lines, *(f"mov.b32 ${i}, d;" for i in range(pack)), "}"])


def _share_text(pack: int) -> str:
    """Replace y by the quotient of the largest elements where `_find_text` found one: y, bits, quotient."""
    y, bits, largest = (range(i * pack, (i + 1) * pack) for i in range(1, 4))
    lines = ["{ .reg .pred p; .reg .b32 c;"]
    lines += [f".reg .f32 t{i}; mov.f32 t{i}, ${y[i]};" for i in range(pack)]
    lines.append(f"setp.ne.u32 p, ${bits[0]}, 0; @!p bra done;")
    for i in range(pack):
        lines.append(f"and.b32 c, ${bits[0]}, {1 << i}; setp.ne.u32 p, c, 0; @p mov.f32 t{i}, ${largest[i]};")
    lines.append("done:")
    return "\n".join([*lines, *(f"mov.f32 ${i}, t{i};" for i in range(pack)), "}"])


_TEXT = {
    "find": {pack: _find_text(pack) for pack in (1, 2, 4, 8, 16, 32)},
    "share": {pack: _share_text(pack) for pack in (1, 2, 4, 8, 16, 32)},
}


@triton.constexpr_function
def _text(name, pack):
    return _TEXT[name][pack]


@triton.constexpr_function
def _constraints(pattern, pack):
    return ",".join(name for name in pattern.split(",") for _ in range(pack))


@triton.constexpr_function
def _pack(count):
    """Elements of a thread that share a word of bits; all of them lie in one row of the tile."""
    return min(count, 32)


@triton.jit
def find_largest(x, m, flag, valid, short: tl.constexpr, NATIVE: tl.constexpr):
    """Where the row's largest elements are, for `softmax_output`; `flag` is that of `largest_flag`.

    Everything counts as such in rows that are not valid.
    """
    if short:
        return valid
    elif NATIVE and x.dtype == tl.float32:
        pack: tl.constexpr = _pack(x.shape[2] * x.shape[3])
        text: tl.constexpr = _text("find", pack)
        constraints: tl.constexpr = _constraints("=r,f,f,r", pack)
        m = tl.where(valid, m, float("nan"))
        return tl.inline_asm_elementwise(text, constraints, [x, m, flag], dtype=tl.int32, is_pure=True, pack=pack)
    else:
        return tl.where(valid, x == m, True).to(tl.int32)


@triton.jit
def softmax_output(e, found, r, r_low, largest, short: tl.constexpr, NATIVE: tl.constexpr):
    """The quotient of an exponential and the sum, ready to be stored but for the rounding to 16 bits.

    `found` is what `find_largest` returns; rows that are not valid have NaN for `largest`.
    """
    if short:
        return e * r
    else:
        y = tl.fma(e, r, e * r_low)
        if NATIVE and e.dtype == tl.float32:
            # A pack is the same elements here and in `find_largest`: nothing changes the layout in between.
            pack: tl.constexpr = _pack(e.shape[2] * e.shape[3])
            text: tl.constexpr = _text("share", pack)
            constraints: tl.constexpr = _constraints("=f,f,r,f", pack)
            return tl.inline_asm_elementwise(
                text, constraints, [y, found, largest], dtype=tl.float32, is_pure=True, pack=pack
            )
        else:
            y = tl.where(found != 0, largest, y)
            if e.dtype == tl.float64:
                y *= _DOWN_64
            return y


@triton.jit
def log_sum(
    hi,
    lo,
    m,
    base,
    floor,
    bias,
    valid,
    short: tl.constexpr,
    long_row: tl.constexpr,
    wide: tl.constexpr,
    dtype: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The parts (top, middle, low) that are subtracted from x: m + log(sum / largest term); short: (m, log, 0).

    The largest term leaves the sum as an integer: a float logarithm of the rounded sum would lose every small term
    when one dominates.
    """
    e, error = exponential(m, base, floor, bias, short)
    high, low = exponential_terms(e, error, short, long_row, NATIVE)
    if short and not long_row:
        lo -= high.to(tl.int64)
    elif dtype == tl.float64:
        high, low = _MAGIC_BITS_64 - high, _MAGIC_BITS_64 - low
        a, b = sums.shifted_wide(high, 44)
        hi, lo = sums.add_words(hi, lo, a, b)
        hi, lo = sums.add_wide(hi, lo, low)
    else:
        low_bias: tl.constexpr = _MAGIC_BITS_32 if short else (2 * _MAGIC_BITS_32 + 2**31) % 2**32 - 2**31
        largest = ((high - _MAGIC_BITS_32).to(tl.int64) << 23) + (low - low_bias).to(tl.int64)
        if wide:
            hi, lo = sums.add_wide(hi, lo, -largest)
        else:
            lo -= largest
    rest, rest_low = wide_pair(hi, lo, short, long_row, wide, dtype)
    if short:
        t, t_low = rest, rest_low
    else:
        down: tl.constexpr = _DOWN_64 if dtype == tl.float64 else _DOWN_32
        e, error = e * down, error * down
        t = ops.divide(rest, e)
        t_low = ops.divide((tl.fma(ops.negate(t), e, rest) + rest_low) - t * error, e)
    # A row that is not valid may hold any integer here; 0 keeps the logarithm in its domain.
    high, low = ops.log1p_pair(tl.where(valid, t, 0.0), tl.where(valid, t_low, 0.0))
    if short:
        return m, tl.where(valid, high, float("nan")), low
    else:
        top, middle = ops.two_sum(m, high)
        return tl.where(valid, top, float("nan")), middle, low


@triton.jit
def log_softmax_output(x, top, middle, low, short: tl.constexpr):
    """The difference x - m - log(sum)."""
    if short:
        return (x - top) - middle
    else:
        u, v = ops.two_sum(x, ops.negate(top))
        # x = -inf, or an overflow: what TwoSum calls the error is NaN there.
        y = u + ((v - middle) - low)
        return tl.where(tl.abs(u) == float("inf"), u, y)


@triton.jit
def largest_terms(key_max, key_min):
    """(largest magnitude key, what the sum is if a term is not finite) from the keys of the extreme terms."""
    a = ops.magnitude_key(ops.from_key(key_max))
    b = ops.magnitude_key(ops.from_key(key_min))
    if key_max.dtype == tl.int64:
        negative = key_min == _NEG_INF_64
        positive = key_max == _INF_64
        nan = key_max > _INF_64
    else:
        negative = key_min == _NEG_INF_32
        positive = key_max == _INF_32
        nan = key_max > _INF_32
    special = tl.where(positive, float("inf"), float("-inf"))
    special = tl.where(nan | (positive & negative), float("nan"), special)
    return tl.maximum(a, b), special


@triton.jit
def order_free_sum(hi, lo, exponent, special, key, wide: tl.constexpr, dtype: tl.constexpr):
    """The sum (rule 4) from its exact integer; `special` where the largest term is not finite."""
    if dtype == tl.float64:
        s = sums.wide_to_float(hi, lo, exponent - 88, tl.float64)
        return tl.where(key < _INF_64, s, special)
    else:
        if wide:
            s = sums.wide_to_float(hi, lo, exponent.to(tl.int64) - 44, tl.float32)
        else:
            s = sums.scale_pow2(lo.to(tl.float32), exponent - 44)
        return tl.where(key < _INF_32, s, special)


@triton.jit
def backward_terms(dy, y, KIND: tl.constexpr):
    """The terms of the row's sum."""
    if KIND == SOFTMAX:
        return y * dy
    else:
        return dy


@triton.jit
def backward_output(dy, y, s, KIND: tl.constexpr, short: tl.constexpr):
    """The gradient from the row's sum."""
    if KIND == SOFTMAX:
        return y * (dy - s)
    elif short:
        return tl.fma(ops.exp_short_any(y), ops.negate(s), dy)
    else:
        return tl.fma(ops.exp(y), ops.negate(s), dy)
