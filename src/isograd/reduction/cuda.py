"""sum and mean over any axes of torch tensors on a GPU, with the bits of `isograd.reduction`."""

import math
from typing import Any, NamedTuple

import torch

from isograd.errors import UnsupportedError
from isograd.reduction import triton_kernels
from isograd.reduction.axes import Axes, normalized
from isograd.triton_launcher import (
    Rows,
    Specification,
    architecture,
    launch,
    merged,
    power_of_two,
    processors,
    rows,
)

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ELEMENTS = 2048  # of a tile
_HELD = 8192  # elements of a row that one program holds
_LONGEST = 1 << 16  # elements of a row that one program adds up
_SHORT_SUM = 1 << 17  # terms whose integer parts add up in one word each
_MOST_CHUNKS = 512


class Configuration(NamedTuple):
    """How a sum is launched: rows and columns of a tile, chunks a row, warps. One chunk: `sum_rows`."""

    rows: int
    block: int
    chunks: int
    warps: int


class _Problem(NamedTuple):
    n: int
    rows: Rows
    mean: bool
    native: bool
    words: int
    config: Configuration

    @property
    def count(self) -> int:
        return self.rows.outer * self.rows.inner

    @property
    def length(self) -> int:
        """Elements of a chunk, whole tiles."""
        block = self.config.block
        return -(-(-(-self.n // self.config.chunks)) // block) * block

    @property
    def programs(self) -> int:
        return self.rows.outer * -(-self.rows.inner // self.config.rows)


def configuration(n: int, inner: int, outer: int, contiguous: bool, multiprocessors: int) -> Configuration:
    """The tiles for `outer * inner` rows of n elements; `contiguous` says that a row's elements are neighbours."""
    whole = power_of_two(n)
    if contiguous:
        block = min(whole, _HELD)
        per_program = min(power_of_two(inner), max(_ELEMENTS // block, 1))
    else:
        per_program = min(power_of_two(inner), 64)
        block = min(whole, _ELEMENTS // per_program)
    programs = outer * -(-inner // per_program)
    if n <= _HELD or (n <= _LONGEST and programs >= 2 * multiprocessors):
        return Configuration(per_program, block, 1, min(max(per_program * block // 512, 1), 8))
    block = min(block, max(_ELEMENTS // per_program, 1))
    wanted = max(-(-4 * multiprocessors // programs), 1)
    chunks = min(wanted, -(-n // block), _MOST_CHUNKS)
    return Configuration(per_program, block, max(chunks, 2), 4)


def _sum_rows(p: _Problem) -> Specification:
    config = p.config
    tail = (p.n, p.rows.inner, *p.rows.strides, config.rows, config.block, p.n <= config.block, p.mean, p.native)
    return Specification(tail, p.programs, config.warps)


def _input(p: _Problem) -> tuple[Any, ...]:
    """What keys and parts know of the input."""
    sizes = (p.n, p.rows.inner, p.config.chunks, p.length, p.count)
    strides = (p.rows.axis_strides[0], p.rows.inner_strides[0], p.rows.outer_shape, p.rows.outer_strides[0])
    return (*sizes, *strides, p.config.rows, p.config.block)


def _sum_keys(p: _Problem) -> Specification:
    return Specification((*_input(p), p.native), p.programs * p.config.chunks, p.config.warps)


def _sum_parts(p: _Problem) -> Specification:
    tail = (*_input(p), power_of_two(p.config.chunks), p.words, p.native)
    return Specification(tail, p.programs * p.config.chunks, p.config.warps)


def _sum_finish(p: _Problem) -> Specification:
    chunks = power_of_two(p.config.chunks)
    per_program = min(power_of_two(p.rows.inner), max(_ELEMENTS // chunks, 1))
    sizes = (p.n, p.rows.inner, p.config.chunks, p.count)
    strides = (p.rows.axis_strides[1], p.rows.inner_strides[1], p.rows.outer_shape, p.rows.outer_strides[1])
    tail = (*sizes, *strides, per_program, chunks, p.words, p.mean, p.native)
    return Specification(tail, p.rows.outer * -(-p.rows.inner // per_program))


def _reduce(operation: str, x: torch.Tensor, axis: Axes, keepdims: bool, config: Configuration | None) -> torch.Tensor:
    if x.dtype not in _FLOATS:
        raise UnsupportedError(f"{operation}: x has dtype {x.dtype}; accepted: float16, bfloat16, float32, float64")
    axes = normalized(operation, axis, x.dim())
    kept = [d for d in range(x.dim()) if d not in axes]
    sizes = [x.shape[d] for d in kept]
    out = torch.empty(sizes, dtype=x.dtype, device=x.device)
    if out.numel():
        _launch(x, axes, kept, out, operation == "mean", config)
    return out.reshape([1 if d in axes else n for d, n in enumerate(x.shape)]) if keepdims else out


def _launch(
    x: torch.Tensor, axes: tuple[int, ...], kept: list[int], out: torch.Tensor, mean: bool, config: Configuration | None
) -> None:
    n = math.prod(x.shape[d] for d in axes)
    _, steps = merged([x.shape[d] for d in axes], [[x.stride(d) for d in axes]])
    if len(steps) > 1:
        x = x.permute(*kept, *axes).reshape(*out.shape, n)
        kept, steps = list(range(out.dim())), [(x.stride(-1),)]
    step = steps[0][0] if steps else 1
    shape = (*out.shape, n)
    problem = rows(shape, [(*[x.stride(d) for d in kept], step), (*out.stride(), 0)], len(shape) - 1)
    if config is None:
        contiguous = step == 1 or problem.inner_strides[0] != 1
        config = configuration(n, problem.inner, problem.outer, contiguous, processors(x))
    words = (2 if x.dtype == torch.float64 else 1) * (2 if n > _SHORT_SUM else 1)
    native = architecture(x) >= 90 and x.element_size() > 2  # the packed conversions want two elements a thread
    p = _Problem(n, problem, mean, native, words, config)
    if config.chunks == 1:
        launch(triton_kernels.sum_rows, (x, out), _sum_rows, p)
        return
    key_type = torch.int64 if x.dtype == torch.float64 else torch.int32
    keys = torch.empty(config.chunks * p.count, dtype=key_type, device=x.device)
    parts = torch.empty(config.chunks * words * p.count, dtype=torch.int64, device=x.device)
    launch(triton_kernels.sum_keys, (x, keys), _sum_keys, p)
    launch(triton_kernels.sum_parts, (x, keys, parts), _sum_parts, p)
    launch(triton_kernels.sum_finish, (keys, parts, out), _sum_finish, p)


def sum(  # noqa: A001 - NumPy's name
    x: torch.Tensor, axis: Axes = None, keepdims: bool = False, config: Configuration | None = None
) -> torch.Tensor:
    """The order-free sum of a tensor on a GPU over an axis, a tuple of axes, or all; see `isograd.reduction.api.sum`.

    Launches on the current stream of the tensor's device, without waiting. `config` overrides the rule.
    """
    return _reduce("sum", x, axis, keepdims, config)


def mean(
    x: torch.Tensor, axis: Axes = None, keepdims: bool = False, config: Configuration | None = None
) -> torch.Tensor:
    """The mean: RN(sum / count) in the work type, NaN without terms; otherwise as `sum`."""
    return _reduce("mean", x, axis, keepdims, config)
