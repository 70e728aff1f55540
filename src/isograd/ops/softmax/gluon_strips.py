# mypy: ignore-errors
# ruff: noqa: D403, N803, N806, RET505, SIM108
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Softmax kernels along an axis that is not contiguous, on NVIDIA GPUs, in Gluon.

A cluster of blocks takes a strip of LANES * RV rows that are neighbours in memory, 64 or 128 bytes wide, and holds all
of it in registers: LANES lanes hold different rows; half warps, warps and blocks hold different columns. What belongs
to a row is computed once a thread and row, so few rows a thread with many columns each keep that share small.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.rows import gluon_exchange as exchange
from isograd.rows import triton_rows as rows
from isograd.rows.gluon_rows import broad
from isograd.rows.triton_configuration import Configuration

SOFTMAX = rows.SOFTMAX


@gluon.jit
def _place(inner, ROWS: gl.constexpr, layout: gl.constexpr):
    """Rows of this program on the inner axis, as [1, rows, 1, 1], and the index over the outer axes."""
    line: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout)))
    blocks = gl.cdiv(inner, ROWS)
    pid = gl.program_id(0)
    outer = pid // blocks
    first = (pid - outer * blocks) * (ROWS)
    return (first + gl.arange(0, ROWS, layout=line))[None, :, None, None], outer


@gluon.jit
def _columns(Q: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr):
    """Columns as [Q, 1, 1, 1] plus [1, 1, GROUP, 1]: neighbours belong to different threads."""
    cube: gl.constexpr = gl.SliceLayout(3, layout)
    q = gl.arange(0, Q, layout=gl.SliceLayout(1, gl.SliceLayout(2, cube)))[:, None, None, None]
    p = gl.arange(0, GROUP, layout=gl.SliceLayout(0, gl.SliceLayout(1, cube)))[None, None, :, None]
    return q, p * Q


@gluon.jit
def _outer_offset(outer, shape, strides):
    """Offset of an index over the outer axes, the last axis fastest."""
    offset = gl.to_tensor(0).to(gl.int64)
    for i in gl.static_range(len(shape)):
        rest = outer // shape[len(shape) - 1 - i]
        offset += (outer - rest * shape[len(shape) - 1 - i]).to(gl.int64) * strides[len(shape) - 1 - i]
        outer = rest
    return offset


@gluon.jit
def _pointers(ptr, outer, shape, strides, row, q, p, axis_stride, VEC: gl.constexpr):
    """Pointers of the strip; what is the same for every thread is added last."""
    if VEC > 1:
        axis_stride = gl.multiple_of(axis_stride, VEC)
    step = gl.to_tensor(axis_stride).to(gl.int64)
    return (ptr + _outer_offset(outer, shape, strides) + q * step + row) + p * step


@gluon.jit
def _get(pointers, mask, other: gl.constexpr, MASKED: gl.constexpr):
    if MASKED:
        return gl.load(pointers, mask=mask, other=other)
    else:
        return gl.load(pointers)


@gluon.jit
def _put(pointers, value, mask, MASKED: gl.constexpr):
    if MASKED:
        gl.store(pointers, value, mask=mask)
    else:
        gl.store(pointers, value)


@gluon.jit
def _rows_of(Q: gl.constexpr, ROWS: gl.constexpr, layout: gl.constexpr):
    """An int32 a thread and row."""
    line: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, layout))
    q = gl.arange(0, Q, layout=gl.SliceLayout(1, line))[:, None]
    return q + gl.arange(0, ROWS, layout=gl.SliceLayout(0, line))[None, :]


@gluon.jit
def forward_strip(
    x_ptr,
    out_ptr,
    n,
    inner,
    x_axis,
    out_axis,
    outer_shape,
    x_outer,
    out_outer,
    KIND: gl.constexpr,
    CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    LANES: gl.constexpr,
    RV: gl.constexpr,
    VEC: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
):
    """softmax or log_softmax of rows of at most Q * GROUP elements."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    short: gl.constexpr = dtype.primitive_bitwidth == 16
    Q: gl.constexpr = CTAS * gl.num_warps() * (32 // LANES)
    row, outer = _place(inner, LANES * RV, layout)
    q, p = _columns(Q, GROUP, layout)
    mask = (row < inner) & (q + p < n)
    x = _get(_pointers(x_ptr, outer, outer_shape, x_outer, row, q, p, x_axis, VEC), mask, float("-inf"), MASKED)
    exchange.strip_setup(_rows_of(Q, LANES * RV, layout), LANES, RV, CTAS)

    x = ops.widen(x, RV == 2)
    most = rows.thread_maximum(x)
    key = ops.max_key(most)
    key, _ = exchange.strip_extremes(key, key, LANES, RV, CTAS)
    m = ops.from_key(key)
    valid = ops.is_finite(m)
    base, floor, bias = rows.row_shift(m, short)
    flag = broad(rows.largest_flag(most, m, valid, short))
    found = rows.find_largest(x, broad(m), flag, broad(valid), short, True)
    e, error = rows.exponential(x, broad(base), broad(floor), broad(bias), short)
    high, low = rows.exponential_terms(e, error, short, False, True)
    high, low = rows.exponential_sums(high, low, short, False)
    if short:
        value = high
    else:
        value = (high << 23) + low
    total = exchange.strip_total(value, LANES, RV, CTAS)
    if KIND == SOFTMAX:
        r, r_low = rows.softmax_factors(total, total, valid, short, False, False, gl.float32)
        largest = rows.largest_output(m, base, floor, bias, r, r_low, valid, short)
        y = rows.softmax_output(e, found, broad(r), broad(r_low), broad(largest), short, True)
    else:
        top, middle, bottom = rows.log_sum(
            total, total, m, base, floor, bias, valid, short, False, False, gl.float32, True
        )
        y = rows.log_softmax_output(x, broad(top), broad(middle), broad(bottom), short)
    pointers = _pointers(out_ptr, outer, outer_shape, out_outer, row, q, p, out_axis, VEC)
    _put(pointers, ops.narrow(y, dtype, True), mask, MASKED)


@gluon.jit
def backward_strip(
    dy_ptr,
    y_ptr,
    out_ptr,
    n,
    inner,
    dy_axis,
    y_axis,
    out_axis,
    outer_shape,
    dy_outer,
    y_outer,
    out_outer,
    KIND: gl.constexpr,
    CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    LANES: gl.constexpr,
    RV: gl.constexpr,
    VEC: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
):
    """The gradient of either for rows of at most Q * GROUP elements."""
    dtype: gl.constexpr = dy_ptr.dtype.element_ty
    short: gl.constexpr = dtype.primitive_bitwidth == 16
    Q: gl.constexpr = CTAS * gl.num_warps() * (32 // LANES)
    row, outer = _place(inner, LANES * RV, layout)
    q, p = _columns(Q, GROUP, layout)
    mask = (row < inner) & (q + p < n)
    dy = _get(_pointers(dy_ptr, outer, outer_shape, dy_outer, row, q, p, dy_axis, VEC), mask, 0.0, MASKED)
    y = _get(_pointers(y_ptr, outer, outer_shape, y_outer, row, q, p, y_axis, VEC), mask, 0.0, MASKED)
    exchange.strip_setup(_rows_of(Q, LANES * RV, layout), LANES, RV, CTAS)

    zero = inner >> 31  # which the compiler cannot tell

    terms = rows.backward_terms(ops.widen(dy, RV == 2), ops.widen(y, RV == 2), KIND)
    most, least = rows.thread_extremes(terms, terms)
    most, least = exchange.strip_extremes(ops.max_key(most), ops.max_key(least), LANES, RV, CTAS)
    key, special = rows.largest_terms(most, least)
    exponent, scale, magic, low_scale = sums.term_scale(key)
    token = broad(zero & most)
    terms = rows.backward_terms(ops.widen_later(dy, token), ops.widen_later(y, token), KIND)
    high, low = sums.split_term_bits(terms, broad(scale), broad(magic), broad(low_scale))
    high, low = rows.limb_sums(high, low, magic, 1)
    total = exchange.strip_total((high << 23) + low, LANES, RV, CTAS)
    s = rows.order_free_sum(total, total, exponent, special, key, False, gl.float32)
    token = broad(zero & ops.as_int(s))
    dx = rows.backward_output(ops.widen_later(dy, token), ops.widen_later(y, token), broad(s), KIND, short)
    pointers = _pointers(out_ptr, outer, outer_shape, out_outer, row, q, p, out_axis, VEC)
    _put(pointers, ops.narrow(dx, dtype, True), mask, MASKED)


def layout_of(config: Configuration) -> gl.BlockedLayout:
    """Lanes on the rows of the strip, what is left of a warp, warps and the blocks of a cluster on the columns."""
    bases = [[1 << i, 0, 0, 0] for i in range(config.ctas.bit_length() - 1)]
    lanes = config.rows // config.vector
    return gl.BlockedLayout(
        [1, config.vector, config.group, 1], [32 // lanes, lanes, 1, 1], [config.warps, 1, 1, 1], [1, 0, 2, 3], bases
    )
