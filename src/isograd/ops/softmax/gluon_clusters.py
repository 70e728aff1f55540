# mypy: ignore-errors
# ruff: noqa: D403, N803, N806, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Softmax kernels for long contiguous rows on NVIDIA GPUs, in Gluon: a row is read once, by a cluster of blocks.

Each block holds BLOCK columns of the row in registers. What the blocks exchange, extreme keys and integer sums
(`rows/gluon_exchange.py`), needs no order. Several clusters share the processors, so that the arithmetic of one row
hides behind the memory accesses of others.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.ops.softmax import gluon_chunks as arithmetic
from isograd.rows import gluon_exchange as exchange
from isograd.rows import triton_rows as rows
from isograd.rows.gluon_rows import broad, columns, fetch, put, threads

SOFTMAX = rows.SOFTMAX


@gluon.jit
def _get(ptr, stride, begin, offset, n, other: gl.constexpr, MASKED: gl.constexpr):
    pointers = (ptr + gl.program_id(0).to(gl.int64) * stride + begin) + offset
    if MASKED:
        return gl.load(pointers, mask=begin + offset < n, other=other)
    else:
        return gl.load(pointers)


@gluon.jit
def _backward_row(dy, y, zero, parity, KIND: gl.constexpr, CTAS: gl.constexpr):
    """The gradient of softmax or log_softmax for the row that the cluster holds.

    `zero` is one that the compiler cannot tell; it must not come from a number that a loop compares, whose sign the
    compiler knows.
    """
    dtype: gl.constexpr = dy.dtype
    short: gl.constexpr = dtype.primitive_bitwidth == 16
    p = rows.backward_terms(ops.widen(dy, True), ops.widen(y, True), KIND)
    most, least = rows.thread_extremes(p, p)
    most, least = exchange.extremes(ops.max_key(most), ops.max_key(least), parity, CTAS)
    key, special = rows.largest_terms(most, least)
    exponent, scale, magic, low_scale = sums.term_scale(key)
    token = broad(zero & most)
    p = rows.backward_terms(ops.widen_later(dy, token), ops.widen_later(y, token), KIND)
    high, low = sums.split_term_bits(p, broad(scale), broad(magic), broad(low_scale))
    high, low = rows.limb_sums(high, low, magic, 1)
    total = exchange.total((high << 23) + low, parity, False, CTAS)
    s = rows.order_free_sum(total, total, exponent, special, key, False, gl.float32)
    token = broad(zero & ops.as_int(s))
    dx = rows.backward_output(ops.widen_later(dy, token), ops.widen_later(y, token), broad(s), KIND, short)
    return ops.narrow(dx, dtype, True)


@gluon.jit
def backward_cluster(
    dy_ptr,
    y_ptr,
    out_ptr,
    n_rows,
    n,
    dy_row,
    y_row,
    out_row,
    KIND: gl.constexpr,
    BLOCK: gl.constexpr,
    CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    V: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
):
    """The gradient of softmax or log_softmax; rows of at most 2**17 elements."""
    begin, offset = columns(CTAS, BLOCK, BLOCK, GROUP, V, layout)
    dy = _get(dy_ptr, dy_row, begin, offset, n, 0.0, MASKED)
    y = _get(y_ptr, y_row, begin, offset, n, 0.0, MASKED)
    exchange.setup(threads(CTAS, BLOCK, GROUP, layout), CTAS)
    dx = _backward_row(dy, y, n >> 31, 0, KIND, CTAS)
    put(out_ptr, gl.program_id(0), out_row, begin, offset, n, dx, MASKED)


@gluon.jit
def _forward_row(x, parity, KIND: gl.constexpr, CTAS: gl.constexpr, layout: gl.constexpr, dtype: gl.constexpr):
    """softmax or log_softmax of the row that the cluster holds."""
    short: gl.constexpr = dtype.primitive_bitwidth == 16
    most = rows.thread_maximum(x)
    m = ops.from_key(exchange.maximum(ops.max_key(most), parity, CTAS))
    valid = ops.is_finite(m)
    base, floor, bias = rows.row_shift(m, short)
    flag = broad(rows.largest_flag(most, m, valid, short))
    found = rows.find_largest(x, broad(m), flag, broad(valid), short, True)
    e, error = rows.exponential(x, broad(base), broad(floor), broad(bias), short)
    high, low = rows.exponential_terms(e, error, short, False, True)
    high, low = rows.exponential_sums(high, low, short, False)
    if short:
        value = gl.convert_layout(high, gl.SliceLayout(2, gl.SliceLayout(3, layout)), assert_trivial=True)
    else:
        value = (high << 23) + low
    total = exchange.total(value, parity, short, CTAS)
    if KIND == SOFTMAX:
        r, r_low = rows.softmax_factors(total, total, valid, short, False, False, gl.float32)
        largest = rows.largest_output(m, base, floor, bias, r, r_low, valid, short)
        y = rows.softmax_output(e, found, broad(r), broad(r_low), broad(largest), short, True)
        if short:
            y = ops.narrow(y, dtype, True)
        return y
    else:
        top, middle, bottom = rows.log_sum(
            total, total, m, base, floor, bias, valid, short, False, False, gl.float32, True
        )
        y = rows.log_softmax_output(x, broad(top), broad(middle), broad(bottom), short)
        return ops.narrow(y, dtype, True)


@gluon.jit
def forward_cluster(
    x_ptr,
    out_ptr,
    n_rows,
    n,
    x_row,
    out_row,
    KIND: gl.constexpr,
    BLOCK: gl.constexpr,
    CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    V: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
):
    """softmax or log_softmax; rows of at most 2**17 elements, of 16 bits 2**18."""
    begin, offset = columns(CTAS, BLOCK, BLOCK, GROUP, V, layout)
    x = _get(x_ptr, x_row, begin, offset, n, float("-inf"), MASKED)
    exchange.setup(threads(CTAS, BLOCK, GROUP, layout), CTAS)
    y = _forward_row(ops.widen(x, True), 0, KIND, CTAS, layout, x_ptr.dtype.element_ty)
    put(out_ptr, gl.program_id(0), out_row, begin, offset, n, y, MASKED)


@gluon.jit
def forward_staged(
    x_ptr,
    out_ptr,
    n_rows,
    n,
    x_row,
    out_row,
    KIND: gl.constexpr,
    BLOCK: gl.constexpr,
    CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    CHUNKS: gl.constexpr,
    V: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
    shared: gl.constexpr,
):
    """The same for clusters that stay and take one row after another: the next row arrives during the arithmetic."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    begin, offset = columns(CTAS, BLOCK, BLOCK, GROUP, V, layout)
    stage = gl.allocate_shared_memory(dtype, [BLOCK // GROUP, CTAS, GROUP // V, V], shared)
    row = gl.program_id(0)
    fetch(stage, x_ptr, row, n_rows, x_row, begin, offset, n, MASKED)
    async_copy.commit_group()
    exchange.setup(threads(CTAS, BLOCK, GROUP, layout), CTAS)
    parity = 0
    while row < n_rows:
        following = row + gl.num_programs(0)
        async_copy.wait_group(0)
        x = stage.load(layout)
        fetch(stage, x_ptr, following, n_rows, x_row, begin, offset, n, MASKED)
        async_copy.commit_group()
        if MASKED:
            x = gl.where(begin + offset < n, x, float("-inf"))
        if CHUNKS == 1:
            y = _forward_row(ops.widen(x, True), parity, KIND, CTAS, layout, dtype)
            put(out_ptr, row, out_row, begin, offset, n, y, MASKED)
        else:
            STEP: gl.constexpr = BLOCK // CHUNKS
            ys = arithmetic.forward(
                arithmetic.chunks(x, CHUNKS, layout), n >> 31, parity, KIND, 0, 1, CTAS, CHUNKS, layout
            )
            _, part = columns(CTAS, BLOCK, STEP, GROUP // CHUNKS, V, layout)
            for k in gl.static_range(CHUNKS):
                put(out_ptr, row, out_row, begin, part + k * STEP, n, ys[k], MASKED)
        row = following
        parity ^= 1


@gluon.jit
def backward_staged(
    dy_ptr,
    y_ptr,
    out_ptr,
    n_rows,
    n,
    dy_row,
    y_row,
    out_row,
    KIND: gl.constexpr,
    BLOCK: gl.constexpr,
    CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    V: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
    shared: gl.constexpr,
):
    """The gradient for clusters that stay, as `forward_staged`; columns that a row lacks arrive as zeros."""
    dtype: gl.constexpr = dy_ptr.dtype.element_ty
    begin, offset = columns(CTAS, BLOCK, BLOCK, GROUP, V, layout)
    dy_stage = gl.allocate_shared_memory(dtype, [BLOCK // GROUP, CTAS, GROUP // V, V], shared)
    y_stage = gl.allocate_shared_memory(dtype, [BLOCK // GROUP, CTAS, GROUP // V, V], shared)
    row = gl.program_id(0)
    fetch(dy_stage, dy_ptr, row, n_rows, dy_row, begin, offset, n, MASKED)
    fetch(y_stage, y_ptr, row, n_rows, y_row, begin, offset, n, MASKED)
    async_copy.commit_group()
    exchange.setup(threads(CTAS, BLOCK, GROUP, layout), CTAS)
    parity = 0
    while row < n_rows:
        following = row + gl.num_programs(0)
        async_copy.wait_group(0)
        dy, y = dy_stage.load(layout), y_stage.load(layout)
        fetch(dy_stage, dy_ptr, following, n_rows, dy_row, begin, offset, n, MASKED)
        fetch(y_stage, y_ptr, following, n_rows, y_row, begin, offset, n, MASKED)
        async_copy.commit_group()
        dx = _backward_row(dy, y, n >> 31, parity, KIND, CTAS)
        put(out_ptr, row, out_row, begin, offset, n, dx, MASKED)
        row = following
        parity ^= 1
