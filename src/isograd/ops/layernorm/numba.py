"""layernorm on the CPU, one row of the axis after the other."""

from typing import Any

import numpy as np

from isograd.core.kernel import launcher
from isograd.numerics.numba_memory import (
    BLOCK,
    empty_work,
    load,
    load_block,
    pointer,
    row_offset,
    stack_block,
    store,
    store_block,
    work_one,
    work_zero,
)
from isograd.numerics.numba_ops import magnitude_key
from isograd.numerics.numba_storage import narrow
from isograd.numerics.numba_sum import block_magnitude
from isograd.numerics.numba_wide import to_float
from isograd.numerics.reference import narrow as rounded
from isograd.numerics.reference import work_dtype
from isograd.reduction import api as reduction
from isograd.rows.numba_rows import added_pieces, stored_sum, weigh
from isograd.rows.walk import for_pieces, for_rows, one_row
from isograd.runtime.fenv import default_environment
from isograd.runtime.numba_compile import device_function, kernel


@device_function
def _center(block, count, mean, factor):
    """Turn elements into normalized ones or, with a factor of one, into centered ones."""
    for i in range(count):
        store(block, i, (load(block, i) - mean) * factor)


@device_function
def _shift(bias, offset, stride, count, block, biases):
    """Add the biases of its places to a block."""
    load_block(bias, offset, stride, count, biases)
    for i in range(count):
        store(block, i, load(block, i) + load(biases, i))


@kernel
def layernorm_rows(
    like, mean_address, rstd_address, x_address, y_address, shape, mean_strides, rstd_strides, x_strides, y_strides, n,
    x_stride, y_stride, weight_address, weight_stride, weighted, bias_address, bias_stride, biased, eps, start, stop,
):  # fmt: skip
    """Rows of the result; y may be x."""
    x, y, weight = pointer(x_address, like), pointer(y_address, like), pointer(weight_address, like)
    bias, zero = pointer(bias_address, like), work_zero(like)
    mean, rstd, one = pointer(mean_address, zero), pointer(rstd_address, zero), work_one(zero)
    block, others = stack_block(zero), stack_block(zero)
    scratch = empty_work(n if n > BLOCK else 0, zero)
    kept = pointer(scratch.ctypes.data, zero)
    for row in range(start, stop):
        xo, yo = row_offset(row, shape, x_strides), row_offset(row, shape, y_strides)
        key = magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(x, xo + j * x_stride, x_stride, count, block)
            key = block_magnitude(block, count, key)
            if n > BLOCK:
                store_block(kept, j, 1, count, block)
        center = stored_sum(kept, n, key, block, zero) / to_float(n, zero)
        store(mean, row_offset(row, shape, mean_strides), narrow(center, zero))
        key = magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(x, xo + j * x_stride, x_stride, count, block)
            _center(block, count, center, one)
            for i in range(count):
                store(block, i, load(block, i) * load(block, i))
            key = block_magnitude(block, count, key)
            if n > BLOCK:
                store_block(kept, j, 1, count, block)
        r = one / np.sqrt(stored_sum(kept, n, key, block, zero) / to_float(n, zero) + eps)
        store(rstd, row_offset(row, shape, rstd_strides), narrow(r, zero))
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(x, xo + j * x_stride, x_stride, count, block)
            _center(block, count, center, r)
            if weighted:
                weigh(weight, j * weight_stride, weight_stride, count, block, others)
            if biased:
                _shift(bias, j * bias_stride, bias_stride, count, block, others)
            store_block(y, yo + j * y_stride, y_stride, count, block)


@kernel
def layernorm_backward_rows(
    like, mean_address, rstd_address, dy_address, x_address, p_address, dx_address, shape, mean_strides, rstd_strides,
    dy_strides, x_strides, p_strides, dx_strides, n, dy_stride, x_stride, p_stride, dx_stride, weight_address,
    weight_stride, weighted, summed, start, stop,
):  # fmt: skip
    """Rows of the gradient; dx may be dy or x. summed: p gets the terms of the weight's gradient."""
    dy, x, dx = pointer(dy_address, like), pointer(x_address, like), pointer(dx_address, like)
    weight, zero = pointer(weight_address, like), work_zero(like)
    mean, rstd, p = pointer(mean_address, zero), pointer(rstd_address, zero), pointer(p_address, zero)
    g, normal, block = stack_block(zero), stack_block(zero), stack_block(zero)
    scratch, g_scratch = empty_work(n if n > BLOCK else 0, zero), empty_work(n if n > BLOCK else 0, zero)
    kept, g_kept = pointer(scratch.ctypes.data, zero), pointer(g_scratch.ctypes.data, zero)
    for row in range(start, stop):
        dyo, xo = row_offset(row, shape, dy_strides), row_offset(row, shape, x_strides)
        po, dxo = row_offset(row, shape, p_strides), row_offset(row, shape, dx_strides)
        center = load(mean, row_offset(row, shape, mean_strides))
        r = load(rstd, row_offset(row, shape, rstd_strides))
        key, g_key = magnitude_key(zero), magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(dy, dyo + j * dy_stride, dy_stride, count, g)
            load_block(x, xo + j * x_stride, x_stride, count, normal)
            _center(normal, count, center, r)
            if weighted:
                weigh(weight, j * weight_stride, weight_stride, count, g, block)
            for i in range(count):
                store(block, i, load(g, i) * load(normal, i))
            key, g_key = block_magnitude(block, count, key), block_magnitude(g, count, g_key)
            if n > BLOCK:
                store_block(kept, j, 1, count, block)
                store_block(g_kept, j, 1, count, g)
        a = stored_sum(kept, n, key, block, zero) / to_float(n, zero)
        b = stored_sum(g_kept, n, g_key, g, zero) / to_float(n, zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(dy, dyo + j * dy_stride, dy_stride, count, g)
            load_block(x, xo + j * x_stride, x_stride, count, normal)
            _center(normal, count, center, r)
            if summed:
                for i in range(count):
                    store(block, i, load(g, i) * load(normal, i))
                store_block(p, po + j * p_stride, p_stride, count, block)
            if weighted:
                weigh(weight, j * weight_stride, weight_stride, count, g, block)
            for i in range(count):
                store(block, i, r * ((load(g, i) - b) - load(normal, i) * a))
            store_block(dx, dxo + j * dx_stride, dx_stride, count, block)


# --- launches --------------------------------------------------------------------------------------------------------
@launcher("layernorm")
def layernorm(problem: Any, x: Any, y: Any, mean: Any, rstd: Any, weight: Any = None, bias: Any = None) -> None:
    """Compute y, the mean and rstd; y may be x."""
    if x.size == 0:
        mean.fill(np.nan)  # rows without elements
        rstd.fill(np.nan)
        return
    with default_environment():
        eps = work_dtype(x.dtype)(problem.eps)
    settings = (*one_row(weight, x), *one_row(bias, x), eps)
    for_rows(layernorm_rows, problem.axis, (x, y), *settings, per_row=(mean, rstd))


@launcher("layernorm_backward")
def layernorm_backward(
    problem: Any,
    dy: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    dx: Any,
    weight: Any = None,
    dweight: Any = None,
    dbias: Any = None,
) -> None:
    """Compute dx, which may be dy or x, and what of dweight and dbias is asked for."""
    others, summed = tuple([d for d in range(x.ndim) if d != problem.axis]), dweight is not None
    if dbias is not None:  # first: dx may overwrite dy
        dbias[...] = reduction.sum(dy, others)
    p = np.empty(x.shape, rstd.dtype) if summed else dx
    if x.size:
        settings = (*one_row(weight, x), summed)
        for_rows(layernorm_backward_rows, problem.axis, (dy, x, p, dx), *settings, per_row=(mean, rstd))
    if summed:
        with default_environment():
            dweight[...] = rounded(reduction.sum(p, others), dweight.dtype)


@launcher("add_layernorm")
def add_layernorm(
    problem: Any,
    x: Any,
    residual: Any,
    y: Any,
    summed: Any,
    mean: Any,
    rstd: Any,
    weight: Any = None,
    bias: Any = None,
) -> None:
    """Compute the sum, and of it y, the mean and rstd; y and the sum may be x or the residual."""
    for_pieces(added_pieces, BLOCK, (x, residual, summed))
    layernorm(problem, summed, y, mean, rstd, weight, bias)


@launcher("add_layernorm_backward")
def add_layernorm_backward(
    problem: Any,
    dy: Any,
    summed: Any,
    mean: Any,
    rstd: Any,
    dx: Any,
    dsummed: Any = None,
    weight: Any = None,
    dweight: Any = None,
    dbias: Any = None,
) -> None:
    """Compute dx, which may be dy, dsummed or the sum, and what else is asked for."""
    of_norm = dx if dsummed is None else np.empty_like(dx)
    layernorm_backward(problem, dy, summed, mean, rstd, of_norm, weight, dweight, dbias)
    if dsummed is not None:
        for_pieces(added_pieces, BLOCK, (of_norm, dsummed, dx))
