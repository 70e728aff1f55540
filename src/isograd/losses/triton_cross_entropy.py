# mypy: ignore-errors
# ruff: noqa: N803, RET505, SIM108
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Cross entropy in Triton: any axis, any strides, every option; `cross_entropy_reference.py` is the definition.

A program serves ROWS neighbouring rows in passes over their classes: the maximum, the sum of exponentials, where the
target distribution is dense the largest of its terms and their sum, and the gradient. Rows that fit a tile are read
once and held in registers; the others come from the second-level cache after the first pass. Tiles are shaped as in
`softmax/triton_rows.py`. A target that is no class makes its row NaN and is reported.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.rows import triton_rows as rows
from isograd.rows import triton_tiles as tiles

HARD, SMOOTH, PROBABILITIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _columns(BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr):
    """[q, 1, p, v] classes of a tile; GROUP of them belong to a thread, V to one access."""
    q = tl.arange(0, BLOCK // GROUP)[:, None, None] * V
    p = tl.arange(0, GROUP // V)[None, :, None] * (BLOCK // GROUP * V)
    return (p + q + tl.arange(0, V)[None, None, :])[:, None, :, :]


@triton.jit
def _pointers(base, row, column, inner_stride, axis_stride, INNER: tl.constexpr, VEC: tl.constexpr):
    """Pointers of a tile; the stride of the axis that is not contiguous is a multiple of VEC."""
    if VEC > 1:
        if INNER:
            inner_stride = tl.multiple_of(inner_stride, VEC)
        else:
            axis_stride = tl.multiple_of(axis_stride, VEC)
    return base + (tiles.broad(row) * inner_stride + column.to(tl.int64) * axis_stride)


@triton.jit
def _load(base, row, column, inner_stride, axis_stride, mask, other: tl.constexpr, INNER, VEC, NATIVE: tl.constexpr):
    pointers = _pointers(base, row, column, inner_stride, axis_stride, INNER, VEC)
    return ops.widen(tl.load(pointers, mask=mask, other=other), NATIVE)


@triton.jit
def _class_weight(weight_ptr, column, n, WEIGHTED: tl.constexpr, work: tl.constexpr):
    """The weights of a tile's classes, [q, 1, p, v]."""
    if WEIGHTED:
        return tl.load(weight_ptr + column, mask=column < n, other=0.0)
    else:
        return tl.full(column.shape, 1.0, work)


@triton.jit
def _distribution(
    y_ptr, weight_ptr, row, column, mask, n, y_inner, y_axis, keep, spread,
    MODE: tl.constexpr, WEIGHTED: tl.constexpr, INNER: tl.constexpr, NATIVE: tl.constexpr, work: tl.constexpr,
):  # fmt: skip
    """What the target distribution has in a tile; with index targets the weights that smoothing spreads over."""
    w = _class_weight(weight_ptr, column, n, WEIGHTED, work)
    if MODE == SMOOTH:
        return tl.broadcast_to(w, mask.shape)
    else:
        y = _load(y_ptr, row, column, y_inner, y_axis, mask, 0.0, INNER, 1, NATIVE)
        return (y * keep + spread) * w


@triton.jit
def _target(
    target_ptr, flag_ptr, row, inside, outer, outer_shape, t_inner, t_outer, at_inner, at_outer, n, ignore_index, code,
):  # fmt: skip
    """(targets, 0 where there is none; rows that are kept; rows whose target is no class) of this program."""
    pointers = target_ptr + memory.outer_offset(outer, outer_shape, t_outer) + row * t_inner
    target = tl.load(pointers, mask=inside, other=0).to(tl.int64)
    kept = inside & (target != memory.wide_int(ignore_index))
    bad = kept & ((target < 0) | (target >= n))
    position = memory.outer_offset(outer, outer_shape, at_outer) + row * at_inner
    memory.report(flag_ptr, code, bad, position, target, n)
    return tl.where(kept & ~bad, target, 0), kept, bad


@triton.jit
def _target_in_part(
    target_ptr, row, inside, outer, outer_shape, t_inner, t_outer, first, n, ignore_index,
):  # fmt: skip
    """(targets among the n classes from `first` on, -1 where there is none; rows that are kept) of this program."""
    pointers = target_ptr + memory.outer_offset(outer, outer_shape, t_outer) + row * t_inner
    target = tl.load(pointers, mask=inside, other=0).to(tl.int64)
    kept = inside & (target != memory.wide_int(ignore_index))
    target -= first
    return tl.where(kept & (target >= 0) & (target < n), target, -1), kept


@triton.jit
def _targets_here(target, BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr):
    """Where a tile has its rows' targets; what differs within a thread is known to the compiler."""
    thread = tiles.broad(target.to(tl.int32)) - tl.arange(0, BLOCK // GROUP)[:, None, None, None] * V
    p = tl.arange(0, GROUP // V)[None, None, :, None] * (BLOCK // GROUP * V)
    return thread == p + tl.arange(0, V)[None, None, None, :]


@triton.jit
def _gradient(
    x, hit, own, kept, q, m, base, floor, bias, r, r_low, largest, factor, g, keep, spread,
    MODE: tl.constexpr, short: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile; what a row has one of comes as [ROWS], q as a tile."""
    if MODE == HARD:
        # No exponential is above that of a row's maximum, so zeros make the gradient of an ignored row 0.
        r, r_low, largest = tl.where(kept, r, 0.0), tl.where(kept, r_low, 0.0), tl.where(kept, largest, 0.0)
        factor, g = tl.where(kept, factor, 0.0), tl.where(kept, g, 0.0)
    e, _ = rows.exponential(x, tiles.broad(base), tiles.broad(floor), tiles.broad(bias), short)
    every = tiles.broad(tl.full(m.shape, 1, tl.int32))
    # Rows that are not valid have NaN for their largest quotient.
    found = rows.find_largest(x, tiles.broad(m), every, tiles.broad(largest == largest), short, NATIVE)
    p = rows.softmax_output(e, found, tiles.broad(r), tiles.broad(r_low), tiles.broad(largest), short, NATIVE)
    if MODE == HARD:
        # An fma that adds -0 is a product; a literal -0.0 is 0.0 to some versions of Triton.
        nothing = ops.negate(tl.zeros_like(p))
        return tl.fma(tiles.broad(factor), p, tl.where(hit, tiles.broad(ops.negate(g * own)), nothing))
    else:
        if MODE == SMOOTH:
            q = tl.where(hit, tiles.broad(keep * own + spread * own), spread * q)
        dx = tl.fma(tiles.broad(factor), p, ops.negate(tiles.broad(g) * q))
        return tl.where(tiles.broad(kept), dx, 0.0)


@triton.jit
def forward(
    x_ptr,
    y_ptr,
    target_ptr,
    weight_ptr,
    numbers_ptr,
    dloss_ptr,
    loss_ptr,
    state_ptr,
    dx_ptr,
    flag_ptr,
    n,
    inner,
    ignore_index,
    code,
    state_part,
    x_axis,
    x_inner,
    y_axis,
    y_inner,
    t_axis,
    t_inner,
    at_axis,
    at_inner,
    g_axis,
    g_inner,
    loss_axis,
    loss_inner,
    state_axis,
    state_inner,
    dx_axis,
    dx_inner,
    outer_shape,
    x_outer,
    y_outer,
    t_outer,
    at_outer,
    g_outer,
    loss_outer,
    state_outer,
    dx_outer,
    MODE: tl.constexpr,
    FUSED: tl.constexpr,
    STATE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    Z: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    INNER: tl.constexpr,
    VEC: tl.constexpr,
    HELD: tl.constexpr,
    LONG: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The losses with, STATE, the states and, FUSED, the gradients. HELD: a tile holds the rows. Z: with a z-loss."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    work: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    wide: tl.constexpr = LONG or dtype == tl.float64
    keep, spread = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    row, outer = tiles.place(inner, ROWS)
    inside = row < inner
    column = _columns(BLOCK, GROUP, V)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    y_ptr += memory.outer_offset(outer, outer_shape, y_outer)
    first = tiles.broad(inside) & (column < n)
    held = first
    stop = n
    if HELD:
        held = _load(x_ptr, row, column, x_inner, x_axis, first, float("-inf"), INNER, VEC, NATIVE)
        stop = BLOCK
    if MODE == PROBABILITIES:
        target, kept, bad = row * 0, inside, inside & (row < 0)
        own = tl.full(row.shape, 1.0, work)
    else:
        target, kept, bad = _target(
            target_ptr, flag_ptr, row, inside, outer, outer_shape, t_inner, t_outer, at_inner, at_outer, n,
            ignore_index, code,
        )  # fmt: skip
        own = tl.load(weight_ptr + target) if WEIGHTED else tl.full(row.shape, 1.0, work)
    # Read before the row's sums, and so before the gradient may take the logit's place.
    x_target = ops.widen(tl.load(x_ptr + row * x_inner + target * x_axis, mask=inside, other=0.0), False)

    best = tl.full((BLOCK // GROUP, ROWS, GROUP // V, V), float("-inf"), work)
    for start in range(0, stop, BLOCK):
        x = held
        if not HELD:
            mask = tiles.broad(inside) & (column + start < n)
            x = _load(x_ptr, row, column + start, x_inner, x_axis, mask, float("-inf"), INNER, VEC, NATIVE)
        best = tl.maximum(best, x, propagate_nan=tl.PropagateNan.ALL)
    m = ops.from_key(tl.max(ops.max_key(rows.thread_maximum(best)), axis=0))
    valid = ops.is_finite(m) & ~bad
    base, floor, bias = rows.row_shift(m, short)

    high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    low_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
    for start in range(0, stop, BLOCK):
        x = held
        if not HELD:
            mask = tiles.broad(inside) & (column + start < n)
            x = _load(x_ptr, row, column + start, x_inner, x_axis, mask, float("-inf"), INNER, VEC, NATIVE)
        e, error = rows.exponential(x, tiles.broad(base), tiles.broad(floor), tiles.broad(bias), short)
        high, low = rows.exponential_terms(e, error, short, LONG, NATIVE)
        high, low = rows.exponential_sums(high, low, short, LONG)
        high_sum += high
        low_sum += low
    if wide:
        hi, lo = rows.wide_sum(high_sum, low_sum, dtype)
    elif short:
        lo = tl.sum(high_sum, axis=0)
        hi = lo
    else:
        lo = rows.narrow_sum(high_sum, low_sum)
        hi = lo
    r, r_low = rows.softmax_factors(hi, lo, valid, short, LONG, wide, dtype)
    largest = rows.largest_output(m, base, floor, bias, r, r_low, valid, short)
    top, middle, bottom = rows.log_sum(hi, lo, m, base, floor, bias, valid, short, LONG, wide, dtype, False)
    if short:
        lse = top + middle
    else:
        lse = top + (middle + bottom)
    loss = 0.0 - rows.log_softmax_output(x_target, top, middle, bottom, short)
    loss = own * loss
    total = own

    if MODE != HARD:
        total = tl.load(numbers_ptr + 4) * own + tl.load(numbers_ptr + 5)
        most = tl.zeros((BLOCK // GROUP, ROWS, GROUP // V, V), work)
        least = tl.zeros((BLOCK // GROUP, ROWS, GROUP // V, V), work)
        q_most = tl.zeros((BLOCK // GROUP, ROWS, GROUP // V, V), work)
        q_least = tl.zeros((BLOCK // GROUP, ROWS, GROUP // V, V), work)
        for start in range(0, stop, BLOCK):
            mask = tiles.broad(inside) & (column + start < n)
            x = held
            if not HELD:
                x = _load(x_ptr, row, column + start, x_inner, x_axis, mask, float("-inf"), INNER, VEC, NATIVE)
            q = _distribution(
                y_ptr, weight_ptr, row, column + start, mask, n, y_inner, y_axis, keep, spread, MODE, WEIGHTED, INNER,
                NATIVE, work,
            )  # fmt: skip
            p = q * rows.log_softmax_output(x, tiles.broad(top), tiles.broad(middle), tiles.broad(bottom), short)
            most, least = tiles.extremes(most, least, tl.where(mask, p, 0.0))
            if MODE == PROBABILITIES:
                q_most, q_least = tiles.extremes(q_most, q_least, tl.where(mask, q, 0.0))
        key, special, exponent, scale, magic, low_scale = tiles.term_scale(most, least)
        q_key, q_special, q_exponent, q_scale, q_magic, q_low_scale = tiles.term_scale(q_most, q_least)
        high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
        low_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
        q_high_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
        q_low_sum = tl.zeros((BLOCK // GROUP, ROWS), tl.int64)
        for start in range(0, stop, BLOCK):
            mask = tiles.broad(inside) & (column + start < n)
            x = held
            if not HELD:
                x = _load(x_ptr, row, column + start, x_inner, x_axis, mask, float("-inf"), INNER, VEC, NATIVE)
            q = _distribution(
                y_ptr, weight_ptr, row, column + start, mask, n, y_inner, y_axis, keep, spread, MODE, WEIGHTED, INNER,
                NATIVE, work,
            )  # fmt: skip
            p = q * rows.log_softmax_output(x, tiles.broad(top), tiles.broad(middle), tiles.broad(bottom), short)
            high, low = tiles.limbs(tl.where(mask, p, 0.0), scale, magic, low_scale)
            high_sum += high
            low_sum += low
            if MODE == PROBABILITIES:
                high, low = tiles.limbs(tl.where(mask, q, 0.0), q_scale, q_magic, q_low_scale)
                q_high_sum += high
                q_low_sum += low
        hi, lo = rows.wide_sum(high_sum, low_sum, work)
        everything = 0.0 - rows.order_free_sum(hi, lo, exponent, special, key, True, work)
        if MODE == SMOOTH:
            loss = keep * loss + spread * everything
        else:
            hi, lo = rows.wide_sum(q_high_sum, q_low_sum, work)
            loss = everything
            total = rows.order_free_sum(hi, lo, q_exponent, q_special, q_key, True, work)
    if Z:
        loss += tl.load(numbers_ptr + 2) * (lse * lse)
        total += tl.load(numbers_ptr + 3) * lse
    # A row that is not finite, and one whose target is no class.
    loss = tl.where(valid, loss, float("nan"))
    total = tl.where(valid, total, float("nan"))

    loss_ptr += memory.outer_offset(outer, outer_shape, loss_outer)
    tl.store(loss_ptr + row * loss_inner, ops.narrow(tl.where(kept, loss, 0.0), work, False), mask=inside)
    if STATE:
        places = state_ptr + memory.outer_offset(outer, outer_shape, state_outer) + row * state_inner
        part = memory.wide_int(state_part)
        low = r_low
        if short:
            low = tl.full(r.shape, 0.0, work)
        m_kept = tl.where(valid, m, float("nan"))
        low = tl.where(valid, low, float("nan"))
        tl.store(places, ops.narrow(tl.where(kept, m_kept, 0.0), work, False), mask=inside)
        tl.store(places + part, ops.narrow(tl.where(kept, r, 0.0), work, False), mask=inside)
        tl.store(places + 2 * part, ops.narrow(tl.where(kept, low, 0.0), work, False), mask=inside)
        tl.store(places + 3 * part, ops.narrow(tl.where(kept, total, 0.0), work, False), mask=inside)
    if FUSED:
        dloss_ptr += memory.outer_offset(outer, outer_shape, g_outer)
        g = tl.load(dloss_ptr + row * g_inner, mask=inside, other=0.0)
        factor = g * total
        dx_ptr += memory.outer_offset(outer, outer_shape, dx_outer)
        for start in range(0, stop, BLOCK):
            mask = tiles.broad(inside) & (column + start < n)
            x = held
            if not HELD:
                x = _load(x_ptr, row, column + start, x_inner, x_axis, mask, float("-inf"), INNER, VEC, NATIVE)
            q = x
            if MODE != HARD:
                q = _distribution(
                    y_ptr, weight_ptr, row, column + start, mask, n, y_inner, y_axis, keep, spread, MODE, WEIGHTED,
                    INNER, NATIVE, work,
                )  # fmt: skip
            hit = _targets_here(target - start, BLOCK, GROUP, V)
            dx = _gradient(
                x, hit, own, kept, q, m, base, floor, bias, r, r_low, largest, factor, g,
                keep, spread, MODE, short, NATIVE,
            )  # fmt: skip
            pointers = _pointers(dx_ptr, row, column + start, dx_inner, dx_axis, INNER, VEC)
            tl.store(pointers, ops.narrow(dx, dtype, NATIVE), mask=mask)


@triton.jit(do_not_specialize=["first"])
def backward(
    x_ptr,
    y_ptr,
    target_ptr,
    weight_ptr,
    numbers_ptr,
    dloss_ptr,
    state_ptr,
    dx_ptr,
    flag_ptr,
    first,
    n,
    inner,
    ignore_index,
    code,
    state_part,
    x_axis,
    x_inner,
    y_axis,
    y_inner,
    t_axis,
    t_inner,
    at_axis,
    at_inner,
    g_axis,
    g_inner,
    state_axis,
    state_inner,
    dx_axis,
    dx_inner,
    outer_shape,
    x_outer,
    y_outer,
    t_outer,
    at_outer,
    g_outer,
    state_outer,
    dx_outer,
    MODE: tl.constexpr,
    WEIGHTED: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    INNER: tl.constexpr,
    VEC: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The gradients from the states, in one pass. PART: of the n classes from `first` on, whose weights are given."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    short: tl.constexpr = dtype.primitive_bitwidth == 16
    work: tl.constexpr = tl.float64 if dtype == tl.float64 else tl.float32
    keep, spread = tl.load(numbers_ptr), tl.load(numbers_ptr + 1)
    row, outer = tiles.place(inner, ROWS)
    inside = row < inner
    column = _columns(BLOCK, GROUP, V)
    x_ptr += memory.outer_offset(outer, outer_shape, x_outer)
    y_ptr += memory.outer_offset(outer, outer_shape, y_outer)
    dx_ptr += memory.outer_offset(outer, outer_shape, dx_outer)
    if MODE == PROBABILITIES:
        target, kept, bad = row * 0, inside, inside & (row < 0)
        own = tl.full(row.shape, 1.0, work)
    elif PART:
        target, kept = _target_in_part(
            target_ptr, row, inside, outer, outer_shape, t_inner, t_outer, first, n, ignore_index
        )  # fmt: skip
        # The states of rows whose target is no class are NaN.
        bad = inside & (row < 0)
        own = tl.load(weight_ptr + tl.maximum(target, 0)) if WEIGHTED else tl.full(row.shape, 1.0, work)
    else:
        target, kept, bad = _target(
            target_ptr, flag_ptr, row, inside, outer, outer_shape, t_inner, t_outer, at_inner, at_outer, n,
            ignore_index, code,
        )  # fmt: skip
        own = tl.load(weight_ptr + target) if WEIGHTED else tl.full(row.shape, 1.0, work)
    places = state_ptr + memory.outer_offset(outer, outer_shape, state_outer) + row * state_inner
    part = memory.wide_int(state_part)
    m = tl.load(places, mask=inside, other=0.0)
    r = tl.load(places + part, mask=inside, other=0.0)
    r_low = tl.load(places + 2 * part, mask=inside, other=0.0)
    total = tl.load(places + 3 * part, mask=inside, other=0.0)
    g = tl.load(dloss_ptr + memory.outer_offset(outer, outer_shape, g_outer) + row * g_inner, mask=inside, other=0.0)
    valid = ops.is_finite(m) & ~bad
    factor = tl.where(valid, g * total, float("nan"))
    # The state of an ignored row knows no maximum; below infinity exponentials are finite.
    m = tl.where(kept, m, float("inf"))
    base, floor, bias = rows.row_shift(m, short)
    largest = rows.largest_output(m, base, floor, bias, r, r_low, valid, short)
    for start in range(0, n, BLOCK):
        mask = tiles.broad(inside) & (column + start < n)
        x = _load(x_ptr, row, column + start, x_inner, x_axis, mask, float("-inf"), INNER, VEC, NATIVE)
        if PART:
            # A logit that was computed a second time may exceed its row's maximum by its own error.
            x = tl.minimum(x, tiles.broad(m), propagate_nan=tl.PropagateNan.ALL)
        q = x
        if MODE != HARD:
            q = _distribution(
                y_ptr, weight_ptr, row, column + start, mask, n, y_inner, y_axis, keep, spread, MODE, WEIGHTED, INNER,
                NATIVE, work,
            )  # fmt: skip
        hit = _targets_here(target - start, BLOCK, GROUP, V)
        dx = _gradient(
            x, hit, own, kept, q, m, base, floor, bias, r, r_low, largest, factor, g,
            keep, spread, MODE, short, NATIVE,
        )  # fmt: skip
        pointers = _pointers(dx_ptr, row, column + start, dx_inner, dx_axis, INNER, VEC)
        tl.store(pointers, ops.narrow(dx, dtype, NATIVE), mask=mask)


@triton.jit
def check_targets(target_ptr, flag_ptr, count, step, n, ignore_index, code, BLOCK: tl.constexpr):
    """Report a target that is no class."""
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    target = tl.load(target_ptr + place * step, mask=inside, other=0).to(tl.int64)
    kept = inside & (target != memory.wide_int(ignore_index))
    memory.report(flag_ptr, code, kept & ((target < 0) | (target >= n)), place, target, n)
