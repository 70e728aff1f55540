# mypy: ignore-errors
# ruff: noqa: D403, N803, RET505, RUF005, SIM108
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well. It does not
# know a star within a tuple either.
"""Softmax of what the threads of a block or cluster hold of rows, in Gluon, a chunk of columns after another.

A tile has the shape [q, rows or blocks, p, v], as in `rows/triton_rows.py`; chunks are parts of p. The compiler would
interleave the arithmetic on all of a thread's elements, and so hold several values of each at a time. So a chunk
starts when the sums of the one before are known: what it reads depends on them by way of a zero that the compiler
cannot tell.

LANES and RV describe strips (`rows/gluon_exchange.py`); LANES is 0 where all threads share a row.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.rows import gluon_exchange as exchange
from isograd.rows import triton_rows as rows
from isograd.rows.gluon_rows import broad

SOFTMAX = rows.SOFTMAX
_MAGIC_BITS = ops.MAGIC_BITS_32


# --- exchanges -------------------------------------------------------------------------------------------------------
@gluon.jit
def _maximum(key, parity, LANES: gl.constexpr, RV: gl.constexpr, CTAS: gl.constexpr):
    if LANES > 0:
        return exchange.strip_maximum(key, LANES, RV, CTAS)
    else:
        return exchange.maximum(key, parity, CTAS)


@gluon.jit
def _total(value, parity, short: gl.constexpr, LANES: gl.constexpr, RV: gl.constexpr, CTAS: gl.constexpr):
    if LANES > 0:
        return exchange.strip_total(value, LANES, RV, CTAS)
    else:
        return exchange.total(value, parity, short, CTAS)


# --- chunks ----------------------------------------------------------------------------------------------------------
@gluon.jit
def _halves(x):
    """The first and the second half of a thread's columns."""
    x = gl.reshape(x, [x.shape[0], x.shape[1], 2, x.shape[2] // 2, x.shape[3]])
    return gl.split(gl.permute(x, [0, 1, 3, 4, 2]))


@gluon.jit
def chunks(x, CHUNKS: gl.constexpr, layout: gl.constexpr):
    """The chunks of a tile."""
    if CHUNKS == 1:
        return (gl.convert_layout(x, layout, assert_trivial=True),)
    else:
        a, b = _halves(x)
        return chunks(a, CHUNKS // 2, layout) + chunks(b, CHUNKS // 2, layout)


@gluon.jit
def _of_threads(v, layout: gl.constexpr):
    """A value a thread and row."""
    return gl.convert_layout(v, gl.SliceLayout(2, gl.SliceLayout(3, layout)), assert_trivial=True)


@gluon.jit
def _largest(x, layout: gl.constexpr):
    """The maximum of what a thread holds of a row, NaN wins; of 16-bit types two at a time."""
    if x.dtype.primitive_bitwidth == 16 and x.shape[2] > 1:
        a, b = _halves(x)
        return _largest(ops.nan_maximum(a, b), layout)
    else:
        return _of_threads(rows.thread_maximum(ops.widen(x, True)), layout)


@gluon.jit
def _least(x, layout: gl.constexpr):
    """The minimum, likewise."""
    if x.dtype.primitive_bitwidth == 16 and x.shape[2] > 1:
        a, b = _halves(x)
        return _least(ops.nan_minimum(a, b), layout)
    else:
        x = ops.widen(x, True)
        _, least = rows.thread_extremes(x, x)
        return _of_threads(least, layout)


@gluon.jit
def _sum_of_pairs(terms, layout: gl.constexpr):
    """The sum of what a thread holds, terms of at most 2**30, two of which fit a word."""
    if terms.shape[2] > 1:
        a, b = _halves(terms)
        terms = a + b
    return _of_threads(rows.thread_sum(terms.to(gl.uint32, bitcast=True).to(gl.int64)), layout)


@gluon.constexpr_function
def _surplus(terms):
    return (terms * _MAGIC_BITS + 2**31) % 2**32 - 2**31


@gluon.jit
def _limb_total(high, low, magic_bits, COUNT: gl.constexpr, LOW_TERMS: gl.constexpr):
    """The integer of a thread's limbs, from their sums modulo 2**32 that still stand on the bits of constants."""
    high -= COUNT * magic_bits
    low -= _surplus(LOW_TERMS * COUNT)
    return (high.to(gl.int64) << 23) + low.to(gl.int64)


# --- forward ---------------------------------------------------------------------------------------------------------
@gluon.jit
def _sums(
    xs,
    zero,
    parity,
    KIND: gl.constexpr,
    LANES: gl.constexpr,
    RV: gl.constexpr,
    CTAS: gl.constexpr,
    CHUNKS: gl.constexpr,
    layout: gl.constexpr,
):
    """(exponentials and marks of the largest elements, for softmax; what is known of the row)."""
    short: gl.constexpr = xs[0].dtype.primitive_bitwidth == 16
    most = _largest(xs[0], layout)
    mosts = (most,)
    for k in gl.static_range(1, CHUNKS):
        mosts = mosts + (_largest(xs[k], layout),)
        most = ops.nan_maximum(most, mosts[k])
    m = ops.from_key(_maximum(ops.max_key(most), parity, LANES, RV, CTAS))
    valid = ops.is_finite(m)
    base, floor, bias = rows.row_shift(m, short)
    kept = ()
    marks = ()
    high_sum = ops.as_int(m) * 0
    low_sum = high_sum
    value = high_sum.to(gl.int64)
    for k in gl.static_range(CHUNKS):
        if short:
            token = zero & value.to(gl.int32)
        else:
            token = zero & (high_sum ^ low_sum)
        x = ops.widen_later(xs[k], broad(token))
        if KIND == SOFTMAX:
            flag = broad(rows.largest_flag(mosts[k], m, valid, short))
            marks = marks + (rows.find_largest(x, broad(m), flag, broad(valid), short, True),)
        after = ops.as_float(ops.as_int(base) ^ token)
        e, error = rows.exponential(x, broad(after), broad(floor), broad(bias), short)
        high, low = rows.exponential_terms(e, error, short, False, True)
        if short:
            value += _sum_of_pairs(high, layout)
        else:
            high_sum += rows.thread_sum(high)
            low_sum += rows.thread_sum(low)
        if KIND == SOFTMAX:
            kept = kept + (e,)
    if not short:
        bits = high_sum * 0 + _MAGIC_BITS
        value = _limb_total(high_sum, low_sum, bits, CHUNKS * xs[0].shape[2] * xs[0].shape[3], 2)
    total = _total(value, parity, short, LANES, RV, CTAS)
    return kept, marks, (m, base, floor, bias, valid, total)


@gluon.jit
def forward(
    xs,
    zero,
    parity,
    KIND: gl.constexpr,
    LANES: gl.constexpr,
    RV: gl.constexpr,
    CTAS: gl.constexpr,
    CHUNKS: gl.constexpr,
    layout: gl.constexpr,
):
    """softmax or log_softmax of chunks; `zero` is one that the compiler cannot tell."""
    dtype: gl.constexpr = xs[0].dtype
    short: gl.constexpr = dtype.primitive_bitwidth == 16
    kept, marks, known = _sums(xs, zero, parity, KIND, LANES, RV, CTAS, CHUNKS, layout)
    m, base, floor, bias, valid, total = known
    ys = ()
    if KIND == SOFTMAX:
        r, r_low = rows.softmax_factors(total, total, valid, short, False, False, gl.float32)
        largest = rows.largest_output(m, base, floor, bias, r, r_low, valid, short)
        for k in gl.static_range(CHUNKS):
            y = rows.softmax_output(kept[k], marks[k], broad(r), broad(r_low), broad(largest), short, True)
            ys = ys + (ops.narrow(y, dtype, True),)
    else:
        top, middle, low = rows.log_sum(
            total, total, m, base, floor, bias, valid, short, False, False, gl.float32, True
        )
        token = broad(zero & ops.as_int(top))
        after = broad(top)
        for k in gl.static_range(CHUNKS):
            x = ops.widen_later(xs[k], token)
            y = rows.log_softmax_output(x, after, broad(middle), broad(low), short)
            if not short:
                after = ops.as_float(ops.as_int(broad(top)) ^ (zero & ops.as_int(y)))
            ys = ys + (ops.narrow(y, dtype, True),)
    return ys


# --- backward --------------------------------------------------------------------------------------------------------
@gluon.jit
def _extreme_terms(dy, y, KIND: gl.constexpr, layout: gl.constexpr):
    """The largest and the least of a thread's terms of a row; NaN wins."""
    if dy.dtype.primitive_bitwidth == 16 and KIND != SOFTMAX:
        return _largest(dy, layout), _least(dy, layout)
    else:
        terms = rows.backward_terms(ops.widen(dy, True), ops.widen(y, True), KIND)
        return rows.thread_extremes(terms, terms)


@gluon.jit
def backward(
    dys,
    ys,
    zero,
    KIND: gl.constexpr,
    LANES: gl.constexpr,
    RV: gl.constexpr,
    CTAS: gl.constexpr,
    CHUNKS: gl.constexpr,
    layout: gl.constexpr,
):
    """The gradient of either, of chunks of a strip."""
    dtype: gl.constexpr = dys[0].dtype
    short: gl.constexpr = dtype.primitive_bitwidth == 16
    most, least = _extreme_terms(dys[0], ys[0], KIND, layout)
    for k in gl.static_range(1, CHUNKS):
        more, less = _extreme_terms(dys[k], ys[k], KIND, layout)
        most, least = rows.nan_extremes(most, least, more, less)
    most, least = exchange.strip_extremes(ops.max_key(most), ops.max_key(least), LANES, RV, CTAS)
    key, special = rows.largest_terms(most, least)
    exponent, scale, magic, low_scale = sums.term_scale(key)
    high_sum = most * 0
    low_sum = high_sum
    for k in gl.static_range(CHUNKS):
        done = zero & (high_sum ^ low_sum)
        token = broad(done ^ (zero & most))
        terms = rows.backward_terms(ops.widen_later(dys[k], token), ops.widen_later(ys[k], token), KIND)
        after = ops.as_float(ops.as_int(scale) ^ done)
        high, low = sums.split_term_bits(terms, broad(after), broad(magic), broad(low_scale))
        high_sum += rows.thread_sum(high)
        low_sum += rows.thread_sum(low)
    value = _limb_total(high_sum, low_sum, ops.as_int(magic), CHUNKS * dys[0].shape[2] * dys[0].shape[3], 1)
    total = exchange.strip_total(value, LANES, RV, CTAS)
    s = rows.order_free_sum(total, total, exponent, special, key, False, gl.float32)
    token = broad(zero & ops.as_int(s))
    dxs = ()
    for k in gl.static_range(CHUNKS):
        dx = rows.backward_output(ops.widen_later(dys[k], token), ops.widen_later(ys[k], token), broad(s), KIND, short)
        dxs = dxs + (ops.narrow(dx, dtype, True),)
    return dxs
