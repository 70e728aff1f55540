"""How CPU kernels walk through rows: the axis apart, the other dimensions merged where memory allows."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.constants import LANES
from isograd.numerics.storage import address, compute_dtype, kernel_type
from isograd.runtime import parallel
from isograd.runtime.layout import plan_walk

Shape = tuple[int, ...]


def element_strides(array: Any) -> Shape:
    """The strides of an array in elements."""
    return tuple([s // array.itemsize for s in array.strides])


def one_row(array: Any, like: Any) -> tuple[int, int, bool]:
    """(address, stride, whether there is one) of an optional array of the axis alone."""
    return (address(like), 0, False) if array is None else (address(array), element_strides(array)[0], True)


def work_zero(dtype: str) -> Any:
    """The zero of the type that a storage type is computed in, as kernels take it."""
    return kernel_type(np.dtype(compute_dtype(dtype)))


@functools.lru_cache(maxsize=4096)
def row_walk(shape: Shape, strides: tuple[Shape, ...]) -> tuple[int, tuple[Any, ...]]:
    """(rows, (shape, strides of every operand)) of the dimensions besides the one that rows lie on."""
    # A last axis of size 1 is left out of every row, so that the walk is over the given dimensions alone.
    walk = plan_walk((*shape, 1), tuple((*s, 0) for s in strides), len(shape))
    return math.prod(shape), (np.array(walk.shape, np.int64), *(np.array(s, np.int64) for s in walk.strides))


@functools.lru_cache(maxsize=4096)
def piece_walk(shape: Shape, strides: tuple[Shape, ...], block: int) -> tuple[int, tuple[Any, ...], int, Shape]:
    """(pieces, (outer shape, outer strides), elements of a row, its strides) for work on one element at a time.

    The dimensions are merged as far as memory allows; a row of what is left is cut into pieces of a block.
    """
    walk = plan_walk((*shape, 1), tuple((*s, 0) for s in strides), len(shape))
    *outer, n = walk.shape
    sizes = np.array(outer or [1], np.int64)
    steps = tuple(np.array(s[:-1] or (0,), np.int64) for s in walk.strides)
    pieces = math.prod(outer) * -(-n // block)
    return pieces, (sizes, *steps), n, tuple(s[-1] for s in walk.strides)


def for_pieces(kernel: Any, block: int, arrays: Sequence[Any], *settings: Any) -> None:
    """Run a kernel over pieces of at most `block` elements of arrays of one shape, the last the one that is written.

    It takes the type, its zero, addresses, outer shape and strides, the length of a row, its strides and settings.
    """
    out = arrays[-1]
    if out.size == 0:
        return
    count, outer, n, steps = piece_walk(out.shape, tuple(map(element_strides, arrays)), block)
    parallel.for_ranges(
        kernel, count, parallel.grain(count, min(n, block)), kernel_type(out.dtype), work_zero(out.dtype),
        *map(address, arrays), *outer, n, *steps, *settings,
    )  # fmt: skip


def for_rows(
    kernel: Callable[..., None],
    axis: int,
    rows: Sequence[NDArray[Any]],
    *scalars: Any,
    per_row: Sequence[NDArray[Any]] = (),
    counted: Sequence[Shape] = (),
) -> None:
    """Call a kernel for every row of an axis, on the library's threads.

    It takes a zero of the storage type; the addresses of `per_row`, arrays without the axis, and of `rows`, arrays with
    it, the one that is written last; the shape that rows are counted over and the strides of each array in it; the
    length of a row and the strides of `rows` along it; the scalars, and the range of rows. counted: strides of numbers
    that elements have without memory; they come before those of `rows`.
    """
    shape, steps = rows[-1].shape, [*counted, *[element_strides(a) for a in rows]]
    n = shape[axis]
    outer_steps = [element_strides(a) for a in per_row] + [s[:axis] + s[axis + 1 :] for s in steps]
    count, outer = row_walk(shape[:axis] + shape[axis + 1 :], tuple(outer_steps))
    parallel.for_ranges(
        kernel, count, parallel.grain(count, 4 * n), kernel_type(rows[-1].dtype), *map(address, (*per_row, *rows)),
        *outer, n, *(s[axis] for s in steps), *scalars,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _axis_walk(
    shape: Shape, strides: tuple[Shape, ...], axis: int, dtype: np.dtype[Any]
) -> tuple[bool, int, int, Any, tuple[Any, ...]]:
    """(whether lanes are taken, how many tiles or rows, elements of each, a zero, what follows the addresses).

    The strides are in bytes.
    """
    walk = plan_walk(shape, tuple([tuple([s // dtype.itemsize for s in steps]) for steps in strides]), axis)
    rows, zero = math.prod(walk.shape), kernel_type(dtype)
    outer = (np.array(walk.shape, np.int64), *(np.array(s, np.int64) for s in walk.strides))
    if not walk.lanes:
        return False, rows, walk.length, zero, (*outer, walk.length, *walk.axis_strides)
    after = (*outer, walk.lanes, walk.length, *walk.axis_strides)
    return True, rows * -(-walk.lanes // LANES), walk.length * min(walk.lanes, LANES), zero, after


def for_rows_or_lanes(
    rows_kernel: Callable[..., None], lanes_kernel: Callable[..., None], axis: int, *rows: NDArray[Any]
) -> None:
    """As `for_rows`; where memory is contiguous along another axis, a kernel that takes tiles of neighbouring rows.

    That one gets the number of neighbours before the length of a row.
    """
    out = rows[-1]
    if out.size == 0:
        return
    tiled, count, work, zero, after = _axis_walk(out.shape, tuple([a.strides for a in rows]), axis, out.dtype)
    kernel, size = lanes_kernel if tiled else rows_kernel, parallel.grain(count, work)
    parallel.for_ranges(kernel, count, size, zero, *[address(a) for a in rows], *after)
