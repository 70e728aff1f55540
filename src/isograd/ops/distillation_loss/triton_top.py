# mypy: ignore-errors
# ruff: noqa: N803, SIM108
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Distillation from a teacher's best classes in Triton; `reference.py` is the definition.

The classes that the teacher names are a tile of their own, [K, rows, 1, 1]. An index that is no class makes its row NaN
and is reported; one that a row names twice makes it NaN.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.ops.distillation_loss.triton_rows import log_difference
from isograd.rows import triton_rows as rows
from isograd.rows import triton_tiles as tiles

# A rest is large from 2**-12 of the largest exponential on, in units of 2**-44 or 2**-88.
_LARGE_32, _LARGE_64 = tl.constexpr(1 << 32), tl.constexpr(1 << 12)
_ONE_32, _ONE_64 = tl.constexpr(1 << 44), tl.constexpr(1 << 24)


@triton.jit
def _named(i_ptr, flag_ptr, row, outer, outer_shape, i_axis, i_inner, i_outer, at_inner, at_outer, inner, n, k, code,
           K: tl.constexpr):  # fmt: skip
    """(indices [K, ROWS], 0 where there is none; their mask; rows that are fit) of this program."""
    j = tl.arange(0, K).to(tl.int64)[:, None]
    mask = (row < inner)[None, :] & (j < k)
    pointers = i_ptr + memory.outer_offset(outer, outer_shape, i_outer) + row[None, :] * i_inner + j * i_axis
    given = tl.load(pointers, mask=mask, other=0).to(tl.int64)
    bad = mask & ((given < 0) | (given >= n))
    position = memory.outer_offset(outer, outer_shape, at_outer) + row[None, :] * at_inner + j
    memory.report(flag_ptr, code, bad, position, given, n)
    unfit = tl.max(bad.to(tl.int32), axis=0)
    for i in range(k):
        own = tl.sum(tl.where(j == i, given, 0), axis=0)
        alike = tl.sum((mask & (given == own[None, :])).to(tl.int32), axis=0)
        unfit = tl.maximum(unfit, (alike > 1).to(tl.int32))
    return tl.where(bad | ~mask, 0, given), mask, unfit == 0


@triton.jit
def _as_tile(v):
    return v[:, :, None, None]


@triton.jit
def _named_sum(z, mask, m, base, floor, bias, work: tl.constexpr):
    """The integer sum of the exponentials of a tile of named classes."""
    _, high, low = tiles.exponentials(_as_tile(tl.where(mask, z, float("-inf"))), base, floor, bias)
    hi, lo = rows.wide_sum(high, low, work)
    # What stands where there is no class has an exponential too: that of the floor, which rounds to 0.
    return hi, lo


@triton.jit
def _negative(hi, lo):
    low = -lo
    return ~hi + (low == 0).to(tl.int64), low


@triton.jit
def _teacher_rest(log_p, mask, work: tl.constexpr):
    """(whether these are log-probabilities, 1 less the sum of the teacher's probabilities)."""
    fit = tl.max((mask & ~(log_p <= 0.5)).to(tl.int32), axis=0) == 0
    zero = tl.zeros((log_p.shape[1],), work)
    base, floor, bias = rows.row_shift(zero, False)
    hi, lo = _negative(*_named_sum(tl.where(log_p <= 0.5, log_p, float("-inf")), mask, zero, base, floor, bias, work))
    if work == tl.float64:
        hi += _ONE_64
        p = sums.wide_to_float(hi, lo, -88, tl.float64)
    else:
        hi, lo = sums.add_wide(hi, lo, tl.full(lo.shape, _ONE_32, tl.int64))
        p = sums.wide_to_float(hi, lo, -44, tl.float32)
    return fit, tl.where(p > 0.0, p, 0.0)


@triton.jit
def _excluded(i_ptr, row, inner, i_axis, i_inner, k, column):
    """Which columns of a tile the teacher names; `i_ptr` at this program's outer index."""
    hit = (column < 0) & (tiles.broad(row) < 0)
    for i in range(k):
        index = tl.load(i_ptr + row * i_inner + i * memory.wide_int(i_axis), mask=row < inner, other=-1).to(tl.int64)
        hit = hit | (column == tiles.broad(index))
    return hit


@triton.jit
def _rest_sum(
    x_ptr, i_ptr, held, row, column, n, inner, k, x_axis, x_inner, i_axis, i_inner, factor, hi, lo, z, mask, m, needed,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr,
    work: tl.constexpr,
):  # fmt: skip
    """(hi, lo, m) of the classes that the teacher does not name; m is -inf where there is none."""
    base, floor, bias = rows.row_shift(m, False)
    a, b = _negative(*_named_sum(z, mask, m, base, floor, bias, work))
    hi, lo = sums.add_words(hi, lo, a, b)
    if work == tl.float64:
        large = hi >= _LARGE_64
    else:
        large = (hi > 0) | ((hi == 0) & ((lo < 0) | (lo >= _LARGE_32)))
    small = needed & ~large
    if tl.max(small.to(tl.int32), axis=0) > 0:
        # Small beside the others, and known to few bits in their units: a sum in its own.
        inside = tiles.broad(row < inner)
        stop = n
        if HELD:
            stop = BLOCK
        best = tiles.empty_tile(BLOCK, ROWS, GROUP, V, float("-inf"), work)
        for start in range(0, stop, BLOCK):
            x = held
            if not HELD:
                there = inside & (column + start < n)
                x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, there, factor)
            hit = _excluded(i_ptr, row, inner, i_axis, i_inner, k, column + start)
            best = tiles.larger(best, tl.where(hit, float("-inf"), x))
        own, some = tiles.maximum(best)
        own_base, own_floor, own_bias = rows.row_shift(tl.where(some, own, 0.0), False)
        high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
        low_sum = high_sum
        for start in range(0, stop, BLOCK):
            x = held
            if not HELD:
                there = inside & (column + start < n)
                x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, there, factor)
            hit = _excluded(i_ptr, row, inner, i_axis, i_inner, k, column + start)
            _, high, low = tiles.exponentials(tl.where(hit, float("-inf"), x), own_base, own_floor, own_bias)
            high_sum += high
            low_sum += low
        own_hi, own_lo = rows.wide_sum(high_sum, low_sum, work)
        hi, lo = tl.where(small, own_hi, hi), tl.where(small, own_lo, lo)
        m = tl.where(small, own, m)
    return hi, lo, m


@triton.jit
def _row_sum(
    x_ptr, held, row, column, n, inner, x_axis, x_inner, factor,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, HELD: tl.constexpr, work: tl.constexpr,
):  # fmt: skip
    """(hi, lo, m, whether m is finite): the integer sum of the exponentials of rows, relative to their maximum."""
    inside = tiles.broad(row < inner)
    stop = n
    if HELD:
        stop = BLOCK
    best = held
    if not HELD:
        for start in range(BLOCK, stop, BLOCK):
            there = inside & (column + start < n)
            best = tiles.larger(best, tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, there, factor))
    m, valid = tiles.maximum(best)
    base, floor, bias = rows.row_shift(m, False)
    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = high_sum
    for start in range(0, stop, BLOCK):
        x = held
        if not HELD:
            there = inside & (column + start < n)
            x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, there, factor)
        _, high, low = tiles.exponentials(x, base, floor, bias)
        high_sum += high
        low_sum += low
    hi, lo = rows.wide_sum(high_sum, low_sum, work)
    return hi, lo, m, valid


@triton.jit(do_not_specialize=["factor_low", "factor_high", "square_low", "square_high"])
def distillation_top_rows(
    x_ptr, t_ptr, i_ptr, loss_ptr, flag_ptr, factor_low, factor_high, square_low, square_high, n, k, code, inner,
    x_axis, x_inner, t_axis, t_inner, i_axis, i_inner, at_axis, at_inner, loss_axis, loss_inner,
    outer_shape, x_outer, t_outer, i_outer, at_outer, loss_outer,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The losses of rows."""
    work: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    factor, square = tiles.number(factor_low, factor_high, work), tiles.number(square_low, square_high, work)
    row, outer = tiles.place(inner, ROWS)
    column = tiles.columns(BLOCK, GROUP, V)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    t_ptr += memory.outer_offset(outer, outer_shape, t_outer)
    index, mask, fit = _named(
        i_ptr, flag_ptr, row, outer, outer_shape, i_axis, i_inner, i_outer, at_inner, at_outer, inner, n, k, code, K
    )  # fmt: skip
    i_ptr += memory.outer_offset(outer, outer_shape, i_outer)
    j = tl.arange(0, K).to(tl.int64)[:, None]
    log_p = ops.widen(tl.load(t_ptr + row[None, :] * t_inner + j * t_axis, mask=mask, other=float("-inf")), False)
    z = ops.widen(tl.load(x_ptr + row[None, :] * x_inner + index * x_axis, mask=mask, other=0.0), False)
    z = tiles.scaled(z, factor)
    there = tiles.broad(row < inner) & (column < n)
    held = tiles.load_scaled(x_ptr, row, column, x_inner, x_axis, there, factor)
    hi, lo, m, valid = _row_sum(
        x_ptr, held, row, column, n, inner, x_axis, x_inner, factor, BLOCK, ROWS, GROUP, HELD, work
    )  # fmt: skip
    known, p_rest = _teacher_rest(log_p, mask, work)
    valid = valid & fit & known
    base, floor, bias = rows.row_shift(m, False)
    top, middle, bottom = tiles.logarithm(hi, lo, m, base, floor, bias, valid, work)
    log_q = rows.log_softmax_output(z, top[None, :], middle[None, :], bottom[None, :], False)
    p = ops.exp(log_p)
    term = tl.where(mask & (p != 0.0), p * (log_p - log_q), 0.0)

    hi, lo, rm = _rest_sum(
        x_ptr, i_ptr, held, row, column, n, inner, k, x_axis, x_inner, i_axis, i_inner, factor, hi, lo, z, mask, m,
        valid & (p_rest != 0.0), BLOCK, ROWS, GROUP, V, HELD, work,
    )  # fmt: skip
    some = valid & (p_rest != 0.0) & ops.is_finite(rm)
    base, floor, bias = rows.row_shift(tl.where(some, rm, 0.0), False)
    r_top, r_middle, r_bottom = tiles.logarithm(hi, lo, tl.where(some, rm, 0.0), base, floor, bias, some, work)
    high, rest = log_difference(r_top, r_middle, r_bottom, top, middle, bottom)
    log_q_rest = tl.where(ops.is_finite(high), high + rest, high)
    last = tl.where(some, p_rest * (ops.log(p_rest) - log_q_rest), 0.0)

    key = tl.maximum(tl.max(terms.term_key(term), axis=0), terms.term_key(last))
    exponent, scale, magic, low_scale = sums.term_scale(key)
    a, b = terms.term_parts(term, scale[None, :], magic[None, :], low_scale[None, :])
    last_a, last_b = terms.term_parts(last, scale, magic, low_scale)
    special = tl.sum(terms.special_terms(term), axis=0) + terms.special_terms(last)
    total = terms.sum_of_parts(tl.sum(a, axis=0) + last_a, tl.sum(b, axis=0) + last_b, exponent, special, key)
    loss = ops.narrow(tl.where(valid, square * total, float("nan")), work, False)
    loss_ptr += memory.outer_offset(outer, outer_shape, loss_outer)
    tl.store(loss_ptr + row * loss_inner, loss, mask=row < inner)


@triton.jit(do_not_specialize=["factor_low", "factor_high", "scale_low", "scale_high"])
def distillation_top_gradient(
    g_ptr, x_ptr, t_ptr, i_ptr, dx_ptr, flag_ptr, factor_low, factor_high, scale_low, scale_high, divisor, n, k, code,
    inner, g_axis, g_inner, x_axis, x_inner, t_axis, t_inner, i_axis, i_inner, at_axis, at_inner, dx_axis, dx_inner,
    outer_shape, g_outer, x_outer, t_outer, i_outer, at_outer, dx_outer,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The gradients of rows for the student's logits, whose place they may take."""
    work: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    factor, scale = tiles.number(factor_low, factor_high, work), tiles.number(scale_low, scale_high, work)
    row, outer = tiles.place(inner, ROWS)
    column = tiles.columns(BLOCK, GROUP, V)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    t_ptr += memory.outer_offset(outer, outer_shape, t_outer)
    index, mask, fit = _named(
        i_ptr, flag_ptr, row, outer, outer_shape, i_axis, i_inner, i_outer, at_inner, at_outer, inner, n, k, code, K
    )  # fmt: skip
    i_ptr += memory.outer_offset(outer, outer_shape, i_outer)
    j = tl.arange(0, K).to(tl.int64)[:, None]
    log_p = ops.widen(tl.load(t_ptr + row[None, :] * t_inner + j * t_axis, mask=mask, other=float("-inf")), False)
    z = ops.widen(tl.load(x_ptr + row[None, :] * x_inner + index * x_axis, mask=mask, other=0.0), False)
    z = tiles.scaled(z, factor)
    inside = tiles.broad(row < inner)
    held = tiles.load_scaled(x_ptr, row, column, x_inner, x_axis, inside & (column < n), factor)
    hi, lo, m, valid = _row_sum(
        x_ptr, held, row, column, n, inner, x_axis, x_inner, factor, BLOCK, ROWS, GROUP, HELD, work
    )  # fmt: skip
    known, p_rest = _teacher_rest(log_p, mask, work)
    valid = valid & fit & known
    base, floor, bias = rows.row_shift(m, False)
    r, r_low, largest = tiles.factors(hi, lo, m, base, floor, bias, valid, work)
    hi, lo, rm = _rest_sum(
        x_ptr, i_ptr, held, row, column, n, inner, k, x_axis, x_inner, i_axis, i_inner, factor, hi, lo, z, mask, m,
        valid & (p_rest != 0.0), BLOCK, ROWS, GROUP, V, HELD, work,
    )  # fmt: skip
    some = valid & (p_rest != 0.0) & ops.is_finite(rm)
    rm = tl.where(some, rm, 0.0)
    r_base, r_floor, r_bias = rows.row_shift(rm, False)
    s, s_low, s_largest = tiles.factors(hi, lo, rm, r_base, r_floor, r_bias, some, work)

    g_ptr += memory.outer_offset(outer, outer_shape, g_outer)
    g = tl.load(g_ptr + row * g_inner, mask=row < inner, other=0.0)
    g = ops.divide(g, tl.zeros_like(g) + memory.wide_int(divisor).to(work)) * scale
    named = tiles.probabilities(_as_tile(z), m, base, floor, bias, r, r_low, largest)
    named = tiles.broad(g) * (named - _as_tile(ops.exp(log_p)))
    dx_ptr += memory.outer_offset(outer, outer_shape, dx_outer)
    stop = n
    if HELD:
        stop = BLOCK
    # Every thread has read what it needs of the named classes before any of them is written.
    tl.debug_barrier()
    for start in range(0, stop, BLOCK):
        there = inside & (column + start < n)
        x = held
        if not HELD:
            x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, there, factor)
        q = tiles.probabilities(x, m, base, floor, bias, r, r_low, largest)
        share = tiles.probabilities(x, rm, r_base, r_floor, r_bias, s, s_low, s_largest)
        slope = tl.where(tiles.broad(some), q - tiles.broad(p_rest) * share, q)
        tiles.store(dx_ptr, row, column + start, dx_inner, dx_axis, there, tiles.broad(g) * slope)
    tl.debug_barrier()
    named = ops.narrow(tl.where(tiles.broad(valid), named, float("nan")), dx_ptr.dtype.element_ty, False)
    pointers = dx_ptr + row[None, :] * dx_inner + index * dx_axis
    tl.store(_as_tile(pointers), named, mask=_as_tile(mask & fit[None, :]))
