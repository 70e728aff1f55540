# ruff: noqa: N803
"""rmsnorm in Triton; `reference.py` is the definition."""

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
    mean = tiles.mean(high_sum, low_sum, exponent, special, key, n, work)
    r = ops.divide(1.0, ops.root(mean + tiles.number(eps_low, eps_high, work)))
    tl.store(rstd_ptr + row * rstd_inner, ops.narrow(r, work, False), mask=row < inner)
    for start in range(0, stop, BLOCK):
        mask = inside & (column + start < n)
        x = held
        if not HELD:
            x = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0)
        y = x * tiles.broad(r)
        if WEIGHTED:
            y *= tiles.along(weight_ptr, weight_axis, column + start, n)
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
        g *= tiles.along(weight_ptr, weight_axis, column, n)
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
                g *= tiles.along(weight_ptr, weight_axis, column + start, n)
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
            g *= tiles.along(weight_ptr, weight_axis, column + start, n)
        high, low = tiles.limbs(g * v, scale, magic, low_scale)
        high_sum += high
        low_sum += low
    a = tiles.broad(tiles.mean(high_sum, low_sum, exponent, special, key, n, work))
    for start in range(0, stop, BLOCK):
        mask = inside & (column + start < n)
        g, v = held_dy, held_v
        if not HELD:
            g = tiles.load(dy_ptr, row, column + start, dy_inner, dy_axis, mask, 0.0)
            v = tiles.load(x_ptr, row, column + start, x_inner, x_axis, mask, 0.0) * r
        if WEIGHTED:
            g *= tiles.along(weight_ptr, weight_axis, column + start, n)
        tiles.store(dx_ptr, row, column + start, dx_inner, dx_axis, mask, r * (g - v * a))


# --- launches --------------------------------------------------------------------------------------------------------
def _eps(problem: Any) -> tuple[int, int]:
    work = compute_dtype(problem.dtype)
    with default_environment():
        return words_of(np.dtype(work).type(problem.eps), work)


@launcher("rmsnorm")
def rmsnorm(
    problem: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    summed: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute y and rstd; y may be x.

    residual, summed: for `add_rmsnorm`, what is added to x and where the sum goes.
    """
    eps = _eps(problem)

    def in_tiles(x: torch.Tensor) -> None:
        launch_rows(
            rmsnorm_rows,
            problem.axis,
            {"x": x, "y": y},
            per_row={"rstd": rstd},
            one_row={"weight": standing_in(weight, x)},
            constants={"WEIGHTED": weight is not None},
            numbers={"eps_low": eps[0], "eps_high": eps[1]},
            size=size,
        )

    normalized(
        problem.axis, x, y, rstd, eps, in_tiles, weight=weight, residual=residual, summed=summed,
        held=size is None,
    )  # fmt: skip


@launcher("rmsnorm_backward")
def rmsnorm_backward(
    problem: Any,
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    weight: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dsummed: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute dx, which may be dy or x, and dweight where it is asked for."""

    def in_tiles(dx: torch.Tensor) -> None:
        launch_rows(
            rmsnorm_backward_rows,
            problem.axis,
            {"dy": dy, "x": x, "dx": dx},
            per_row={"rstd": rstd},
            one_row={"weight": standing_in(weight, x)},
            constants={"WEIGHTED": weight is not None},
            size=size,
        )

    gradients(
        problem.axis, dy, x, rstd, dx, in_tiles, weight=weight, dweight=dweight, dsummed=dsummed, held=size is None
    )


@launcher("add_rmsnorm")
def add_rmsnorm(
    problem: Any,
    x: torch.Tensor,
    residual: torch.Tensor,
    y: torch.Tensor,
    summed: torch.Tensor,
    rstd: torch.Tensor,
    weight: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute the sum, and of it y and rstd; y and the sum may be x or the residual."""
    rmsnorm(problem, x, y, rstd, weight, residual, summed, size)


@launcher("add_rmsnorm_backward")
def add_rmsnorm_backward(
    problem: Any,
    dy: torch.Tensor,
    summed: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    dsummed: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute dx, which may be dy, dsummed or the sum, and what else is asked for."""
    rmsnorm_backward(problem, dy, summed, rstd, dx, weight, dweight, dsummed, size)
