"""How the Triton kernels of divergences are configured and launched."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from isograd import faults
from isograd.fenv import default_environment
from isograd.losses import (
    triton_distillation,
    triton_distillation_top,
    triton_divergence,
)
from isograd.losses.divergence_reference import divisor, temperature_of
from isograd.losses.triton_totals import divided
from isograd.reduction import cuda as reduction
from isograd.reduction import triton_kernels as reduction_kernels
from isograd.rows.triton_launch import Tile, tile, words_of
from isograd.triton_launcher import (
    Launcher,
    Specification,
    architecture,
    c_strides,
    kept,
    merged,
    power_of_two,
    processors,
    rows,
)

Strides = tuple[int, ...]
_ELEMENTS = 1024  # of a tile of elements
_MOST_CHUNKS = 512
_SHORT_SUM = 1 << 17  # terms whose integer parts add up in one word each


# --- elements --------------------------------------------------------------------------------------------------------
def _merged(shape: Sequence[int], strides: Sequence[Strides]) -> tuple[Any, ...]:
    """(shape, strides of every tensor) of merged dimensions, at least one."""
    sizes, steps = merged(shape, strides)
    if not sizes:
        sizes, steps = [1], [tuple(0 for _ in strides)]
    return (tuple(sizes), *(tuple(step[t] for step in steps) for t in range(len(strides))))


@kept
def _elements(name: str, n: int, before: tuple[int, ...], shape: Strides, strides: Any, flags: Any, _: Any) -> Launcher:
    tail = (n, *before, *_merged(shape, strides), *flags, _ELEMENTS)
    return Launcher(getattr(triton_divergence, name), Specification(tail, -(-n // _ELEMENTS)))


class _Sum(NamedTuple):
    """The kernels of a sum in chunks, and the sizes of their scratch memory."""

    keys: Launcher
    parts: Launcher
    finish: Launcher
    chunks: int
    words: int


@kept
def _sum(
    n: int, share: int, shape: Strides, strides: Any, log_target: bool, wide: bool, multiprocessors: int, _: Any
) -> _Sum:
    chunks = min(4 * multiprocessors, -(-n // _ELEMENTS), _MOST_CHUNKS)
    length = -(-n // (chunks * _ELEMENTS)) * _ELEMENTS
    chunks = -(-n // length)
    words = (2 if wide else 1) * (2 if n > _SHORT_SUM else 1)
    layout, most = _merged(shape, strides), _MOST_CHUNKS
    free = ("n", "length", "chunks")
    keys = Specification((n, length, *layout, log_target, _ELEMENTS), chunks, free=free[:2])
    parts = Specification((n, length, chunks, *layout, log_target, _ELEMENTS, most, words), chunks, free=free)
    tail = (share, 1, chunks, 1, 1, 1, (), (), 1, most, words, share != 1, False)
    finish = Specification(tail, 1, free=("n", "chunks"))
    return _Sum(
        Launcher(triton_divergence.kl_keys, keys),
        Launcher(triton_divergence.kl_parts, parts),
        Launcher(reduction_kernels.sum_finish, finish),
        chunks,
        words,
    )


def kl_div(descriptor: Any, arguments: Mapping[str, Any]) -> None:
    """The loss, on the current stream of the arguments' device."""
    x, t, loss = arguments["input"], arguments["target"], arguments["loss"]
    n, shape, log_target = x.numel(), descriptor.shape, descriptor.log_target
    if descriptor.reduction == "none":
        if n:
            strides = (x.stride(), t.stride(), loss.stride())
            _elements("kl_terms", n, (), shape, strides, (log_target,), (x.dtype, architecture(x)))(x, t, loss)
        return
    share = divisor(descriptor.reduction, shape)
    if n == 0:
        loss.fill_(0.0 if share else float("nan"))
        return
    wide = x.dtype == torch.float64
    fixed = (log_target, wide, processors(x), (x.dtype, architecture(x)))
    found = _sum(n, share, shape, (x.stride(), t.stride()), *fixed)
    keys = torch.empty(found.chunks, dtype=torch.int64 if wide else torch.int32, device=x.device)
    words = torch.empty(found.chunks * found.words, dtype=torch.int64, device=x.device)
    found.keys(x, t, keys)
    found.parts(x, t, keys, words)
    found.finish(keys, words, loss)


def kl_div_backward(descriptor: Any, arguments: Mapping[str, Any]) -> None:
    """The gradient, on the current stream of the arguments' device."""
    g, x, t, dx = (arguments[name] for name in ("dloss", "input", "target", "dx"))
    if dx.numel() == 0:
        return
    share = 1 if descriptor.reduction == "none" else divisor(descriptor.reduction, descriptor.shape)
    strides = (g.expand(descriptor.shape).stride(), x.stride(), t.stride(), dx.stride())
    flags = (descriptor.log_target, descriptor.wrt == "input")
    fixed = (dx.numel(), (share,), descriptor.shape, strides, flags, (x.dtype, architecture(x)))
    _elements("kl_gradient", *fixed)(g, x, t, dx)


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
