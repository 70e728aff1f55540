"""How the gather family's Triton kernels are configured and launched, on torch tensors of one device.

The rules pick variants from shape, dtype and architecture; nothing is timed at run time, and no choice changes a bit.
Types of 16 bits take the portable conversions, since NVIDIA's packed ones want two elements a thread.
Scratch memory comes from torch's allocator.
"""

import math
from typing import Any, NamedTuple

import torch

from isograd.core import faults
from isograd.devices.triton_launcher import (
    Launcher,
    Rows,
    Specification,
    architecture,
    c_strides,
    kept,
    power_of_two,
    processors,
    rows,
)
from isograd.gather import triton_groups, triton_kernels

_SHORT_SUM = 1 << 17  # terms whose integer parts add up in one word each
_FEW = 8  # sources of a row that one thread compares with one another; half as many doubles
_COMPARED = 64  # sources of a row that are compared as a tile of pairs
_UNIQUE = 1024  # sources of a row that may be stored at once where they are distinct
_Shape = tuple[int, ...]


def _work(dtype: torch.dtype) -> tuple[torch.dtype, int]:
    """(type of keys, words of a short sum)."""
    return (torch.int64, 2) if dtype == torch.float64 else (torch.int32, 1)


# --- along an axis ---------------------------------------------------------------------------------------------------
def _tile(k: int, inner: int, along: bool) -> tuple[int, int]:
    """(rows, elements of each) of a program of 1,024 elements; `along` says that the elements are neighbours."""
    k, inner = power_of_two(k), power_of_two(inner)
    if along:
        k = min(k, 1024)
        return 1024 // k, k
    rows_ = min(inner, 128)
    k = min(k, 1024 // rows_)
    return min(inner, 1024 // k), k


@kept
def _take(
    shape: _Shape, n: int, axis: int, strides: tuple[_Shape, ...], types: Any, code: int, negative: bool
) -> Launcher:
    problem = rows(shape, [*strides, c_strides(shape)], axis)
    k = shape[axis]
    per_program, block = _tile(k, problem.inner, problem.axis_strides[2] == 1)
    tail = (n, k, problem.inner, code, *problem.strides, per_program, block, negative)
    programs = problem.outer * -(-problem.inner // per_program) * -(-k // block)
    return Launcher(triton_kernels.take, Specification(tail, programs, free=_free(problem, 2)))


def _free(problem: Rows, written: int) -> tuple[str, ...]:
    """The number of rows, where the elements of each are neighbours in the tensor of this number."""
    return ("inner",) if problem.axis_strides[written] == 1 else ()


def take_along_axis(
    x: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    axis: int,
    operation: str = "take_along_axis",
    negative: bool = True,
) -> None:
    """Compute out[.., j, ..] = x[.., indices[.., j, ..], ..]; NaN and a fault where an index is out of range."""
    if out.numel() == 0:
        return
    device = out.device
    strides = (x.stride(), indices.stride(), out.stride())
    types = (x.dtype, indices.dtype)
    code = faults.code(operation, "indices", negative)
    take = _take(out.shape, x.shape[axis], axis, strides, types, code, negative)
    take(x, indices, out, faults.flag(device))
    faults.after_launch(device)


class ScatterConfiguration(NamedTuple):
    """How scatter sums with few sources are launched.

    variant: "few" (a thread compares the sources of its row) or "pairs" (a tile of pairs). rows: of a program. block:
    columns of one store. fill: whether the kernel fills the output.
    """

    variant: str
    rows: int
    block: int
    warps: int
    fill: bool


def scatter_configuration(
    k: int,
    n: int,
    inner: int,
    count: int,
    itemsize: int,
    unique: bool,
    has_x: bool,
    arch: int,
    multiprocessors: int,
    along: bool = False,
) -> ScatterConfiguration | None:
    """The variant for rows of n elements with k sources each, None where atomics serve them.

    inner: neighbours on the inner axis; count: rows in all; along: whether a row's sources are neighbours in memory.
    """
    k = power_of_two(k)
    if k > (_UNIQUE if unique else _COMPARED):
        return None
    if k <= (_FEW // 2 if itemsize == 8 else _FEW):
        variant, size = "few", 32
    else:
        most = 1024 if itemsize == 8 else 2048
        variant, size = "pairs", max(most // k if unique else most // (k * k), 1)
    size = size if along else min(power_of_two(inner), size)
    warps = 4 if variant == "pairs" else 2  # more threads than rows: they fill the output
    # Few programs would fill a long row slowly. AMD's barrier does not order stores to memory.
    fill = arch > 0 and (size * n * itemsize <= 1 << 16 or count >= 4 * size * multiprocessors)
    block = (1024 if has_x else 4096) // size  # what is copied passes through registers
    return ScatterConfiguration(variant, size, min(power_of_two(n), max(block, 1)), warps, fill)


class _Scatter(NamedTuple):
    """Everything that fixes the kernels of a scatter sum; strides of indices, values, x and out."""

    shape: _Shape
    k: int
    axis: int
    strides: tuple[_Shape, ...]
    types: Any
    code: int
    negative: bool
    unique: bool
    has_x: bool
    in_place: bool
    arch: int
    multiprocessors: int
    config: ScatterConfiguration | None
    atomics: bool
    short_sum: int


class _ScatterKernels(NamedTuple):
    """One kernel and whether it fills the output, or three and the words of a sum."""

    launchers: tuple[Launcher, ...]
    fills: bool
    words: int


@kept
def _scatter(p: _Scatter) -> _ScatterKernels:
    sources = (*p.shape[: p.axis], p.k, *p.shape[p.axis + 1 :])
    problem = rows(p.shape, [*p.strides[:2], c_strides(sources), *p.strides[2:]], p.axis)
    itemsize, n = p.types[0].itemsize, p.shape[p.axis]
    native, config = p.arch >= 90 and itemsize > 2, p.config
    if config is None and not p.atomics:
        count = problem.outer * problem.inner
        machine = (p.arch, p.multiprocessors)
        along = problem.axis_strides[1] == 1
        config = scatter_configuration(p.k, n, problem.inner, count, itemsize, p.unique, p.has_x, *machine, along)
    if config is None:
        return _scatter_with_atomics(p, problem, native)
    fills = config.fill and not p.in_place
    kernel = triton_kernels.scatter_few if config.variant == "few" else triton_kernels.scatter_pairs
    narrow = n < 1 << 31
    fixed = (config.rows, power_of_two(p.k), config.block, p.has_x, fills, p.unique, narrow, p.negative, native)
    tail = (n, p.k, problem.inner, p.code, *problem.strides, *fixed)
    programs = problem.outer * -(-problem.inner // config.rows)
    specification = Specification(tail, programs, config.warps, free=_free(problem, 1))
    return _ScatterKernels((Launcher(kernel, specification),), fills, 0)


def _scatter_with_atomics(p: _Scatter, problem: Rows, native: bool) -> _ScatterKernels:
    n, k = p.shape[p.axis], p.k
    _, words = _work(p.types[0])
    words *= 2 if k > p.short_sum else 1
    steps = [v for pair in zip(problem.axis_strides, problem.inner_strides, strict=True) for v in pair]
    outer = problem.outer_strides
    per_program, block = _tile(k, problem.inner, problem.axis_strides[0] == 1)
    programs = problem.outer * -(-problem.inner // per_program) * -(-k // block)
    fixed = (p.negative, native)
    crowded = k > 4 * n  # a look at the key before the atomic saves most of them
    keys = (n, k, problem.inner, p.code, *steps[:6], problem.outer_shape, *outer[:3], per_program, block, crowded)
    sizes = (n, k, problem.inner, math.prod(p.shape))
    add = (*sizes, *steps[:4], problem.outer_shape, *outer[:2], per_program, block, words)
    launchers = [
        Launcher(triton_kernels.scatter_keys, Specification((*keys, *fixed), programs)),
        Launcher(triton_kernels.scatter_words, Specification((*add, *fixed), programs)),
    ]
    per_program, block = _tile(n, problem.inner, problem.axis_strides[4] == 1)
    programs = problem.outer * -(-problem.inner // per_program) * -(-n // block)
    tail = (n, problem.inner, math.prod(p.shape), *steps[6:], problem.outer_shape, *outer[3:], per_program, block)
    finish = Specification((*tail, words, p.has_x, native), max(programs, 1))
    return _ScatterKernels((*launchers, Launcher(triton_kernels.scatter_finish, finish)), True, words)


def scatter_sum(
    indices: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    axis: int,
    x: torch.Tensor | None = None,
    unique: bool = False,
    operation: str = "scatter_sum",
    negative: bool = True,
    config: ScatterConfiguration | None = None,
    atomics: bool = False,
) -> None:
    """Compute out = zeros or x, plus the sum of values[.., j, ..] with indices[.., j, ..] == i in out[.., i, ..].

    `out` may be `x`. `unique` promises distinct indices along the axis. `config` and `atomics` override the rule.
    """
    if indices.numel() == 0:
        _fill(out, x)
        return
    base, device = out if x is None else x, out.device
    in_place = x is not None and x.data_ptr() == out.data_ptr()
    strides = (indices.stride(), values.stride(), base.stride(), out.stride())
    problem = _Scatter(
        out.shape,
        indices.shape[axis],
        axis,
        strides,
        (out.dtype, indices.dtype),
        faults.code(operation, "indices", negative),
        negative,
        unique,
        x is not None,
        in_place,
        architecture(out),
        processors(out),
        config,
        atomics,
        _SHORT_SUM,
    )
    launchers, fills, words = _scatter(problem)
    if not fills and not in_place:
        _fill(out, x)
    if not words:
        launchers[0](indices, values, base, out, faults.flag(device))
    else:
        keys = torch.zeros(out.numel(), dtype=_work(out.dtype)[0], device=device)
        parts = torch.zeros(words * out.numel(), dtype=torch.int64, device=device)
        find, add, finish = launchers
        find(indices, values, keys, faults.flag(device))
        add(indices, values, keys, parts)
        finish(keys, parts, base, out)
    faults.after_launch(device)


def _fill(out: torch.Tensor, x: torch.Tensor | None) -> None:
    if x is None:
        out.zero_()
    elif x.data_ptr() != out.data_ptr():
        out.copy_(x)


# --- whole rows ------------------------------------------------------------------------------------------------------
class SumConfiguration(NamedTuple):
    """How `index_sum` is launched.

    copy_rows, copy_warps, sum_rows, sum_warps: destinations and warps of a program of `group_copy` and `group_sum`;
    block: their columns. hot_rows, hot_block, stages: sources and columns of a tile of a hot chunk, and tiles on their
    way. spread: programs for each multiprocessor that share a list.
    """

    copy_rows: int
    copy_warps: int
    sum_rows: int
    sum_warps: int
    block: int
    hot_rows: int
    hot_block: int
    spread: int = 5
    stages: int = 3


def sum_configuration(num: int, width: int, itemsize: int) -> SumConfiguration:
    """The tiles for rows of `width` elements."""
    columns, work = power_of_two(width), max(itemsize, 4)
    block = min(columns, 4096 // work)
    hot_block = min(columns, 1024 // work)
    copy_rows = min(power_of_two(num), max(8192 // work // block, 1))
    sum_rows = max(4096 // work // block, 1)
    hot_rows = min(4096 // work // hot_block, triton_groups.CHUNK.value)
    return SumConfiguration(copy_rows, 4, sum_rows, 4, block, hot_rows, hot_block)


def _matrix(t: torch.Tensor, count: int) -> torch.Tensor:
    """A tensor as a matrix of `count` rows, copied only where strides do not allow a view."""
    if t.dim() == 2:
        return t
    return t.reshape(count, t.numel() // count if count else math.prod(t.shape[1:]))


@kept
def _select(num: int, count: int, width: int, code: int, strides: _Shape, types: Any, negative: bool) -> Launcher:
    itemsize = types[0].itemsize
    block = min(power_of_two(width), 4096 // itemsize)
    per_program = max(8192 // itemsize // block, 1)
    tail = (num, count, width, code, *strides, per_program, block, negative)
    return Launcher(
        triton_groups.select, Specification(tail, -(-count // per_program) * -(-width // block), free=("num", "count"))
    )


def index_select(
    weight: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    operation: str = "index_select",
    argument: str = "indices",
    negative: bool = True,
) -> None:
    """Rows of `weight` (num, *rest) at indices of any shape into `out` (*indices.shape, *rest)."""
    if out.numel() == 0:
        return
    device, num, count = out.device, weight.shape[0], indices.numel()
    flat = indices.reshape(-1).contiguous()
    result, source = out.reshape(count, out.numel() // count), _matrix(weight, num)
    code = faults.code(operation, argument, negative)
    strides = (*source.stride(), *result.stride())
    select = _select(num, count, result.shape[1], code, strides, (out.dtype, indices.dtype), negative)
    select(source, flat, result, faults.flag(device))
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.reshape(out.shape))
    faults.after_launch(device)


class _Sum(NamedTuple):
    """Everything that fixes the kernels of an index_sum; strides of values, x and out as matrices."""

    num: int
    sources: int
    width: int
    index_stride: int
    strides: _Shape
    types: Any
    skipped: int | None
    negative: bool
    code: int
    has_x: bool
    in_place: bool
    arch: int
    multiprocessors: int
    config: SumConfiguration | None
    short_sum: int


class _SumKernels(NamedTuple):
    """The kernels in their order and the sizes of the scratch memories."""

    launchers: tuple[Launcher, ...]
    scratch: int
    scratch_type: torch.dtype
    hot: int


_COUNTED = 64  # sources of a program that counts; it compares them in pairs
_BLOCK = 256  # sources or, times four, destinations of the other programs that group


@kept
def _sum(p: _Sum) -> _SumKernels:
    num, count, width, groups = p.num, p.sources, p.width, triton_groups
    itemsize = p.types[0].itemsize
    config = p.config or sum_configuration(num, width, itemsize)
    native = p.arch >= 90 and itemsize > 2
    words = _work(p.types[0])[1] * (2 if count > p.short_sum else 1)
    hots = count > groups.HOT.value
    hot_size = (words + 1) * width + -(-width // config.hot_block)
    programs = config.spread * p.multiprocessors
    places = -(-count // _BLOCK)
    skips = p.skipped is not None
    index = (num, count, p.index_stride, p.skipped if skips else 0)
    copies = max(-(-num // config.copy_rows) * -(-width // config.block), 1)
    tiles = (config.block, config.hot_rows, config.hot_block, config.stages, words, hots, p.has_x)
    sizes = (num, count, width)
    copy = (*sizes, programs if hots else 0, hot_size, *p.strides, config.copy_rows, *tiles)
    add = (*sizes, programs, hot_size, *p.strides, config.sum_rows, *tiles)
    specifications = (
        (groups.group_count, Specification((*index, p.code, _COUNTED, skips, p.negative), -(-count // _COUNTED), 2)),
        (groups.group_allocate, Specification((num, count, 4 * _BLOCK, hots), max(-(-num // (4 * _BLOCK)), 1))),
        (groups.group_place, Specification((*index, hot_size, places, _BLOCK, hots, skips, p.negative), places)),
        (
            groups.group_copy,
            Specification((*copy, p.in_place, native), copies + (programs if hots else 0), config.copy_warps),
        ),
        (groups.group_sum, Specification((*add, native), programs, config.sum_warps)),
    )
    scratch = groups.COUNTERS.value + 5 * num + 2 * count + 2 * count // groups.CHUNK.value + 1 + 3 * (count // 2 + 1)
    kind = torch.int32 if scratch < 1 << 31 else torch.int64
    hot = count // (groups.HOT.value + 1) * hot_size if hots else 0
    vary = ("num", "count", "hot_size", "programs", "hot_programs")
    launchers = [
        Launcher(kernel, s._replace(free=tuple([name for name in vary if name in kernel.arg_names])))
        for kernel, s in specifications
    ]
    return _SumKernels(tuple(launchers), scratch, kind, hot)


def index_sum(
    indices: torch.Tensor,
    values: torch.Tensor,
    out: torch.Tensor,
    x: torch.Tensor | None = None,
    skipped: int | None = None,
    operation: str = "index_sum",
    argument: str = "indices",
    negative: bool = True,
    config: SumConfiguration | None = None,
) -> None:
    """Compute out (num, *rest) = zeros or x, plus the sum of values[s] with indices[s] == d in out[d].

    indices: any shape; values: (*indices.shape, *rest). `out` may be `x`. Sources whose index equals `skipped` are left
    out. `config` overrides the rule.
    """
    if values.numel() == 0:
        _fill(out, x)
        return
    device, num, count = out.device, out.shape[0], indices.numel()
    flat = indices if indices.dim() == 1 else indices.reshape(-1)
    result, source = _matrix(out, num), values.reshape(count, values.numel() // count)
    base = result if x is None else _matrix(x, num)
    problem = _Sum(
        num,
        count,
        source.shape[1],
        flat.stride(0),
        (*source.stride(), *base.stride(), *result.stride()),
        (out.dtype, indices.dtype),
        skipped,
        negative,
        faults.code(operation, argument, negative),
        x is not None,
        x is not None and base.data_ptr() == result.data_ptr(),
        architecture(out),
        processors(out),
        config,
        _SHORT_SUM,
    )
    launchers, size, kind, hot_size = _sum(problem)
    scratch = torch.zeros(size, dtype=kind, device=device)
    flag = faults.flag(device)
    hot = torch.empty(hot_size, dtype=torch.int64, device=device) if hot_size else flag  # never looked at
    group_count, group_allocate, group_place, group_copy, group_sum = launchers
    group_count(flat, scratch, flag)
    group_allocate(scratch)
    group_place(flat, scratch, hot)
    group_copy(source, base, result, scratch, hot)
    group_sum(source, base, result, scratch, hot)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.reshape(out.shape))
    faults.after_launch(device)
