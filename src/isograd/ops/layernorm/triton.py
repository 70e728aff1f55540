# ruff: noqa: N803
"""layernorm in Triton; `reference.py` is the definition."""

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from isograd.core.kernel import launcher
from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.numerics.storage import compute_dtype
from isograd.rows import triton_tiles as tiles
from isograd.rows.triton_launch import Tile, launch_rows, standing_in, words_of
from isograd.rows.triton_norms import gradients, normalized
from isograd.runtime.fenv import default_environment


@triton.jit(do_not_specialize=["eps_low", "eps_high"])
def layernorm_rows(
    weight_ptr, bias_ptr, mean_ptr, rstd_ptr, x_ptr, y_ptr, eps_low, eps_high, n, inner, weight_axis, bias_axis, x_axis,
    y_axis, mean_inner, rstd_inner, x_inner, y_inner, outer_shape, mean_outer, rstd_outer, x_outer, y_outer,
    WEIGHTED: tl.constexpr, BIASED: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """Rows of the result; y may be x."""
    work: tl.constexpr = rstd_ptr.dtype.element_ty
    row, outer = tiles.place(inner, ROWS)
    column = tiles.columns(BLOCK, GROUP, V)
    inside = tiles.broad(row < inner)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    y_ptr += memory.outer_offset(outer, outer_shape, y_outer)
    mean_ptr += memory.outer_offset(outer, outer_shape, mean_outer)
    rstd_ptr += memory.outer_offset(outer, outer_shape, rstd_outer)
    held = tiles.load(x_ptr, row, column, x_inner, x_axis, inside & (column < n), 0.0)
    stop = n
    if HELD:
        stop = BLOCK
    most = held
    least = held
    if not HELD:
        for start in range(BLOCK, stop, BLOCK):
            mask = inside & (column + start < n)
            x = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0)
            # Beyond the end stands an element of the row again, as the extremes serve for the squares as well.
            most, least = tiles.extremes(most, least, tl.where(mask, x, held))
    key, special, exponent, scale, magic, low_scale = tiles.term_scale(most, least)
    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = high_sum
    for start in range(0, stop, BLOCK):
        x = held
        if not HELD:
            mask = inside & (column + start < n)
            x = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0)
        high, low = tiles.limbs(x, scale, magic, low_scale)
        high_sum += high
        low_sum += low
    mean = tiles.mean(high_sum, low_sum, exponent, special, key, n, work)
    tl.store(mean_ptr + row * mean_inner, ops.narrow(mean, work, False), mask=row < inner)
    center = tiles.broad(mean)
    # Rounding keeps order: the largest square is that of the largest or of the least element.
    most, least = most - center, least - center
    if HELD:
        held = tl.where(inside & (column < n), held - center, 0.0)
        most, least = held, held
    most = tiles.larger(most * most, least * least)
    key, special, exponent, scale, magic, low_scale = tiles.term_scale(most, most)
    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = high_sum
    for start in range(0, stop, BLOCK):
        c = held
        if not HELD:
            mask = inside & (column + start < n)
            x = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0)
            c = tl.where(mask, x - center, 0.0)
        high, low = tiles.limbs(c * c, scale, magic, low_scale)
        high_sum += high
        low_sum += low
    variance = tiles.mean(high_sum, low_sum, exponent, special, key, n, work)
    r = ops.divide(1.0, ops.root(variance + tiles.number(eps_low, eps_high, work)))
    tl.store(rstd_ptr + row * rstd_inner, ops.narrow(r, work, False), mask=row < inner)
    for start in range(0, stop, BLOCK):
        mask = inside & (column + start < n)
        y = held
        if not HELD:
            y = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0) - center
        y *= tiles.broad(r)
        if WEIGHTED:
            y *= tiles.along(weight_ptr, weight_axis, column + start, n)
        if BIASED:
            y += tiles.along(bias_ptr, bias_axis, column + start, n)
        tiles.store(y_ptr, row, column + start, y_inner, y_axis, mask, y)


@triton.jit
def _loaded(
    weight_ptr, dy_ptr, x_ptr, row, column, n, inner, weight_axis, dy_axis, x_axis, dy_inner, x_inner, center, r,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """(g, v), zero outside."""
    mask = tiles.broad(row < inner) & (column < n)
    g = tiles.load(dy_ptr, row, column, dy_inner, dy_axis, mask, 0.0)
    if WEIGHTED:
        g = tl.where(mask, g * tiles.along(weight_ptr, weight_axis, column, n), 0.0)
    x = tiles.load(x_ptr, row, column, x_inner, x_axis, mask, 0.0)
    # A row that is not finite has NaN beyond its end as well.
    return g, tl.where(mask, (x - center) * r, 0.0)


@triton.jit
def layernorm_backward_rows(
    weight_ptr, mean_ptr, rstd_ptr, dy_ptr, x_ptr, dx_ptr, n, inner, weight_axis, dy_axis, x_axis, dx_axis,
    mean_inner, rstd_inner, dy_inner, x_inner, dx_inner, outer_shape, mean_outer, rstd_outer, dy_outer, x_outer,
    dx_outer, WEIGHTED: tl.constexpr,
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
    mean_ptr += memory.outer_offset(outer, outer_shape, mean_outer)
    rstd_ptr += memory.outer_offset(outer, outer_shape, rstd_outer)
    center = tiles.broad(tl.load(mean_ptr + row * mean_inner, mask=row < inner, other=0.0))
    r = tiles.broad(tl.load(rstd_ptr + row * rstd_inner, mask=row < inner, other=0.0))
    held_g, held_v = _loaded(
        weight_ptr, dy_ptr, x_ptr, row, column, n, inner, weight_axis, dy_axis, x_axis, dy_inner, x_inner, center, r,
        WEIGHTED,
    )  # fmt: skip
    stop = n
    if HELD:
        stop = BLOCK
    most, g_most = held_g * held_v, held_g
    least, g_least = most, g_most
    if not HELD:
        for start in range(BLOCK, stop, BLOCK):
            g, v = _loaded(
                weight_ptr, dy_ptr, x_ptr, row, column + start, n, inner, weight_axis, dy_axis, x_axis, dy_inner,
                x_inner, center, r, WEIGHTED,
            )  # fmt: skip
            most, least = tiles.extremes(most, least, g * v)
            g_most, g_least = tiles.extremes(g_most, g_least, g)
    key, special, exponent, scale, magic, low_scale = tiles.term_scale(most, least)
    g_key, g_special, g_exponent, g_scale, g_magic, g_low_scale = tiles.term_scale(g_most, g_least)
    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = high_sum
    g_high_sum = high_sum
    g_low_sum = high_sum
    for start in range(0, stop, BLOCK):
        g, v = held_g, held_v
        if not HELD:
            g, v = _loaded(
                weight_ptr, dy_ptr, x_ptr, row, column + start, n, inner, weight_axis, dy_axis, x_axis, dy_inner,
                x_inner, center, r, WEIGHTED,
            )  # fmt: skip
        high, low = tiles.limbs(g * v, scale, magic, low_scale)
        high_sum += high
        low_sum += low
        high, low = tiles.limbs(g, g_scale, g_magic, g_low_scale)
        g_high_sum += high
        g_low_sum += low
    a = tiles.broad(tiles.mean(high_sum, low_sum, exponent, special, key, n, work))
    b = tiles.broad(tiles.mean(g_high_sum, g_low_sum, g_exponent, g_special, g_key, n, work))
    for start in range(0, stop, BLOCK):
        g, v = held_g, held_v
        if not HELD:
            g, v = _loaded(
                weight_ptr, dy_ptr, x_ptr, row, column + start, n, inner, weight_axis, dy_axis, x_axis, dy_inner,
                x_inner, center, r, WEIGHTED,
            )  # fmt: skip
        mask = inside & (column + start < n)
        tiles.store(dx_ptr, row, column + start, dx_inner, dx_axis, mask, r * ((g - b) - v * a))


# --- launches --------------------------------------------------------------------------------------------------------
def _eps(problem: Any) -> tuple[int, int]:
    work = compute_dtype(problem.dtype)
    with default_environment():
        return words_of(np.dtype(work).type(problem.eps), work)


@launcher("layernorm")
def layernorm(
    problem: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    summed: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute y, the mean and rstd; y may be x.

    residual, summed: for `add_layernorm`, what is added to x and where the sum goes.
    """
    eps = _eps(problem)

    def in_tiles(x: torch.Tensor) -> None:
        launch_rows(
            layernorm_rows,
            problem.axis,
            {"x": x, "y": y},
            per_row={"mean": mean, "rstd": rstd},
            one_row={"weight": standing_in(weight, x), "bias": standing_in(bias, x)},
            constants={"WEIGHTED": weight is not None, "BIASED": bias is not None},
            numbers={"eps_low": eps[0], "eps_high": eps[1]},
            size=size,
        )

    normalized(
        problem.axis, x, y, rstd, eps, in_tiles, mean, weight, bias, residual=residual, summed=summed,
        held=size is None,
    )  # fmt: skip


@launcher("layernorm_backward")
def layernorm_backward(
    problem: Any,
    dy: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    weight: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    dsummed: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute dx, which may be dy or x, and what of dweight and dbias is asked for."""

    def in_tiles(dx: torch.Tensor) -> None:
        launch_rows(
            layernorm_backward_rows,
            problem.axis,
            {"dy": dy, "x": x, "dx": dx},
            per_row={"mean": mean, "rstd": rstd},
            one_row={"weight": standing_in(weight, x)},
            constants={"WEIGHTED": weight is not None},
            size=size,
        )

    gradients(problem.axis, dy, x, rstd, dx, in_tiles, mean, weight, dweight, dbias, dsummed, size is None)


@launcher("add_layernorm")
def add_layernorm(
    problem: Any,
    x: torch.Tensor,
    residual: torch.Tensor,
    y: torch.Tensor,
    summed: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute the sum, and of it y, the mean and rstd; y and the sum may be x or the residual."""
    layernorm(problem, x, y, mean, rstd, weight, bias, residual, summed, size)


@launcher("add_layernorm_backward")
def add_layernorm_backward(
    problem: Any,
    dy: torch.Tensor,
    summed: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    dsummed: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute dx, which may be dy, dsummed or the sum, and what else is asked for."""
    layernorm_backward(problem, dy, summed, mean, rstd, dx, weight, dweight, dbias, dsummed, size)
