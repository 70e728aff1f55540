# mypy: ignore-errors
# ruff: noqa: D403, N803, N806, RUF005
# Triton does not know a star within a tuple.
"""Softmax kernels along an axis that is not contiguous, on NVIDIA GPUs, in Gluon.

A cluster of blocks takes a strip of LANES * RV rows that are neighbours in memory, 64 or 128 bytes wide, and holds all
of it in registers: LANES lanes hold different rows; half warps, warps and blocks hold different columns. What belongs
to a row is computed once a thread and row, so few rows a thread with many columns each keep that share small.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from isograd.ops.softmax import gluon_chunks as arithmetic
from isograd.rows import gluon_exchange as exchange
from isograd.rows.triton_configuration import Configuration


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
def _columns(Q: gl.constexpr, SIZE: gl.constexpr, layout: gl.constexpr):
    """Columns of the first chunk as [Q, 1, 1, 1] plus [1, 1, SIZE, 1]: neighbours belong to different threads."""
    cube: gl.constexpr = gl.SliceLayout(3, layout)
    q = gl.arange(0, Q, layout=gl.SliceLayout(1, gl.SliceLayout(2, cube)))[:, None, None, None]
    p = gl.arange(0, SIZE, layout=gl.SliceLayout(0, gl.SliceLayout(1, cube)))[None, None, :, None]
    return q, p * Q


@gluon.jit
def _outer_offset(outer, shape, strides):
    """Offset of an index over the outer axes, the last axis fastest."""
    offset = gl.to_tensor(0).to(gl.int64)
    for i in gl.static_range(len(shape) - 1):
        rest = outer // shape[len(shape) - 1 - i]
        offset += (outer - rest * shape[len(shape) - 1 - i]).to(gl.int64) * strides[len(shape) - 1 - i]
        outer = rest
    if len(shape) > 0:
        offset += outer.to(gl.int64) * strides[0]
    return offset


@gluon.jit
def _step(axis_stride, VEC: gl.constexpr):
    """The stride of the axis, a multiple of VEC, as an int64."""
    return gl.to_tensor(axis_stride // VEC * VEC).to(gl.int64)


@gluon.jit
def _start(ptr, outer, shape, strides, row, q, step):
    """Where a thread begins; what is the same for every thread is added later."""
    return ptr + _outer_offset(outer, shape, strides) + q * step + row


@gluon.jit
def _get(
    ptr,
    outer,
    shape,
    strides,
    row,
    q,
    p,
    axis_stride,
    inner,
    n,
    other: gl.constexpr,
    Q: gl.constexpr,
    SIZE: gl.constexpr,
    CHUNKS: gl.constexpr,
    VEC: gl.constexpr,
    MASKED: gl.constexpr,
):
    """The chunks of a strip."""
    step = _step(axis_stride, VEC)
    start = _start(ptr, outer, shape, strides, row, q, step)
    chunks = ()
    for k in gl.static_range(CHUNKS):
        column = p + k * SIZE * Q
        if MASKED:
            v = gl.load(start + column * step, mask=(row < inner) & (q + column < n), other=other)
        else:
            v = gl.load(start + column * step)
        chunks = chunks + (v,)
    return chunks


@gluon.jit
def _put(
    ptr,
    chunks,
    outer,
    shape,
    strides,
    row,
    q,
    p,
    axis_stride,
    inner,
    n,
    Q: gl.constexpr,
    SIZE: gl.constexpr,
    CHUNKS: gl.constexpr,
    VEC: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Store the chunks of a strip."""
    step = _step(axis_stride, VEC)
    start = _start(ptr, outer, shape, strides, row, q, step)
    for k in gl.static_range(CHUNKS):
        column = p + k * SIZE * Q
        if MASKED:
            gl.store(start + column * step, chunks[k], mask=(row < inner) & (q + column < n))
        else:
            gl.store(start + column * step, chunks[k])


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
    CHUNKS: gl.constexpr,
    LANES: gl.constexpr,
    RV: gl.constexpr,
    VEC: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
):
    """softmax or log_softmax of rows of at most Q * GROUP elements."""
    Q: gl.constexpr = CTAS * gl.num_warps() * (32 // LANES)
    SIZE: gl.constexpr = GROUP // CHUNKS
    row, outer = _place(inner, LANES * RV, layout)
    q, p = _columns(Q, SIZE, layout)
    xs = _get(
        x_ptr, outer, outer_shape, x_outer, row, q, p, x_axis, inner, n, float("-inf"), Q, SIZE, CHUNKS, VEC, MASKED
    )
    exchange.strip_setup(_rows_of(Q, LANES * RV, layout), LANES, RV, CTAS)
    ys = arithmetic.forward(xs, inner >> 31, 0, KIND, LANES, RV, CTAS, CHUNKS, layout)
    _put(out_ptr, ys, outer, outer_shape, out_outer, row, q, p, out_axis, inner, n, Q, SIZE, CHUNKS, VEC, MASKED)


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
    CHUNKS: gl.constexpr,
    LANES: gl.constexpr,
    RV: gl.constexpr,
    VEC: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
):
    """The gradient of either for rows of at most Q * GROUP elements."""
    Q: gl.constexpr = CTAS * gl.num_warps() * (32 // LANES)
    SIZE: gl.constexpr = GROUP // CHUNKS
    row, outer = _place(inner, LANES * RV, layout)
    q, p = _columns(Q, SIZE, layout)
    dys = _get(dy_ptr, outer, outer_shape, dy_outer, row, q, p, dy_axis, inner, n, 0.0, Q, SIZE, CHUNKS, VEC, MASKED)
    ys = _get(y_ptr, outer, outer_shape, y_outer, row, q, p, y_axis, inner, n, 0.0, Q, SIZE, CHUNKS, VEC, MASKED)
    exchange.strip_setup(_rows_of(Q, LANES * RV, layout), LANES, RV, CTAS)
    dxs = arithmetic.backward(dys, ys, inner >> 31, KIND, LANES, RV, CTAS, CHUNKS, layout)
    _put(out_ptr, dxs, outer, outer_shape, out_outer, row, q, p, out_axis, inner, n, Q, SIZE, CHUNKS, VEC, MASKED)


def layout_of(config: Configuration) -> gl.BlockedLayout:
    """Lanes on the rows of the strip, what is left of a warp, warps and the blocks of a cluster on the columns."""
    bases = [[1 << i, 0, 0, 0] for i in range(config.ctas.bit_length() - 1)]
    lanes, size = config.rows // config.vector, config.group // config.chunks
    return gl.BlockedLayout(
        [1, config.vector, size, 1], [32 // lanes, lanes, 1, 1], [config.warps, 1, 1, 1], [1, 0, 2, 3], bases
    )
