# mypy: ignore-errors
# ruff: noqa: D103, N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""The softmax family in Triton: any axis, any strides, float16, bfloat16, float32, float64.

Two kernels for each direction. `*_tile` holds whole rows in registers. `*_loop` passes over rows of any length three
times; the long rows that training meets go to `gluon_kernels.py` and `gluon_pipes.py`, which stage them on chip.

A problem is a set of rows: the reduced axis of n elements, the inner axis (the remaining one with the smallest
stride), and up to six outer axes. A program serves ROWS neighbours on the inner axis. Formulas: `reference.py`.
"""

import torch
import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.softmax import triton_rows as rows
from isograd.softmax.gluon_kernels import backward_cluster, backward_staged, forward_cluster, forward_staged
from isograd.softmax.gluon_pipes import forward_piped
from isograd.softmax.gluon_strips import backward_strip, forward_strip
from isograd.softmax.triton_launch import launch

SOFTMAX, LOG_SOFTMAX = rows.SOFTMAX, rows.LOG_SOFTMAX


@triton.jit
def _place(inner, outer_shape, ROWS: tl.constexpr):
    """(indices on the inner axis, index over the outer axes) of this program."""
    pid = tl.program_id(0)
    outer = pid * 0
    if len(outer_shape) > 0:
        blocks = tl.cdiv(inner, ROWS)
        outer = pid // blocks
        pid -= outer * blocks
    first = pid.to(tl.int64) * ROWS
    return (first + tl.arange(0, ROWS))[None, :, None, None], outer


@triton.jit
def _outer_offset(outer, shape, strides):
    """Offset of an index over the outer axes, the last axis fastest."""
    offset = tl.zeros((), tl.int64)
    for i in tl.static_range(len(shape)):
        rest = outer // shape[len(shape) - 1 - i]
        offset += (outer - rest * shape[len(shape) - 1 - i]).to(tl.int64) * strides[len(shape) - 1 - i]
        outer = rest
    return offset


@triton.jit
def _columns(BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr):
    """[q, 1, p, v] indices on the reduced axis; GROUP of them belong to a thread, V to one access."""
    q = tl.arange(0, BLOCK // GROUP)[:, None, None] * V
    p = tl.arange(0, GROUP // V)[None, :, None] * (BLOCK // GROUP * V)
    return (p + q + tl.arange(0, V)[None, None, :]).to(tl.int64)[:, None, :, :]


@triton.jit
def _pointers(base, row, column, inner_stride, axis_stride, INNER: tl.constexpr, VEC: tl.constexpr):
    """Pointers of a tile; the stride of the axis that is not contiguous is a multiple of VEC."""
    if VEC > 1:
        if INNER:
            inner_stride = tl.multiple_of(inner_stride, VEC)
        else:
            axis_stride = tl.multiple_of(axis_stride, VEC)
    return base + row * inner_stride + column * axis_stride


@triton.jit
def _mask(row, column, inner, n):
    return (row < inner) & (column < n)


@triton.jit
def _broad(v):
    """A value a row as a tile."""
    return v[None, :, None, None]


@triton.jit
def _load(pointers, mask, other: tl.constexpr, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    if MASKED:
        return ops.widen(tl.load(pointers, mask=mask, other=other), NATIVE)
    else:
        return ops.widen(tl.load(pointers), NATIVE)


@triton.jit
def _store(pointers, value, mask, MASKED: tl.constexpr, NATIVE: tl.constexpr):
    y = ops.narrow(value, pointers.dtype.element_ty, NATIVE)
    if MASKED:
        tl.store(pointers, y, mask=mask)
    else:
        tl.store(pointers, y)


# --- forward ---------------------------------------------------------------------------------------------------------
@triton.jit
def forward_tile(
    x_ptr,
    out_ptr,
    n,
    inner,
    x_axis,
    x_inner,
    out_axis,
    out_inner,
    outer_shape,
    x_outer,
    out_outer,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    INNER: tl.constexpr,
    VEC: tl.constexpr,
    MASKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Softmax or log_softmax of rows of at most BLOCK elements, held in registers."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    wide: tl.constexpr = dtype == tl.float64
    row, outer = _place(inner, outer_shape, ROWS)
    column = _columns(BLOCK, GROUP, V)
    mask = _mask(row, column, inner, n)
    x_ptr += _outer_offset(outer, outer_shape, x_outer)
    x = _load(_pointers(x_ptr, row, column, x_inner, x_axis, INNER, VEC), mask, float("-inf"), MASKED, NATIVE)

    most = rows.thread_maximum(x)
    key = tl.max(ops.max_key(most), axis=0)
    m = ops.from_key(key)
    valid = ops.is_finite(m)
    base, floor, bias = rows.row_shift(m, short)
    flag = rows.largest_flag(most, m[None, :], valid[None, :], short)[:, :, None, None]
    found = rows.find_largest(x, _broad(m), flag, _broad(valid), short, NATIVE)
    e, error = rows.exponential(x, _broad(base), _broad(floor), _broad(bias), short)
    high, low = rows.exponential_terms(e, error, short, False, NATIVE)
    high, low = rows.exponential_sums(high, low, short, False)
    if short:
        lo = tl.sum(high, axis=0)
        hi = lo
    elif wide:
        hi, lo = rows.wide_sum(high, low, dtype)
    else:
        lo = rows.narrow_sum(high, low)
        hi = lo
    if KIND == SOFTMAX:
        r, r_low = rows.softmax_factors(hi, lo, valid, short, False, wide, dtype)
        largest = rows.largest_output(m, base, floor, bias, r, r_low, valid, short)
        y = rows.softmax_output(e, found, _broad(r), _broad(r_low), _broad(largest), short, NATIVE)
    else:
        top, middle, bottom = rows.log_sum(hi, lo, m, base, floor, bias, valid, short, False, wide, dtype, NATIVE)
        y = rows.log_softmax_output(x, _broad(top), _broad(middle), _broad(bottom), short)
    out_ptr += _outer_offset(outer, outer_shape, out_outer)
    _store(_pointers(out_ptr, row, column, out_inner, out_axis, INNER, VEC), y, mask, MASKED, NATIVE)


@triton.jit
def forward_loop(
    x_ptr,
    out_ptr,
    n,
    inner,
    x_axis,
    x_inner,
    out_axis,
    out_inner,
    outer_shape,
    x_outer,
    out_outer,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    INNER: tl.constexpr,
    VEC: tl.constexpr,
    LONG: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Softmax or log_softmax of rows of any length in three passes."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    wide: tl.constexpr = LONG or not short
    work: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    row, outer = _place(inner, outer_shape, ROWS)
    x_ptr += _outer_offset(outer, outer_shape, x_outer)
    out_ptr += _outer_offset(outer, outer_shape, out_outer)
    column = _columns(BLOCK, GROUP, V)

    best = tl.full((BLOCK // GROUP, ROWS, GROUP // V, V), float("-inf"), work)
    for start in range(0, n, BLOCK):
        mask = _mask(row, column + start, inner, n)
        x = _load(_pointers(x_ptr, row, column + start, x_inner, x_axis, INNER, VEC), mask, float("-inf"), True, NATIVE)
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    m = ops.from_key(tl.max(ops.max_key(rows.thread_maximum(best)), axis=0))
    valid = ops.is_finite(m)
    base, floor, bias = rows.row_shift(m, short)

    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    for start in range(0, n, BLOCK):
        mask = _mask(row, column + start, inner, n)
        x = _load(_pointers(x_ptr, row, column + start, x_inner, x_axis, INNER, VEC), mask, float("-inf"), True, NATIVE)
        e, error = rows.exponential(x, _broad(base), _broad(floor), _broad(bias), short)
        high, low = rows.exponential_terms(e, error, short, LONG, NATIVE)
        high, low = rows.exponential_sums(high, low, short, LONG)
        high_sum += high
        low_sum += low
    if wide:
        hi, lo = rows.wide_sum(high_sum, low_sum, dtype)
    else:
        lo = tl.sum(high_sum, axis=0)
        hi = lo
    if KIND == SOFTMAX:
        r, r_low = rows.softmax_factors(hi, lo, valid, short, LONG, wide, dtype)
        largest = rows.largest_output(m, base, floor, bias, r, r_low, valid, short)
    else:
        top, middle, bottom = rows.log_sum(hi, lo, m, base, floor, bias, valid, short, LONG, wide, dtype, NATIVE)

    for start in range(0, n, BLOCK):
        mask = _mask(row, column + start, inner, n)
        x = _load(_pointers(x_ptr, row, column + start, x_inner, x_axis, INNER, VEC), mask, float("-inf"), True, NATIVE)
        if KIND == SOFTMAX:
            e, _ = rows.exponential(x, _broad(base), _broad(floor), _broad(bias), short)
            every = _broad(tl.full(valid.shape, 1, tl.int32))
            found = rows.find_largest(x, _broad(m), every, _broad(valid), short, NATIVE)
            y = rows.softmax_output(e, found, _broad(r), _broad(r_low), _broad(largest), short, NATIVE)
        else:
            y = rows.log_softmax_output(x, _broad(top), _broad(middle), _broad(bottom), short)
        _store(_pointers(out_ptr, row, column + start, out_inner, out_axis, INNER, VEC), y, mask, True, NATIVE)


# --- backward --------------------------------------------------------------------------------------------------------
@triton.jit
def backward_tile(
    dy_ptr,
    y_ptr,
    out_ptr,
    n,
    inner,
    dy_axis,
    dy_inner,
    y_axis,
    y_inner,
    out_axis,
    out_inner,
    outer_shape,
    dy_outer,
    y_outer,
    out_outer,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    INNER: tl.constexpr,
    VEC: tl.constexpr,
    MASKED: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The gradient of either for rows of at most BLOCK elements, held in registers."""
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    wide: tl.constexpr = dtype == tl.float64
    row, outer = _place(inner, outer_shape, ROWS)
    column = _columns(BLOCK, GROUP, V)
    mask = _mask(row, column, inner, n)
    dy_ptr += _outer_offset(outer, outer_shape, dy_outer)
    y_ptr += _outer_offset(outer, outer_shape, y_outer)
    dy = _load(_pointers(dy_ptr, row, column, dy_inner, dy_axis, INNER, VEC), mask, 0.0, MASKED, NATIVE)
    y = _load(_pointers(y_ptr, row, column, y_inner, y_axis, INNER, VEC), mask, 0.0, MASKED, NATIVE)

    p = rows.backward_terms(dy, y, KIND)
    most, least = rows.thread_extremes(p, p)
    most, least = rows.row_extremes(most, least)
    key, special = rows.largest_terms(most, least)
    exponent, scale, magic, low_scale = sums.term_scale(key)
    high, low = sums.split_term_bits(p, _broad(scale), _broad(magic), _broad(low_scale))
    high, low = rows.limb_sums(high, low, magic[None, :], 1)
    if wide:
        hi, lo = rows.wide_sum(high, low, dtype)
    else:
        lo = rows.narrow_sum(high, low)
        hi = lo
    s = rows.order_free_sum(hi, lo, exponent, special, key, wide, dtype)
    dx = rows.backward_output(dy, y, _broad(s), KIND, short)
    out_ptr += _outer_offset(outer, outer_shape, out_outer)
    _store(_pointers(out_ptr, row, column, out_inner, out_axis, INNER, VEC), dx, mask, MASKED, NATIVE)


@triton.jit
def backward_loop(
    dy_ptr,
    y_ptr,
    out_ptr,
    n,
    inner,
    dy_axis,
    dy_inner,
    y_axis,
    y_inner,
    out_axis,
    out_inner,
    outer_shape,
    dy_outer,
    y_outer,
    out_outer,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    INNER: tl.constexpr,
    VEC: tl.constexpr,
    LONG: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The gradient of either for rows of any length in three passes."""
    dtype: tl.constexpr = dy_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    work: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    row, outer = _place(inner, outer_shape, ROWS)
    dy_ptr += _outer_offset(outer, outer_shape, dy_outer)
    y_ptr += _outer_offset(outer, outer_shape, y_outer)
    out_ptr += _outer_offset(outer, outer_shape, out_outer)
    column = _columns(BLOCK, GROUP, V)

    most = tl.zeros((BLOCK // GROUP, ROWS, GROUP // V, V), work)
    least = tl.zeros((BLOCK // GROUP, ROWS, GROUP // V, V), work)
    for start in range(0, n, BLOCK):
        mask = _mask(row, column + start, inner, n)
        dy = _load(_pointers(dy_ptr, row, column + start, dy_inner, dy_axis, INNER, VEC), mask, 0.0, True, NATIVE)
        y = _load(_pointers(y_ptr, row, column + start, y_inner, y_axis, INNER, VEC), mask, 0.0, True, NATIVE)
        p = rows.backward_terms(dy, y, KIND)
        most = tl.maximum(most, p, propagate_nan=tl.PropagateNan.ALL)
        least = tl.minimum(least, p, propagate_nan=tl.PropagateNan.ALL)
    most, least = rows.thread_extremes(most, least)
    most, least = rows.row_extremes(most, least)
    key, special = rows.largest_terms(most, least)
    exponent, scale, magic, low_scale = sums.term_scale(key)

    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    for start in range(0, n, BLOCK):
        mask = _mask(row, column + start, inner, n)
        dy = _load(_pointers(dy_ptr, row, column + start, dy_inner, dy_axis, INNER, VEC), mask, 0.0, True, NATIVE)
        y = _load(_pointers(y_ptr, row, column + start, y_inner, y_axis, INNER, VEC), mask, 0.0, True, NATIVE)
        p = rows.backward_terms(dy, y, KIND)
        high, low = sums.split_term_bits(p, _broad(scale), _broad(magic), _broad(low_scale))
        high, low = rows.limb_sums(high, low, magic[None, :], 1)
        high_sum += high
        low_sum += low
    hi, lo = rows.wide_sum(high_sum, low_sum, dtype)
    s = rows.order_free_sum(hi, lo, exponent, special, key, True, dtype)

    for start in range(0, n, BLOCK):
        mask = _mask(row, column + start, inner, n)
        dy = _load(_pointers(dy_ptr, row, column + start, dy_inner, dy_axis, INNER, VEC), mask, 0.0, True, NATIVE)
        y = _load(_pointers(y_ptr, row, column + start, y_inner, y_axis, INNER, VEC), mask, 0.0, True, NATIVE)
        dx = rows.backward_output(dy, y, _broad(s), KIND, short)
        _store(_pointers(out_ptr, row, column + start, out_inner, out_axis, INNER, VEC), dx, mask, True, NATIVE)


KERNELS = {
    ("forward", "tile"): forward_tile,
    ("forward", "loop"): forward_loop,
    ("forward", "cluster"): forward_cluster,
    ("forward", "staged"): forward_staged,
    ("forward", "piped"): forward_piped,
    ("forward", "strip"): forward_strip,
    ("backward", "tile"): backward_tile,
    ("backward", "loop"): backward_loop,
    ("backward", "cluster"): backward_cluster,
    ("backward", "staged"): backward_staged,
    ("backward", "strip"): backward_strip,
}


def softmax(x: torch.Tensor, out: torch.Tensor, axis: int) -> None:
    launch(KERNELS, "softmax", (x, out), axis)


def log_softmax(x: torch.Tensor, out: torch.Tensor, axis: int) -> None:
    launch(KERNELS, "log_softmax", (x, out), axis)


def softmax_backward(dy: torch.Tensor, y: torch.Tensor, out: torch.Tensor, axis: int) -> None:
    launch(KERNELS, "softmax_backward", (dy, y, out), axis)


def log_softmax_backward(dy: torch.Tensor, y: torch.Tensor, out: torch.Tensor, axis: int) -> None:
    launch(KERNELS, "log_softmax_backward", (dy, y, out), axis)
