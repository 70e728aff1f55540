# ruff: noqa: N803
"""rotary and its gradient in Triton, tiles of rows and pairs; `reference.py` is the definition."""

import math
from typing import Any

import torch
import triton
import triton.language as tl

from isograd.core.kernel import launcher
from isograd.devices.triton_launcher import Launcher, Specification, architecture, kept, power_of_two
from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.ops.rotary.reference import halves
from isograd.rows import triton_elements as elements
from isograd.rows.triton_launch import Strides

_WIDEST, _TILE = 512, 1024  # pairs or elements of a row in a tile, and of a tile


@triton.jit
def _place(rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(rows [ROWS], the first column) of this program."""
    parts = tl.cdiv(columns, BLOCK)
    pid = tl.program_id(0).to(tl.int64)
    block = pid // parts
    return block * ROWS + tl.arange(0, ROWS), (pid - block * parts) * BLOCK


@triton.jit
def rotated(
    x_ptr, cos_ptr, sin_ptr, y_ptr, rows, pairs, x_axis, cos_axis, sin_axis, y_axis, shape, x_outer, cos_outer,
    sin_outer, y_outer, BACK: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Rows of pairs; y may be x. BACK: the other way round."""
    row, first = _place(rows, pairs, ROWS, BLOCK)
    column = (first + tl.arange(0, BLOCK))[None, :]
    inside = (row < rows)[:, None]
    mask = inside & (column < pairs)
    x_ptr += memory.element_offset(row, shape, x_outer)[:, None]
    y_ptr += memory.element_offset(row, shape, y_outer)[:, None]
    cos_ptr += memory.element_offset(row, shape, cos_outer)[:, None]
    sin_ptr += memory.element_offset(row, shape, sin_outer)[:, None]
    cos = tl.load(cos_ptr + column * cos_axis, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + column * sin_axis, mask=mask, other=0.0)
    if BACK:
        sin = ops.negate(sin)
    of = y_ptr.dtype.element_ty
    if INTERLEAVED:
        # Both of a pair at once, as they are neighbours in memory.
        place = (2 * first + tl.arange(0, 2 * BLOCK))[None, :]
        both = inside & (place < 2 * pairs)
        x = ops.widen(tl.load(x_ptr + place * x_axis, mask=both, other=0.0), False)
        a, b = tl.split(tl.reshape(x, (ROWS, BLOCK, 2)))
        y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), (ROWS, 2 * BLOCK))
        tl.store(y_ptr + place * y_axis, ops.narrow(y, of, False), mask=both)
    else:
        a = ops.widen(tl.load(x_ptr + column * x_axis, mask=mask, other=0.0), False)
        b = ops.widen(tl.load(x_ptr + (column + pairs) * x_axis, mask=mask, other=0.0), False)
        tl.store(y_ptr + column * y_axis, ops.narrow(a * cos - b * sin, of, False), mask=mask)
        tl.store(y_ptr + (column + pairs) * y_axis, ops.narrow(b * cos + a * sin, of, False), mask=mask)


@triton.jit
def copied(
    x_ptr, y_ptr, rows, columns, x_axis, y_axis, shape, x_outer, y_outer, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows of what is not rotated."""
    row, first = _place(rows, columns, ROWS, BLOCK)
    column = (first + tl.arange(0, BLOCK))[None, :]
    mask = (row < rows)[:, None] & (column < columns)
    x_ptr += memory.element_offset(row, shape, x_outer)[:, None]
    y_ptr += memory.element_offset(row, shape, y_outer)[:, None]
    x = ops.widen(tl.load(x_ptr + column * x_axis, mask=mask, other=0.0), False)
    tl.store(y_ptr + column * y_axis, ops.narrow(x, y_ptr.dtype.element_ty, False), mask=mask)


# --- launches --------------------------------------------------------------------------------------------------------
@kept
def _prepared(
    kernel: Any, columns: int, shape: Strides, strides: tuple[Strides, ...], flags: tuple[bool, ...], _: Any
) -> Launcher:
    """A kernel for rows of pairs, or of elements, on the last axis."""
    sizes, *outer = elements.layout(shape[:-1], [s[:-1] for s in strides])
    sizes = (1, *sizes[1:])  # nobody reads the first, which varies with the number of rows
    count, block = math.prod(shape[:-1]), min(power_of_two(columns), _WIDEST)
    rows = _TILE // block
    tail = (count, columns, *[s[-1] for s in strides], sizes, *outer, *flags, rows, block)
    return Launcher(kernel, Specification(tail, -(-count // rows) * -(-columns // block), free=("rows",)))


def _launch(problem: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, y: torch.Tensor, back: bool) -> None:
    if y.numel() == 0:
        return
    shape, like = tuple(y.shape), (y.dtype, architecture(y))
    strides = tuple([t.stride() for t in (x, cos, sin, y)])
    _prepared(rotated, problem.pairs, shape, strides, (back, problem.interleaved), like)(x, cos, sin, y)
    rest, other = (halves(t, problem.pairs, False)[2] for t in (x, y))
    if rest.numel():
        _prepared(copied, rest.shape[-1], shape, (rest.stride(), other.stride()), (), like)(rest, other)


@launcher("rotary")
def rotary(problem: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, y: torch.Tensor) -> None:
    """Compute y, which may be x."""
    _launch(problem, x, cos, sin, y, False)


@launcher("rotary_backward")
def rotary_backward(problem: Any, dy: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, dx: torch.Tensor) -> None:
    """Compute dx, which may be dy."""
    _launch(problem, dy, cos, sin, dx, True)
