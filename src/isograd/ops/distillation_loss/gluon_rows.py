# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Distillation of long contiguous rows on NVIDIA GPUs, in Gluon: both are read once; `reference.py` is the definition.

As `forward_staged` of the softmax family: a cluster of blocks holds a row of both operands in registers while the next
ones arrive in shared memory. `triton_rows.py` has the same for rows of any kind.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.ops.distillation_loss.triton_rows import log_difference
from isograd.rows import gluon_exchange as exchange
from isograd.rows import triton_rows as rows
from isograd.rows import triton_tiles as tiles
from isograd.rows.gluon_rows import broad, columns, fetch, put


@gluon.jit
def _scaled(x, factor, begin, offset, n, COLDER: gl.constexpr, MASKED: gl.constexpr):
    """Logits over the temperature; COLDER: below 1, where a finite one may overflow."""
    x = ops.widen(x, True)
    z = tiles.scaled(x, factor) if COLDER else x * factor
    if MASKED:
        z = gl.where(begin + offset < n, z, float("-inf"))
    return z


@gluon.jit
def _exponentials(z, base, floor, bias):
    """(exponentials, their integer sum a thread) of a tile."""
    e, error = rows.exponential(z, broad(base), broad(floor), broad(bias), False)
    high, low = rows.exponential_terms(e, error, False, False, True)
    high, low = rows.exponential_sums(high, low, False, False)
    return e, (high << 23) + low


@gluon.jit
def _get(ptr, row, stride, begin, offset, n, MASKED: gl.constexpr):
    """What the cluster holds of a row, from memory."""
    pointers = (ptr + row.to(gl.int64) * stride + begin) + offset
    if MASKED:
        return gl.load(pointers, mask=begin + offset < n, other=0.0)
    else:
        return gl.load(pointers)


@gluon.jit
def _logarithms(odd, x_sum, xm, t_sum, tm, valid):
    """The logarithmic sums of both rows, in three parts each: the even lanes find one, the odd lanes the other."""
    total, m = gl.where(odd, t_sum, x_sum), gl.where(odd, tm, xm)
    base, floor, bias = rows.row_shift(m, False)
    top, middle, low = rows.log_sum(total, total, m, base, floor, bias, valid, False, False, False, gl.float32, True)
    far_top, far_middle, far_low = exchange.of_neighbour(top), exchange.of_neighbour(middle), exchange.of_neighbour(low)
    x_parts = gl.where(odd, far_top, top), gl.where(odd, far_middle, middle), gl.where(odd, far_low, low)
    t_parts = gl.where(odd, top, far_top), gl.where(odd, middle, far_middle), gl.where(odd, low, far_low)
    return x_parts, t_parts


@gluon.jit
def _differences(x, t, high, rest):
    """(high part of log p - log q, the whole of it); an infinite high part is right alone."""
    a, b = ops.two_sum(t, ops.negate(x))
    u, v = ops.two_sum(a, ops.negate(broad(high)))
    return u, u + (v + (b - broad(rest)))


@gluon.jit
def _probabilities(z, m, r, r_low, largest):
    """Softmax of a tile; the factors of a row that is not valid are NaN."""
    base, floor, bias = rows.row_shift(m, False)
    e, _ = rows.exponential(z, broad(base), broad(floor), broad(bias), False)
    return gl.where(z == broad(m), broad(largest), gl.fma(e, broad(r), e * broad(r_low)))


@gluon.jit(do_not_specialize=["factor_low", "factor_high", "square_low", "square_high", "n_rows"])
def distillation_staged(
    x_ptr,
    t_ptr,
    loss_ptr,
    factor_low,
    factor_high,
    square_low,
    square_high,
    n_rows,
    n,
    x_row,
    t_row,
    loss_row,
    COLDER: gl.constexpr,
    BLOCK: gl.constexpr,
    CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    V: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
    shared: gl.constexpr,
):
    """The losses of rows of at most 2**17 elements."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    line: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, layout))
    factor, square = ops.as_float(factor_low), ops.as_float(square_low)
    begin, offset = columns(CTAS, BLOCK, BLOCK, GROUP, V, layout)
    thread = gl.arange(0, BLOCK // GROUP, layout=gl.SliceLayout(1, line))[:, None]
    block = gl.arange(0, CTAS, layout=gl.SliceLayout(0, line))[None, :]
    none = (thread + block) * 0
    x_stage = gl.allocate_shared_memory(dtype, [BLOCK // GROUP, CTAS, GROUP // V, V], shared)
    t_stage = gl.allocate_shared_memory(dtype, [BLOCK // GROUP, CTAS, GROUP // V, V], shared)
    row = gl.program_id(0)
    fetch(x_stage, x_ptr, row, n_rows, x_row, begin, offset, n, MASKED)
    fetch(t_stage, t_ptr, row, n_rows, t_row, begin, offset, n, MASKED)
    async_copy.commit_group()
    exchange.setup_for_two(thread + block, CTAS)
    while row < n_rows:
        following = row + gl.num_programs(0)
        async_copy.wait_group(0)
        x = _scaled(x_stage.load(layout), factor, begin, offset, n, COLDER, MASKED)
        t = _scaled(t_stage.load(layout), factor, begin, offset, n, COLDER, MASKED)
        fetch(x_stage, x_ptr, following, n_rows, x_row, begin, offset, n, MASKED)
        fetch(t_stage, t_ptr, following, n_rows, t_row, begin, offset, n, MASKED)
        async_copy.commit_group()

        t_most = rows.thread_maximum(t)
        # Two maxima at once: the second one's keys are counted down.
        x_key, t_key = exchange.extremes(
            ops.max_key(rows.thread_maximum(x)), ops.max_key(t_most) ^ -1, 0, CTAS
        )  # fmt: skip
        xm, tm = ops.from_key(x_key), ops.from_key(t_key ^ -1)
        valid = ops.is_finite(xm) & ops.is_finite(tm)
        x_base, x_floor, x_bias = rows.row_shift(xm, False)
        t_base, t_floor, t_bias = rows.row_shift(tm, False)
        flag = broad(rows.largest_flag(t_most, tm, valid, False))
        found = rows.find_largest(t, broad(tm), flag, broad(valid), False, True)
        _, x_sum = _exponentials(x, x_base, x_floor, x_bias)
        e, t_sum = _exponentials(t, t_base, t_floor, t_bias)
        x_sum, t_sum = exchange.totals(x_sum, t_sum, 0, CTAS)

        x_log, t_log = _logarithms((thread & 1) + block * 0 == 1, x_sum, xm, t_sum, tm, valid)
        high, rest = log_difference(t_log[0], t_log[1], t_log[2], x_log[0], x_log[1], x_log[2])
        r, r_low = rows.softmax_factors(t_sum, t_sum, valid, False, False, False, gl.float32)
        largest = rows.largest_output(tm, t_base, t_floor, t_bias, r, r_low, valid, False)
        p = rows.softmax_output(e, found, broad(r), broad(r_low), broad(largest), False, True)
        _, d = _differences(x, t, high, rest)
        term = p * d
        key = exchange.maximum(ops.max_key(rows.thread_maximum(gl.abs(term))), 1, CTAS)
        special = gl.full(key.shape, 0.0, gl.float32, line)
        if exchange.maximum_again(CTAS) >= 0x7F800000:
            # A term is not finite, or would not be if its probability were not 0: all of them once more, with care.
            x = _scaled(_get(x_ptr, row, x_row, begin, offset, n, MASKED), factor, begin, offset, n, COLDER, MASKED)
            t = _scaled(_get(t_ptr, row, t_row, begin, offset, n, MASKED), factor, begin, offset, n, COLDER, MASKED)
            p = _probabilities(t, tm, r, r_low, largest)
            u, d = _differences(x, t, high, rest)
            term = gl.where(p == 0.0, 0.0, p * gl.where(gl.abs(u) == float("inf"), u, d))
            most, least = rows.thread_extremes(term, term)
            # Both boxes are used twice, so that their turns and parities stay what they are.
            exchange.total(key.to(gl.int64), 1, False, CTAS)
            most, least = exchange.extremes(ops.max_key(most), ops.max_key(least), 0, CTAS)
            exchange.total(key.to(gl.int64), 0, False, CTAS)
            exchange.maximum(key, 1, CTAS)
            key, special = rows.largest_terms(most, least)
        exponent, scale, magic, low_scale = sums.term_scale(key)
        high, low = sums.split_term_bits(term, broad(scale), broad(magic), broad(low_scale))
        high, low = rows.limb_sums(high, low, magic, 1)
        total = exchange.total((high << 23) + low, 1, False, CTAS)
        s = rows.order_free_sum(total, total, exponent, special, key, False, gl.float32)
        loss = ops.narrow(gl.where(valid, square * s, float("nan")), gl.float32, False)
        gl.store(loss_ptr + row.to(gl.int64) * loss_row + none, loss, (thread + block) == 0)
        row = following


@gluon.jit(do_not_specialize=["factor_low", "factor_high", "scale_low", "scale_high", "divisor", "n_rows"])
def gradient_staged(
    g_ptr,
    x_ptr,
    t_ptr,
    dx_ptr,
    factor_low,
    factor_high,
    scale_low,
    scale_high,
    divisor,
    n_rows,
    n,
    g_row,
    x_row,
    t_row,
    dx_row,
    COLDER: gl.constexpr,
    BLOCK: gl.constexpr,
    CTAS: gl.constexpr,
    GROUP: gl.constexpr,
    V: gl.constexpr,
    MASKED: gl.constexpr,
    layout: gl.constexpr,
    shared: gl.constexpr,
):
    """The gradients of rows of at most 2**17 elements for the student's logits, whose place they may take."""
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    line: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, layout))
    factor, scale = ops.as_float(factor_low), ops.as_float(scale_low)
    share = (gl.program_id(0).to(gl.int64) * 0 + divisor).to(gl.float32)  # the divisor, which a constant may stand for
    begin, offset = columns(CTAS, BLOCK, BLOCK, GROUP, V, layout)
    thread = gl.arange(0, BLOCK // GROUP, layout=gl.SliceLayout(1, line))[:, None]
    block = gl.arange(0, CTAS, layout=gl.SliceLayout(0, line))[None, :]
    none = (thread + block) * 0
    x_stage = gl.allocate_shared_memory(dtype, [BLOCK // GROUP, CTAS, GROUP // V, V], shared)
    t_stage = gl.allocate_shared_memory(dtype, [BLOCK // GROUP, CTAS, GROUP // V, V], shared)
    row = gl.program_id(0)
    fetch(x_stage, x_ptr, row, n_rows, x_row, begin, offset, n, MASKED)
    fetch(t_stage, t_ptr, row, n_rows, t_row, begin, offset, n, MASKED)
    async_copy.commit_group()
    exchange.setup_for_two(thread + block, CTAS)
    parity = 0
    while row < n_rows:
        following = row + gl.num_programs(0)
        g = gl.load(g_ptr + row.to(gl.int64) * g_row + none)
        async_copy.wait_group(0)
        x = _scaled(x_stage.load(layout), factor, begin, offset, n, COLDER, MASKED)
        t = _scaled(t_stage.load(layout), factor, begin, offset, n, COLDER, MASKED)
        fetch(x_stage, x_ptr, following, n_rows, x_row, begin, offset, n, MASKED)
        fetch(t_stage, t_ptr, following, n_rows, t_row, begin, offset, n, MASKED)
        async_copy.commit_group()

        x_most, t_most = rows.thread_maximum(x), rows.thread_maximum(t)
        x_key, t_key = exchange.extremes(ops.max_key(x_most), ops.max_key(t_most) ^ -1, parity, CTAS)
        xm, tm = ops.from_key(x_key), ops.from_key(t_key ^ -1)
        valid = ops.is_finite(xm) & ops.is_finite(tm)
        x_base, x_floor, x_bias = rows.row_shift(xm, False)
        t_base, t_floor, t_bias = rows.row_shift(tm, False)
        x_flag = broad(rows.largest_flag(x_most, xm, valid, False))
        t_flag = broad(rows.largest_flag(t_most, tm, valid, False))
        x_found = rows.find_largest(x, broad(xm), x_flag, broad(valid), False, True)
        t_found = rows.find_largest(t, broad(tm), t_flag, broad(valid), False, True)
        x_e, x_sum = _exponentials(x, x_base, x_floor, x_bias)
        t_e, t_sum = _exponentials(t, t_base, t_floor, t_bias)
        x_sum, t_sum = exchange.totals(x_sum, t_sum, parity, CTAS)

        r, r_low = rows.softmax_factors(x_sum, x_sum, valid, False, False, False, gl.float32)
        largest = rows.largest_output(xm, x_base, x_floor, x_bias, r, r_low, valid, False)
        q = rows.softmax_output(x_e, x_found, broad(r), broad(r_low), broad(largest), False, True)
        r, r_low = rows.softmax_factors(t_sum, t_sum, valid, False, False, False, gl.float32)
        largest = rows.largest_output(tm, t_base, t_floor, t_bias, r, r_low, valid, False)
        p = rows.softmax_output(t_e, t_found, broad(r), broad(r_low), broad(largest), False, True)
        g = ops.divide(g, gl.full(g.shape, 0.0, gl.float32, line) + share) * scale
        put(dx_ptr, row, dx_row, begin, offset, n, ops.narrow(broad(g) * (q - p), dtype, True), MASKED)
        row = following
        parity ^= 1
