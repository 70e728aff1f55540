# mypy: ignore-errors
"""The order-free sum on the CPU, over a range of contiguous rows."""

import numpy as np

from isograd.numerics.numba_memory import BLOCK, load_block, pointer, stack_block, store, work_zero
from isograd.numerics.numba_ops import magnitude_key
from isograd.numerics.numba_storage import narrow
from isograd.numerics.numba_sum import (
    block_magnitude,
    block_special,
    block_terms,
    is_finite_key,
    special_value,
    sum_scale,
)
from isograd.numerics.numba_wide import add_limbs, limb_shift, wide_to_float
from isograd.runtime.numba_compile import kernel


@kernel
def sum_rows(like, x_address, y_address, n, divisor, start, stop):
    """y[row] = the sum of row `row`, n elements, divided by a number of the work type."""
    x, y = pointer(x_address, like), pointer(y_address, like)
    zero = work_zero(like)
    block = stack_block(zero)
    for row in range(start, stop):
        offset = row * n
        key = magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(x, offset + j, 1, count, block)
            key = block_magnitude(block, count, key)
        finite = is_finite_key(key)
        first, second, exponent = sum_scale(key)
        hi, lo, special = np.int64(0), np.uint64(0), np.int64(0)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            if n > BLOCK:
                load_block(x, offset + j, 1, count, block)
            if finite:
                high, low = block_terms(block, count, first, second)
                hi, lo = add_limbs(hi, lo, high, low, limb_shift(like))
            else:
                special = block_special(block, count, special)
        s = wide_to_float(hi, lo, exponent, zero) if finite else special_value(special, zero)
        store(y, row, narrow(s / divisor, like))
