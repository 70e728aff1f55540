# mypy: ignore-errors
"""Rows of logits on the CPU: their maxima, exponentials, and exact sums.

What takes `like`, a value of the storage type, computes as rows of that type. Logits that are scaled by a factor take
`zero`, the zero of the work type: their arithmetic is that of float32 or float64 rows whatever the storage type. A row
stays in a block or, where it is longer, in `kept`, memory of a row's length.
"""

import numpy as np

from isograd.numerics.numba_memory import (
    BLOCK,
    load,
    load_block,
    pointer,
    row_offset,
    stack_block,
    store,
    store_block,
    work_largest,
)
from isograd.numerics.numba_ops import from_key, is_finite, lowest_key, max_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import (
    PARTIAL,
    block_special,
    block_terms,
    is_finite_key,
    special_value,
    sum_scale,
)
from isograd.numerics.numba_wide import add_limbs, limb_shift, wide_to_float
from isograd.rows.numba_exponentials import exponential_part, term_scale
from isograd.runtime.numba_compile import device_function, kernel


@device_function
def scaled(x, factor):
    """A logit over the temperature; a finite one stays finite."""
    z, largest = x * factor, work_largest(x)
    if is_finite(x):
        z = largest if z > largest else z
        z = -largest if z < -largest else z
    return z


@device_function
def load_scaled(base, offset, stride, count, factor, block):
    """Widen `count` elements into a block and multiply them."""
    if stride == 1:
        for i in range(count):
            store(block, i, scaled(widen(load(base, offset + i)), factor))
    else:
        for i in range(count):
            store(block, i, scaled(widen(load(base, offset + i * stride)), factor))


@device_function
def block_maximum(block, count, key):
    """The larger of `key` and the largest key in a block."""
    for i in range(count):
        k = max_key(load(block, i))
        key = k if k > key else key
    return key


@device_function
def scaled_maximum(x, offset, stride, n, factor, block, zero):
    """The maximum of a scaled row; one that fits stays in the block."""
    key = lowest_key(zero)
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        load_scaled(x, offset + j * stride, stride, count, factor, block)
        key = block_maximum(block, count, key)
    return from_key(key)


@device_function
def block_exponentials(block, count, hi, lo, m, base, floor, bias, scale, zero):
    """Turn a block into marked exponentials and add their integer terms to (hi, lo)."""
    for start in range(0, count, PARTIAL):
        stop = min(start + PARTIAL, count)
        high, low = exponential_part(block, start, stop, m, base, floor, bias, scale, zero)
        hi, lo = add_limbs(hi, lo, high, low, limb_shift(zero))
    return hi, lo


@device_function
def scaled_exponentials(x, offset, stride, n, factor, block, kept, keep, m, base, floor, bias, zero):
    """The integer sum of a scaled row's exponentials, which stay in the block or, with `keep`, in `kept`.

    A row that fits stands in the block already, as `scaled_maximum` leaves it.
    """
    scale = term_scale(n, zero)
    hi, lo = np.int64(0), np.uint64(0)
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        if n > BLOCK:
            load_scaled(x, offset + j * stride, stride, count, factor, block)
        hi, lo = block_exponentials(block, count, hi, lo, m, base, floor, bias, scale, zero)
        if keep and n > BLOCK:
            store_block(kept, j, 1, count, block)
    return hi, lo


@device_function
def stored_sum(kept, n, key, block, zero):
    """The order-free sum of n terms that stand in the block or, where they are more, in `kept`.

    `key` is the largest magnitude's.
    """
    finite = is_finite_key(key)
    first, second, exponent = sum_scale(key)
    hi, lo, special = np.int64(0), np.uint64(0), np.int64(0)
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        if n > BLOCK:
            load_block(kept, j, 1, count, block)
        if finite:
            high, low = block_terms(block, count, first, second)
            hi, lo = add_limbs(hi, lo, high, low, limb_shift(zero))
        else:
            special = block_special(block, count, special)
    return wide_to_float(hi, lo, exponent, zero) if finite else special_value(special, zero)


@device_function
def fill(y, offset, stride, n, value, like):
    """Store one value throughout a row."""
    stored = narrow(value, like)
    for i in range(n):
        store(y, offset + i * stride, stored)


@device_function
def weigh(weight, offset, stride, count, block, weights):
    """Multiply a block by the weights of its places."""
    load_block(weight, offset, stride, count, weights)
    for i in range(count):
        store(block, i, load(block, i) * load(weights, i))


# --- rows as they are ------------------------------------------------------------------------------------------------
@device_function
def fill_row(y, offset, stride, n, block, value):
    """Make every element of a row the same."""
    for i in range(BLOCK):
        store(block, i, value)
    for start in range(0, n, BLOCK):
        store_block(y, offset + start * stride, stride, min(n - start, BLOCK), block)


@device_function
def piece(index, n):
    """(row, start within it, length) of a piece; a row is cut into pieces of a block."""
    pieces = (n + BLOCK - 1) // BLOCK
    row = index // pieces
    j = (index - row * pieces) * BLOCK
    return row, j, min(n - j, BLOCK)


@kernel
def added_pieces(
    like,
    zero,
    a_address,
    b_address,
    y_address,
    shape,
    a_strides,
    b_strides,
    y_strides,
    n,
    a_step,
    b_step,
    y_step,
    start,
    stop,
):
    """Sums of two arrays, a piece of a row each; y may be either."""
    a, b, y = pointer(a_address, like), pointer(b_address, like), pointer(y_address, like)
    blocks = (n + BLOCK - 1) // BLOCK
    one, other = stack_block(zero), stack_block(zero)
    for piece in range(start, stop):
        row, j = piece // blocks, piece % blocks * BLOCK
        count = min(n - j, BLOCK)
        load_block(a, row_offset(row, shape, a_strides) + j * a_step, a_step, count, one)
        load_block(b, row_offset(row, shape, b_strides) + j * b_step, b_step, count, other)
        for i in range(count):
            store(one, i, load(one, i) + load(other, i))
        store_block(y, row_offset(row, shape, y_strides) + j * y_step, y_step, count, one)
