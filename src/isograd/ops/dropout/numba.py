# mypy: ignore-errors
"""Dropout on the CPU, a piece of a block after the other."""

from typing import Any

import numpy as np

from isograd.core.kernel import launcher
from isograd.numerics.numba_memory import (
    BLOCK,
    load,
    load_block,
    pointer,
    row_offset,
    stack_block,
    store,
    store_block,
    work_one,
)
from isograd.numerics.numba_random import philox
from isograd.numerics.numba_sum import PARTIAL
from isograd.numerics.random import number_strides
from isograd.numerics.storage import address, kernel_type
from isograd.ops.dropout.reference import LAST_WORD, factor, threshold
from isograd.rows.numba_rows import piece
from isograd.rows.walk import element_strides, piece_walk, work_zero
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment
from isograd.runtime.numba_compile import device_function, kernel

_LOW, _HALF, _LAST, _NONE = np.uint64(0xFFFFFFFF), np.uint64(32), np.uint64(LAST_WORD), np.uint64(0)
_TWO, _THREE, _BLOCKS = np.uint64(2), np.uint64(3), np.uint64(0x3FFFFFFFFFFFFFFF)


@device_function
def _words(block, seed):
    """The four words of a block."""
    return philox(block & _LOW, block >> _HALF, _NONE, _LAST, seed)


@device_function
def _word(number, seed):
    """The word of one number."""
    a, b, c, d = _words(number >> _TWO, seed)
    part = number & _THREE
    low, high = (b if part & np.uint64(1) else a), (d if part & np.uint64(1) else c)
    return high if part & np.uint64(2) else low


@device_function
def _drop(block, count, first, step, seed, limit, scale, spare, zero):
    """Drop of elements whose numbers are `first`, `first` + `step`, ...; `spare` is a block for 0 and 1.

    Neighbouring numbers come from blocks of four.
    """
    if step != np.uint64(1):
        for i in range(count):
            y = load(block, i) * scale
            store(block, i, y if _word(first + np.uint64(i) * step, seed) >= limit else zero)
        return
    one = work_one(zero)
    for start in range(0, count, PARTIAL):
        size = min(count - start, PARTIAL)
        number = first + np.uint64(start)
        lead = np.int64(number & _THREE)
        for b in range((lead + size + 3) >> 2):
            # Numbers count modulo 2^64, and so do their blocks modulo 2^62.
            a, c, d, e = _words(((number >> _TWO) + np.uint64(b)) & _BLOCKS, seed)
            store(spare, 4 * b, one if a >= limit else zero)
            store(spare, 4 * b + 1, one if c >= limit else zero)
            store(spare, 4 * b + 2, one if d >= limit else zero)
            store(spare, 4 * b + 3, one if e >= limit else zero)
        for i in range(size):
            y = load(block, start + i) * scale
            store(block, start + i, y if load(spare, lead + i) != zero else zero)


@kernel
def dropped(
    like, zero, x_address, y_address, shape, numbers, x_strides, y_strides, n, number_stride, x_stride, y_stride, seed,
    offset, limit, scale, start, stop,
):  # fmt: skip
    """Pieces of the result, which may be x; `numbers` and `number_stride` are the strides of the elements' numbers."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    block, spare = stack_block(zero), stack_block(zero)
    step = np.uint64(number_stride)
    for index in range(start, stop):
        row, j, count = piece(index, n)
        first = offset + np.uint64(row_offset(row, shape, numbers)) + np.uint64(j) * step
        load_block(x, row_offset(row, shape, x_strides) + j * x_stride, x_stride, count, block)
        _drop(block, count, first, step, seed, limit, scale, spare, zero)
        store_block(y, row_offset(row, shape, y_strides) + j * y_stride, y_stride, count, block)


@launcher("dropout")
def dropout(problem: Any, x: Any, y: Any) -> None:
    """Compute y, which may be x."""
    if y.size == 0:
        return
    with default_environment():
        limit, scale = np.uint64(threshold(problem.p)), factor(problem.p, y.dtype)
    strides = (number_strides(y.shape, problem.batched), element_strides(x), element_strides(y))
    count, outer, n, steps = piece_walk(y.shape, strides, BLOCK)
    parallel.for_ranges(
        dropped, count, parallel.grain(count, 4 * min(n, BLOCK)), kernel_type(y.dtype), work_zero(y.dtype), address(x),
        address(y), *outer, n, *steps, np.uint64(problem.seed), np.uint64(problem.offset), limit, scale,
    )  # fmt: skip
