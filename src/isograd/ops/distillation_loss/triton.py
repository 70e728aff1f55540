"""The distillation loss in Triton: how the kernels of `triton_rows.py` and `triton_top.py` are launched."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from isograd.core import faults
from isograd.core.kernel import launcher
from isograd.devices.triton_launcher import Launcher, Specification, architecture, c_strides, kept, power_of_two, rows
from isograd.numerics.losses import divisor
from isograd.ops.distillation_loss import gluon_rows as long_rows
from isograd.ops.distillation_loss import triton_rows, triton_top
from isograd.ops.distillation_loss.reference import temperature_of
from isograd.reduction import cuda as reduction
from isograd.rows import gluon_rows
from isograd.rows.triton_configuration import clustered
from isograd.rows.triton_launch import Tile, tile, words_of
from isograd.rows.triton_totals import divided
from isograd.runtime.fenv import default_environment

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
    tail = (*sizes, *problem.strides, *shape_of_tile, *fixed.last)
    programs = problem.outer * -(-problem.inner // size.rows)
    # How many rows there are says nothing of how memory is read where a row's elements are neighbours.
    neighbours = all(problem.axis_strides[i] == 1 for i in fixed.whole)
    free = tuple([name for name in ("divisor", "inner") if neighbours and name in fixed.kernel.arg_names])
    return Launcher(fixed.kernel, Specification(tail, programs, size.warps, free=free))


# --- long rows, on Hopper and its successor --------------------------------------------------------------------------
@kept
def _staged(kernel: Any, before: tuple[int, ...], sizes: Strides, dtype: Any, colder: bool) -> Launcher:
    n_rows, n = sizes[:2]
    # 32 elements of both operands a thread.
    config = clustered("staged", power_of_two(n), dtype.itemsize, 32 * dtype.itemsize, 4, 128)
    masked = config.block * config.ctas != n
    tile_ = (config.block, config.ctas, config.group, config.vector, masked)
    layouts = (gluon_rows.layout_of(config), gluon_rows.shared_layout_of(config))
    tail = (*before, *sizes, colder, *tile_, *layouts)
    free = ("divisor", "n_rows") if before else ("n_rows",)
    options = {"registers": config.registers, "ctas": config.ctas, "stays": True, "free": free}
    return Launcher(kernel, Specification(tail, n_rows, config.warps, **options))


def _run_staged(
    tensors: Sequence[torch.Tensor],
    strides: Sequence[Strides],
    share: int | None,
    numbers: tuple[int, ...],
    colder: bool,
) -> bool:
    """Run the kernel for long rows, if it serves the problem: rows of neighbours, multiples of 16 elements apart.

    Of rows above 2**16 elements too few are held at a time: passes are as fast.

    (student, teacher, losses), or (gradient of the losses, student, teacher, that of the student) with a share.
    """
    whole = (0, 1) if share is None else (1, 2, 3)
    x, dtypes = tensors[whole[0]], {tensors[i].dtype for i in whole}
    n, itemsize = x.shape[-1], x.element_size()
    if len(dtypes) > 1 or itemsize == 8 or not 4096 <= n <= 1 << 16 or not 90 <= architecture(x) < 110:
        return False
    problem = rows(tuple(x.shape), strides, x.dim() - 1)
    # The compiler is told of multiples of 16 elements; by less, copies of 16-bit elements would be too narrow.
    places = [n]
    for i in whole:
        places += [problem.inner_strides[i], tensors[i].data_ptr()]
    if problem.outer_shape or any(problem.axis_strides[i] != 1 for i in whole) or any(p % 16 for p in places):
        return False
    kernel = long_rows.distillation_staged if share is None else long_rows.gradient_staged
    before = () if share is None else (share,)
    sizes = (problem.inner, n, *problem.inner_strides)
    _staged(kernel, before, sizes, x.dtype, colder)(*tensors, numbers=numbers)
    return True


def _reduced(losses: torch.Tensor, share: int) -> torch.Tensor:
    if losses.numel() == 0:
        return losses.new_full((), 0.0 if share else float("nan"))
    if share == losses.numel():
        return reduction.mean(losses)
    total = reduction.sum(losses)
    if share == 1:
        return total
    return divided(total, losses.new_full((), share))


def _run(
    problem: Any,
    x: torch.Tensor,
    t: torch.Tensor,
    indices: torch.Tensor | None,
    given: list[torch.Tensor],
    share: int,
    size: Tile | None,
) -> None:
    """Run a kernel; `given` is the losses, or their gradient and that of the student."""
    backward = len(given) == 2
    axis, work = x.dim() - 1, "float64" if x.dtype == torch.float64 else "float32"
    with default_environment():
        factors = temperature_of(problem.temperature, np.float64 if work == "float64" else np.float32)
    numbers = (*words_of(factors.inverse, work), *words_of(factors.itself if backward else factors.square, work))
    out = given[-1]
    tensors = [*given[:-1], x, t]
    strides = [*(_inserted(g.stride(), axis) for g in given[:-1]), x.stride(), t.stride()]
    after: tuple[int, ...] = ()
    if indices is not None:
        tensors.append(indices)
        strides += [indices.stride(), c_strides(indices.shape)]
        after = (problem.classes, faults.code(problem.operation, "indices", False))
    strides.append(out.stride() if backward else _inserted(out.stride(), axis))
    colder = bool(factors.inverse > 1)
    top = indices is not None
    if not top and size is None and _run_staged((*tensors, out), strides, share if backward else None, numbers, colder):
        return
    module: Any = triton_top if top else triton_rows
    kernel = getattr(module, f"distillation_{'top_' if top else ''}{'gradient' if backward else 'rows'}")
    first, itemsize = len(given) - 1, 8 if work == "float64" else 4
    whole = (first,) if top else (first, first + 1)
    whole = (*whole, len(strides) - 1) if backward else whole
    fixed = _Fixed(
        kernel,
        (share,) if backward else (),
        after,
        (power_of_two(problem.classes),) if top else (colder,),
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


def _share(problem: Any) -> int:
    """What the sum of the losses is divided by."""
    return 1 if problem.reduction == "none" else divisor(problem.reduction, problem.shape[:-1])


@launcher("distillation_loss")
def distillation_loss(
    problem: Any,
    student: torch.Tensor,
    teacher: torch.Tensor,
    loss: torch.Tensor,
    indices: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute the loss."""
    share, whole = _share(problem), problem.reduction == "none"
    losses = loss if whole else torch.empty(student.shape[:-1], dtype=_work(student), device=student.device)
    if student.numel():
        _run(problem, student, teacher, indices, [losses], share, size)
    else:
        losses.zero_()
    if not whole:
        loss.copy_(_reduced(losses, share))
    if indices is not None:
        faults.after_launch(student.device)


@launcher("distillation_loss_backward")
def distillation_loss_backward(
    problem: Any,
    dloss: torch.Tensor,
    student: torch.Tensor,
    teacher: torch.Tensor,
    dstudent: torch.Tensor,
    indices: torch.Tensor | None = None,
    size: Tile | None = None,
) -> None:
    """Compute dstudent; it may be the student's logits."""
    if student.numel():
        given = [dloss.expand(student.shape[:-1]), dstudent]
        _run(problem, student, teacher, indices, given, _share(problem), size)
    if indices is not None:
        faults.after_launch(student.device)
