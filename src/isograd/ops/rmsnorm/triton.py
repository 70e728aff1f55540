# ruff: noqa: N803
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""rmsnorm in Triton; `reference.py` is the definition."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from isograd.core.kernel import launcher
from isograd.fenv import default_environment
from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.numerics.storage import compute_dtype
from isograd.rows import triton_tiles as tiles
from isograd.rows.triton_launch import Strides, Tile, launch_rows, words_of
from isograd.triton_launcher import Launcher, Specification, architecture, kept, merged, processors


@triton.jit
def _weights(weight_ptr, weight_axis, column, n):
    return ops.widen(tl.load(weight_ptr + column * weight_axis, mask=column < n, other=0.0), False)


@triton.jit
def _mean(high, low, exponent, special, key, n, work: tl.constexpr):
    """The mean of a row's terms from the sums of their limbs."""
    total = tiles.total(high, low, exponent, special, key, work)
    return ops.divide(total, tl.zeros_like(total) + memory.wide_int(n).to(work))


@triton.jit(do_not_specialize=["eps_low", "eps_high"])
def rmsnorm_rows(
    weight_ptr, rstd_ptr, x_ptr, y_ptr, eps_low, eps_high, n, inner, weight_axis, x_axis, y_axis,
    rstd_inner, x_inner, y_inner, outer_shape, rstd_outer, x_outer, y_outer, WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Rows of the result; y may be x."""
    work: tl.constexpr = rstd_ptr.dtype.element_ty
    row, outer = tiles.place(inner, ROWS)
    column = tiles.columns(BLOCK, GROUP, V)
    inside = tiles.broad(row < inner)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    y_ptr += memory.outer_offset(outer, outer_shape, y_outer)
    rstd_ptr += memory.outer_offset(outer, outer_shape, rstd_outer)
    held = tiles.load(x_ptr, row, column, x_inner, x_axis, inside & (column < n), 0.0)
    stop = n
    if HELD:
        stop = BLOCK
    most = held * held
    least = most
    if not HELD:
        for start in range(BLOCK, stop, BLOCK):
            mask = inside & (column + start < n)
            x = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0)
            most, least = tiles.extremes(most, least, x * x)
    key, special, exponent, scale, magic, low_scale = tiles.term_scale(most, least)
    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = high_sum
    for start in range(0, stop, BLOCK):
        x = held
        if not HELD:
            mask = inside & (column + start < n)
            x = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0)
        high, low = tiles.limbs(x * x, scale, magic, low_scale)
        high_sum += high
        low_sum += low
    mean = _mean(high_sum, low_sum, exponent, special, key, n, work)
    r = ops.divide(1.0, ops.root(mean + tiles.number(eps_low, eps_high, work)))
    tl.store(rstd_ptr + row * rstd_inner, ops.narrow(r, work, False), mask=row < inner)
    for start in range(0, stop, BLOCK):
        mask = inside & (column + start < n)
        x = held
        if not HELD:
            x = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0)
        y = x * tiles.broad(r)
        if WEIGHTED:
            y *= _weights(weight_ptr, weight_axis, column + start, n)
        tiles.store(y_ptr, row, column + start, y_inner, y_axis, mask, y)


@triton.jit
def rmsnorm_backward_rows(
    weight_ptr, rstd_ptr, dy_ptr, x_ptr, dx_ptr, n, inner, weight_axis, dy_axis, x_axis, dx_axis,
    rstd_inner, dy_inner, x_inner, dx_inner, outer_shape, rstd_outer, dy_outer, x_outer, dx_outer,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Rows of the gradient; dx may be dy or x."""
    work: tl.constexpr = rstd_ptr.dtype.element_ty
    row, outer = tiles.place(inner, ROWS)
    column = tiles.columns(BLOCK, GROUP, V)
    inside = tiles.broad(row < inner)
    dy_ptr += memory.outer_offset(outer, outer_shape, dy_outer)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    dx_ptr += memory.outer_offset(outer, outer_shape, dx_outer)
    rstd_ptr += memory.outer_offset(outer, outer_shape, rstd_outer)
    r = tiles.broad(tl.load(rstd_ptr + row * rstd_inner, mask=row < inner, other=0.0))
    mask = inside & (column < n)
    held_dy = tiles.load(dy_ptr, row, column, dy_inner, dy_axis, mask, 0.0)
    held_v = tiles.load(x_ptr, row, column, x_inner, x_axis, mask, 0.0) * r
    # A row that is not finite has NaN beyond its end as well.
    held_v = tl.where(mask, held_v, 0.0)
    g = held_dy
    if WEIGHTED:
        g *= _weights(weight_ptr, weight_axis, column, n)
    stop = n
    if HELD:
        stop = BLOCK
    most = g * held_v
    least = most
    if not HELD:
        for start in range(BLOCK, stop, BLOCK):
            mask = inside & (column + start < n)
            g = tiles.load(dy_ptr, row, column + start, dy_inner, dy_axis, mask, 0.0)
            v = tl.where(mask, tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0) * r, 0.0)
            if WEIGHTED:
                g *= _weights(weight_ptr, weight_axis, column + start, n)
            most, least = tiles.extremes(most, least, g * v)
    key, special, exponent, scale, magic, low_scale = tiles.term_scale(most, least)
    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = high_sum
    for start in range(0, stop, BLOCK):
        g, v = held_dy, held_v
        if not HELD:
            mask = inside & (column + start < n)
            g = tiles.load(dy_ptr, row, column + start, dy_inner, dy_axis, mask, 0.0)
            v = tl.where(mask, tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0) * r, 0.0)
        if WEIGHTED:
            g *= _weights(weight_ptr, weight_axis, column + start, n)
        high, low = tiles.limbs(g * v, scale, magic, low_scale)
        high_sum += high
        low_sum += low
    a = tiles.broad(_mean(high_sum, low_sum, exponent, special, key, n, work))
    for start in range(0, stop, BLOCK):
        mask = inside & (column + start < n)
        g, v = held_dy, held_v
        if not HELD:
            g = tiles.load(dy_ptr, row, column + start, dy_inner, dy_axis, mask, 0.0)
            v = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0) * r
        if WEIGHTED:
            g *= _weights(weight_ptr, weight_axis, column + start, n)
        tiles.store(dx_ptr, row, column + start, dx_inner, dx_axis, mask, r * (g - v * a))


# --- the gradient of the weight: sums over rows, by integer atomics, whose order leaves no trace ----------------------
@triton.jit
def _terms(
    dy_ptr, x_ptr, rstd_ptr, row, stop, column, n, shape, dy_steps, x_steps, rstd_steps, dy_axis, x_axis,
):  # fmt: skip
    """The terms [rows, columns], zero outside."""
    mask = (row < stop)[:, None] & (column < n)[None, :]
    dy_ptr += memory.element_offset(row, shape, dy_steps)[:, None] + column[None, :] * dy_axis
    x_ptr += memory.element_offset(row, shape, x_steps)[:, None] + column[None, :] * x_axis
    r = tl.load(rstd_ptr + memory.element_offset(row, shape, rstd_steps), mask=row < stop, other=0.0)
    dy = ops.widen(tl.load(dy_ptr, mask=mask, other=0.0), False)
    x = ops.widen(tl.load(x_ptr, mask=mask, other=0.0), False)
    return tl.where(mask, dy * (x * r[:, None]), 0.0)


@triton.jit
def _chunk(chunks, length, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(first rows, where they stop, columns) of this program."""
    pid = tl.program_id(0).to(tl.int64)
    begin = pid % chunks * length
    column = pid // chunks * COLUMNS + tl.arange(0, COLUMNS)
    return begin + tl.arange(0, ROWS), tl.minimum(begin + length, memory.wide_int(count)), column


@triton.jit
def weight_keys(
    dy_ptr, x_ptr, rstd_ptr, keys_ptr, n, count, chunks, length, shape, dy_steps, x_steps, rstd_steps, dy_axis, x_axis,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The key of the largest term of every column."""
    row, stop, column = _chunk(chunks, length, count, ROWS, COLUMNS)
    key = tl.zeros((ROWS, COLUMNS), keys_ptr.dtype.element_ty)
    for start in range(0, length, ROWS):
        p = _terms(
            dy_ptr, x_ptr, rstd_ptr, row + start, stop, column, n, shape, dy_steps, x_steps, rstd_steps, dy_axis, x_axis
        )  # fmt: skip
        key = tl.maximum(key, terms.term_key(p))
    tl.atomic_max(keys_ptr + column, tl.max(key, axis=0), mask=column < n, sem="relaxed")


@triton.jit
def weight_parts(
    dy_ptr, x_ptr, rstd_ptr, keys_ptr, words_ptr, n, count, chunks, length, shape, dy_steps, x_steps, rstd_steps,
    dy_axis, x_axis, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The integer sums of every column, added up in memory."""
    row, stop, column = _chunk(chunks, length, count, ROWS, COLUMNS)
    key = tl.load(keys_ptr + column, mask=column < n, other=0)
    _, scale, magic, low_scale = sums.term_scale(key[None, :])
    a = tl.zeros((ROWS, COLUMNS), tl.int64)
    b = a
    special = tl.zeros((ROWS, COLUMNS), rstd_ptr.dtype.element_ty)
    for start in range(0, length, ROWS):
        p = _terms(
            dy_ptr, x_ptr, rstd_ptr, row + start, stop, column, n, shape, dy_steps, x_steps, rstd_steps, dy_axis, x_axis
        )  # fmt: skip
        more_a, more_b = terms.term_parts(p, scale, magic, low_scale)
        a += more_a
        b += more_b
        special += terms.special_terms(p)
    a, b, special = tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(special, axis=0)
    wide: tl.constexpr = rstd_ptr.dtype.element_ty == tl.float64
    terms.accumulate(words_ptr + column, n, a, b, special, key, column < n, WORDS, wide)


@triton.jit
def weight_finish(
    keys_ptr, words_ptr, dweight_ptr, n, dweight_axis, COLUMNS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Round the sums."""
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < n
    key = tl.load(keys_ptr + column, mask=mask, other=0)
    w0, w1, w2, w3 = terms.load_words(words_ptr + column, n, mask, WORDS)
    s = terms.sum_of_words(w0, w1, w2, w3, key, WORDS)
    tl.store(dweight_ptr + column * dweight_axis, ops.narrow(s, dweight_ptr.dtype.element_ty, False), mask=mask)


# --- launches --------------------------------------------------------------------------------------------------------
def _weight(weight: torch.Tensor | None, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """The weight, or something else that no kernel reads."""
    return {"weight": like.as_strided((1,), (0,)) if weight is None else weight}


@launcher("rmsnorm")
def rmsnorm(
    problem: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute y and rstd; y may be x."""
    if x.numel() == 0:
        rstd.fill_(float("nan"))  # rows without elements
        return
    work = compute_dtype(problem.dtype)
    with default_environment():
        low, high = words_of(np.dtype(work).type(problem.eps), work)
    launch_rows(
        rmsnorm_rows,
        problem.axis,
        {"x": x, "y": y},
        per_row={"rstd": rstd},
        one_row=_weight(weight, x),
        constants={"WEIGHTED": weight is not None},
        numbers={"eps_low": low, "eps_high": high},
        size=size,
    )


@launcher("rmsnorm_backward")
def rmsnorm_backward(
    problem: Any,
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    weight: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute dx, which may be dy or x, and dweight where it is asked for."""
    if dweight is not None:  # first: dx may overwrite what it is made of
        _weight_gradient(problem.axis, dy, x, rstd, dweight)
    if dx.numel() == 0:
        return
    launch_rows(
        rmsnorm_backward_rows,
        problem.axis,
        {"dy": dy, "x": x, "dx": dx},
        per_row={"rstd": rstd},
        one_row=_weight(weight, x),
        constants={"WEIGHTED": weight is not None},
        size=size,
    )


_ROWS, _COLUMNS, _MOST_ROWS = 8, 128, 1 << 17  # of a tile; terms whose integer parts add up in one word each


class _Sums(NamedTuple):
    keys: Launcher
    parts: Launcher
    finish: Launcher


@kept
def _sums(
    axis: int, shape: Strides, strides: tuple[Strides, ...], dweight_step: int, words: int, multiprocessors: int, _: Any
) -> _Sums:
    n, others = shape[axis], [d for d in range(len(shape)) if d != axis]
    dy, x, rstd = strides
    outer = (tuple(dy[d] for d in others), tuple(x[d] for d in others), rstd)
    sizes, steps = merged([shape[d] for d in others], outer)
    steps = steps or [(0, 0, 0)]
    count, blocks = math.prod(sizes), -(-n // _COLUMNS)
    chunks = max(min(-(-4 * multiprocessors // blocks), -(-count // _ROWS)), -(-count // _MOST_ROWS))
    length = -(-count // (chunks * _ROWS)) * _ROWS
    # Nobody divides by the first size, which varies with the number of rows.
    walk = ((0, *sizes[1:]), *(tuple(step[t] for step in steps) for t in range(3)))
    tail = (n, count, chunks, length, *walk, dy[axis], x[axis], _ROWS, _COLUMNS)
    free = ("count", "chunks", "length")
    return _Sums(
        Launcher(weight_keys, Specification(tail, chunks * blocks, free=free)),
        Launcher(weight_parts, Specification((*tail, words), chunks * blocks, free=free)),
        Launcher(weight_finish, Specification((n, dweight_step, _COLUMNS, words), blocks)),
    )


def _weight_gradient(axis: int, dy: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, dweight: torch.Tensor) -> None:
    if x.numel() == 0:
        dweight.zero_()
        return
    double = rstd.dtype == torch.float64
    words, n = 4 if double else 2, x.shape[axis]
    strides, dtypes = (dy.stride(), x.stride(), rstd.stride()), (x.dtype, architecture(x))
    found = _sums(axis, tuple(x.shape), strides, dweight.stride(0), words, processors(x), dtypes)
    keys = torch.zeros(n, dtype=torch.int64 if double else torch.int32, device=x.device)
    sums_of_parts = torch.zeros(words * n, dtype=torch.int64, device=x.device)
    found.keys(dy, x, rstd, keys)
    found.parts(dy, x, rstd, keys, sums_of_parts)
    found.finish(keys, sums_of_parts, dweight)
