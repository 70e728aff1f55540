# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""sparsemax in Triton; `reference.py` is the definition.

Differences to the row's maximum become integers, in digits of 22 bits, whose sums are exact. What is not above the
threshold of the elements that are left leaves, until nothing does: what remains is the support that sorting finds.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from isograd.core.kernel import launcher
from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.rows import triton_tiles as tiles
from isograd.rows.triton_launch import Tile, launch_rows

_DIGIT = tl.constexpr((1 << 22) - 1)
_LIMB = tl.constexpr((1 << 44) - 1)
_ONE = tl.constexpr(1 << 22)  # one in units of the highest digit
_SCALE_32, _SCALE_64 = tl.constexpr(2.0**21), tl.constexpr(2.0**44)
_LIMB_32, _LIMB_64 = tl.constexpr(2.0**23), tl.constexpr(2.0**44)


@triton.jit
def _rounded(d):
    """rint(d / q) of a tile as (high, low): high * 2**44 + low; binary32 has all in low."""
    if d.dtype == tl.float64:
        magic = tl.full(d.shape, ops.MAGIC_64, tl.float64)
        scale, low_scale = tl.full(d.shape, _SCALE_64, tl.float64), tl.full(d.shape, _LIMB_64, tl.float64)
        high, low = sums.split_term_bits(d, scale, magic, low_scale)
        return high - ops.MAGIC_BITS_64, low - ops.MAGIC_BITS_64
    else:
        high, low = sums.split_term_bits(d, _SCALE_32, ops.MAGIC_32, _LIMB_32)
        low = ((high - ops.MAGIC_BITS_32).to(tl.int64) << 23) + (low - ops.MAGIC_BITS_32).to(tl.int64)
        return low, low


@triton.jit
def _units(x, m):
    """(d, its error, whether x is within 1 of the maximum, the units of the difference as (high, low)) of a tile."""
    d, error = ops.two_sum(x, ops.negate(tiles.broad(m)))
    near = d >= -1.0
    d, error = tl.where(near, d, -1.0), tl.where(near, error, 0.0)
    high, low = _rounded(d)
    more_high, more_low = _rounded(error)
    low += more_low
    if x.dtype == tl.float64:
        high += more_high + (low >> 44)
        low = low & _LIMB
    else:
        high = low
    return d, error, near, high, low


@triton.jit
def _digit_sum(v):
    return tl.sum(tl.sum(v, axis=3), axis=2)


@triton.jit
def _floor(a, k):
    """Floor of a / k, k > 0."""
    return tl.where(a < 0, -((k - 1 - a) // k), tl.where(a < 0, 0, a) // k)


@triton.jit
def _threshold(a3, a2, a1, a0, k, work: tl.constexpr):
    """(high, low) of the floor of a sum in digits over k."""
    if work == tl.float64:
        q3 = _floor(a3, k)
        rest = ((a3 - q3 * k) << 22) + a2
        q2 = rest // k
        rest = ((rest - q2 * k) << 22) + a1
        q1 = rest // k
        q0 = (((rest - q1 * k) << 22) + a0) // k
        low = (q1 << 22) + q0
        return (q3 << 22) + q2 + (low >> 44), low & _LIMB
    else:
        q1 = _floor(a1, k)
        low = (q1 << 22) + (((a1 - q1 * k) << 22) + a0) // k
        return low, low


@triton.jit
def _as_pair(a3, a2, a1, a0, work: tl.constexpr):
    """A sum in digits as an unevaluated pair."""
    if work == tl.float64:
        hi, lo = sums.shifted_wide(a2, 44)
        hi += a3 << 2
        b, v = sums.shifted_wide(a1, 22)
        hi, lo = sums.add_words(hi, lo, b, v)
        hi, lo = sums.add_wide(hi, lo, a0)
        return sums.wide_to_pair(hi, lo, -88, tl.float64)
    else:
        hi, lo = sums.shifted_wide(a1, 22)
        hi, lo = sums.add_wide(hi, lo, a0)
        return sums.wide_to_pair(hi, lo, -44, tl.float32)


@triton.jit
def _digit_sums(
    x_ptr, held, row, column, inner, n, x_inner, x_axis, m, t_high, t_low, stop,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, HELD: tl.constexpr, ALL: tl.constexpr,
    work: tl.constexpr,
):  # fmt: skip
    """(digits of the sum of the units above a threshold, less one; how many there are) of every row."""
    a3 = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    a2, a1, a0, count = a3, a3, a3, a3
    for start in range(0, stop, BLOCK):
        x = held
        if not HELD:
            mask = tiles.broad(row < inner) & (column + start < n)
            x = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, float("-inf"))
        _, _, near, high, low = _units(x, m)
        if not ALL:
            equal = high == tiles.broad(t_high)
            near = near & ((high > tiles.broad(t_high)) | (equal & (low > tiles.broad(t_low))))
        high, low = tl.where(near, high, 0), tl.where(near, low, 0)
        count += _digit_sum(near.to(tl.int64))
        if work == tl.float64:
            a3 += _digit_sum(high >> 22)
            a2 += _digit_sum(high & _DIGIT)
        a1 += _digit_sum(low >> 22)
        a0 += _digit_sum(low & _DIGIT)
    a3, a2, a1, a0 = tl.sum(a3, axis=0), tl.sum(a2, axis=0), tl.sum(a1, axis=0), tl.sum(a0, axis=0)
    if work == tl.float64:
        a3 -= _ONE
    else:
        a1 -= _ONE
    return a3, a2, a1, a0, tl.sum(count, axis=0)


@triton.jit
def sparsemax_rows(
    x_ptr, y_ptr, n, inner, x_axis, x_inner, y_axis, y_inner, outer_shape, x_outer, y_outer,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Rows of the result; y may be x."""
    work: tl.constexpr = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    row, outer = tiles.place(inner, ROWS)
    column = tiles.columns(BLOCK, GROUP, V)
    inside = tiles.broad(row < inner)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    y_ptr += memory.outer_offset(outer, outer_shape, y_outer)
    held = tiles.load(x_ptr, row, column, x_inner, x_axis, inside & (column < n), float("-inf"))
    stop = n
    if HELD:
        stop = BLOCK
    best = held
    if not HELD:
        for start in range(BLOCK, stop, BLOCK):
            mask = inside & (column + start < n)
            x = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, float("-inf"))
            best = tiles.larger(best, x)
    m, valid = tiles.maximum(best)
    # A row without a finite maximum is computed as zeros would be, and NaN in the end.
    m = tl.where(valid, m, float("inf"))
    none = tl.zeros((ROWS,), tl.int64)
    a3, a2, a1, a0, count = _digit_sums(
        x_ptr, held, row, column, inner, n, x_inner, x_axis, m, none, none, stop, BLOCK, ROWS, GROUP, HELD, True, work
    )  # fmt: skip
    k = tl.maximum(count, 1)
    changed = tl.full((), 1, tl.int32)
    while changed > 0:
        t_high, t_low = _threshold(a3, a2, a1, a0, k, work)
        a3, a2, a1, a0, count = _digit_sums(
            x_ptr, held, row, column, inner, n, x_inner, x_axis, m, t_high, t_low, stop, BLOCK, ROWS, GROUP, HELD,
            False, work,
        )  # fmt: skip
        left = tl.maximum(count, 1)
        changed = tl.max((left != k).to(tl.int32), axis=0)
        k = left
    head, rest = _as_pair(a3, a2, a1, a0, work)
    size = k.to(work)
    high = ops.divide(head, size)
    low = ops.divide(tl.fma(ops.negate(high), size, head) + rest, size)
    for start in range(0, stop, BLOCK):
        mask = inside & (column + start < n)
        x = held
        if not HELD:
            x = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, float("-inf"))
        d, error = ops.two_sum(x, ops.negate(tiles.broad(m)))
        u, v = ops.two_sum(d, ops.negate(tiles.broad(high)))
        y = u + (v + (error - tiles.broad(low)))
        y = tl.where((d >= -1.0) & (y > 0.0), y, 0.0)
        y = tl.where(tiles.broad(valid), y, float("nan"))
        tiles.store(y_ptr, row, column + start, y_inner, y_axis, mask, y)


@triton.jit
def _supported(y, g):
    """The upstream gradient on the support, 0 outside, and NaN where the result is."""
    return tl.where(y > 0.0, g, tl.where(y == y, 0.0, y))


@triton.jit
def sparsemax_backward_rows(
    dy_ptr, y_ptr, dx_ptr, n, inner, dy_axis, dy_inner, y_axis, y_inner, dx_axis, dx_inner,
    outer_shape, dy_outer, y_outer, dx_outer,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Rows of the gradient; dx may be dy or y."""
    work: tl.constexpr = tl.float64 if dy_ptr.dtype.element_ty == tl.float64 else tl.float32
    row, outer = tiles.place(inner, ROWS)
    column = tiles.columns(BLOCK, GROUP, V)
    inside = tiles.broad(row < inner)
    dy_ptr += memory.outer_offset(outer, outer_shape, dy_outer)
    y_ptr += memory.outer_offset(outer, outer_shape, y_outer)
    dx_ptr += memory.outer_offset(outer, outer_shape, dx_outer)
    mask = inside & (column < n)
    held_dy = tiles.load(dy_ptr, row, column, dy_inner, dy_axis, mask, 0.0)
    held_y = tiles.load(y_ptr, row, column, y_inner, y_axis, mask, 0.0)
    stop = n
    if HELD:
        stop = BLOCK
    most = _supported(held_y, held_dy)
    least = most
    count = _digit_sum((held_y > 0.0).to(tl.int64))
    if not HELD:
        for start in range(BLOCK, stop, BLOCK):
            mask = inside & (column + start < n)
            dy = tiles.load(dy_ptr, row, column + start, dy_inner, dy_axis, mask, 0.0)
            y = tiles.load(y_ptr, row, column + start, y_inner, y_axis, mask, 0.0)
            most, least = tiles.extremes(most, least, _supported(y, dy))
            count += _digit_sum((y > 0.0).to(tl.int64))
    key, special, exponent, scale, magic, low_scale = tiles.term_scale(most, least)
    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = high_sum
    for start in range(0, stop, BLOCK):
        dy, y = held_dy, held_y
        if not HELD:
            mask = inside & (column + start < n)
            dy = tiles.load(dy_ptr, row, column + start, dy_inner, dy_axis, mask, 0.0)
            y = tiles.load(y_ptr, row, column + start, y_inner, y_axis, mask, 0.0)
        high, low = tiles.limbs(_supported(y, dy), scale, magic, low_scale)
        high_sum += high
        low_sum += low
    s = tiles.total(high_sum, low_sum, exponent, special, key, work)
    mean = ops.divide(s, tl.sum(count, axis=0).to(work))
    for start in range(0, stop, BLOCK):
        mask = inside & (column + start < n)
        dy, y = held_dy, held_y
        if not HELD:
            dy = tiles.load(dy_ptr, row, column + start, dy_inner, dy_axis, mask, 0.0)
            y = tiles.load(y_ptr, row, column + start, y_inner, y_axis, mask, 0.0)
        tiles.store(dx_ptr, row, column + start, dx_inner, dx_axis, mask, _supported(y, dy - tiles.broad(mean)))


# --- launches --------------------------------------------------------------------------------------------------------
@launcher("sparsemax")
def sparsemax(problem: Any, x: torch.Tensor, y: torch.Tensor, size: Tile | None = None) -> None:
    """Compute y; it may be x."""
    launch_rows(sparsemax_rows, problem.axis, {"x": x, "y": y}, size=size)


@launcher("sparsemax_backward")
def sparsemax_backward(
    problem: Any, dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, size: Tile | None = None
) -> None:
    """Compute dx; it may be dy or y."""
    launch_rows(sparsemax_backward_rows, problem.axis, {"dy": dy, "y": y, "dx": dx}, size=size)
