# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""The softmax family in Triton: any axis, any strides, float16, bfloat16, float32, float64.

Two kernels for each direction. `*_tile` holds whole rows in registers. `*_loop` passes over rows of any length three
times; the long rows that training meets go to `gluon_clusters.py` and `gluon_pipes.py`, which stage them on chip, and
rows whose neighbours in memory belong to other rows to `gluon_strips.py`.

A problem is a set of rows: the reduced axis of n elements, the inner axis (the remaining one with the smallest
stride), and up to six outer axes. A program serves ROWS neighbours on the inner axis. Formulas: `reference.py`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from isograd.core.kernel import launcher
from isograd.devices.triton_launcher import Launcher, Specification, architecture, kept
from isograd.devices.triton_launcher import rows as rows_of
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics.constants import SHORT_ROW
from isograd.ops.softmax import gluon_pipes, gluon_strips
from isograd.ops.softmax.gluon_clusters import backward_cluster, backward_staged, forward_cluster, forward_staged
from isograd.rows import gluon_rows
from isograd.rows import triton_rows as rows
from isograd.rows.triton_configuration import FORWARD, INT32_ROW, Configuration, configuration
from isograd.rows.triton_launch import Tile
from isograd.rows.triton_tiles import broad, columns

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
    column = columns(BLOCK, GROUP, V)
    mask = _mask(row, column, inner, n)
    x_ptr += _outer_offset(outer, outer_shape, x_outer)
    x = _load(_pointers(x_ptr, row, column, x_inner, x_axis, INNER, VEC), mask, float("-inf"), MASKED, NATIVE)

    most = rows.thread_maximum(x)
    key = tl.max(ops.max_key(most), axis=0)
    m = ops.from_key(key)
    valid = ops.is_finite(m)
    base, floor, bias = rows.row_shift(m, short)
    flag = rows.largest_flag(most, m[None, :], valid[None, :], short)[:, :, None, None]
    found = rows.find_largest(x, broad(m), flag, broad(valid), short, NATIVE)
    e, error = rows.exponential(x, broad(base), broad(floor), broad(bias), short)
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
        y = rows.softmax_output(e, found, broad(r), broad(r_low), broad(largest), short, NATIVE)
    else:
        top, middle, bottom = rows.log_sum(hi, lo, m, base, floor, bias, valid, short, False, wide, dtype, NATIVE)
        y = rows.log_softmax_output(x, broad(top), broad(middle), broad(bottom), short)
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
    column = columns(BLOCK, GROUP, V)

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
        e, error = rows.exponential(x, broad(base), broad(floor), broad(bias), short)
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
            e, _ = rows.exponential(x, broad(base), broad(floor), broad(bias), short)
            every = broad(tl.full(valid.shape, 1, tl.int32))
            found = rows.find_largest(x, broad(m), every, broad(valid), short, NATIVE)
            y = rows.softmax_output(e, found, broad(r), broad(r_low), broad(largest), short, NATIVE)
        else:
            y = rows.log_softmax_output(x, broad(top), broad(middle), broad(bottom), short)
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
    column = columns(BLOCK, GROUP, V)
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
    high, low = sums.split_term_bits(p, broad(scale), broad(magic), broad(low_scale))
    high, low = rows.limb_sums(high, low, magic[None, :], 1)
    if wide:
        hi, lo = rows.wide_sum(high, low, dtype)
    else:
        lo = rows.narrow_sum(high, low)
        hi = lo
    s = rows.order_free_sum(hi, lo, exponent, special, key, wide, dtype)
    dx = rows.backward_output(dy, y, broad(s), KIND, short)
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
    column = columns(BLOCK, GROUP, V)

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
        high, low = sums.split_term_bits(p, broad(scale), broad(magic), broad(low_scale))
        high, low = rows.limb_sums(high, low, magic[None, :], 1)
        high_sum += high
        low_sum += low
    hi, lo = rows.wide_sum(high_sum, low_sum, dtype)
    s = rows.order_free_sum(hi, lo, exponent, special, key, True, dtype)

    for start in range(0, n, BLOCK):
        mask = _mask(row, column + start, inner, n)
        dy = _load(_pointers(dy_ptr, row, column + start, dy_inner, dy_axis, INNER, VEC), mask, 0.0, True, NATIVE)
        y = _load(_pointers(y_ptr, row, column + start, y_inner, y_axis, INNER, VEC), mask, 0.0, True, NATIVE)
        dx = rows.backward_output(dy, y, broad(s), KIND, short)
        _store(_pointers(out_ptr, row, column + start, out_inner, out_axis, INNER, VEC), dx, mask, True, NATIVE)


KERNELS = {
    ("forward", "tile"): forward_tile,
    ("forward", "loop"): forward_loop,
    ("forward", "cluster"): forward_cluster,
    ("forward", "staged"): forward_staged,
    ("forward", "piped"): gluon_pipes.forward_piped,
    ("forward", "strip"): gluon_strips.forward_strip,
    ("backward", "tile"): backward_tile,
    ("backward", "loop"): backward_loop,
    ("backward", "cluster"): backward_cluster,
    ("backward", "staged"): backward_staged,
    ("backward", "strip"): gluon_strips.backward_strip,
}
_LAYOUTS = {"cluster": gluon_rows, "staged": gluon_rows, "piped": gluon_rows, "strip": gluon_strips}


# --- launches --------------------------------------------------------------------------------------------------------
@kept
def _launcher(
    op: str,
    axis: int,
    shape: tuple[int, ...],
    strides: tuple[tuple[int, ...], ...],
    dtype: torch.dtype,
    places: tuple[int, ...],
    arch: int,
    config: Configuration | None,
) -> Launcher:
    """The kernel for a problem; `places` are addresses modulo 16."""
    n, problem, itemsize = shape[axis], rows_of(shape, strides, axis), dtype.itemsize
    contiguous = n == 1 or all(s == 1 for s in problem.axis_strides) or 1 not in problem.inner_strides
    # Elements, at most 16 bytes' worth, to which every row and every address is aligned.
    length, steps = (n, problem.inner_strides) if contiguous else (problem.inner, problem.axis_strides)
    common = math.gcd(16 // itemsize, length, *steps, *(s for t in problem.outer_strides for s in t))
    vec = math.gcd(common * itemsize, 16, *places) // itemsize or 1
    if config is None:
        if contiguous:
            whole = not problem.outer_shape and all(s == 1 for s in problem.axis_strides)
            # The compiler is told of multiples of 16 elements; by less, copies of 16-bit elements would be too narrow.
            known = itemsize != 2 or not any(s % 16 for s in (n, *problem.inner_strides))
            aligned = whole and known and vec * itemsize == 16
        else:
            aligned = vec * itemsize >= 4 and all(s == 1 for s in problem.inner_strides)
        config = configuration(n, itemsize, op, arch, contiguous, problem.inner, aligned)
    variant, kernel = config.variant, KERNELS["forward" if op in FORWARD else "backward", config.variant]
    covered = config.block * config.ctas
    if variant == "strip":
        covered = config.ctas * config.warps * 32 * config.vector // config.rows * config.group
    values: dict[str, Any] = {
        "n": n, "n_rows": problem.inner, "inner": problem.inner, "outer_shape": problem.outer_shape,
        "KIND": int(op.startswith("log")), "BLOCK": config.block, "ROWS": config.rows, "CTAS": config.ctas,
        "GROUP": config.group, "CHUNKS": config.chunks, "V": config.vector, "RV": config.vector,
        "LANES": config.rows // config.vector, "INNER": contiguous, "VEC": vec, "NATIVE": config.native,
        "MASKED": covered != n or problem.inner % config.rows != 0,
        "LONG": n > (SHORT_ROW if itemsize == 2 else INT32_ROW),
    }  # fmt: skip
    if variant in _LAYOUTS:
        values |= {"layout": _LAYOUTS[variant].layout_of(config), "shared": gluon_rows.shared_layout_of(config)}
    for i, name in enumerate(kernel.arg_names[: len(strides)]):
        name, inner = name.removesuffix("_ptr"), problem.inner_strides[i]
        values |= {f"{name}_axis": problem.axis_strides[i], f"{name}_inner": inner, f"{name}_row": inner}
        values[f"{name}_outer"] = problem.outer_strides[i]
    tail = tuple([values[name] for name in kernel.arg_names[len(strides) :]])
    programs = problem.outer * -(-problem.inner // config.rows)
    free = ("inner",) if contiguous and variant in ("tile", "loop") else ()
    options = {"registers": config.registers or None, "ctas": config.ctas, "stays": variant in ("staged", "piped")}
    return Launcher(kernel, Specification(tail, programs, config.warps, free=free, **options))


def launch(op: str, tensors: Sequence[torch.Tensor], axis: int, size: Tile | Configuration | None = None) -> None:
    """Run `op` over an axis of tensors of one shape and type, the last of which is the output.

    The launch goes to the current stream of the tensors' device, which need not be the current device. size: by default
    what the rule says.
    """
    out = tensors[-1]
    if out.numel() == 0:
        return
    if isinstance(size, Tile):
        variant = "tile" if out.shape[axis] <= size.block else "loop"
        size = Configuration(variant, size.block, size.rows, size.warps, size.group, size.vector)
    strides, places = tuple([t.stride() for t in tensors]), tuple([t.data_ptr() & 15 for t in tensors])
    _launcher(op, axis, tuple(out.shape), strides, out.dtype, places, architecture(out), size)(*tensors)


@launcher("softmax")
@launcher("log_softmax")
def forward(problem: Any, x: torch.Tensor, y: torch.Tensor, size: Any = None) -> None:
    """Compute y, which may be x."""
    launch(problem.operation, (x, y), problem.axis, size)


@launcher("softmax_backward")
@launcher("log_softmax_backward")
def backward(problem: Any, dy: torch.Tensor, y: torch.Tensor, dx: torch.Tensor, size: Any = None) -> None:
    """Compute dx, which may be dy or y."""
    launch(problem.operation, (dy, y, dx), problem.axis, size)
