# mypy: ignore-errors
"""What kernels that walk along a row of logits on the CPU share: its maximum, and the exact sum of its exponentials."""

import numpy as np

from isograd.numerics.numba_compile import device_function
from isograd.numerics.numba_memory import BLOCK, load, load_block, prefetch_read, prefetch_write, store, store_block
from isograd.numerics.numba_ops import from_key, lowest_key, max_key
from isograd.numerics.numba_sum import PARTIAL
from isograd.numerics.numba_wide import add_limbs, limb_shift
from isograd.softmax.numba_steps import exponential_part, term_scale


@device_function
def _block_maximum(block, count, key):
    for i in range(count):
        k = max_key(load(block, i))
        key = k if k > key else key
    return key


@device_function
def row_maximum(x, offset, stride, n, block, like):
    """The maximum of a row, NaN if it holds one; a row of at most a block stays in it."""
    key = lowest_key(like)
    for start in range(0, n, BLOCK):
        count = min(n - start, BLOCK)
        load_block(x, offset + start * stride, stride, count, block)
        key = _block_maximum(block, count, key)
    return from_key(key)


@device_function
def fill_row(y, offset, stride, n, block, value):
    """Make every element of a row the same."""
    for i in range(BLOCK):
        store(block, i, value)
    for start in range(0, n, BLOCK):
        store_block(y, offset + start * stride, stride, min(n - start, BLOCK), block)


@device_function
def exponential_sum(
    x, xo, x_ahead, x_stride, y, yo, y_stride, n, block, kept, keep, m, base, floor, bias, like
):  # fmt: skip
    """Sum a row's exponentials. They stay in the block, or in `kept` when the row is longer and `keep` is set.

    The arithmetic takes longer than the memory needs to deliver the next row and the lines of the result.
    """
    scale = term_scale(n, like)
    hi, lo = np.int64(0), np.uint64(0)
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        if n > BLOCK:
            load_block(x, xo + j * x_stride, x_stride, count, block)
        for start in range(0, count, PARTIAL):
            stop = min(start + PARTIAL, count)
            prefetch_read(x, x_ahead + (j + start) * x_stride, x_stride, stop - start)
            prefetch_write(y, yo + (j + start) * y_stride, y_stride, stop - start)
            high, low = exponential_part(block, start, stop, m, base, floor, bias, scale, like)
            hi, lo = add_limbs(hi, lo, high, low, limb_shift(like))
        if keep and n > BLOCK:
            store_block(kept, j, 1, count, block)
    return hi, lo
