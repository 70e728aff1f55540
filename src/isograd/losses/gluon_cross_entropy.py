# mypy: ignore-errors
# ruff: noqa: N803, SIM108
"""Losses and gradients of long contiguous rows on NVIDIA GPUs, in Gluon: a row is read once and written once.

Plain index targets only. As `forward_staged` of the softmax family: a cluster of blocks holds a row in registers while
its next row arrives in shared memory. The gradient may take the place of the logits: a block writes only after every
block of its cluster has told its part of the row's sum, and so has read the target's logit.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from isograd.numerics import triton_ops as ops
from isograd.rows import gluon_exchange as exchange
from isograd.rows import triton_rows as rows
from isograd.rows.gluon_rows import broad, columns, fetch, put

# The name since Triton 3.9, and the one before.
_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _put(place, value, kept, first):
    """Store what a row has one of; 0 where the row is ignored."""
    gl.store(place, ops.narrow(gl.where(kept, value, 0.0), gl.float32, False), first)


@gluon.jit
def gradient_staged(
    x_ptr,
    target_ptr,
    weight_ptr,
    numbers_ptr,
    dloss_ptr,
    loss_ptr,
    state_ptr,
    dx_ptr,
    n_rows,
    n,
    ignore_index,
    state_part,
    x_row,
    target_row,
    dloss_row,
    loss_row,
    state_row,
    dx_row,
    STATE: gl.constexpr,
    WEIGHTED: gl.constexpr,
    Z: gl.constexpr,
    BLOCK: gl.constexpr,
    CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    V: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
    shared: gl.constexpr,
):
    """The losses, gradients and, STATE, states of rows of at most 2**17 elements, of 16 bits 2**18."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    short: gl.constexpr = dtype.primitive_bitwidth == 16
    line: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, layout))
    begin, offset = columns(CTAS, BLOCK, BLOCK, GROUP, V, layout)
    thread = gl.arange(0, BLOCK // GROUP, layout=gl.SliceLayout(1, line))[:, None]
    block = gl.arange(0, CTAS, layout=gl.SliceLayout(0, line))[None, :]
    none = (thread + block) * 0
    stage = gl.allocate_shared_memory(dtype, [BLOCK // GROUP, CTAS, GROUP // V, V], shared)
    row = gl.program_id(0)
    fetch(stage, x_ptr, row, n_rows, x_row, begin, offset, n, MASKED)
    async_copy.commit_group()
    exchange.setup(thread + block, CTAS)
    zero = n >> 31  # which the compiler cannot tell
    parity = 0
    while row < n_rows:
        following = row + gl.num_programs(0)
        wide_row = row.to(gl.int64)
        target = gl.load(target_ptr + (wide_row * target_row + none)).to(gl.int64)
        kept = target != ignore_index
        inside = kept & (target >= 0) & (target < n)
        target = gl.where(inside, target, 0)
        x_target = ops.widen(gl.load(x_ptr + wide_row * x_row + target), False)
        g = gl.load(dloss_ptr + (wide_row * dloss_row + none))
        async_copy.wait_group(0)
        x = ops.widen(stage.load(layout), True)
        fetch(stage, x_ptr, following, n_rows, x_row, begin, offset, n, MASKED)
        async_copy.commit_group()
        if MASKED:
            x = gl.where(begin + offset < n, x, float("-inf"))

        most = rows.thread_maximum(x)
        key = ops.max_key(most)
        # The logit of the target has arrived before this block tells its maximum.
        key = exchange.maximum(key ^ (zero & ops.as_int(x_target)), parity, CTAS)
        m = ops.from_key(key)
        # A row that is not finite and one whose target is no class are NaN.
        valid = ops.is_finite(m) & (kept == inside)
        base, floor, bias = rows.row_shift(m, short)
        flag = broad(rows.largest_flag(most, m, valid, short))
        found = rows.find_largest(x, broad(m), flag, broad(valid), short, True)
        e, error = rows.exponential(x, broad(base), broad(floor), broad(bias), short)
        high, low = rows.exponential_terms(e, error, short, False, True)
        high, low = rows.exponential_sums(high, low, short, False)
        if short:
            value = gl.convert_layout(high, line, assert_trivial=True)
        else:
            value = (high << 23) + low
        total = exchange.total(value, parity, short, CTAS)
        r, r_low = rows.softmax_factors(total, total, valid, short, False, False, gl.float32)
        largest = rows.largest_output(m, base, floor, bias, r, r_low, valid, short)
        top, middle, bottom = rows.log_sum(
            total, total, m, base, floor, bias, valid, short, False, False, gl.float32, True
        )
        if WEIGHTED:
            own = gl.load(weight_ptr + target)
        else:
            own = gl.full(target.shape, 1.0, gl.float32, line)
        factor = own
        loss = own * (0.0 - rows.log_softmax_output(x_target, top, middle, bottom, short))
        if Z:
            if short:
                lse = top + middle
            else:
                lse = top + (middle + bottom)
            loss += gl.load(numbers_ptr + 2) * (lse * lse)
            factor += gl.load(numbers_ptr + 3) * lse
        loss = gl.where(valid, loss, float("nan"))
        _put(loss_ptr + wide_row * loss_row + none, loss, kept, (thread + block) == 0)
        factor = gl.where(valid, factor, float("nan"))
        if STATE:
            low = r_low
            if short:
                low = r * 0.0
            place = state_ptr + wide_row * state_row + none
            _put(place, gl.where(valid, m, float("nan")), kept, (thread + block) == 0)
            place += state_part
            _put(place, r, kept, (thread + block) == 0)
            place += state_part
            _put(place, gl.where(valid, low, float("nan")), kept, (thread + block) == 0)
            place += state_part
            _put(place, factor, kept, (thread + block) == 0)
        factor = g * factor
        p = rows.softmax_output(e, found, broad(r), broad(r_low), broad(largest), short, True)
        dx = ops.narrow(broad(factor) * p, dtype, True)
        if gl.load(target_ptr + wide_row * target_row).to(gl.int64) == ignore_index:
            dx = gl.full(dx.shape, 0.0, dtype, layout)
        put(dx_ptr, row, dx_row, begin, offset, n, dx, MASKED)
        e, _ = rows.exponential(x_target, base, floor, bias, short)
        found = rows.find_largest(x_target, m, valid, valid, short, False)
        p = rows.softmax_output(e, found, r, r_low, largest, short, False)
        at = gl.fma(factor, p, ops.negate(g * own))
        # The target's gradient replaces what the block has just stored there.
        _barrier()
        here = inside & (thread == 0) & (target >= block * BLOCK) & (target < (block + 1) * BLOCK)
        gl.store(dx_ptr + wide_row * dx_row + target, ops.narrow(at, dtype, False), here)
        row = following
        parity ^= 1
