# mypy: ignore-errors
# ruff: noqa: N803
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""The router, its gradient, top_k and renormalize in Triton; formulas: `reference.py`.

A problem is a matrix of rows; its columns may have any stride. `router_separated` serves float32 and 16-bit softmax
scores by a short cut and goes the general way where a row's largest logits are too close to tell their order.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics.triton_memory import as_bits, report
from isograd.ops.router import triton_select as pieces
from isograd.rows import triton_rows as rows


@triton.jit
def _rows(ROWS: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)


@triton.jit
def _load_tile(x_ptr, row, column, tokens, n, x_row, x_column, other: tl.constexpr, NATIVE: tl.constexpr):
    """Widened elements of a tile."""
    mask = (row < tokens)[None, :, None, None] & (column < n)
    pointers = x_ptr + pieces.broad(row * x_row) + column.to(tl.int64) * x_column
    return ops.widen(tl.load(pointers, mask=mask, other=other), NATIVE)


@triton.jit
def _store_chosen(w_ptr, i_ptr, w, where, row, tokens, k, w_row, w_column, i_row, i_column):
    """Store [lanes, rows] weights and experts."""
    lane = tl.arange(0, w.shape[0])[:, None].to(tl.int64)
    mask = (lane < k) & (row < tokens)[None, :]
    y = ops.narrow(w, w_ptr.dtype.element_ty, False)
    tl.store(w_ptr + row[None, :] * w_row + lane * w_column, y, mask=mask)
    tl.store(i_ptr + row[None, :] * i_row + lane * i_column, where.to(tl.int64), mask=mask)


@triton.jit
def _finished(w, k, RENORMALIZE: tl.constexpr, SCALED: tl.constexpr, SCALE: tl.constexpr):
    """Weights as they are returned, from the scores of the chosen experts; lanes from k on are no matter."""
    if RENORMALIZE:
        lane = tl.arange(0, w.shape[0])[:, None]
        w, _ = pieces.renormalized(tl.where(lane < k, w, 0.0))
    if SCALED:
        w = w * tl.full(w.shape, SCALE, w.dtype)
    return w


@triton.jit
def _biased(
    s, column, bias_ptr, row, tokens, n, bias_row, bias_stride, HAS_BIAS: tl.constexpr, BIAS_ROWS: tl.constexpr
):
    """What experts are chosen by: their scores, and the bias of all tokens or of each."""
    if HAS_BIAS:
        at, mask = column.to(tl.int64) * bias_stride, column < n
        if BIAS_ROWS:
            at, mask = at + pieces.broad(row * bias_row), mask & (row < tokens)[None, :, None, None]
        s += tl.load(bias_ptr + at, mask=mask, other=0.0)
    return s


@triton.jit
def _choose(
    x,
    column,
    bias_ptr,
    row,
    tokens,
    n,
    k,
    groups,
    group_k,
    bias_row,
    bias_stride,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """[K, rows] scores of the chosen experts and their indices, the general way."""
    s = pieces.scores(x, SOFTMAX, NATIVE)
    c = _biased(s, column, bias_ptr, row, tokens, n, bias_row, bias_stride, HAS_BIAS, BIAS_ROWS)
    key = pieces.selection_key(c)
    key = tl.where(column < n, key, pieces.lowest_like(key))
    if GROUPS > 1:
        key = pieces.mask_groups(key, column, n // groups, groups, group_k, GROUPS)
    bits, where = pieces.select(key, column, ops.as_int(s), k, K)
    return ops.as_float(bits), where


@triton.jit(do_not_specialize=["tokens"])
def router_tile(
    x_ptr,
    bias_ptr,
    w_ptr,
    i_ptr,
    tokens,
    n,
    k,
    groups,
    group_k,
    x_row,
    x_column,
    bias_row,
    bias_stride,
    w_row,
    w_column,
    i_row,
    i_column,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The router of rows of at most BLOCK experts."""
    row = _rows(ROWS)
    column = pieces.columns(BLOCK, GROUP, V)
    x = _load_tile(x_ptr, row, column, tokens, n, x_row, x_column, float("-inf"), NATIVE)
    w, where = _choose(
        x, column, bias_ptr, row, tokens, n, k, groups, group_k, bias_row, bias_stride, K, GROUPS, SOFTMAX, HAS_BIAS,
        BIAS_ROWS, NATIVE,
    )  # fmt: skip
    w = _finished(w, k, RENORMALIZE, SCALED, SCALE)
    _store_chosen(w_ptr, i_ptr, w, where, row, tokens, k, w_row, w_column, i_row, i_column)


@triton.jit(do_not_specialize=["tokens"])
def router_lanes(
    x_ptr,
    bias_ptr,
    w_ptr,
    i_ptr,
    tokens,
    n,
    x_row,
    x_column,
    bias_row,
    bias_stride,
    w_row,
    w_column,
    i_row,
    i_column,
    K: tl.constexpr,
    SIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BIAS_ROWS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Binary32 scores of rows of at most BLOCK experts; as many lanes as K and GROUPS have a row.

    The chosen experts are found one a lane, where their scores are computed again: nothing crosses shared memory.
    """
    row = _rows(ROWS)
    column = pieces.columns(BLOCK, GROUP, V)
    x = _load_tile(x_ptr, row, column, tokens, n, x_row, x_column, float("-inf"), NATIVE)
    if SOFTMAX:
        e, error, m, valid, base, floor, bias, hi, lo = pieces.exponentials(x, NATIVE)
        r, r_low = pieces.factors(hi, lo, valid, tl.float32)
        s = pieces.quotients(e, error, x, pieces.broad(m), tl.zeros_like(x) + pieces.broad(r), pieces.broad(r_low))
    else:
        s = pieces.sigmoid(x)
    s = _biased(s, column, bias_ptr, row, tokens, n, bias_row, bias_stride, HAS_BIAS, BIAS_ROWS)
    key = tl.where(column < n, pieces.selection_key(s), pieces.LOWEST_32)
    if GROUPS > 1:
        key = pieces.best_groups(key, column, SIZE, GROUPS, GROUP_K)
    where = pieces.select_lanes(key, column, K)
    lane = tl.arange(0, BLOCK // GROUP)[:, None]
    inside = (row < tokens)[None, :] & (lane < K)
    pointers = x_ptr + (row * x_row)[None, :] + where.to(tl.int64) * x_column
    chosen = ops.widen(tl.load(pointers, mask=inside, other=float("-inf")), False)
    if SOFTMAX:
        e, error = rows.exponential(chosen, base[None, :], floor[None, :], bias[None, :], False)
        w = pieces.quotients(e, error, chosen, m[None, :], tl.zeros_like(e) + r[None, :], r_low[None, :])
    else:
        w = pieces.sigmoid(chosen)
    w = _finished(w, K, RENORMALIZE, SCALED, SCALE)
    _store_chosen(w_ptr, i_ptr, w, where, row, tokens, K, w_row, w_column, i_row, i_column)


@triton.jit(do_not_specialize=["tokens"])
def router_separated(
    x_ptr,
    w_ptr,
    i_ptr,
    tokens,
    n,
    x_row,
    x_column,
    w_row,
    w_column,
    i_row,
    i_column,
    K: tl.constexpr,
    LANES: tl.constexpr,
    LOW: tl.constexpr,
    EXACT: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Softmax scores of rows of at most BLOCK experts, without bias and groups; K < BLOCK // GROUP.

    The largest logits are the largest scores unless they are close to one another. Scores are computed of the chosen
    experts alone. Where that does not hold the program starts again and takes the scores of all.
    """
    row = _rows(ROWS)
    column = pieces.columns(BLOCK, GROUP, V)
    x = _load_tile(x_ptr, row, column, tokens, n, x_row, x_column, float("-inf"), NATIVE)
    packed = pieces.pack(x, column, LOW)
    found, last, close, spent = pieces.select_separated(packed, K, LOW, EXACT)
    _, _, m, valid, base, floor, bias, hi, lo = pieces.exponentials(x, NATIVE)
    r, r_low = pieces.factors(hi, lo, valid, tl.float32)
    where = pieces.unpack_column(found, LOW)
    lane = tl.arange(0, BLOCK // GROUP)[:, None]
    inside = (row < tokens)[None, :] & (lane < K) & (where < n)
    pointers = x_ptr + (row * x_row)[None, :] + where.to(tl.int64) * x_column
    chosen = ops.widen(tl.load(pointers, mask=inside, other=float("-inf")), False)
    e, error = rows.exponential(chosen, base[None, :], floor[None, :], bias[None, :], False)
    w = pieces.quotients(e, error, chosen, m[None, :], tl.zeros_like(e) + r[None, :], r_low[None, :])
    # A score of zero or nearly so says nothing about the order; a NaN is not above the limit either.
    small = inside & ((w >= 7.888609052210118e-31) == 0)
    close = tl.where(row < tokens, tl.maximum(close, tl.max(small.to(tl.int32), axis=0)), 0)
    if tl.max(tl.maximum(close, spent), axis=0) == 0:
        y = _finished(w, K, RENORMALIZE, SCALED, SCALE)
        _store_chosen(w_ptr, i_ptr, y, where, row, tokens, K, w_row, w_column, i_row, i_column)
    else:
        # Read once more, so that nobody has to keep it until here.
        x = _load_tile(x_ptr, row, column, tokens, n, x_row, x_column, float("-inf"), NATIVE)
        more = (pieces.count_from(pieces.pack(x, column, LOW), last) != K + 1).to(tl.int32)
        if tl.max(tl.maximum(close, tl.where(row < tokens, more, 0)), axis=0) == 0:
            y = _finished(w, K, RENORMALIZE, SCALED, SCALE)
            _store_chosen(w_ptr, i_ptr, y, where, row, tokens, K, w_row, w_column, i_row, i_column)
        else:
            s, at = _choose(x, column, x_ptr, row, tokens, n, K, 1, 1, 0, 0, LANES, 1, True, False, False, NATIVE)
            s = _finished(s, K, RENORMALIZE, SCALED, SCALE)
            _store_chosen(w_ptr, i_ptr, s, at, row, tokens, K, w_row, w_column, i_row, i_column)


@triton.jit(do_not_specialize=["tokens"])
def router_backward(
    d_ptr,
    x_ptr,
    i_ptr,
    out_ptr,
    flag_ptr,
    tokens,
    n,
    k,
    code,
    d_row,
    d_column,
    x_row,
    x_column,
    i_row,
    i_column,
    out_row,
    out_column,
    K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    SCALED: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The gradient of the logits: a tile of what every expert gets, then the chosen ones over it.

    A token with an expert out of range gets NaN throughout.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = _rows(ROWS)
    column = pieces.columns(BLOCK, GROUP, V)
    x = _load_tile(x_ptr, row, column, tokens, n, x_row, x_column, float("-inf"), NATIVE)
    lane = tl.arange(0, K)[:, None].to(tl.int64)
    inside = (row < tokens)[None, :] & (lane < k)
    expert = tl.load(i_ptr + row[None, :] * i_row + lane * i_column, mask=inside, other=0).to(tl.int64)
    outside = inside & ((expert < 0) | (expert >= n))
    report(flag_ptr, code, outside, row[None, :] * k + lane, expert, n)
    inside = inside & (outside == 0)
    spoilt = tl.max(outside.to(tl.int32), axis=0) > 0
    g = tl.load(d_ptr + row[None, :] * d_row + lane * d_column, mask=inside, other=0.0)
    chosen = tl.load(x_ptr + row[None, :] * x_row + expert * x_column, mask=inside, other=float("-inf"))
    chosen = ops.widen(chosen, False)
    if SOFTMAX:
        e, error, m, valid, base, floor, bias, hi, lo = pieces.exponentials(x, NATIVE)
        r, r_low = pieces.factors(hi, lo, valid, x.dtype)
        e_i, error_i = rows.exponential(chosen, base[None, :], floor[None, :], bias[None, :], False)
        y = pieces.quotients(e_i, error_i, chosen, m[None, :], tl.zeros_like(e_i) + r[None, :], r_low[None, :])
    else:
        y = pieces.sigmoid(chosen)
    y = tl.where(inside, y, 0.0)
    if SCALED:
        g = g * tl.full(g.shape, SCALE, g.dtype)
    if RENORMALIZE:
        g = tl.where(inside, pieces.renormalized_gradient(g, y), 0.0)
    mask = (row < tokens)[None, :, None, None] & (column < n)
    pointers = out_ptr + pieces.broad(row * out_row) + column.to(tl.int64) * out_column
    if SOFTMAX:
        total = pieces.lane_sum(y * g)
        s = pieces.quotients(e, error, x, pieces.broad(m), tl.zeros_like(x) + pieces.broad(r), pieces.broad(r_low))
        rest = tl.where(spoilt, float("nan"), tl.sum(0.0 - total, axis=0))
        tl.store(pointers, ops.narrow(s * pieces.broad(rest), dtype, NATIVE), mask=mask)
        dx = y * (g - total)
    else:
        rest = tl.where(spoilt, float("nan"), tl.zeros(spoilt.shape, x.dtype))
        tl.store(pointers, ops.narrow(tl.zeros(x.shape, x.dtype) + pieces.broad(rest), dtype, False), mask=mask)
        dx = (g * y) * (1.0 - y)
    tl.debug_barrier()
    y = ops.narrow(tl.where(spoilt[None, :], float("nan"), dx), dtype, False)
    tl.store(out_ptr + row[None, :] * out_row + expert * out_column, y, mask=inside)


# --- top_k -----------------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["tokens"])
def top_k_tile(
    x_ptr,
    v_ptr,
    i_ptr,
    tokens,
    n,
    k,
    x_row,
    x_column,
    v_row,
    v_column,
    i_row,
    i_column,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """top_k of rows of at most BLOCK elements."""
    row = _rows(ROWS)
    column = pieces.columns(BLOCK, GROUP, V)
    key = pieces.selection_key(_load_tile(x_ptr, row, column, tokens, n, x_row, x_column, 0.0, NATIVE))
    key = tl.where(column < n, key, pieces.lowest_like(key))
    _, where = pieces.select(key, column, key, k, K)
    lane = tl.arange(0, K)[:, None].to(tl.int64)
    mask = (lane < k) & (row < tokens)[None, :]
    at = where.to(tl.int64)
    bits = tl.load(as_bits(x_ptr) + row[None, :] * x_row + at * x_column, mask=mask, other=0)
    tl.store(as_bits(v_ptr) + row[None, :] * v_row + lane * v_column, bits, mask=mask)
    tl.store(i_ptr + row[None, :] * i_row + lane * i_column, at, mask=mask)


@triton.jit
def descending_keys(x_ptr, key_ptr, count, BLOCK: tl.constexpr):
    """Keys in the opposite order of top_k, for a stable sort."""
    j = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = ops.widen(tl.load(x_ptr + j, mask=j < count, other=0.0), False)
    tl.store(key_ptr + j, ~pieces.selection_key(x), mask=j < count)


# --- renormalize -----------------------------------------------------------------------------------------------------
@triton.jit(do_not_specialize=["tokens"])
def renormalize_tile(
    g_ptr,
    w_ptr,
    out_ptr,
    tokens,
    n,
    g_row,
    g_column,
    w_row,
    w_column,
    out_row,
    out_column,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows of at most BLOCK weights, divided by their sum, or the gradient of that."""
    row = _rows(ROWS)
    lane = tl.arange(0, BLOCK)[:, None].to(tl.int64)
    mask = (lane < n) & (row < tokens)[None, :]
    w = ops.widen(tl.load(w_ptr + row[None, :] * w_row + lane * w_column, mask=mask, other=0.0), False)
    if BACKWARD:
        g = ops.widen(tl.load(g_ptr + row[None, :] * g_row + lane * g_column, mask=mask, other=0.0), False)
        y = pieces.renormalized_gradient(g, w)
    else:
        y, _ = pieces.renormalized(w)
    y = ops.narrow(y, out_ptr.dtype.element_ty, False)
    tl.store(out_ptr + row[None, :] * out_row + lane * out_column, y, mask=mask)
