# mypy: ignore-errors
"""Sums of gradients on the CPU, over a range of contiguous memory."""

from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from isograd.numerics.numba_memory import BLOCK, load, load_block, pointer, stack_block, store, store_block, work_zero
from isograd.numerics.numba_ops import magnitude_key
from isograd.numerics.numba_sum import block_magnitude
from isograd.runtime.numba_compile import INLINED, device_function, kernel


def _to_work(n: Any, zero: Any) -> Any:
    """An int64 rounded to the work type."""
    raise NotImplementedError


@overload(_to_work, jit_options=INLINED)
def _to_work_overload(n, zero):
    return (lambda n, zero: np.float64(n)) if zero == types.float64 else (lambda n, zero: np.float32(n))


@device_function
def _units(x, scale, limit):
    """The nearest multiple of the quantum, 0 where x is not within the range."""
    kept = x if abs(x) < limit else work_zero(x)
    return np.int64(np.rint(kept * scale))


@kernel
def accumulate(like, g_address, total_address, peaks, parts, step, scale, limit, first, grain, start, stop):
    """Add the parts of a gradient to a total, or begin the total with them.

    The peak of a range goes where its grain has a place.
    """
    g, total = pointer(g_address, like), pointer(total_address, np.int64(0))
    zero = work_zero(like)
    block = stack_block(zero)
    peak = magnitude_key(zero)
    for j in range(start, stop, BLOCK):
        count = min(stop - j, BLOCK)
        for part in range(parts):
            load_block(g, part * step + j, 1, count, block)
            peak = block_magnitude(block, count, peak)
            if first and part == 0:
                for i in range(count):
                    store(total, j + i, _units(load(block, i), scale, limit))
            else:
                for i in range(count):
                    store(total, j + i, load(total, j + i) + _units(load(block, i), scale, limit))
    peaks[start // grain] = peak


@kernel
def peak_of(like, g_address, peaks, grain, start, stop):
    """The peak of a range."""
    g = pointer(g_address, like)
    zero = work_zero(like)
    block = stack_block(zero)
    peak = magnitude_key(zero)
    for j in range(start, stop, BLOCK):
        count = min(stop - j, BLOCK)
        load_block(g, j, 1, count, block)
        peak = block_magnitude(block, count, peak)
    peaks[start // grain] = peak


@kernel
def mean(like, total_address, y_address, divisor, scale, start, stop):
    """Totals over a divisor, times the quantum."""
    total, y = pointer(total_address, np.int64(0)), pointer(y_address, like)
    zero = work_zero(like)
    block = stack_block(zero)
    for j in range(start, stop, BLOCK):
        count = min(stop - j, BLOCK)
        for i in range(count):
            store(block, i, (_to_work(load(total, j + i), zero) / divisor) * scale)
        store_block(y, j, 1, count, block)
