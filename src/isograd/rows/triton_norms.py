# mypy: ignore-errors
# ruff: noqa: N803, SIM108
"""The gradient of a norm in Triton, for rows of neighbours that a program holds: rmsnorm, and layernorm (CENTERED).

A program goes through many rows and keeps the largest terms of every column's sum meanwhile, so that the gradients of
weight and bias need x and dy once more and not twice.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from isograd.devices.triton_launcher import Launcher, Specification, architecture, kept, power_of_two, processors, rows
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_terms as terms
from isograd.rows import triton_tiles as tiles
from isograd.rows.triton_launch import Strides, standing_in
from isograd.rows.triton_sums import sums_over_rows


@triton.jit
def _load(ptr, row, column, step, n, count, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    pointers = ptr + (tiles.broad(row) * step + column)
    if MASKED:
        x = tl.load(pointers, mask=tiles.broad(row < count) & (column < n), other=0.0)
    else:
        x = tl.load(pointers)
    return ops.widen(x, NATIVE)


@triton.jit
def norm_backward_rows(
    weight_ptr, mean_ptr, rstd_ptr, dy_ptr, x_ptr, dx_ptr, keys_ptr, n, count, weight_step, mean_step, rstd_step,
    dy_step, x_step, dx_step, CENTERED: tl.constexpr, WEIGHTED: tl.constexpr, DX: tl.constexpr, WEIGHT: tl.constexpr,
    BIAS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
    MASKED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Write dx where it is asked for (DX), and the keys of every column's largest terms of dweight and of dbias."""
    work: tl.constexpr = rstd_ptr.dtype.element_ty
    column = tiles.columns(BLOCK, GROUP, V)
    best = tiles.empty_tile(BLOCK, ROWS, GROUP, V, 0.0, work)
    bias_best = best
    step = tl.num_programs(0).to(tl.int64) * ROWS
    for first in range(tl.program_id(0).to(tl.int64) * ROWS, count, step):
        row = first + tl.arange(0, ROWS)
        inside = row < count
        mask = tiles.broad(inside) & (column < n)
        r = tiles.broad(tl.load(rstd_ptr + row * rstd_step, mask=inside, other=0.0))
        dy = _load(dy_ptr, row, column, dy_step, n, count, MASKED, NATIVE)
        v = _load(x_ptr, row, column, x_step, n, count, MASKED, NATIVE)
        if CENTERED:
            v -= tiles.broad(tl.load(mean_ptr + row * mean_step, mask=inside, other=0.0))
        v *= r
        if MASKED:  # a row that is not finite has NaN beyond its end as well
            v = tl.where(mask, v, 0.0)
        if WEIGHT:
            best = tiles.larger(best, tl.abs(dy * v))
        if BIAS:
            bias_best = tiles.larger(bias_best, tl.abs(dy))
        if DX:
            g = dy
            if WEIGHTED:
                # An offset of 0, which no compiler can tell: the weight is read again for every row, from the cache.
                w_ptr = weight_ptr + tl.minimum(first, 0) * V + column * weight_step
                if MASKED:
                    w = tl.load(w_ptr, mask=column < n, other=0.0)
                else:
                    w = tl.load(w_ptr)
                g = dy * ops.widen(w, NATIVE)
            if CENTERED:
                if MASKED:
                    g = tl.where(mask, g, 0.0)
                h = g - tiles.broad(tiles.held_mean(g, n, work, ROWS))
            else:
                h = g
            a = tiles.broad(tiles.held_mean(g * v, n, work, ROWS))
            y = ops.narrow(r * (h - v * a), dx_ptr.dtype.element_ty, NATIVE)
            to = dx_ptr + (tiles.broad(row) * dx_step + column)
            if MASKED:
                tl.store(to, y, mask=mask)
            else:
                tl.store(to, y)
    if WEIGHT:
        _keep(keys_ptr, column, n, best)
        keys_ptr += n
    if BIAS:
        _keep(keys_ptr, column, n, bias_best)


@triton.jit
def _keep(keys_ptr, column, n, best):
    key = tl.max(terms.term_key(best), axis=1, keep_dims=True)
    tl.atomic_max(keys_ptr + column, key, mask=column < n, sem="relaxed")


# --- launches --------------------------------------------------------------------------------------------------------
_GROUP = 64  # bytes of the work type in a thread of each tile
_REGISTERS: int | None = None
_LONGEST = 1 << 15  # bytes of the work type in a row that is held


@kept
def _held(
    axis: int,
    shape: Strides,
    strides: tuple[Strides, ...],
    flags: tuple[bool, ...],
    itemsize: int,
    double: bool,
    arch: int,
    multiprocessors: int,
    _: Any,
) -> Launcher | None:
    """The kernel of a problem whose rows lie one after the other; None of another one."""
    n, wide = shape[axis], 8 if double else 4
    weight, *per_row = strides[:3]
    spread = [*[(*s[:axis], 0, *s[axis:]) for s in per_row], *strides[3:]]
    problem = rows(shape, spread, axis)
    block = power_of_two(n)
    if problem.outer_shape or any(s != 1 for s in problem.axis_strides[2:]) or block * wide > _LONGEST:
        return None
    group = min(_GROUP // wide, block)
    threads = block // group
    of_tile = max(128 // threads, 1)
    vector = min(16 // itemsize, group)
    tail = (
        n, problem.inner, weight[0], *problem.inner_strides, *flags, block, of_tile, group, vector,
        block != n or of_tile > 1, arch >= 90,
    )  # fmt: skip
    programs = min(-(-problem.inner // of_tile), 16 * multiprocessors)
    warps = max(of_tile * threads // 32, 1)
    specification = Specification(tail, programs, warps, registers=_REGISTERS, free=("count",), stays=True)
    return Launcher(norm_backward_rows, specification)


def gradients(
    axis: int,
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    otherwise: Callable[[], None],
    mean: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    held: bool = True,
) -> None:
    """Write dx, which may be dy or x, and what is asked for of dweight and dbias.

    otherwise: computes dx of rows that no program holds, and of all of them without `held`.
    """
    if x.numel() == 0:
        for out in (dweight, dbias):
            if out is not None:
                out.zero_()
        return
    center, scale = rstd if mean is None else mean, standing_in(weight, x)
    tensors = (scale, center, rstd, dy, x, dx)

    def of_rows(*asked: bool) -> Launcher | None:
        if not held:
            return None
        return _held(
            axis, tuple(x.shape), tuple([t.stride() for t in tensors]), (mean is not None, weight is not None, *asked),
            x.element_size(), rstd.dtype == torch.float64, architecture(x), processors(x), x.dtype,
        )  # fmt: skip

    if dweight is not None or dbias is not None:
        # A dx in the place of what the sums are made of comes after them.
        apart = dx.data_ptr() not in (dy.data_ptr(), x.data_ptr())
        both = of_rows(apart, dweight is not None, dbias is not None)
        find = None if both is None else lambda keys: both(*tensors, keys)
        sums_over_rows(axis, dy, x, rstd, mean, dweight, dbias, find)
        if apart and both is not None:
            return
    alone = of_rows(True, False, False)
    if alone is None:
        otherwise()
    else:
        alone(*tensors, rstd)
