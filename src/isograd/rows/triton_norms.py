# mypy: ignore-errors
# ruff: noqa: N803, SIM108
"""The gradient of a norm in Triton, for rows of neighbours that a program holds: rmsnorm, and layernorm (CENTERED).

A program goes through many rows and keeps the largest terms of every column's sum meanwhile, so that the gradients of
weight and bias need x and dy once more and not twice.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from isograd.devices.triton_launcher import Launcher, Specification, architecture, kept, power_of_two, processors, rows
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_terms as terms
from isograd.rows import triton_elements as elements
from isograd.rows import triton_tiles as tiles
from isograd.rows.triton_launch import Strides, standing_in
from isograd.rows.triton_sums import sums_over_rows


@triton.jit
def _load(ptr, row, column, step, n, count, MASKED: tl.constexpr, NATIVE: tl.constexpr, POLICY: tl.constexpr):
    pointers = ptr + (tiles.broad(row) * step + column)
    if MASKED:
        mask = tiles.broad(row < count) & (column < n)
        x = tl.load(pointers, mask=mask, other=0.0, eviction_policy=POLICY)
    else:
        x = tl.load(pointers, eviction_policy=POLICY)
    return ops.widen(x, NATIVE)


@triton.jit
def _along(ptr, step, column, n, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    """What all rows share."""
    if MASKED:
        w = tl.load(ptr + column * step, mask=column < n, other=0.0)
    else:
        w = tl.load(ptr + column * step)
    return ops.widen(w, NATIVE)


@triton.jit
def _store(ptr, row, column, step, n, count, y, MASKED: tl.constexpr):
    pointers = ptr + (tiles.broad(row) * step + column)
    if MASKED:
        tl.store(pointers, y, mask=tiles.broad(row < count) & (column < n))
    else:
        tl.store(pointers, y)


@triton.jit(do_not_specialize=["eps_low", "eps_high"])
def norm_rows(
    weight_ptr, bias_ptr, mean_ptr, rstd_ptr, residual_ptr, x_ptr, summed_ptr, y_ptr, eps_low, eps_high, n, count,
    weight_step, bias_step, mean_step, rstd_step, residual_step, x_step, summed_step, y_step, CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr, BIASED: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Rows of the result, which may be x, and of the sum with the residual."""
    work: tl.constexpr = rstd_ptr.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < count
    column = tiles.columns(BLOCK, GROUP, V)
    x = _load(x_ptr, row, column, x_step, n, count, MASKED, NATIVE, "")
    if RESIDUAL:
        x += _load(residual_ptr, row, column, residual_step, n, count, MASKED, NATIVE, "")
        summed = ops.narrow(x, summed_ptr.dtype.element_ty, NATIVE)
        _store(summed_ptr, row, column, summed_step, n, count, summed, MASKED)
        x = ops.widen(summed, NATIVE)
    if CENTERED:
        mean = tiles.held_mean(x, n, work, ROWS)
        tl.store(mean_ptr + row * mean_step, ops.narrow(mean, work, False), mask=inside)
        x -= tiles.broad(mean)
        if MASKED:
            x = tl.where(column < n, x, 0.0)
    r = tiles.held_mean(x * x, n, work, ROWS) + tiles.number(eps_low, eps_high, work)
    r = ops.divide(1.0, ops.root(r))
    tl.store(rstd_ptr + row * rstd_step, ops.narrow(r, work, False), mask=inside)
    y = x * tiles.broad(r)
    if WEIGHTED:
        y *= _along(weight_ptr, weight_step, column, n, MASKED, NATIVE)
    if BIASED:
        y += _along(bias_ptr, bias_step, column, n, MASKED, NATIVE)
    _store(y_ptr, row, column, y_step, n, count, ops.narrow(y, y_ptr.dtype.element_ty, NATIVE), MASKED)


@triton.jit
def _pair(
    dy_ptr, x_ptr, w_ptr, row, column, dy_step, x_step, weight_step, n, count, mean, r, CENTERED: tl.constexpr,
    WEIGHTED: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr, POLICY: tl.constexpr,
):  # fmt: skip
    """(g, v, dy), zero outside."""
    dy = _load(dy_ptr, row, column, dy_step, n, count, MASKED, NATIVE, POLICY)
    v = _load(x_ptr, row, column, x_step, n, count, MASKED, NATIVE, POLICY)
    if CENTERED:
        v -= mean
    v *= r
    g = dy
    if WEIGHTED:
        g = dy * _along(w_ptr, weight_step, column, n, MASKED, NATIVE)
    if MASKED:  # a row that is not finite has NaN beyond its end as well
        mask = tiles.broad(row < count) & (column < n)
        g, v = tl.where(mask, g, 0.0), tl.where(mask, v, 0.0)
    return g, v, dy


@triton.jit
def norm_backward_rows(
    weight_ptr, mean_ptr, rstd_ptr, dy_ptr, dsummed_ptr, x_ptr, dx_ptr, keys_ptr, n, count, weight_step, mean_step,
    rstd_step, dy_step, dsummed_step, x_step, dx_step, CENTERED: tl.constexpr, WEIGHTED: tl.constexpr,
    ADDED: tl.constexpr, DX: tl.constexpr, WEIGHT: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr,
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
        r = tiles.broad(tl.load(rstd_ptr + row * rstd_step, mask=inside, other=0.0))
        mean = r
        if CENTERED:
            mean = tiles.broad(tl.load(mean_ptr + row * mean_step, mask=inside, other=0.0))
        # An offset of 0, which no compiler can tell: the weight is read again for every row, from the cache.
        w_ptr = weight_ptr + tl.minimum(first, 0) * V
        g, v, dy = _pair(
            dy_ptr, x_ptr, w_ptr, row, column, dy_step, x_step, weight_step, n, count, mean, r, CENTERED, WEIGHTED,
            MASKED, NATIVE, "",
        )  # fmt: skip
        if WEIGHT:
            best = tiles.larger(best, tl.abs(dy * v))
        if BIAS:
            bias_best = tiles.larger(bias_best, tl.abs(dy))
        if DX:
            b = r
            if CENTERED:
                b = tiles.broad(tiles.held_mean(g, n, work, ROWS))
            a = tiles.broad(tiles.held_mean(g * v, n, work, ROWS))
            # Once more from the cache, which leaves registers to more programs. Another policy, or loads would be one.
            g, v, dy = _pair(
                dy_ptr, x_ptr, w_ptr, row, column, dy_step, x_step, weight_step, n, count, mean, r, CENTERED, WEIGHTED,
                MASKED, NATIVE, "evict_first",
            )  # fmt: skip
            if CENTERED:
                g -= b
            y = ops.narrow(r * (g - v * a), dx_ptr.dtype.element_ty, NATIVE)
            if ADDED:
                y = ops.widen(y, NATIVE) + _load(dsummed_ptr, row, column, dsummed_step, n, count, MASKED, NATIVE, "")
                y = ops.narrow(y, dx_ptr.dtype.element_ty, NATIVE)
            _store(dx_ptr, row, column, dx_step, n, count, y, MASKED)
    if WEIGHT:
        _keep(keys_ptr, column, n, best)
        keys_ptr += n
    if BIAS:
        _keep(keys_ptr, column, n, bias_best)


@triton.jit
def _keep(keys_ptr, column, n, best):
    key = tl.max(terms.term_key(best), axis=1, keep_dims=True)
    tl.atomic_max(keys_ptr + column, key, mask=column < n, sem="relaxed")


@triton.jit
def added(a_ptr, b_ptr, y_ptr, n, shape, a_strides, b_strides, y_strides, BLOCK: tl.constexpr):
    """The sum of two arrays in any layout; y may be either."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    a = elements.load(a_ptr, index, shape, a_strides, mask)
    elements.store(y_ptr, index, shape, y_strides, mask, a + elements.load(b_ptr, index, shape, b_strides, mask))


# --- launches --------------------------------------------------------------------------------------------------------
_STAY = 16  # programs of a multiprocessor that stay, at most


class _Tuning(NamedTuple):
    """Bytes of the work type that a thread has of a row, registers of a thread, bytes of the longest row."""

    group: int
    registers: int | None
    longest: int


def _tuning(forward: bool, centered: bool, narrow: bool, size: int) -> _Tuning:
    """For 16-bit elements (narrow) or others, and rows of so many bytes.

    Forward it is the fastest on an H200 for rows of 4,096 and 16,384 elements. Backward two or three programs fit a
    multiprocessor, with few registers spilled.
    """
    if forward:
        return _Tuning(128 if centered or narrow else 64, None, 1 << 16)
    if centered:
        return _Tuning(64, 128, 1 << 15)
    if size > 1 << 15:
        return _Tuning(128, 128, 1 << 16)
    return _Tuning(64, 80 if narrow and size <= 1 << 14 else 128, 1 << 16)


@kept
def _held(
    kernel: Any,
    axis: int,
    shape: Strides,
    along: int,
    per_row: int,
    strides: tuple[Strides, ...],
    flags: tuple[bool, ...],
    itemsize: int,
    double: bool,
    arch: int,
    multiprocessors: int,
    _: Any,
) -> Launcher | None:
    """The kernel of a problem whose rows lie one after the other; None of another one.

    strides: of so many arrays along the axis, of so many without it, and of whole rows.
    """
    n, wide = shape[axis], 8 if double else 4
    first = strides[:along]
    spread = [*[(*s[:axis], 0, *s[axis:]) for s in strides[along : along + per_row]], *strides[along + per_row :]]
    problem = rows(shape, spread, axis)
    block = power_of_two(n)
    forward = kernel is norm_rows
    tuning = _tuning(forward, flags[0], itemsize == 2, block * wide)
    if problem.outer_shape or any(s != 1 for s in problem.axis_strides[per_row:]) or block * wide > tuning.longest:
        return None
    # At least 128 threads share a row, and have 64 bytes of it.
    group = min(min(tuning.group, max(64, block * wide // 128)) // wide, block)
    threads = block // group
    of_tile = max(128 // threads, 1)
    vector = min(16 // itemsize, group)
    tail = (
        n, problem.inner, *[s[0] for s in first], *problem.inner_strides, *flags, block, of_tile, group, vector,
        block != n or of_tile > 1, arch >= 90,
    )  # fmt: skip
    programs = -(-problem.inner // of_tile)
    if not forward:  # which stay
        programs = min(programs, _STAY * multiprocessors)
    warps = max(of_tile * threads // 32, 1)
    registers = tuning.registers if arch and of_tile == 1 else None
    specification = Specification(
        tail, programs, warps, registers=registers, free=("count",), stays=not forward
    )  # fmt: skip
    return Launcher(kernel, specification)


def _launch_sum(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> None:
    strides = (a.stride(), b.stride(), y.stride())
    elements.prepared(added, y.numel(), (), tuple(y.shape), strides, (), (y.dtype, architecture(y)))(a, b, y)


def normalized(
    axis: int,
    x: torch.Tensor,
    y: torch.Tensor,
    rstd: torch.Tensor,
    eps: tuple[int, int],
    otherwise: Callable[[torch.Tensor], None],
    mean: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    summed: torch.Tensor | None = None,
    held: bool = True,
) -> None:
    """Write y, which may be x, rstd and, where they are given, the mean and the sum with the residual.

    eps: its words. otherwise: the same of rows that no program holds, and of all of them without `held`; it gets what
    the norm is taken of.
    """
    if x.numel() == 0:  # rows without elements
        for out in (rstd, mean):
            if out is not None:
                out.fill_(float("nan"))
        return
    center = rstd if mean is None else mean
    added, into = x if residual is None else residual, y if summed is None else summed
    tensors = (standing_in(weight, x), standing_in(bias, x), center, rstd, added, x, into, y)
    flags = (mean is not None, weight is not None, bias is not None, residual is not None)
    found = _held(
        norm_rows, axis, tuple(x.shape), 2, 2, tuple([t.stride() for t in tensors]), flags, x.element_size(),
        rstd.dtype == torch.float64, architecture(x), processors(x), x.dtype,
    ) if held else None  # fmt: skip
    if found is not None:
        found(*tensors, numbers=eps)
        return
    if residual is not None:
        _launch_sum(x, residual, into)
    otherwise(x if residual is None else into)


def gradients(
    axis: int,
    dy: torch.Tensor,
    x: torch.Tensor,
    rstd: torch.Tensor,
    dx: torch.Tensor,
    otherwise: Callable[[torch.Tensor], None],
    mean: torch.Tensor | None = None,
    weight: torch.Tensor | None = None,
    dweight: torch.Tensor | None = None,
    dbias: torch.Tensor | None = None,
    dsummed: torch.Tensor | None = None,
    held: bool = True,
) -> None:
    """Write dx, which may be any of the others, and what is asked for of dweight and dbias; dsummed is added to dx.

    otherwise: computes dx, without dsummed, of rows that no program holds, and of all of them without `held`.
    """
    if x.numel() == 0:
        for out in (dweight, dbias):
            if out is not None:
                out.zero_()
        return
    center, more = rstd if mean is None else mean, dy if dsummed is None else dsummed
    tensors = (standing_in(weight, x), center, rstd, dy, more, x, dx)
    about = (mean is not None, weight is not None, dsummed is not None)

    def of_rows(*asked: bool) -> Launcher | None:
        if not held:
            return None
        return _held(
            norm_backward_rows, axis, tuple(x.shape), 1, 2, tuple([t.stride() for t in tensors]), (*about, *asked),
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
    if alone is not None:
        alone(*tensors, rstd)
    elif dsummed is None:
        otherwise(dx)
    else:  # which may lie where dx goes
        apart_from = torch.empty_like(dx)
        otherwise(apart_from)
        _launch_sum(apart_from, dsummed, dx)
