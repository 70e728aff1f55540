"""How the gather family's Triton kernels are configured and launched, on torch tensors of one device.

The rules pick variants from shape, dtype and architecture; nothing is timed at run time, and no choice changes a bit.
Types of 16 bits take the portable conversions, since NVIDIA's packed ones want two elements a thread.
Scratch memory comes from torch's allocator.
"""

import functools
import math
from typing import Any, NamedTuple

import torch

from isograd import faults
from isograd.gather import triton_groups, triton_kernels
from isograd.triton_launcher import (
    Specification,
    architecture,
    c_strides,
    launch,
    power_of_two,
    processors,
    rows,
)

_SHORT_SUM = 1 << 17  # terms whose integer parts add up in one word each
_COMPARED = 64  # sources of a row that are compared with one another
_UNIQUE = 1024  # and that may be stored at once where they are distinct
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
        return min(inner, 1024 // k), k
    rows_ = min(inner, 128)
    k = min(k, 1024 // rows_)
    return min(inner, 1024 // k), k


def _take(shape: _Shape, n: int, axis: int, strides: tuple[_Shape, ...], code: int, negative: bool) -> Specification:
    problem = rows(shape, [*strides, c_strides(shape)], axis)
    k = shape[axis]
    per_program, block = _tile(k, problem.inner, problem.axis_strides[2] == 1)
    tail = (n, k, problem.inner, code, *problem.strides, per_program, block, negative)
    return Specification(tail, problem.outer * -(-problem.inner // per_program) * -(-k // block))


def take_along_axis(
    x: torch.Tensor,
    indices: torch.Tensor,
    out: torch.Tensor,
    axis: int,
    operation: str = "take_along_axis",
    negative: bool = True,
) -> None:
    """out[.., j, ..] = x[.., indices[.., j, ..], ..] along `axis`; NaN and a fault where an index is out of range."""
    if out.numel() == 0:
        return
    strides = (x.stride(), indices.stride(), out.stride())
    code = faults.code(operation, "indices", negative)
    tensors = (x, indices, out, faults.flag(out.device))
    launch(triton_kernels.take, tensors, _take, tuple(out.shape), x.shape[axis], axis, strides, code, negative)
    faults.after_launch(out.device)


class ScatterConfiguration(NamedTuple):
    """How `scatter_rows` is launched: rows a program, columns of one store, warps, whether it fills the output."""

    rows: int
    block: int
    warps: int
    fill: bool


def scatter_configuration(
    k: int, n: int, inner: int, programs: int, itemsize: int, unique: bool, arch: int, multiprocessors: int
) -> ScatterConfiguration | None:
    """The variant for rows of n elements with k sources each, None where atomics serve them.

    inner: neighbours on the inner axis; programs: rows in all.
    """
    k = power_of_two(k)
    if k > (_UNIQUE if unique else _COMPARED):
        return None
    most = 1024 if itemsize == 8 else 2048
    pairs = most // k if unique else most // (k * k)
    count = min(power_of_two(inner), max(pairs, 1), 32)
    warps = 4 if count * k * (1 if unique else k) >= 128 or count * n >= 1024 else 1
    # Few programs would fill a long row slowly. AMD's barrier does not order stores to memory.
    fill = arch > 0 and (count * n * itemsize <= 1 << 16 or programs >= 4 * count * multiprocessors)
    return ScatterConfiguration(count, min(power_of_two(n), max(4096 // count, 1)), warps, fill)


def _scatter_problem(shape: _Shape, axis: int, k: int, strides: tuple[_Shape, ...]) -> Any:
    sources = (*shape[:axis], k, *shape[axis + 1 :])
    return rows(shape, [*strides[:2], c_strides(sources), *strides[2:]], axis)


def _scatter_rows(
    shape: _Shape,
    k: int,
    axis: int,
    strides: tuple[_Shape, ...],
    code: int,
    negative: bool,
    has_x: bool,
    unique: bool,
    native: bool,
    config: ScatterConfiguration,
) -> Specification:
    problem = _scatter_problem(shape, axis, k, strides)
    size, block, warps, fill = config
    fixed = (size, power_of_two(k), block, has_x, fill, unique, negative, native)
    tail = (shape[axis], k, problem.inner, code, *problem.strides, *fixed)
    return Specification(tail, problem.outer * -(-problem.inner // size), warps)


def _scatter_sources(
    shape: _Shape, k: int, axis: int, strides: tuple[_Shape, ...], words: int, code: int, negative: bool, native: bool
) -> Specification:
    """`scatter_keys` (words 0) or `scatter_words`."""
    problem = _scatter_problem(shape, axis, k, strides)
    per_program, block = _tile(k, problem.inner, problem.axis_strides[0] == 1)
    axis_inner = [v for pair in zip(problem.axis_strides, problem.inner_strides, strict=True) for v in pair]
    if words:
        used, extra = 2, (math.prod(shape),)
    else:
        used, extra = 3, (code,)
    last = (per_program, block, words, negative, native) if words else (per_program, block, negative, native)
    strides_ = (*axis_inner[: 2 * used], problem.outer_shape, *problem.outer_strides[:used])
    tail = (shape[axis], k, problem.inner, *extra, *strides_, *last)
    return Specification(tail, problem.outer * -(-problem.inner // per_program) * -(-k // block))


def _scatter_finish(
    shape: _Shape, k: int, axis: int, strides: tuple[_Shape, ...], words: int, has_x: bool, native: bool
) -> Specification:
    problem = _scatter_problem(shape, axis, k, strides)
    n = shape[axis]
    per_program, block = _tile(n, problem.inner, problem.axis_strides[4] == 1)
    axis_inner = [v for pair in zip(problem.axis_strides, problem.inner_strides, strict=True) for v in pair]
    strides_ = (*axis_inner[6:], problem.outer_shape, *problem.outer_strides[3:])
    tail = (n, problem.inner, math.prod(shape), *strides_, per_program, block, words, has_x, native)
    return Specification(tail, problem.outer * -(-problem.inner // per_program) * -(-n // block))


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
    """out = zeros or x, plus the sum of values[.., j, ..] with indices[.., j, ..] == i in out[.., i, ..].

    `out` may be `x`. `unique` promises distinct indices along the axis. `config` and `atomics` override the rule.
    """
    if out.numel() == 0 and indices.numel() == 0:
        return
    base = out if x is None else x
    if indices.numel() == 0:
        out.zero_() if x is None else out.copy_(x)
        return
    shape, k, arch = tuple(out.shape), indices.shape[axis], architecture(out)
    strides = (indices.stride(), values.stride(), base.stride(), out.stride())
    code, flag = faults.code(operation, "indices", negative), faults.flag(out.device)
    native, has_x = arch >= 90 and out.element_size() > 2, x is not None
    if config is None and not atomics:
        config = _chosen(shape, k, axis, strides, out.element_size(), unique, arch, processors(out))
    if config is None:
        _scatter_with_atomics(indices, values, base, out, axis, strides, (has_x, native, code, negative), flag)
    else:
        in_place = has_x and base.data_ptr() == out.data_ptr()
        if not config.fill and not in_place:
            out.zero_() if x is None else out.copy_(x)
        config = config._replace(fill=config.fill and not in_place)
        tensors = (indices, values, base, out, flag)
        key = (shape, k, axis, strides, code, negative, has_x, unique, native, config)
        launch(triton_kernels.scatter_rows, tensors, _scatter_rows, *key)
    faults.after_launch(out.device)


@functools.lru_cache(maxsize=4096)
def _chosen(
    shape: _Shape,
    k: int,
    axis: int,
    strides: tuple[_Shape, ...],
    itemsize: int,
    unique: bool,
    arch: int,
    multiprocessors: int,
) -> ScatterConfiguration | None:
    problem = _scatter_problem(shape, axis, k, strides)
    programs = problem.outer * problem.inner
    return scatter_configuration(k, shape[axis], problem.inner, programs, itemsize, unique, arch, multiprocessors)


def _scatter_with_atomics(
    indices: torch.Tensor,
    values: torch.Tensor,
    base: torch.Tensor,
    out: torch.Tensor,
    axis: int,
    strides: tuple[_Shape, ...],
    fixed: tuple[bool, bool, int, bool],
    flag: torch.Tensor,
) -> None:
    has_x, native, code, negative = fixed
    shape, k = tuple(out.shape), indices.shape[axis]
    key_type, words = _work(out.dtype)
    words *= 2 if k > _SHORT_SUM else 1
    keys = torch.zeros(out.numel(), dtype=key_type, device=out.device)
    parts = torch.zeros(words * out.numel(), dtype=torch.int64, device=out.device)
    problem = (shape, k, axis, strides)
    tensors = (indices, values, keys, flag)
    launch(triton_kernels.scatter_keys, tensors, _scatter_sources, *problem, 0, code, negative, native)
    tensors = (indices, values, keys, parts)
    launch(triton_kernels.scatter_words, tensors, _scatter_sources, *problem, words, 0, negative, native)
    launch(triton_kernels.scatter_finish, (keys, parts, base, out), _scatter_finish, *problem, words, has_x, native)


# --- whole rows ------------------------------------------------------------------------------------------------------
class SumConfiguration(NamedTuple):
    """How `index_sum` is launched.

    copy_rows, copy_warps, sum_rows, sum_warps: destinations and warps of a program of `group_copy` and `group_sum`;
    block: their columns. hot_rows, hot_block: sources and columns of a tile of a hot chunk. spread: programs for each
    multiprocessor that share a list.
    """

    copy_rows: int
    copy_warps: int
    sum_rows: int
    sum_warps: int
    block: int
    hot_rows: int
    hot_block: int
    spread: int = 4


def sum_configuration(num: int, width: int, itemsize: int) -> SumConfiguration:
    """The tiles for rows of `width` elements."""
    columns, work = power_of_two(width), max(itemsize, 4)
    block = min(columns, 4096 // work)
    hot_block = min(columns, 1024 // work)
    copy_rows = min(power_of_two(num), max(8192 // work // block, 1))
    sum_rows = max(4096 // work // block, 1)
    return SumConfiguration(copy_rows, 4, sum_rows, 4, block, 8192 // work // hot_block, hot_block)


def _matrix(t: torch.Tensor, count: int) -> torch.Tensor:
    """A tensor as a matrix of `count` rows, copied only where strides do not allow a view."""
    return t.reshape(count, t.numel() // count if count else math.prod(t.shape[1:]))


def _select(
    num: int, count: int, width: int, code: int, strides: _Shape, itemsize: int, negative: bool
) -> Specification:
    block = min(power_of_two(width), 4096 // itemsize)
    per_program = min(power_of_two(count), max(8192 // itemsize // block, 1))
    tail = (num, count, width, code, *strides, per_program, block, negative)
    return Specification(tail, -(-count // per_program) * -(-width // block))


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
    flat = indices.reshape(-1)
    result, source = _matrix(out, flat.numel()), _matrix(weight, weight.shape[0])
    code = faults.code(operation, argument, negative)
    strides = (*source.stride(), *result.stride())
    key = (weight.shape[0], flat.numel(), result.shape[1], code, strides, out.element_size(), negative)
    launch(triton_groups.select, (source, flat.contiguous(), result, faults.flag(out.device)), _select, *key)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.reshape(out.shape))
    faults.after_launch(out.device)


class _Sum(NamedTuple):
    """Everything that fixes the kernels of an index_sum."""

    num: int
    count: int
    width: int
    index_stride: int
    strides: _Shape
    skipped: int | None
    negative: bool
    code: int
    has_x: bool
    in_place: bool
    words: int
    native: bool
    multiprocessors: int
    config: SumConfiguration

    @property
    def hots(self) -> bool:
        """Whether a destination can be hot."""
        return self.count > triton_groups.HOT.value

    @property
    def hot_size(self) -> int:
        """Words of scratch memory of a hot destination."""
        return (self.words + 1) * self.width + -(-self.width // self.config.hot_block)

    @property
    def programs(self) -> int:
        """Programs that share a list."""
        return self.config.spread * self.multiprocessors

    @property
    def most_chunks(self) -> int:
        """The most chunks that hot destinations can have."""
        return 2 * self.count // triton_groups.CHUNK.value + 1

    @property
    def index_arguments(self) -> tuple[int, int]:
        """(stride of the indices, the index to leave out)."""
        return self.index_stride, 0 if self.skipped is None else self.skipped


_BLOCK = 256  # sources or, times four, destinations of a program that groups


def _count(p: _Sum) -> Specification:
    fixed = (_BLOCK, p.skipped is not None, p.negative)
    return Specification((p.num, p.count, *p.index_arguments, p.code, *fixed), -(-p.count // _BLOCK))


def _allocate(p: _Sum) -> Specification:
    return Specification((p.num, p.count, 4 * _BLOCK, p.hots), max(-(-p.num // (4 * _BLOCK)), 1))


def _place(p: _Sum) -> Specification:
    programs = -(-p.count // _BLOCK)
    fixed = (_BLOCK, p.hots, p.skipped is not None, p.negative)
    return Specification((p.num, p.count, *p.index_arguments, p.hot_size, programs, *fixed), programs)


def _copy(p: _Sum) -> Specification:
    config = p.config
    programs = max(-(-p.num // config.copy_rows) * -(-p.width // config.block), 1)
    sizes = (p.num, p.count, p.width, programs, p.programs, p.hot_size)
    tiles = (config.copy_rows, config.block, config.hot_rows, config.hot_block)
    tail = (*sizes, *p.strides, *tiles, p.words, p.hots, p.has_x, p.in_place, p.native)
    return Specification(tail, programs + (p.programs if p.hots else 0), config.copy_warps)


def _sum(p: _Sum) -> Specification:
    config = p.config
    sizes = (p.num, p.count, p.width, p.programs, p.hot_size)
    tiles = (config.sum_rows, config.block, config.hot_rows, config.hot_block)
    tail = (*sizes, *p.strides, *tiles, p.words, p.hots, p.has_x, p.native)
    return Specification(tail, p.programs, config.sum_warps)


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
    """out (num, *rest) = zeros or x, plus the sum of values[s] with indices[s] == d in out[d].

    indices: any shape; values: (*indices.shape, *rest). `out` may be `x`. Sources whose index equals `skipped` are left out. `config` overrides the
    rule.
    """
    if out.numel() == 0 and (indices.numel() == 0 or values.numel() == 0):
        return
    if values.numel() == 0:
        out.zero_() if x is None else out.copy_(x)
        return
    num, count, indices = out.shape[0], indices.numel(), indices.reshape(-1)
    result, source = _matrix(out, num), _matrix(values, count)
    base = result if x is None else _matrix(x, num)
    width = source.shape[1]
    key_type, words = _work(out.dtype)
    words *= 2 if count > _SHORT_SUM else 1
    problem = _Sum(
        num,
        count,
        width,
        indices.stride(0),
        (*source.stride(), *base.stride(), *result.stride()),
        skipped,
        negative,
        faults.code(operation, argument, negative),
        x is not None,
        x is not None and base.data_ptr() == result.data_ptr(),
        words,
        architecture(out) >= 90 and out.element_size() > 2,
        processors(out),
        config or sum_configuration(num, width, out.element_size()),
    )
    counters = triton_groups.COUNTERS.value
    size = counters + 5 * num + 2 * count + problem.most_chunks + 3 * (count // 2 + 1)
    kind = torch.int32 if size < 1 << 31 else torch.int64
    scratch = torch.empty(size, dtype=kind, device=out.device)
    scratch[: counters + num].zero_()
    hot = scratch
    if problem.hots:
        most_hot = count // (triton_groups.HOT.value + 1)
        hot = torch.empty(most_hot * problem.hot_size, dtype=torch.int64, device=out.device)
    launch(triton_groups.group_count, (indices, scratch, faults.flag(out.device)), _count, problem)
    launch(triton_groups.group_allocate, (scratch,), _allocate, problem)
    launch(triton_groups.group_place, (indices, scratch, hot), _place, problem)
    operands = (source, base, result, scratch, hot)
    launch(triton_groups.group_copy, operands, _copy, problem)
    launch(triton_groups.group_sum, operands, _sum, problem)
    if result.data_ptr() != out.data_ptr():
        out.copy_(result.reshape(out.shape))
    faults.after_launch(out.device)
