# mypy: ignore-errors
"""Cross entropy of plain index targets on the CPU where neighbouring rows, and not classes, are contiguous.

A tile of neighbouring rows, the lanes, advances together along the classes. The arithmetic is that of
`numba_cross_entropy.py`.
"""

import numpy as np

from isograd.losses.numba_cross_entropy import IGNORED
from isograd.numerics.numba_memory import (
    LANES,
    load,
    load_block,
    pointer,
    stack_lanes,
    store,
    store_block,
    work_nan,
    work_one,
    work_zero,
)
from isograd.numerics.numba_ops import fma, is_finite, lowest_key
from isograd.numerics.numba_storage import narrow, widen
from isograd.rows.numba_exponentials import (
    exponential,
    is_short,
    largest_quotient,
    log_probability,
    mark,
    quotient,
    row_shift,
)
from isograd.rows.numba_lanes import (
    clear_lanes,
    lane_exponential_sums,
    lane_log_sums,
    lane_maximum,
    lane_reciprocals,
    tile_offset,
    tile_width,
)
from isograd.runtime.numba_compile import device_function, kernel


@device_function
def _first_row(index, lanes):
    tiles = (lanes + LANES - 1) // LANES
    outer = index // tiles
    return outer * lanes + (index - outer * tiles) * LANES


@device_function
def _gradient(
    x, xo, x_stride, targets, weight, dloss, dx, dxo, dx_stride, n, first, count, block, at, largest, live,
    m, base, floor, bias, r, r_low, factor, like,
):  # fmt: skip
    """The gradients of a tile. `live` is zero for lanes that are ignored."""
    zero = work_zero(like)
    for i in range(count):
        target = load(targets, first + i)
        value = largest_quotient(
            load(r, i), load(r_low, i), load(m, i), load(base, i), load(floor, i), load(bias, i), like
        )  # fmt: skip
        store(largest, i, value)
        # Before dx, which may be x, is written.
        own = zero
        if target >= 0:
            v = widen(load(x, xo + target * x_stride + i))
            e, _ = exponential(v, load(base, i), load(floor, i), load(bias, i), like)
            p = quotient(mark(e, v, load(m, i), like), load(r, i), load(r_low, i), value, like)
            own = fma(load(factor, i), p, -(load(dloss, first + i) * load(weight, target)))
        store(at, i, own)
    for j in range(n):
        load_block(x, xo + j * x_stride, 1, count, block)
        for i in range(count):
            v = load(block, i)
            e, _ = exponential(v, load(base, i), load(floor, i), load(bias, i), like)
            p = quotient(mark(e, v, load(m, i), like), load(r, i), load(r_low, i), load(largest, i), like)
            value = load(factor, i) * p
            store(block, i, value if load(live, i) != zero else zero)
        store_block(dx, dxo + j * dx_stride, 1, count, block)
    for i in range(count):
        target = load(targets, first + i)
        if target >= 0:
            store(dx, dxo + target * dx_stride + i, narrow(load(at, i), like))


@kernel
def forward(
    like, x_address, target_address, weight_address, dloss_address, loss_address, state_address, dx_address,
    shape, x_strides, dx_strides, rows, lanes, n, x_stride, dx_stride, fused, z, z_twice, start, stop,
):  # fmt: skip
    """The losses of a range of tiles with their states or, `fused`, with the gradients."""
    zero, integer = work_zero(like), lowest_key(like)
    x, dx = pointer(x_address, like), pointer(dx_address, like)
    targets, weight = pointer(target_address, np.int64(0)), pointer(weight_address, zero)
    dloss, loss, state = pointer(dloss_address, zero), pointer(loss_address, zero), pointer(state_address, zero)
    block, m, r, r_low, factor = (stack_lanes(zero), stack_lanes(zero), stack_lanes(zero), stack_lanes(zero),
                                  stack_lanes(zero))  # fmt: skip
    base, floor, bias = stack_lanes(zero), stack_lanes(zero), stack_lanes(integer)
    key, high, low = stack_lanes(integer), stack_lanes(integer), stack_lanes(integer)
    hi, lo = stack_lanes(np.int64(0)), stack_lanes(np.uint64(0))
    at, largest, live = stack_lanes(zero), stack_lanes(zero), stack_lanes(zero)
    top, middle, rest = stack_lanes(zero), stack_lanes(zero), stack_lanes(zero)
    for index in range(start, stop):
        xo, dxo = tile_offset(index, lanes, shape, x_strides), tile_offset(index, lanes, shape, dx_strides)
        first, count = _first_row(index, lanes), tile_width(index, lanes)
        lane_maximum(x, xo, x_stride, n, count, block, key, m, base, floor, bias, like)
        clear_lanes(high, low, hi, lo, integer ^ integer, count)
        lane_exponential_sums(
            x, xo, x_stride, n, count, block, m, base, floor, bias, high, low, hi, lo, dx, dxo, dx_stride, False, like
        )  # fmt: skip
        lane_reciprocals(hi, lo, n, count, r, r_low, like)
        lane_log_sums(hi, lo, n, count, m, base, floor, bias, top, middle, rest, like)
        for i in range(count):
            row = first + i
            target = load(targets, row)
            value, total, first_r, second_r, top_m = zero, zero, zero, zero, zero
            if target != IGNORED:
                top_m = load(m, i) if is_finite(load(m, i)) else work_nan(like)
                value, total, first_r, second_r = work_nan(like), work_nan(like), work_nan(like), work_nan(like)
                if is_finite(top_m):
                    first_r, second_r = load(r, i), load(r_low, i)
                    v = widen(load(x, xo + target * x_stride + i))
                    total = load(weight, target)
                    value = total * (
                        zero - log_probability(v, top_m, load(top, i), load(middle, i), load(rest, i), like)
                    )
                    if z != zero:
                        lse = load(middle, i) + load(rest, i)
                        lse = top_m + load(top, i) if is_short(like) else load(top, i) + lse
                        value = value + z * (lse * lse)
                        total = total + z_twice * lse
            store(loss, row, narrow(value, zero))
            if fused:
                store(r, i, first_r)
                store(r_low, i, second_r)
                store(factor, i, load(dloss, row) * total)
                store(live, i, zero if target == IGNORED else work_one(like))
            else:
                store(state, row, narrow(top_m, zero))
                store(state, rows + row, narrow(first_r, zero))
                store(state, 2 * rows + row, narrow(second_r, zero))
                store(state, 3 * rows + row, narrow(total, zero))
        if fused:
            _gradient(
                x, xo, x_stride, targets, weight, dloss, dx, dxo, dx_stride, n, first, count, block, at, largest, live,
                m, base, floor, bias, r, r_low, factor, like,
            )  # fmt: skip


@kernel
def backward(
    like, x_address, target_address, weight_address, dloss_address, state_address, dx_address,
    shape, x_strides, dx_strides, rows, lanes, n, x_stride, dx_stride, start, stop,
):  # fmt: skip
    """The gradients of a range of tiles from their states."""
    zero, integer = work_zero(like), lowest_key(like)
    x, dx = pointer(x_address, like), pointer(dx_address, like)
    targets, weight = pointer(target_address, np.int64(0)), pointer(weight_address, zero)
    dloss, state = pointer(dloss_address, zero), pointer(state_address, zero)
    block, m, r, r_low, factor = (stack_lanes(zero), stack_lanes(zero), stack_lanes(zero), stack_lanes(zero),
                                  stack_lanes(zero))  # fmt: skip
    base, floor, bias = stack_lanes(zero), stack_lanes(zero), stack_lanes(integer)
    at, largest, live = stack_lanes(zero), stack_lanes(zero), stack_lanes(zero)
    for index in range(start, stop):
        xo, dxo = tile_offset(index, lanes, shape, x_strides), tile_offset(index, lanes, shape, dx_strides)
        first, count = _first_row(index, lanes), tile_width(index, lanes)
        for i in range(count):
            row = first + i
            store(m, i, load(state, row))
            store(r, i, load(state, rows + row))
            store(r_low, i, load(state, 2 * rows + row))
            store(factor, i, load(dloss, row) * load(state, 3 * rows + row))
            store(live, i, zero if load(targets, row) == IGNORED else work_one(like))
            a, b, k = row_shift(load(m, i), like)
            store(base, i, a)
            store(floor, i, b)
            store(bias, i, k)
        _gradient(
            x, xo, x_stride, targets, weight, dloss, dx, dxo, dx_stride, n, first, count, block, at, largest, live,
            m, base, floor, bias, r, r_low, factor, like,
        )  # fmt: skip
