"""How Triton kernels on rows are launched: the tile, and arguments by the names that the kernel gives them.

For a tensor `x` with the axis a kernel names `x_ptr` and its strides `x_axis`, `x_inner` and `x_outer`; one of a single
row has no more than `x_ptr` and `x_axis`, one with an element for every row no `x_axis`, and numbers that elements have
without memory no `x_ptr`. Further names are `n`, the length of a row, `inner` and `outer_shape`, what rows are counted
over, and the tile's. A name that nobody gives a value for is an error, and so is a value that the kernel has no name
for.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from isograd.devices.triton_launcher import Launcher, Rows, Specification, architecture, kept, power_of_two, rows
from isograd.rows.triton_configuration import configuration

Strides = tuple[int, ...]


class Tile(NamedTuple):
    """Columns and rows of a tile, columns a thread and of one access, warps."""

    block: int
    rows: int
    group: int
    vector: int
    warps: int


def tile(n: int, problem: Rows, whole: Sequence[int], held: int, itemsize: int, arch: int) -> Tile:
    """The tile for rows of n elements. whole: which tensors have such rows; held: bytes of an element of all."""
    strides = [problem.axis_strides[i] for i in whole]
    contiguous = n == 1 or all(s == 1 for s in strides) or all(problem.inner_strides[i] != 1 for i in whole)
    config = configuration(n, held, "log_softmax", arch, contiguous, problem.inner, False)
    vector = min(max(16 // itemsize, 1), config.group) if contiguous else config.vector
    return Tile(config.block, config.rows, config.group, vector, config.warps)


def words_of(value: Any, work: str) -> tuple[int, int]:
    """The bits of a number of the work type as two int32 words, the low one first."""
    if work == "float64":
        return halves(int(np.float64(value).view(np.int64)))
    return int(np.float32(value).view(np.int32)), 0


def halves(value: int) -> tuple[int, int]:
    """A 64-bit integer as two int32 words, the low one first."""
    low, high = value & 0xFFFFFFFF, value >> 32 & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


def standing_in(array: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """An optional array of the axis alone, or something else that no kernel reads."""
    return like.as_strided((1,), (0,)) if array is None else array


_ROWS, _PER_ROW, _ONE_ROW, _COUNTED = range(4)
_TILE = ("BLOCK", "ROWS", "GROUP", "V", "HELD")


class _Prepared(NamedTuple):
    launcher: Launcher
    tensors: tuple[int, ...]  # which tensor is each pointer of the kernel
    numbers: tuple[str, ...]


@kept
def _prepared(
    kernel: Any,
    axis: int,
    shape: Strides,
    kinds: tuple[tuple[str, int], ...],
    strides: tuple[Strides, ...],
    constants: tuple[tuple[str, Any], ...],
    numbers: tuple[str, ...],
    dtypes: tuple[Any, ...],
    held: int,
    arch: int,
    size: Tile | None,
) -> _Prepared:
    n = shape[axis]
    where = {name: i for i, name in enumerate([name for name, kind in kinds if kind != _COUNTED])}
    # What a row has one of has a stride of 0 along it, what all rows share one of 0 everywhere else.
    spread = [
        s
        if kind in (_ROWS, _COUNTED)
        else (*s[:axis], 0, *s[axis:])
        if kind == _PER_ROW
        else (*[0] * axis, *s, *[0] * (len(shape) - axis - 1))
        for (_, kind), s in zip(kinds, strides, strict=True)
    ]
    problem = rows(shape, spread, axis)
    whole = [i for i, (_, kind) in enumerate(kinds) if kind == _ROWS]
    size = size or tile(n, problem, whole, held, max(dtypes[where[kinds[i][0]]].itemsize for i in whole), arch)
    values: dict[str, Any] = {"n": n, "inner": problem.inner, "outer_shape": problem.outer_shape, **dict(constants)}
    values |= zip(_TILE, (size.block, size.rows, size.group, size.vector, n <= size.block), strict=True)
    for i, (name, kind) in enumerate(kinds):
        if kind != _PER_ROW:
            values[f"{name}_axis"] = problem.axis_strides[i]
        if kind != _ONE_ROW:
            values |= {f"{name}_inner": problem.inner_strides[i], f"{name}_outer": problem.outer_strides[i]}
    names = list(kernel.arg_names)
    pointers = [f"{name}_ptr" for name in where]
    first = [*[name for name in names if name in pointers], *numbers]
    if sorted(names) != sorted([*pointers, *numbers, *values]) or names[: len(first)] != first:
        raise TypeError(f"{kernel.__name__} has the arguments {names}; given: {[*pointers, *numbers, *values]}")
    tail = tuple([values[name] for name in names[len(first) :]])
    programs = problem.outer * -(-problem.inner // size.rows)
    order = tuple([where[name.removesuffix("_ptr")] for name in first[: len(pointers)]])
    # How many rows there are says nothing of how memory is read where a row's elements are neighbours.
    free = ("inner",) if all(problem.axis_strides[i] == 1 for i in whole) else ()
    return _Prepared(Launcher(kernel, Specification(tail, programs, size.warps, free=free)), order, numbers)


def launch_rows(
    kernel: Any,
    axis: int,
    of_rows: Mapping[str, torch.Tensor],
    *,
    per_row: Mapping[str, torch.Tensor] | None = None,
    one_row: Mapping[str, torch.Tensor] | None = None,
    counted: Mapping[str, Strides] | None = None,
    constants: Mapping[str, Any] | None = None,
    numbers: Mapping[str, int] | None = None,
    size: Tile | None = None,
) -> None:
    """Run a kernel over the rows of an axis, on the current stream of the tensors' device.

    of_rows: tensors with the axis, the one that is written last. per_row: tensors without it. one_row: tensors of the
    axis alone. counted: strides of numbers that elements have. constants: what a kernel is compiled for. numbers: int32
    that vary by call; the kernel takes them behind its pointers. size: the tile, by default what the rule says.
    """
    tensors: list[torch.Tensor] = []
    kinds: list[tuple[str, int]] = []
    for kind, given in ((_ONE_ROW, one_row), (_PER_ROW, per_row), (_ROWS, of_rows)):
        if given:
            tensors += given.values()
            kinds += [(name, kind) for name in given]
    strides = [t.stride() for t in tensors]
    if counted:
        kinds, strides = [*((name, _COUNTED) for name in counted), *kinds], [*counted.values(), *strides]
    out = tensors[-1]
    if out.numel() == 0:
        return
    held = (8 if out.dtype == torch.float64 else 4) * power_of_two(len(of_rows) - 1)
    found = _prepared(
        kernel, axis, tuple(out.shape), tuple(kinds), tuple(strides),
        tuple(constants.items()) if constants else (), tuple(numbers) if numbers else (),
        tuple([t.dtype for t in tensors]), held, architecture(out), size,
    )  # fmt: skip
    values = tuple([numbers[name] for name in found.numbers]) if numbers else ()
    found.launcher(*[tensors[i] for i in found.tensors], numbers=values)
