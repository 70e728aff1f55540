"""sum and mean over any axes of torch tensors on a GPU, with the bits of `isograd.reduction`."""

import math
from typing import Any, NamedTuple

import torch

from isograd.devices.triton_launcher import (
    Launcher,
    Rows,
    Specification,
    architecture,
    c_strides,
    kept,
    merged,
    power_of_two,
    processors,
    rows,
)
from isograd.errors import UnsupportedError
from isograd.reduction import triton_kernels
from isograd.reduction.axes import Axes, normalized

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
    def kept(self) -> int:
        """Rows in all."""
        return self.rows.outer * self.rows.inner

    @property
    def length(self) -> int:
        """Elements of a chunk, whole tiles."""
        tiles = -(-self.n // self.config.block)
        return -(-tiles // self.config.chunks) * self.config.block

    @property
    def programs(self) -> int:
        return self.rows.outer * -(-self.rows.inner // self.config.rows)


def configuration(n: int, inner: int, outer: int, contiguous: bool, multiprocessors: int) -> Configuration:
    """The tiles for `outer * inner` rows of n elements; `contiguous` says that a row's elements are neighbours."""
    whole = power_of_two(n)
    if inner * outer == 1 and n <= _HELD:  # few sizes, for whatever is compiled for one
        whole = _ELEMENTS // 2 if n <= _ELEMENTS // 2 else _HELD
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
    return Specification(tail, p.programs, config.warps, free=("n",) if p.kept == 1 else ())


def _input(p: _Problem) -> tuple[Any, ...]:
    """What keys and parts know of the input."""
    sizes = (p.n, p.rows.inner, p.config.chunks, p.length, p.kept)
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
    sizes = (p.n, p.rows.inner, p.config.chunks, p.kept)
    strides = (p.rows.axis_strides[1], p.rows.inner_strides[1], p.rows.outer_shape, p.rows.outer_strides[1])
    tail = (*sizes, *strides, per_program, chunks, p.words, p.mean, p.native)
    return Specification(tail, p.rows.outer * -(-p.rows.inner // per_program))


def _reduce(operation: str, x: torch.Tensor, axis: Axes, keepdims: bool, config: Configuration | None) -> torch.Tensor:
    if x.dtype not in _FLOATS:
        raise UnsupportedError(f"{operation}: x has dtype {x.dtype}; accepted: float16, bfloat16, float32, float64")
    axes = normalized(operation, axis, x.dim())
    others = tuple([d for d in range(x.dim()) if d not in axes])
    out = torch.empty([x.shape[d] for d in others], dtype=x.dtype, device=x.device)
    if out.numel():
        _launch(x, axes, others, out, operation == "mean", config)
    return out.reshape([1 if d in axes else n for d, n in enumerate(x.shape)]) if keepdims else out


class _Kernels(NamedTuple):
    """The kernels of a problem: one, or three with the sizes of their scratch memory (keys, words)."""

    launchers: tuple[Launcher, ...]
    keys: int = 0
    words: int = 0


@kept
def _kernels(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    kept_axes: tuple[int, ...],
    axes: tuple[int, ...],
    dtype: torch.dtype,
    mean: bool,
    config: Configuration | None,
    arch: int,
    multiprocessors: int,
    short_sum: int,
) -> _Kernels | None:
    """None where the reduced axes do not merge into one."""
    n = math.prod(shape[d] for d in axes)
    _, steps = merged([shape[d] for d in axes], [[strides[d] for d in axes]])
    if len(steps) > 1:
        return None
    step = steps[0][0] if steps else 1
    sizes = (*(shape[d] for d in kept_axes), n)
    problem = rows(sizes, [(*(strides[d] for d in kept_axes), step), c_strides((*sizes[:-1], 1))], len(sizes) - 1)
    if config is None:
        contiguous = step == 1 or problem.inner_strides[0] != 1
        config = configuration(n, problem.inner, problem.outer, contiguous, multiprocessors)
    words = (2 if dtype == torch.float64 else 1) * (2 if n > short_sum else 1)
    native = arch >= 90 and dtype.itemsize > 2  # the packed conversions want two elements a thread
    p = _Problem(n, problem, mean, native, words, config)
    if config.chunks == 1:
        return _Kernels((Launcher(triton_kernels.sum_rows, _sum_rows(p)),))
    launchers = (
        Launcher(triton_kernels.sum_keys, _sum_keys(p)),
        Launcher(triton_kernels.sum_parts, _sum_parts(p)),
        Launcher(triton_kernels.sum_finish, _sum_finish(p)),
    )
    return _Kernels(launchers, config.chunks * p.kept, config.chunks * words * p.kept)


def _launch(
    x: torch.Tensor, axes: tuple[int, ...], others: tuple[int, ...], out: torch.Tensor, mean: bool, config: Any
) -> None:
    fixed = (x.dtype, mean, config, architecture(x), processors(x), _SHORT_SUM)
    found = _kernels(tuple(x.shape), x.stride(), others, axes, *fixed)
    if found is None:
        x = x.permute(*others, *axes).contiguous()
        rank = len(others)
        _launch(x, tuple(range(rank, x.dim())), tuple(range(rank)), out, mean, config)
        return
    if not found.keys:
        found.launchers[0](x, out)
        return
    key_type = torch.int64 if x.dtype == torch.float64 else torch.int32
    keys = torch.empty(found.keys, dtype=key_type, device=x.device)
    parts = torch.empty(found.words, dtype=torch.int64, device=x.device)
    find, add, finish = found.launchers
    find(x, keys)
    add(x, keys, parts)
    finish(keys, parts, out)


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
