"""The updates of NumPy arrays: one call of the CPU's kernel for all parameters of a dtype."""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.reference import work_dtype
from isograd.numerics.storage import address, kernel_type
from isograd.optimizers.chunks import chunks
from isograd.optimizers.numbers import Update
from isograd.runtime import parallel

Array = NDArray[Any]


class Row(NamedTuple):
    """A parameter, its gradient and its states, of one shape; all but the gradient are changed."""

    w: Array
    g: Array
    states: Sequence[Array]


def _span(x: Array) -> tuple[int, int]:
    start, end = np.lib.array_utils.byte_bounds(x)
    return start, end


def apart(params: Mapping[str, Array]) -> set[str]:
    """The names of parameters that the kernel may change: contiguous ones that share no memory with another."""
    spans = sorted((*_span(w), name) for name, w in params.items() if w.size)
    shared, reach, last = set[str](), 0, ""
    for start, end, name in spans:
        if start < reach:
            shared |= {name, last}
        if end > reach:
            reach, last = end, name
    return {name for name, w in params.items() if w.flags.c_contiguous and w.flags.aligned and name not in shared}


@functools.lru_cache(maxsize=256)
def _places(counts: tuple[int, ...], length: int) -> NDArray[np.int64]:
    return chunks(np.array(counts, np.int64), length)


def _readable(g: Array, starts: list[int], ends: list[int]) -> Array:
    """A gradient as the kernel reads it, which changes parameters meanwhile."""
    if not (g.flags.c_contiguous and g.flags.aligned):
        return np.array(g, order="C")
    begin = address(g)
    last = bisect_left(starts, begin + g.nbytes) - 1
    return g.copy() if last >= 0 and ends[last] > begin else g


def update_all(update: Update, numbers: Array, rows: Sequence[Row]) -> None:
    """Update parameters of one dtype that are `apart`; numbers: `NUMBERS` in the work type."""
    from isograd.optimizers import numba_updates

    dtype = rows[0].w.dtype
    spans = sorted((address(row.w), row.w.nbytes) for row in rows)
    starts, ends = [start for start, _ in spans], [start + size for start, size in spans]
    # The gradients live as long as this frame.
    grads = [_readable(row.g, starts, ends) for row in rows]
    states = [[*map(address, row.states), 0, 0][:2] for row in rows]
    every = zip(rows, grads, states, strict=True)
    table = np.array([[address(row.w), address(g), *kept, 0, row.w.size, 0] for row, g, kept in every], np.int64)
    values = np.tile(numbers, len(rows))
    counts = tuple([row.w.size for row in rows])
    where = _places(counts, numba_updates.LENGTH)
    like, zero = kernel_type(dtype), work_dtype(dtype)(0)
    grain = parallel.grain(len(where), sum(counts) // max(len(where), 1))
    parallel.for_ranges(
        numba_updates.update_chunks, len(where), grain, like, like, like, zero, address(table), address(values),
        address(where), update.rule, update.decay, update.momentum, update.first, update.nesterov, update.maximize,
        False,
    )  # fmt: skip
