"""rmsnorm on the CPU, one row of the axis after the other."""

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
from isograd.runtime.numba_compile import kernel


@kernel
def rmsnorm_rows(
    like, rstd_address, x_address, y_address, shape, rstd_strides, x_strides, y_strides, n, x_stride, y_stride,
    weight_address, weight_stride, weighted, eps, start, stop,
):  # fmt: skip
    """Rows of the result; y may be x."""
    x, y, weight = pointer(x_address, like), pointer(y_address, like), pointer(weight_address, like)
    zero = work_zero(like)
    rstd = pointer(rstd_address, zero)
    block, weights = stack_block(zero), stack_block(zero)
    scratch = empty_work(n if n > BLOCK else 0, zero)
    kept = pointer(scratch.ctypes.data, zero)
    for row in range(start, stop):
        xo, yo = row_offset(row, shape, x_strides), row_offset(row, shape, y_strides)
        key = magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(x, xo + j * x_stride, x_stride, count, block)
            for i in range(count):
                store(block, i, load(block, i) * load(block, i))
            key = block_magnitude(block, count, key)
            if n > BLOCK:
                store_block(kept, j, 1, count, block)
        r = work_one(zero) / np.sqrt(stored_sum(kept, n, key, block, zero) / to_float(n, zero) + eps)
        store(rstd, row_offset(row, shape, rstd_strides), narrow(r, zero))
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(x, xo + j * x_stride, x_stride, count, block)
            for i in range(count):
                store(block, i, load(block, i) * r)
            if weighted:
                weigh(weight, j * weight_stride, weight_stride, count, block, weights)
            store_block(y, yo + j * y_stride, y_stride, count, block)


@kernel
def rmsnorm_backward_rows(
    like, rstd_address, dy_address, x_address, p_address, dx_address, shape, rstd_strides, dy_strides, x_strides,
    p_strides, dx_strides, n, dy_stride, x_stride, p_stride, dx_stride, weight_address, weight_stride, weighted, summed,
    start, stop,
):  # fmt: skip
    """Rows of the gradient; dx may be dy or x. summed: p gets the terms of the weight's gradient."""
    dy, x, dx = pointer(dy_address, like), pointer(x_address, like), pointer(dx_address, like)
    weight, zero = pointer(weight_address, like), work_zero(like)
    rstd, p = pointer(rstd_address, zero), pointer(p_address, zero)
    g, normal, block = stack_block(zero), stack_block(zero), stack_block(zero)
    scratch = empty_work(n if n > BLOCK else 0, zero)
    kept = pointer(scratch.ctypes.data, zero)
    for row in range(start, stop):
        dyo, xo = row_offset(row, shape, dy_strides), row_offset(row, shape, x_strides)
        po, dxo = row_offset(row, shape, p_strides), row_offset(row, shape, dx_strides)
        r = load(rstd, row_offset(row, shape, rstd_strides))
        key = magnitude_key(zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(dy, dyo + j * dy_stride, dy_stride, count, g)
            load_block(x, xo + j * x_stride, x_stride, count, normal)
            if weighted:
                weigh(weight, j * weight_stride, weight_stride, count, g, block)
            for i in range(count):
                store(block, i, load(g, i) * (load(normal, i) * r))
            key = block_magnitude(block, count, key)
            if n > BLOCK:
                store_block(kept, j, 1, count, block)
        a = stored_sum(kept, n, key, block, zero) / to_float(n, zero)
        for j in range(0, n, BLOCK):
            count = min(n - j, BLOCK)
            load_block(dy, dyo + j * dy_stride, dy_stride, count, g)
            load_block(x, xo + j * x_stride, x_stride, count, normal)
            for i in range(count):
                store(normal, i, load(normal, i) * r)
            if summed:
                for i in range(count):
                    store(block, i, load(g, i) * load(normal, i))
                store_block(p, po + j * p_stride, p_stride, count, block)
            if weighted:
                weigh(weight, j * weight_stride, weight_stride, count, g, block)
            for i in range(count):
                store(block, i, r * (load(g, i) - load(normal, i) * a))
            store_block(dx, dxo + j * dx_stride, dx_stride, count, block)


# --- launches --------------------------------------------------------------------------------------------------------
@launcher("rmsnorm")
def rmsnorm(problem: Any, x: Any, y: Any, rstd: Any, weight: Any = None) -> None:
    """Compute y and rstd; y may be x."""
    if x.size == 0:
        rstd.fill(np.nan)  # rows without elements
        return
    with default_environment():
        eps = work_dtype(x.dtype)(problem.eps)
    for_rows(rmsnorm_rows, problem.axis, (x, y), *one_row(weight, x), eps, per_row=(rstd,))


@launcher("rmsnorm_backward")
def rmsnorm_backward(
    problem: Any, dy: Any, x: Any, rstd: Any, dx: Any, weight: Any = None, dweight: Any = None
) -> None:
    """Compute dx, which may be dy or x, and dweight where it is asked for."""
    summed = dweight is not None
    p = np.empty(x.shape, rstd.dtype) if summed else dx
    if x.size:
        settings = (*one_row(weight, x), summed)
        for_rows(rmsnorm_backward_rows, problem.axis, (dy, x, p, dx), *settings, per_row=(rstd,))
    if summed:
        others = tuple([d for d in range(x.ndim) if d != problem.axis])
        with default_environment():
            dweight[...] = rounded(reduction.sum(p, others), dweight.dtype)


@launcher("add_rmsnorm")
def add_rmsnorm(
    problem: Any,
    x: Any,
    residual: Any,
    y: Any,
    summed: Any,
    rstd: Any,
    weight: Any = None,
) -> None:
    """Compute the sum, and of it y and rstd; y and the sum may be x or the residual."""
    for_pieces(added_pieces, BLOCK, (x, residual, summed))
    rmsnorm(problem, summed, y, rstd, weight)


@launcher("add_rmsnorm_backward")
def add_rmsnorm_backward(
    problem: Any,
    dy: Any,
    summed: Any,
    rstd: Any,
    dx: Any,
    dsummed: Any = None,
    weight: Any = None,
    dweight: Any = None,
) -> None:
    """Compute dx, which may be dy, dsummed or the sum, and what else is asked for."""
    of_norm = dx if dsummed is None else np.empty_like(dx)
    rmsnorm_backward(problem, dy, summed, rstd, of_norm, weight, dweight)
    if dsummed is not None:
        for_pieces(added_pieces, BLOCK, (of_norm, dsummed, dx))
