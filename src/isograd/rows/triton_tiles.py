# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Tiles of rows for the Triton kernels of divergences, norms, gumbel_softmax, sparsemax; numbers that vary by call.

Tiles are shaped as in `triton_rows.py`, [q, rows, p, v], and hold work-type values. Everything is computed as
in float32 or float64 rows, for 16-bit logits too.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.rows import triton_rows as rows

_DOWN_64 = tl.constexpr(2.0**-512)


@triton.jit
def number(low, high, work: tl.constexpr):
    """A number of the work type whose bits come in int32 words: a value that varies by call compiles nothing anew."""
    if work == tl.float64:
        word = tl.full((), 0xFFFFFFFF, tl.int64)
        return ops.as_float((high.to(tl.int64) << 32) | (low.to(tl.int64) & word))
    else:
        return ops.as_float(low.to(tl.int32))


@triton.jit
def place(inner, ROWS: tl.constexpr):
    """(rows on the inner axis, index over the outer axes) of this program."""
    pid = tl.program_id(0).to(tl.int64)
    blocks = tl.cdiv(inner, ROWS)
    outer = pid // blocks
    return (pid - outer * blocks) * ROWS + tl.arange(0, ROWS), outer


@triton.jit
def columns(BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr):
    """[q, 1, p, v] indices on the axis; GROUP of them belong to a thread, V to one access."""
    q = tl.arange(0, BLOCK // GROUP)[:, None, None] * V
    p = tl.arange(0, GROUP // V)[None, :, None] * (BLOCK // GROUP * V)
    return (p + q + tl.arange(0, V)[None, None, :])[:, None, :, :].to(tl.int64)


@triton.jit
def broad(v):
    """A value a row as a tile."""
    return v[None, :, None, None]


@triton.jit
def load(base, row, column, inner_stride, axis_stride, mask, other: tl.constexpr):
    """A tile of rows in the work type."""
    value = tl.load(base + (broad(row) * inner_stride + column * axis_stride), mask=mask, other=other)
    return ops.widen(value, False)


@triton.jit
def scaled(x, factor):
    """Logits over the temperature; finite ones stay finite."""
    z = x * factor
    # The bits of an infinity less 1 are those of the largest number of its sign.
    return tl.where(ops.is_finite(x) & (tl.abs(z) == float("inf")), ops.as_float(ops.as_int(z) - 1), z)


@triton.jit
def load_scaled(base, row, column, inner_stride, axis_stride, mask, factor, COLDER: tl.constexpr = True):
    """A tile of logits over the temperature, -inf where there are none; not COLDER: the factor is at most 1."""
    x = load(base, row, column, inner_stride, axis_stride, mask, 0.0)
    z = scaled(x, factor) if COLDER else x * factor
    return tl.where(mask, z, float("-inf"))


@triton.jit
def store(base, row, column, inner_stride, axis_stride, mask, value):
    """Store a tile of rows, rounded to the storage type."""
    y = ops.narrow(value, base.dtype.element_ty, False)
    tl.store(base + (broad(row) * inner_stride + column * axis_stride), y, mask=mask)


@triton.jit
def empty_tile(BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, value, work):
    """A tile of one value."""
    return tl.full((BLOCK // GROUP, ROWS, GROUP // V, V), value, work)


@triton.jit
def larger(a, b):
    """The maximum of two tiles; NaN wins."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def extremes(most, least, p):
    """The largest and the least of terms so far; NaN wins."""
    return larger(most, p), tl.minimum(least, p, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(best):
    """(maximum, whether it is finite) of every row, from a tile of maxima."""
    m = ops.from_key(tl.max(ops.max_key(rows.thread_maximum(best)), axis=0))
    return m, ops.is_finite(m)


@triton.jit
def exponentials(z, base, floor, bias):
    """(exponentials, sums a thread of the high and low limbs of their integer terms) of a tile."""
    e, error = rows.exponential(z, broad(base), broad(floor), broad(bias), False)
    high, low = rows.exponential_terms(e, error, False, False, False)
    high, low = rows.exponential_sums(high, low, False, False)
    return e, high, low


@triton.jit
def factors(hi, lo, m, base, floor, bias, valid, work: tl.constexpr):
    """(r, r_low, largest): what turns a row's exponentials into probabilities."""
    r, r_low = rows.softmax_factors(hi, lo, valid, False, False, True, work)
    return r, r_low, rows.largest_output(m, base, floor, bias, r, r_low, valid, False)


@triton.jit
def probabilities(z, m, base, floor, bias, r, r_low, largest):
    """Softmax of a tile; the factors of a row that is not valid are NaN."""
    e, _ = rows.exponential(z, broad(base), broad(floor), broad(bias), False)
    y = tl.where(z == broad(m), broad(largest), tl.fma(e, broad(r), e * broad(r_low)))
    if z.dtype == tl.float64:
        y *= _DOWN_64
    return y


@triton.jit
def logarithm(hi, lo, m, base, floor, bias, valid, work: tl.constexpr):
    """M + log(sum / largest term) in three parts."""
    return rows.log_sum(hi, lo, m, base, floor, bias, valid, False, False, True, work, False)


@triton.jit
def term_scale(most, least):
    """What integer terms need to know of the largest one, and what the sum is if a term is not finite."""
    most, least = rows.thread_extremes(most, least)
    most, least = rows.row_extremes(most, least)
    key, special = rows.largest_terms(most, least)
    exponent, scale, magic, low_scale = sums.term_scale(key)
    return key, special, exponent, scale, magic, low_scale


@triton.jit
def limbs(p, scale, magic, low_scale):
    """Sums a thread of the limbs of a tile's terms."""
    high, low = sums.split_term_bits(p, broad(scale), broad(magic), broad(low_scale))
    return rows.limb_sums(high, low, magic[None, :], 1)


@triton.jit
def total(high, low, exponent, special, key, work: tl.constexpr):
    """The order-free sum of every row from the sums of limbs."""
    hi, lo = rows.wide_sum(high, low, work)
    return rows.order_free_sum(hi, lo, exponent, special, key, True, work)


@triton.jit
def mean(high, low, exponent, special, key, n, work: tl.constexpr):
    """The mean of a row's terms from the sums of their limbs."""
    s = total(high, low, exponent, special, key, work)
    return ops.divide(s, tl.zeros_like(s) + memory.wide_int(n).to(work))


@triton.jit
def along(base, stride, column, n):
    """A tile of what all rows share, one for each place of the axis."""
    return ops.widen(tl.load(base + column * stride, mask=column < n, other=0.0), False)


@triton.jit
def held_mean(p, n, work: tl.constexpr, ROWS: tl.constexpr):
    """The mean of the terms of rows that a tile holds, zero beyond their end."""
    if ROWS == 1:
        # What is not finite takes a way of its own, so that the largest magnitude is all that is looked for.
        key = tl.max(ops.magnitude_key(rows.thread_maximum(tl.abs(p))), axis=0)
        special = tl.zeros((ROWS,), work)
        if not terms.key_is_finite(tl.max(key, axis=0)):
            special += tl.sum(terms.special_terms(p))
    else:
        most, least = rows.thread_extremes(p, p)
        most, least = rows.row_extremes(most, least)
        key, special = rows.largest_terms(most, least)
    exponent, scale, magic, low_scale = sums.term_scale(key)
    high, low = limbs(p, scale, magic, low_scale)
    if work == tl.float64:
        hi, lo = rows.wide_sum(high, low, work)
        s = rows.order_free_sum(hi, lo, exponent, special, key, True, work)
    else:
        lo = rows.narrow_sum(high, low)
        s = rows.order_free_sum(lo, lo, exponent, special, key, False, work)
    return ops.divide(s, tl.zeros_like(s) + memory.wide_int(n).to(work))
