"""How the Triton kernels of distillation are configured and launched."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from isograd import faults
from isograd.fenv import default_environment
from isograd.losses import (
    triton_distillation,
    triton_distillation_top,
)
from isograd.losses.divergence_reference import temperature_of
from isograd.losses.triton_totals import divided
from isograd.numerics.losses import divisor
from isograd.reduction import cuda as reduction
from isograd.rows.triton_launch import Tile, tile, words_of
from isograd.triton_launcher import (
    Launcher,
    Specification,
    architecture,
    c_strides,
    kept,
    power_of_two,
    rows,
)

Strides = tuple[int, ...]


# --- rows ------------------------------------------------------------------------------------------------------------
def _inserted(strides: Strides, axis: int) -> Strides:
    """The strides of what a row has one of, in the dimensions of rows."""
    return (*strides[:axis], 0, *strides[axis:])


class _Fixed(NamedTuple):
    """What fixes a kernel on rows besides shape and strides."""

    kernel: Any
    before: tuple[int, ...]  # between the numbers and n
    after: tuple[int, ...]  # between n and the rows
    flags: tuple[bool, ...]
    last: tuple[int, ...]  # after the tile
    whole: tuple[int, ...]
    held: int
    dtypes: Any
    arch: int
    tile: Tile | None


@kept
def _rows(shape: Strides, strides: tuple[Strides, ...], axis: int, fixed: _Fixed) -> Launcher:
    n, problem = shape[axis], rows(shape, strides, axis)
    itemsize = fixed.dtypes[0].itemsize
    size = fixed.tile or tile(n, problem, fixed.whole, fixed.held, itemsize, fixed.arch)
    sizes = (*fixed.before, n, *fixed.after, problem.inner)
    shape_of_tile = (size.block, size.rows, size.group, size.vector, n <= size.block)
    tail = (*sizes, *problem.strides, *fixed.flags, *shape_of_tile, *fixed.last)
    programs = problem.outer * -(-problem.inner // size.rows)
    return Launcher(fixed.kernel, Specification(tail, programs, size.warps))


def distillation(descriptor: Any, arguments: Mapping[str, Any], size: Tile | None = None) -> None:
    """The distillation loss or its gradient, on the current stream of the arguments' device.

    Whoever calls this for a user calls `faults.after_launch` next.
    """
    x, backward = arguments["student"], descriptor.operation == "distillation_loss_backward"
    leading, work = tuple(x.shape[:-1]), _work(x)
    share = 1 if descriptor.reduction == "none" else divisor(descriptor.reduction, leading)
    if backward:
        if x.numel():
            given = [arguments["dloss"].expand(leading), arguments["dstudent"]]
            _distillation_rows(descriptor, arguments, given, share, size)
        return
    loss = arguments["loss"]
    losses = loss if descriptor.reduction == "none" else torch.empty(leading, dtype=work, device=x.device)
    if x.numel():
        _distillation_rows(descriptor, arguments, [losses], share, size)
    else:
        losses.zero_()
    if descriptor.reduction != "none":
        loss.copy_(_reduced(losses, share))


def _reduced(losses: torch.Tensor, share: int) -> torch.Tensor:
    if losses.numel() == 0:
        return losses.new_full((), 0.0 if share else float("nan"))
    if share == losses.numel():
        return reduction.mean(losses)
    total = reduction.sum(losses)
    if share == 1:
        return total
    return divided(total, losses.new_full((), share))


def _distillation_rows(
    descriptor: Any, arguments: Mapping[str, Any], given: list[torch.Tensor], share: int, size: Tile | None
) -> None:
    """Run a kernel; `given` is the losses, or their gradient and that of the student."""
    x, t, backward = arguments["student"], arguments["teacher"], len(given) == 2
    axis, work = x.dim() - 1, "float64" if x.dtype == torch.float64 else "float32"
    with default_environment():
        factors = temperature_of(descriptor.temperature, np.float64 if work == "float64" else np.float32)
    numbers = (*words_of(factors.inverse, work), *words_of(factors.itself if backward else factors.square, work))
    top, out = descriptor.classes is not None, given[-1]
    tensors = [*given[:-1], x, t]
    strides = [*(_inserted(g.stride(), axis) for g in given[:-1]), x.stride(), t.stride()]
    after: tuple[int, ...] = ()
    if top:
        tensors.append(arguments["indices"])
        strides += [arguments["indices"].stride(), c_strides(arguments["indices"].shape)]
        after = (descriptor.classes, faults.code(descriptor.operation, "indices", False))
    strides.append(out.stride() if backward else _inserted(out.stride(), axis))
    module: Any = triton_distillation_top if top else triton_distillation
    kernel = getattr(module, f"distillation_{'top_' if top else ''}{'gradient' if backward else 'rows'}")
    first, itemsize = len(given) - 1, 8 if work == "float64" else 4
    whole = (first,) if top else (first, first + 1)
    whole = (*whole, len(strides) - 1) if backward else whole
    fixed = _Fixed(
        kernel,
        (share,) if backward else (),
        after,
        (),
        (power_of_two(descriptor.classes),) if top else (),
        whole,
        itemsize * (1 if top else 2),
        (x.dtype, *(v.dtype for v in tensors)),
        architecture(x),
        size,
    )
    launcher = _rows(tuple(x.shape), tuple(strides), axis, fixed)
    launcher(*tensors, out, *([faults.flag(x.device)] if top else []), numbers=numbers)


def _work(t: torch.Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32
