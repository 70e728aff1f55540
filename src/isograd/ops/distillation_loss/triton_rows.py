# mypy: ignore-errors
# ruff: noqa: N803
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Distillation from all of the teacher's logits in Triton; `reference.py` is the definition.

A program serves ROWS neighbouring rows in passes over their classes. Rows that fit a tile (HELD) are read once; the
others come from the second-level cache after the first pass. COLDER: the temperature is below 1, where a finite logit
over it may overflow; every pass takes five instructions an element more.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.rows import triton_rows as rows
from isograd.rows import triton_tiles as tiles


@triton.jit
def log_difference(top, middle, low, other_top, other_middle, other_low):
    """A logarithmic sum less another as an unevaluated pair."""
    high, error = ops.two_sum(top, ops.negate(other_top))
    return high, error + ((middle - other_middle) + (low - other_low))


@triton.jit(do_not_specialize=["factor_low", "factor_high", "square_low", "square_high"])
def distillation_rows(
    x_ptr, t_ptr, loss_ptr, factor_low, factor_high, square_low, square_high, n, inner,
    x_axis, x_inner, t_axis, t_inner, loss_axis, loss_inner, outer_shape, x_outer, t_outer, loss_outer,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr,
    COLDER: tl.constexpr,
):  # fmt: skip
    """The losses of rows."""
    work: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    factor, square = tiles.number(factor_low, factor_high, work), tiles.number(square_low, square_high, work)
    row, outer = tiles.place(inner, ROWS)
    column = tiles.columns(BLOCK, GROUP, V)
    inside = tiles.broad(row < inner)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    t_ptr += memory.outer_offset(outer, outer_shape, t_outer)
    mask = inside & (column < n)
    held_x = tiles.load_scaled(x_ptr, row, column, x_inner, x_axis, mask, factor, COLDER)
    held_t = tiles.load_scaled(t_ptr, row, column, t_inner, t_axis, mask, factor, COLDER)
    stop = n
    if HELD:
        stop = BLOCK

    x_best, t_best = held_x, held_t
    if not HELD:
        for start in range(BLOCK, stop, BLOCK):
            mask = inside & (column + start < n)
            x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, mask, factor, COLDER)
            t = tiles.load_scaled(t_ptr, row, column + start, t_inner, t_axis, mask, factor, COLDER)
            x_best, t_best = tiles.larger(x_best, x), tiles.larger(t_best, t)
    xm, x_valid = tiles.maximum(x_best)
    tm, t_valid = tiles.maximum(t_best)
    valid = x_valid & t_valid
    x_base, x_floor, x_bias = rows.row_shift(xm, False)
    t_base, t_floor, t_bias = rows.row_shift(tm, False)

    x_high = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    x_low, t_high, t_low = x_high, x_high, x_high
    for start in range(0, stop, BLOCK):
        x, t = held_x, held_t
        if not HELD:
            mask = inside & (column + start < n)
            x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, mask, factor, COLDER)
            t = tiles.load_scaled(t_ptr, row, column + start, t_inner, t_axis, mask, factor, COLDER)
        _, high, low = tiles.exponentials(x, x_base, x_floor, x_bias)
        x_high += high
        x_low += low
        _, high, low = tiles.exponentials(t, t_base, t_floor, t_bias)
        t_high += high
        t_low += low
    hi, lo = rows.wide_sum(x_high, x_low, work)
    top, middle, bottom = tiles.logarithm(hi, lo, xm, x_base, x_floor, x_bias, valid, work)
    hi, lo = rows.wide_sum(t_high, t_low, work)
    r, r_low, largest = tiles.factors(hi, lo, tm, t_base, t_floor, t_bias, valid, work)
    t_top, t_middle, t_bottom = tiles.logarithm(hi, lo, tm, t_base, t_floor, t_bias, valid, work)
    high, rest = log_difference(t_top, t_middle, t_bottom, top, middle, bottom)

    most = tiles.empty_tile(BLOCK, ROWS, GROUP, V, 0.0, work)
    least = most
    for start in range(0, stop, BLOCK):
        x, t, mask = held_x, held_t, inside & (column + start < n)
        if not HELD:
            x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, mask, factor, COLDER)
            t = tiles.load_scaled(t_ptr, row, column + start, t_inner, t_axis, mask, factor, COLDER)
        p = _terms(x, t, tm, t_base, t_floor, t_bias, r, r_low, largest, high, rest)
        most, least = tiles.extremes(most, least, tl.where(mask, p, 0.0))
    key, special, exponent, scale, magic, low_scale = tiles.term_scale(most, least)
    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = high_sum
    for start in range(0, stop, BLOCK):
        x, t, mask = held_x, held_t, inside & (column + start < n)
        if not HELD:
            x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, mask, factor, COLDER)
            t = tiles.load_scaled(t_ptr, row, column + start, t_inner, t_axis, mask, factor, COLDER)
        p = _terms(x, t, tm, t_base, t_floor, t_bias, r, r_low, largest, high, rest)
        a, b = tiles.limbs(tl.where(mask, p, 0.0), scale, magic, low_scale)
        high_sum += a
        low_sum += b
    loss = square * tiles.total(high_sum, low_sum, exponent, special, key, work)
    loss = ops.narrow(tl.where(valid, loss, float("nan")), work, False)
    loss_ptr += memory.outer_offset(outer, outer_shape, loss_outer)
    tl.store(loss_ptr + row * loss_inner, loss, mask=row < inner)


@triton.jit
def _terms(x, t, tm, base, floor, bias, r, r_low, largest, high, rest):
    """The terms p (log p - log q) of a tile."""
    p = tiles.probabilities(t, tm, base, floor, bias, r, r_low, largest)
    a, b = ops.two_sum(t, ops.negate(x))
    u, v = ops.two_sum(a, ops.negate(tiles.broad(high)))
    d = tl.where(tl.abs(u) == float("inf"), u, u + (v + (b - tiles.broad(rest))))
    return tl.where(p == 0.0, 0.0, p * d)


@triton.jit(do_not_specialize=["factor_low", "factor_high", "scale_low", "scale_high"])
def distillation_gradient(
    g_ptr, x_ptr, t_ptr, dx_ptr, factor_low, factor_high, scale_low, scale_high, divisor, n, inner,
    g_axis, g_inner, x_axis, x_inner, t_axis, t_inner, dx_axis, dx_inner,
    outer_shape, g_outer, x_outer, t_outer, dx_outer,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr,
    COLDER: tl.constexpr,
):  # fmt: skip
    """The gradients of rows for the student's logits, whose place they may take."""
    work: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    factor, scale = tiles.number(factor_low, factor_high, work), tiles.number(scale_low, scale_high, work)
    row, outer = tiles.place(inner, ROWS)
    column = tiles.columns(BLOCK, GROUP, V)
    inside = tiles.broad(row < inner)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    t_ptr += memory.outer_offset(outer, outer_shape, t_outer)
    mask = inside & (column < n)
    held_x = tiles.load_scaled(x_ptr, row, column, x_inner, x_axis, mask, factor, COLDER)
    held_t = tiles.load_scaled(t_ptr, row, column, t_inner, t_axis, mask, factor, COLDER)
    stop = n
    if HELD:
        stop = BLOCK

    x_best, t_best = held_x, held_t
    if not HELD:
        for start in range(BLOCK, stop, BLOCK):
            mask = inside & (column + start < n)
            x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, mask, factor, COLDER)
            t = tiles.load_scaled(t_ptr, row, column + start, t_inner, t_axis, mask, factor, COLDER)
            x_best, t_best = tiles.larger(x_best, x), tiles.larger(t_best, t)
    xm, x_valid = tiles.maximum(x_best)
    tm, t_valid = tiles.maximum(t_best)
    valid = x_valid & t_valid
    x_base, x_floor, x_bias = rows.row_shift(xm, False)
    t_base, t_floor, t_bias = rows.row_shift(tm, False)

    x_high = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    x_low, t_high, t_low = x_high, x_high, x_high
    for start in range(0, stop, BLOCK):
        x, t = held_x, held_t
        if not HELD:
            mask = inside & (column + start < n)
            x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, mask, factor, COLDER)
            t = tiles.load_scaled(t_ptr, row, column + start, t_inner, t_axis, mask, factor, COLDER)
        _, high, low = tiles.exponentials(x, x_base, x_floor, x_bias)
        x_high += high
        x_low += low
        _, high, low = tiles.exponentials(t, t_base, t_floor, t_bias)
        t_high += high
        t_low += low
    hi, lo = rows.wide_sum(x_high, x_low, work)
    x_r, x_r_low, x_largest = tiles.factors(hi, lo, xm, x_base, x_floor, x_bias, valid, work)
    hi, lo = rows.wide_sum(t_high, t_low, work)
    t_r, t_r_low, t_largest = tiles.factors(hi, lo, tm, t_base, t_floor, t_bias, valid, work)

    g_ptr += memory.outer_offset(outer, outer_shape, g_outer)
    g = tl.load(g_ptr + row * g_inner, mask=row < inner, other=0.0)
    g = ops.divide(g, tl.zeros_like(g) + memory.wide_int(divisor).to(work)) * scale
    dx_ptr += memory.outer_offset(outer, outer_shape, dx_outer)
    for start in range(0, stop, BLOCK):
        x, t, mask = held_x, held_t, inside & (column + start < n)
        if not HELD:
            x = tiles.load_scaled(x_ptr, row, column + start, x_inner, x_axis, mask, factor, COLDER)
            t = tiles.load_scaled(t_ptr, row, column + start, t_inner, t_axis, mask, factor, COLDER)
        q = tiles.probabilities(x, xm, x_base, x_floor, x_bias, x_r, x_r_low, x_largest)
        p = tiles.probabilities(t, tm, t_base, t_floor, t_bias, t_r, t_r_low, t_largest)
        tiles.store(dx_ptr, row, column + start, dx_inner, dx_axis, mask, tiles.broad(g) * (q - p))
