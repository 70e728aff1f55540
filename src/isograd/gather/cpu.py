"""How the CPU kernels of the gather family are called: indices checked, arrays seen as rows or lines, work shared out.

Nothing is written before every index was found in range. Kernels look at an index again when they use it, so that one
that another thread changes meanwhile is an error too.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.core import arrays
from isograd.errors import IndexOutOfRangeError
from isograd.numerics.index_flag import IndexFlag
from isograd.numerics.storage import address, kernel_type
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment
from isograd.runtime.layout import Shape, merge_dimensions

Array = NDArray[Any]

_KINDS = {np.dtype(np.int64): 0, np.dtype(np.int32): 1, np.dtype(np.uint32): 2}
_BITS: dict[int, Any] = {2: np.int16(0), 4: np.int32(0), 8: np.int64(0)}
_IN_PLACE, _ZEROS, _COPY = 0, 1, 2  # what a kernel has to do about destinations without sources
_DENSE = 4  # with a source for so many destinations a line's sums are formed for all destinations
_FEW_COLUMNS = 8  # rows narrower than this are summed line by line


@functools.cache
def _kernels() -> Any:
    with default_environment():  # constants are rounded when a module is loaded
        from isograd.gather import numba_kernels, numba_rows
        from isograd.numerics.numba_memory import BLOCK, LANES

    class Kernels(NamedTuple):
        check: Any = numba_kernels.check_indices
        gather: Any = numba_kernels.gather
        lines: Any = numba_kernels.scatter_lines
        dense_lines: Any = numba_kernels.scatter_dense_lines
        group: Any = numba_rows.group_sources
        rows: Any = numba_rows.sum_rows
        block: int = BLOCK
        lanes: int = LANES

    return Kernels()


def _strides(array: Array) -> Shape:
    """Strides that count elements."""
    itemsize = array.itemsize
    return tuple([s // itemsize for s in array.strides])


def _without(values: Shape, axis: int) -> Shape:
    return (*values[:axis], *values[axis + 1 :])


class _Walk(NamedTuple):
    """Dimensions as the kernels take them, outermost first; strides count elements.

    outer: the sizes of the outer dimensions, then each operand's strides. run: the size of the next one, then each
    operand's stride. inner: the same of the innermost. cut: not 0 where the last two are pieces of one long dimension.
    rows: how many rows of the innermost dimension there are.
    """

    outer: tuple[NDArray[np.int64], ...]
    run: Shape
    inner: Shape
    cut: int
    rows: int


def _split(sizes: Shape, steps: tuple[Shape, ...]) -> tuple[tuple[NDArray[np.int64], ...], Shape]:
    """All dimensions but the last one as arrays, at least one; and the last one with its strides."""
    outer = [np.array(v[:-1] or (1 if v is sizes else 0,), np.int64) for v in (sizes, *steps)]
    return tuple(outer), (sizes[-1], *[s[-1] for s in steps])


@functools.lru_cache(maxsize=4096)
def _walk(shape: Shape, strides: tuple[Shape, ...]) -> _Walk:
    sizes, steps = merge_dimensions(shape, strides)
    inner = (sizes[-1], *[s[-1] for s in steps])
    block = _kernels().block
    if inner[0] > block:
        sizes = (*sizes[:-1], -(-inner[0] // block))
        steps = tuple([(*s[:-1], block * s[-1]) for s in steps])
        return _Walk(*_split(sizes, steps), inner, block, math.prod(sizes))
    rest = _split((1, *sizes[:-1]), tuple([(0, *s[:-1]) for s in steps]))
    return _Walk(*rest, inner, 0, math.prod(sizes[:-1]))


@functools.lru_cache(maxsize=4096)
def _lines(shape: Shape, strides: tuple[Shape, ...]) -> tuple[tuple[Any, ...], int]:
    sizes, steps = merge_dimensions(shape, strides)
    outer, run = _split(sizes, steps)
    return (*outer, *run), math.prod(sizes)


def check_indices(
    operation: str, indices: Array, size: int, where: str, negative: bool = True, skipped: int | None = None
) -> None:
    """Raise IndexOutOfRangeError for the first index, in C order, that is out of range."""
    if indices.size == 0:
        return
    least = -size if negative else 0
    # Repeated elements are looked at once.
    distinct = tuple([n if s else 1 for n, s in zip(indices.shape, indices.strides, strict=True)])
    walk = _walk(distinct, (_strides(indices),))
    flag = IndexFlag()
    parallel.for_ranges(
        _kernels().check, walk.rows, parallel.grain(walk.rows, walk.cut or walk.inner[0]), indices.dtype.type(0),
        address(indices), least, size, skipped is not None, skipped or 0, flag.address, *walk.outer, *walk.run,
        *walk.inner, walk.cut,
    )  # fmt: skip
    if flag:
        wide = indices.astype(np.int64)
        bad = (wide < least) | (wide >= size)
        if skipped is not None:
            bad &= wide != skipped
        if not bad.any():
            flag.require_unset(operation, "indices")
        position = tuple([int(d) for d in np.argwhere(bad)[0]])
        accepted = f"{least} to {size - 1}" if size else "no index"
        raise IndexOutOfRangeError(
            f"{operation}: indices{list(position) if position else ''} is {wide[position]}; {where} of size {size} "
            f"accepts {accepted}"
        )


def _gather(
    operation: str,
    x: Array,
    x_strides: Shape,
    axis_stride: int,
    size: int,
    indices: Array,
    i_strides: Shape,
    v: Array,
) -> None:
    kernels, flag = _kernels(), IndexFlag()
    walk = _walk(v.shape, (x_strides, i_strides, _strides(v)))
    parallel.for_ranges(
        kernels.gather, walk.rows, parallel.grain(walk.rows, walk.cut or walk.inner[0]), _BITS[v.itemsize],
        indices.dtype.type(0), address(x), address(indices), address(v), flag.address, size, axis_stride, *walk.outer,
        *walk.run, *walk.inner, walk.cut,
    )  # fmt: skip
    flag.require_unset(operation, "indices")


def take_along_axis(operation: str, x: Array, indices: Array, v: Array, axis: int) -> None:
    """The elements of x along an axis at the indices, into v."""
    size = x.shape[axis]
    check_indices(operation, indices, size, f"axis {axis}")
    if v.size:
        strides = _strides(x)
        x_strides = (*strides[:axis], 0, *strides[axis + 1 :])
        _gather(operation, x, x_strides, strides[axis], size, indices, _strides(indices), v)


def index_select(operation: str, weight: Array, indices: Array, y: Array, negative: bool) -> None:
    """The rows of weight at the indices, into y."""
    check_indices(operation, indices, weight.shape[0], "axis 0", negative)
    if y.size:
        first, *rest = _strides(weight)
        x_strides = (*(0,) * indices.ndim, *rest)
        i_strides = (*_strides(indices), *(0,) * len(rest))
        _gather(operation, weight, x_strides, first, weight.shape[0], indices, i_strides, y)


def _fill(out: Array, x: Array | None) -> None:
    """Zeros or x into the whole of out, along its outermost dimension in memory."""
    outermost = int(np.argmax([abs(s) if n > 1 else -1 for n, s in zip(out.shape, out.strides, strict=True)]))
    target = np.moveaxis(out, outermost, 0)
    bits = target.view(_BITS[out.itemsize].dtype)
    source = None if x is None else np.moveaxis(x, outermost, 0).view(bits.dtype)

    def part(start: int, stop: int) -> None:
        bits[start:stop] = 0 if source is None else source[start:stop]

    parallel.for_ranges(part, len(bits), parallel.grain(len(bits), out.size // len(bits)))


def scatter(
    operation: str, indices: Array, values: Array, x: Array | None, out: Array, axis: int, unique: bool = False
) -> None:
    """Zeros or x, with values added along an axis at the indices, into out."""
    size = out.shape[axis]
    check_indices(operation, indices, size, f"axis {axis}")
    if out.size == 0:
        return
    others = _without(_strides(indices), axis)
    repeats = all(s == 0 or n == 1 for s, n in zip(others, _without(indices.shape, axis), strict=True))
    if repeats and out.size // size >= _FEW_COLUMNS:
        row = tuple([slice(None) if d == axis else 0 for d in range(out.ndim)])
        _rows(
            operation, np.ascontiguousarray(indices[row]), np.moveaxis(values, axis, 0),
            None if x is None else np.moveaxis(x, axis, 0), np.moveaxis(out, axis, 0), None,
        )  # fmt: skip
    else:
        _scatter_lines(operation, indices, values, x, out, axis, unique)


def _scatter_lines(
    operation: str, indices: Array, values: Array, x: Array | None, out: Array, axis: int, unique: bool = False
) -> None:
    k, n = indices.shape[axis], out.shape[axis]
    flag = IndexFlag()
    dense = k * _DENSE >= n and not unique
    adds = x is not None
    fill = _COPY if adds else _ZEROS
    if x is not None and arrays.same_view(x, out):
        fill = _IN_PLACE
    elif abs(out.strides[axis]) != out.itemsize and out.size > n and not dense:
        # Line by line, every element would cost a line of the cache.
        _fill(out, x)
        fill = _IN_PLACE
    base = out if x is None else x
    operands = (indices, values, base, out)
    strides = [_strides(a) for a in operands]
    along = [s[axis] for s in strides]
    lines, count = _lines(_without(out.shape, axis), tuple([_without(s, axis) for s in strides]))
    work = 8 * k + (n if dense or fill != _IN_PLACE else 0)
    arguments = (
        kernel_type(out.dtype), address(indices), _KINDS[indices.dtype], address(values), address(base), address(out),
        flag.address, k, along[0], along[1], n, along[2], along[3],
    )  # fmt: skip
    grain = parallel.grain(count, work)
    if dense:
        parallel.for_ranges(_kernels().dense_lines, count, grain, *arguments, adds, *lines)
    else:
        parallel.for_ranges(_kernels().lines, count, grain, *arguments, fill, adds, unique, *lines)
    flag.require_unset(operation, "indices")


def index_sum(
    operation: str,
    indices: Array,
    values: Array,
    x: Array | None,
    out: Array,
    negative: bool,
    skipped: int | None,
) -> None:
    """Zeros or x, with rows of values added at the indices, into out; those equal to `skipped` are left out."""
    check_indices(operation, indices, out.shape[0], "axis 0", negative, skipped)
    if out.size == 0:
        return
    flat = np.ascontiguousarray(indices).reshape(-1)
    rows = values.reshape(flat.size, *out.shape[1:])
    if out.size // len(out) >= _FEW_COLUMNS:
        _rows(operation, flat, rows, x, out, skipped)
        return
    if skipped is not None:
        keep = flat != skipped
        flat, rows = flat[keep], rows[keep]
    columns = np.broadcast_to(flat.reshape(-1, *(1,) * (out.ndim - 1)), rows.shape)
    _scatter_lines(operation, columns, rows, x, out, 0)


def _rows(operation: str, indices: Array, values: Array, x: Array | None, out: Array, skipped: int | None) -> None:
    """The same for contiguous indices of rank 1, all of them in range."""
    kernels, flag = _kernels(), IndexFlag()
    size, count = len(out), indices.size
    starts, order = np.empty(size + 2, np.int64), np.zeros(count, np.int64)
    parallel.for_ranges(
        kernels.group, count, max(count, 1), address(indices), _KINDS[indices.dtype], count, size,
        skipped is not None, skipped or 0, flag.address, address(starts), address(order),
    )  # fmt: skip
    flag.require_unset(operation, "indices")
    adds = x is not None
    fill = _ZEROS if x is None else (_IN_PLACE if arrays.same_view(x, out) else _COPY)
    base = out if x is None else x
    strides = [_strides(a) for a in (values, base, out)]
    sizes, steps = merge_dimensions(out.shape[1:], tuple([s[1:] for s in strides]))
    outer, inner = _split(sizes, steps)
    tiles = -(-inner[0] // kernels.lanes)
    tasks = size * math.prod(sizes[:-1]) * tiles
    work = (out.size + 4 * values.size) // tasks
    parallel.for_ranges(
        kernels.rows, tasks, parallel.grain(tasks, work), kernel_type(out.dtype), address(starts), address(order),
        address(values), address(base), address(out), *outer, *inner, *[s[0] for s in strides], size, tiles, fill, adds,
    )  # fmt: skip
