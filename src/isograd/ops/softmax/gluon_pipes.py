# mypy: ignore-errors
# ruff: noqa: D403, N803, N806, RUF005, SIM108
# Triton does not know a star within a tuple, and compiles both sides of a conditional expression.
"""softmax of long contiguous rows in 16 bits on NVIDIA GPUs, in Gluon, with one exchange a row.

Clusters stay and take one row after another. Rows arrive in shared memory two ahead. The maximum of a row is found
while the one before it is being worked on, and crosses the threads together with that row's sum. A row is taken in
chunks, which bounds what a thread holds at a time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from isograd.numerics import triton_ops as ops
from isograd.rows import gluon_exchange as exchange
from isograd.rows import triton_rows as rows
from isograd.rows.gluon_rows import broad, columns, threads

_SLOTS = gl.constexpr(3)  # rows in shared memory: one worked on, one that has arrived, one on its way
# The name since Triton 3.9, and the one before.
_async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared


@gluon.jit
def fetch(
    stage,
    slot,
    ptr,
    row,
    n_rows,
    stride,
    begin,
    offset,
    n,
    CHUNKS: gl.constexpr,
    STEP: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Start the copy of a row into a slot of shared memory; past the last row nothing is read."""
    start = ptr + row.to(gl.int64) * stride + begin
    for k in gl.static_range(CHUNKS):
        if MASKED:
            more = (begin + (offset + k * STEP) < n) & (row < n_rows)
        else:
            more = row < n_rows
        _async_load(stage.index(slot * CHUNKS + k), start + (offset + k * STEP), more)


@gluon.jit
def _chunk(
    stage,
    slot,
    begin,
    offset,
    n,
    k: gl.constexpr,
    CHUNKS: gl.constexpr,
    STEP: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
):
    """A chunk of the row in a slot; minus infinity where it has no column."""
    x = stage.index(slot * CHUNKS + k).load(layout)
    if MASKED:
        x = gl.where(begin + (offset + k * STEP) < n, x, float("-inf"))
    return x


@gluon.jit
def _next(slot):
    """The slot of the row that follows."""
    slot += 1
    return gl.where(slot == _SLOTS, 0, slot)


@gluon.jit
def _row_maximum(
    stage,
    slot,
    begin,
    offset,
    n,
    CHUNKS: gl.constexpr,
    STEP: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
):
    """The maximum of what a thread holds of a row; NaN wins."""
    best = _chunk(stage, slot, begin, offset, n, 0, CHUNKS, STEP, MASKED, layout)
    for k in gl.static_range(1, CHUNKS):
        best = ops.nan_maximum(best, _chunk(stage, slot, begin, offset, n, k, CHUNKS, STEP, MASKED, layout))
    return rows.thread_maximum(ops.widen(best, True))


@gluon.jit
def forward_piped(
    x_ptr,
    out_ptr,
    n_rows,
    n,
    x_row,
    out_row,
    BLOCK: gl.constexpr,
    CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    V: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
    shared: gl.constexpr,
    CHUNKS: gl.constexpr,
):
    """softmax of rows of at most 2**18 elements of 16 bits."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    STEP: gl.constexpr = BLOCK // CHUNKS
    SIZE: gl.constexpr = GROUP // CHUNKS
    begin, offset = columns(CTAS, BLOCK, STEP, SIZE, V, layout)
    stage = gl.allocate_shared_memory(dtype, [_SLOTS * CHUNKS, STEP // SIZE, CTAS, SIZE // V, V], shared)
    row = gl.program_id(0)
    step = gl.num_programs(0)
    fetch(stage, 0, x_ptr, row, n_rows, x_row, begin, offset, n, CHUNKS, STEP, MASKED)
    async_copy.commit_group()
    fetch(stage, 1, x_ptr, row + step, n_rows, x_row, begin, offset, n, CHUNKS, STEP, MASKED)
    async_copy.commit_group()
    exchange.pipe_setup(threads(CTAS, STEP, SIZE, layout), CTAS)
    async_copy.wait_group(1)
    most = _row_maximum(stage, 0, begin, offset, n, CHUNKS, STEP, MASKED, layout)
    key = ops.max_key(most)
    _, key = exchange.sum_and_maximum(key.to(gl.int64) * 0, key, 0, CTAS)
    number = 1
    slot = 0
    while row < n_rows:
        following = _next(slot)
        last = _next(following)
        fetch(stage, last, x_ptr, row + 2 * step, n_rows, x_row, begin, offset, n, CHUNKS, STEP, MASKED)
        async_copy.commit_group()

        m = ops.from_key(key)
        valid = ops.is_finite(m)
        base, floor, bias = rows.row_shift(m, True)
        flag = broad(rows.largest_flag(most, m, valid, True))
        kept = ()
        marks = ()
        value = key.to(gl.int64) * 0
        for k in gl.static_range(CHUNKS):
            x = _chunk(stage, slot, begin, offset, n, k, CHUNKS, STEP, MASKED, layout)
            x = ops.widen(x, True)
            marks = marks + (rows.find_largest(x, broad(m), flag, broad(valid), True, True),)
            e, error = rows.exponential(x, broad(base), broad(floor), broad(bias), True)
            high, low = rows.exponential_terms(e, error, True, False, True)
            high, low = rows.exponential_sums(high, low, True, False)
            value += gl.convert_layout(high, gl.SliceLayout(2, gl.SliceLayout(3, layout)), assert_trivial=True)
            kept = kept + (e,)
        async_copy.wait_group(1)
        most = _row_maximum(stage, following, begin, offset, n, CHUNKS, STEP, MASKED, layout)
        total, key = exchange.sum_and_maximum(value, ops.max_key(most), number, CTAS)

        start = out_ptr + row.to(gl.int64) * out_row + begin
        r, r_low = rows.softmax_factors(total, total, valid, True, False, False, gl.float32)
        largest = rows.largest_output(m, base, floor, bias, r, r_low, valid, True)
        for k in gl.static_range(CHUNKS):
            y = rows.softmax_output(kept[k], marks[k], broad(r), broad(r_low), broad(largest), True, True)
            y = ops.narrow(y, dtype, True)
            if MASKED:
                gl.store(start + (offset + k * STEP), y, mask=begin + (offset + k * STEP) < n)
            else:
                gl.store(start + (offset + k * STEP), y)
        row += step
        slot = following
        number += 1
