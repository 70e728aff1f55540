# mypy: ignore-errors
"""Cross entropy on the CPU, one row of classes after the other; `cross_entropy_reference.py` has the formulas.

Where the classes are not contiguous but neighbouring rows are, a tile of rows is copied into rows that are. What a row
has one of (target, loss, gradient of the loss, the four numbers of its state) lies in arrays of the rows in order.
"""

import numpy as np

from isograd.numerics.numba_memory import (
    BLOCK,
    empty_stored,
    empty_work,
    load,
    load_block,
    pointer,
    row_offset,
    stack_block,
    stack_vector,
    store,
    store_block,
    work_nan,
    work_zero,
)
from isograd.numerics.numba_ops import fma, is_finite, magnitude_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.numerics.numba_sum import (
    block_magnitude,
    block_special,
    block_terms,
    is_finite_key,
    special_value,
    sum_scale,
)
from isograd.numerics.numba_vectors import LANES as LANES_OF_VECTOR
from isograd.numerics.numba_wide import add_limbs, limb_shift, wide_to_float
from isograd.rows.numba_exponentials import (
    exponential,
    is_short,
    largest_quotient,
    log_probability,
    log_sum,
    mark,
    quotient,
    reciprocal,
    row_shift,
    term_scale,
)
from isograd.rows.numba_rows import fill_row
from isograd.rows.numba_vector_rows import contiguous, exponential_sum, row_maximum
from isograd.runtime.numba_compile import device_function, kernel

HARD, SMOOTH, PROBABILITIES = 0, 1, 2  # index targets, the same with label smoothing, probabilities
IGNORED, ELSEWHERE = -1, -2  # targets of rows that are left out, and that lie among classes not given


@device_function
def _pack(x, offset, stride, n, width, rows):
    """Copy `width` neighbouring rows of stride 1 so that each is contiguous."""
    for j in range(n):
        for i in range(width):
            store(rows, i * n + j, load(x, offset + j * stride + i))


@device_function
def _unpack(rows, x, offset, stride, n, width):
    for j in range(n):
        for i in range(width):
            store(x, offset + j * stride + i, load(rows, i * n + j))


@device_function
def _unit(index, tile, shape):
    """(first row, rows) of a step: a row, or at most `tile` rows along the last dimension."""
    if tile == 0:
        return index, np.int64(1)
    inner = shape[len(shape) - 1]
    tiles = (inner + tile - 1) // tile
    outer = index // tiles
    first = (index - outer * tiles) * tile
    return outer * inner + first, min(inner - first, tile)


@device_function
def _fill_distribution(mode, y, yo, y_stride, weight, j, count, keep, spread, q):
    """What the target distribution has in a block; with index targets the weights that smoothing spreads over."""
    if mode == SMOOTH:
        for i in range(count):
            store(q, i, load(weight, j + i))
    else:
        load_block(y, yo + j * y_stride, y_stride, count, q)
        for i in range(count):
            store(q, i, (load(q, i) * keep + spread) * load(weight, j + i))


@device_function
def _fill_products(x, xo, x_stride, j, count, m, top, middle, rest, q, block, like):
    """The products of the distribution and the log-probabilities."""
    load_block(x, xo + j * x_stride, x_stride, count, block)
    for i in range(count):
        store(block, i, load(q, i) * log_probability(load(block, i), m, top, middle, rest, like))


@device_function
def _add_block(block, count, finite, first, second, hi, lo, special, like):
    if finite:
        high, low = block_terms(block, count, first, second)
        hi, lo = add_limbs(hi, lo, high, low, limb_shift(like))
    else:
        special = block_special(block, count, special)
    return hi, lo, special


@device_function
def _distribution_sums(
    mode, x, xo, x_stride, y, yo, y_stride, weight, n, keep, spread, m, top, middle, rest, block, q, like
):  # fmt: skip
    """The order-free sums over the classes of q_j lp_j and, for probabilities, of q_j."""
    zero = work_zero(like)
    key, q_key = magnitude_key(zero), magnitude_key(zero)
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        _fill_distribution(mode, y, yo, y_stride, weight, j, count, keep, spread, q)
        _fill_products(x, xo, x_stride, j, count, m, top, middle, rest, q, block, like)
        key = block_magnitude(block, count, key)
        if mode == PROBABILITIES:
            q_key = block_magnitude(q, count, q_key)
    finite, q_finite = is_finite_key(key), is_finite_key(q_key)
    first, second, exponent = sum_scale(key)
    q_first, q_second, q_exponent = sum_scale(q_key)
    hi, lo, special = np.int64(0), np.uint64(0), np.int64(0)
    q_hi, q_lo, q_special = np.int64(0), np.uint64(0), np.int64(0)
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        if n > BLOCK:
            _fill_distribution(mode, y, yo, y_stride, weight, j, count, keep, spread, q)
            _fill_products(x, xo, x_stride, j, count, m, top, middle, rest, q, block, like)
        hi, lo, special = _add_block(block, count, finite, first, second, hi, lo, special, like)
        if mode == PROBABILITIES:
            q_hi, q_lo, q_special = _add_block(q, count, q_finite, q_first, q_second, q_hi, q_lo, q_special, like)
    total = wide_to_float(hi, lo, exponent, zero) if finite else special_value(special, zero)
    q_total = wide_to_float(q_hi, q_lo, q_exponent, zero) if q_finite else special_value(q_special, zero)
    return total, q_total


@device_function
def _gradient_block(mode, block, q, count, r, r_low, largest, factor, g, like):
    """Turn marked exponentials into gradients; q holds the block's distribution."""
    if mode == HARD:
        for i in range(count):
            store(block, i, factor * quotient(load(block, i), r, r_low, largest, like))
    else:
        for i in range(count):
            p = quotient(load(block, i), r, r_low, largest, like)
            store(block, i, fma(factor, p, -(g * load(q, i))))


@device_function
def _fill_offsets(mode, y, yo, y_stride, weight, j, count, keep, spread, q):
    """The distribution of a block but for the target of an index."""
    if mode != HARD:
        _fill_distribution(mode, y, yo, y_stride, weight, j, count, keep, spread, q)
        if mode == SMOOTH:
            for i in range(count):
                store(q, i, spread * load(q, i))


@device_function
def _gradient_row(
    mode, x, xo, x_stride, y, yo, y_stride, weight, target, x_target, dx, dxo, dx_stride, n, block, q, kept, from_kept,
    keep, spread, m, base, floor, bias, r, r_low, factor, g, like,
):  # fmt: skip
    """The gradient of a row, from its exponentials in the block or in `kept`, or from its logits."""
    largest = largest_quotient(r, r_low, m, base, floor, bias, like)
    for j in range(0, n, BLOCK):
        count = min(n - j, BLOCK)
        if not from_kept:
            load_block(x, xo + j * x_stride, x_stride, count, block)
            for i in range(count):
                v = load(block, i)
                store(block, i, mark(exponential(v, base, floor, bias, like)[0], v, m, like))
        elif n > BLOCK:
            load_block(kept, j, 1, count, block)
        _fill_offsets(mode, y, yo, y_stride, weight, j, count, keep, spread, q)
        _gradient_block(mode, block, q, count, r, r_low, largest, factor, g, like)
        store_block(dx, dxo + j * dx_stride, dx_stride, count, block)
    if mode != PROBABILITIES and target >= 0:
        own = load(weight, target)
        e, _ = exponential(x_target, base, floor, bias, like)
        p = quotient(mark(e, x_target, m, like), r, r_low, largest, like)
        at = own if mode == HARD else keep * own + spread * own
        store(dx, dxo + target * dx_stride, narrow(fma(factor, p, -(g * at)), like))


@device_function
def _row_loss(
    mode, x, xo, x_stride, y, yo, y_stride, weight, target, x_target, n, terms, q, keep, spread, total_keep,
    total_spread, m, top, middle, rest, like,
):  # fmt: skip
    """(loss without the z-loss, sum of the distribution) of a row."""
    zero = work_zero(like)
    value, total = zero, zero
    if mode != HARD:
        value, total = _distribution_sums(
            mode, x, xo, x_stride, y, yo, y_stride, weight, n, keep, spread, m, top, middle, rest, terms, q, like
        )  # fmt: skip
        value = zero - value
    if mode != PROBABILITIES:
        own = load(weight, target)
        loss = own * (zero - log_probability(x_target, m, top, middle, rest, like))
        value = loss if mode == HARD else keep * loss + spread * value
        total = own if mode == HARD else total_keep * own + total_spread
    return value, total


@kernel
def forward(
    like, x_address, y_address, target_address, weight_address, dloss_address, loss_address, state_address, dx_address,
    shape, x_strides, y_strides, dx_strides, rows, n, x_stride, y_stride, dx_stride, tile, mode, fused,
    keep, spread, z, z_twice, total_keep, total_spread, start, stop,
):  # fmt: skip
    """The losses of a range of rows with their states or, `fused`, with the gradients."""
    zero = work_zero(like)
    x_all, y_all, dx_all = pointer(x_address, like), pointer(y_address, like), pointer(dx_address, like)
    targets, weight = pointer(target_address, np.int64(0)), pointer(weight_address, zero)
    dloss, loss, state = pointer(dloss_address, zero), pointer(loss_address, zero), pointer(state_address, zero)
    block, q, terms = stack_block(zero), stack_block(zero), stack_block(zero)
    # A row that is longer than a block keeps its exponentials in the second-level cache.
    scratch = empty_work(n + LANES_OF_VECTOR if fused and n > BLOCK else 0, like)
    kept = block if n <= BLOCK else pointer(scratch.ctypes.data, zero)
    copy, tail = empty_stored(0 if tile != 0 or x_stride == 1 else n, like), stack_vector(like)
    x_tile, y_tile = empty_stored(n * tile, like), empty_stored(n * tile if mode == PROBABILITIES else 0, like)
    x_rows, y_rows = pointer(x_tile.ctypes.data, like), pointer(y_tile.ctypes.data, like)
    for index in range(start, stop):
        first, width = _unit(index, tile, shape)
        x, xo, xs = x_all, row_offset(first, shape, x_strides), x_stride
        y, yo, ys = y_all, row_offset(first, shape, y_strides), y_stride
        dx, dxo, dxs = dx_all, row_offset(first, shape, dx_strides), dx_stride
        if tile != 0:
            _pack(x_all, xo, x_stride, n, width, x_rows)
            if mode == PROBABILITIES:
                _pack(y_all, yo, y_stride, n, width, y_rows)
            x, xo, xs = x_rows, np.int64(0), np.int64(1)
            y, yo, ys = y_rows, np.int64(0), np.int64(1)
            dx, dxo, dxs = x_rows, np.int64(0), np.int64(1)
        for row in range(first, first + width):
            target = np.int64(0) if mode == PROBABILITIES else load(targets, row)
            value, factor, r, r_low, m = zero, zero, zero, zero, zero
            if target != IGNORED:
                x_target = widen(load(x, xo + target * xs))
                given = contiguous(x, xo, xs, n, pointer(copy.ctypes.data, like))
                m = row_maximum(given, n, tail, like)
                m = m if is_finite(m) else work_nan(like)
                value, factor, r, r_low = work_nan(like), work_nan(like), work_nan(like), work_nan(like)
                if is_finite(m):
                    base, floor, bias = row_shift(m, like)
                    hi, lo = exponential_sum(
                        given, n, kept, fused, True, term_scale(n, like), m, base, floor, bias, like, tail
                    )
                    r, r_low = reciprocal(hi, lo, n, like)
                    top, middle, rest = log_sum(hi, lo, n, m, base, floor, bias, like)
                    value, factor = _row_loss(
                        mode, x, xo, xs, y, yo, ys, weight, target, x_target, n, terms, q, keep, spread, total_keep,
                        total_spread, m, top, middle, rest, like,
                    )  # fmt: skip
                    if z != zero:
                        total = m + top if is_short(like) else top + (middle + rest)
                        value = value + z * (total * total)
                        factor = factor + z_twice * total
                    if fused:
                        g = load(dloss, row)
                        _gradient_row(
                            mode, x, xo, xs, y, yo, ys, weight, target, x_target, dx, dxo, dxs, n, block, q, kept, True,
                            keep, spread, m, base, floor, bias, r, r_low, g * factor, g, like,
                        )  # fmt: skip
            if fused and not is_finite(r):
                fill_row(dx, dxo, dxs, n, block, r)
            if fused and target == IGNORED:
                fill_row(dx, dxo, dxs, n, block, zero)
            store(loss, row, narrow(value, zero))
            if not fused:
                store(state, row, narrow(m, zero))
                store(state, rows + row, narrow(r, zero))
                store(state, 2 * rows + row, narrow(r_low, zero))
                store(state, 3 * rows + row, narrow(factor, zero))
            if tile != 0:
                xo, yo, dxo = xo + n, yo + n, dxo + n
        if fused and tile != 0:
            _unpack(x_rows, dx_all, row_offset(first, shape, dx_strides), dx_stride, n, width)


@kernel
def backward(
    like, x_address, y_address, target_address, weight_address, dloss_address, state_address, dx_address,
    shape, x_strides, y_strides, dx_strides, rows, n, x_stride, y_stride, dx_stride, tile, mode,
    keep, spread, start, stop,
):  # fmt: skip
    """The gradients of a range of rows from their states."""
    zero = work_zero(like)
    x_all, y_all, dx_all = pointer(x_address, like), pointer(y_address, like), pointer(dx_address, like)
    targets, weight = pointer(target_address, np.int64(0)), pointer(weight_address, zero)
    dloss, state = pointer(dloss_address, zero), pointer(state_address, zero)
    block, q = stack_block(zero), stack_block(zero)
    x_tile, y_tile = empty_stored(n * tile, like), empty_stored(n * tile if mode == PROBABILITIES else 0, like)
    x_rows, y_rows = pointer(x_tile.ctypes.data, like), pointer(y_tile.ctypes.data, like)
    for index in range(start, stop):
        first, width = _unit(index, tile, shape)
        x, xo, xs = x_all, row_offset(first, shape, x_strides), x_stride
        y, yo, ys = y_all, row_offset(first, shape, y_strides), y_stride
        dx, dxo, dxs = dx_all, row_offset(first, shape, dx_strides), dx_stride
        if tile != 0:
            _pack(x_all, xo, x_stride, n, width, x_rows)
            if mode == PROBABILITIES:
                _pack(y_all, yo, y_stride, n, width, y_rows)
            x, xo, xs = x_rows, np.int64(0), np.int64(1)
            y, yo, ys = y_rows, np.int64(0), np.int64(1)
            dx, dxo, dxs = x_rows, np.int64(0), np.int64(1)
        for row in range(first, first + width):
            target = np.int64(0) if mode == PROBABILITIES else load(targets, row)
            m = load(state, row)
            if target == IGNORED:
                fill_row(dx, dxo, dxs, n, block, zero)
            elif not is_finite(m):
                fill_row(dx, dxo, dxs, n, block, work_nan(like))
            else:
                base, floor, bias = row_shift(m, like)
                x_target = widen(load(x, xo + max(target, np.int64(0)) * xs))
                g = load(dloss, row)
                _gradient_row(
                    mode, x, xo, xs, y, yo, ys, weight, target, x_target, dx, dxo, dxs, n, block, q, block, False,
                    keep, spread, m, base, floor, bias, load(state, rows + row), load(state, 2 * rows + row),
                    g * load(state, 3 * rows + row), g, like,
                )  # fmt: skip
            if tile != 0:
                xo, yo, dxo = xo + n, yo + n, dxo + n
        if tile != 0:
            _unpack(x_rows, dx_all, row_offset(first, shape, dx_strides), dx_stride, n, width)
