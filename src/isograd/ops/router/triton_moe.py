# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Sorting entries by expert, moving the tokens' rows there and back, and the auxiliary losses in Triton.

Sorting is a counting sort without atomics. `rank_entries` gives every entry its rank among those of its expert in its
block, and every block its counts; `scan_blocks` turns the counts of an expert into what the blocks before hold, first
within stretches of blocks, then over their totals; `place_entries` adds an expert's start, the stretch's, the block's
and the rank. Entries that are out of range count as those of one more expert, the last.
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.numerics.triton_memory import as_bits, in_range, nan_bits, report, wide_int
from isograd.ops.router import triton_select as pieces
from isograd.rows import triton_rows as rows


# --- counting sort ---------------------------------------------------------------------------------------------------
@triton.jit
def rank_entries(experts_ptr, ranks_ptr, counts_ptr, flag_ptr, count, bound, code, BLOCK: tl.constexpr):
    """Ranks [count] int32; counts [blocks, bound + 1] int32, zero before."""
    block = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    entry = block * BLOCK + i
    inside = entry < count
    index = tl.load(experts_ptr + entry, mask=inside, other=0).to(tl.int64)
    valid, at = in_range(index, bound, False)
    report(flag_ptr, code, inside & (valid == 0), entry, index, bound)
    expert = tl.where(inside, tl.where(valid, at, wide_int(bound)), -1).to(tl.int32)
    # The same values along the first axis, which a thread has for itself; a transposition would go through memory.
    j = tl.arange(0, BLOCK)
    other = tl.load(experts_ptr + block * BLOCK + j, mask=block * BLOCK + j < count, other=0).to(tl.int64)
    valid, at = in_range(other, bound, False)
    other = tl.where(block * BLOCK + j < count, tl.where(valid, at, wide_int(bound)), -1).to(tl.int32)
    # Two counts in a word: of all in the block, and of those before.
    found = tl.where(j[:, None] < i[None, :], 0x10001, 0x10000)
    found = tl.sum(tl.where(other[:, None] == expert[None, :], found, 0), axis=0)
    before, every = found & 0xFFFF, found >> 16
    tl.store(ranks_ptr + entry, before, mask=inside)
    tl.store(counts_ptr + block * (wide_int(bound) + 1) + expert, every, mask=inside & (before == every - 1))


@triton.jit
def scan_blocks(counts_ptr, totals_ptr, blocks, stretch, bins, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Counts [blocks, bins] become exclusive sums within stretches of blocks; totals [stretches, bins] int64."""
    pid = tl.program_id(0).to(tl.int64)
    parts = tl.cdiv(bins, BINS)
    which = pid // parts
    bin_ = (pid - which * parts) * BINS + tl.arange(0, BINS)
    total = tl.zeros((BINS,), counts_ptr.dtype.element_ty)
    end = tl.minimum((which + 1) * stretch, blocks)
    for start in range(which * stretch, end, BLOCK):
        b = start + tl.arange(0, BLOCK).to(tl.int64)
        pointers = counts_ptr + b[:, None] * bins + bin_[None, :]
        mask = (b < end)[:, None] & (bin_ < bins)[None, :]
        c = tl.load(pointers, mask=mask, other=0)
        tl.store(pointers, tl.cumsum(c, 0) - c + total[None, :], mask=mask)
        total += tl.sum(c, axis=0)
    tl.store(totals_ptr + which * bins + bin_, total.to(tl.int64), mask=bin_ < bins)


@triton.jit
def scan_experts(totals_ptr, starts_ptr, offsets_ptr, bins, offsets_stride, BLOCK: tl.constexpr):
    """Starts [bins]: where every expert begins; offsets are the same without what follows the last but one."""
    before = tl.zeros((), tl.int64)
    for start in range(0, bins, BLOCK):
        e = start + tl.arange(0, BLOCK).to(tl.int64)
        c = tl.load(totals_ptr + e, mask=e < bins, other=0)
        begin = before + tl.cumsum(c, 0) - c
        tl.store(starts_ptr + e, begin, mask=e < bins)
        tl.store(offsets_ptr + e * offsets_stride, begin, mask=e < bins)
        before += tl.sum(c, axis=0)


@triton.jit
def place_entries(
    experts_ptr, ranks_ptr, counts_ptr, stretches_ptr, starts_ptr, order_ptr, count, bound, order_stride,
    BLOCK: tl.constexpr, STRETCH: tl.constexpr,
):  # fmt: skip
    """order[p] = the entry that comes to p."""
    block = tl.program_id(0).to(tl.int64)
    entry = block * BLOCK + tl.arange(0, BLOCK)
    inside = entry < count
    index = tl.load(experts_ptr + entry, mask=inside, other=0).to(tl.int64)
    valid, at = in_range(index, bound, False)
    expert = tl.where(valid, at, wide_int(bound))
    bins = wide_int(bound) + 1
    place = tl.load(starts_ptr + expert, mask=inside, other=0)
    place += tl.load(stretches_ptr + block // STRETCH * bins + expert, mask=inside, other=0)
    place += tl.load(counts_ptr + block * bins + expert, mask=inside, other=0)
    place += tl.load(ranks_ptr + entry, mask=inside, other=0)
    tl.store(order_ptr + place * order_stride, entry, mask=inside)


# --- rows of tokens and of entries -----------------------------------------------------------------------------------
# Takes finite terms away from overflow: a sum of at most 2**20 of them is not finite only where a term is not.
_SMALL = tl.constexpr(2.0**-20)


@triton.jit
def _part(width, BLOCK: tl.constexpr):
    """(row, columns [BLOCK]) of this program, all int64."""
    pid, parts = tl.program_id(0), tl.cdiv(width, BLOCK)
    row = pid // parts
    column = (pid - row * parts).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row.to(tl.int64), column


@triton.jit
def permute_rows(
    x_ptr, order_ptr, y_ptr, flag_ptr, count, k, width, code, x_row, x_column, order_stride, y_row, y_column,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """y[i] = x[order[i] // k], NaN where the order is out of range. NARROW: positions fit 32 bits."""
    block, column = _part(width, BLOCK)
    column = column[None, :]
    i = block * ROWS + tl.arange(0, ROWS)
    inside = i < count
    index = tl.load(order_ptr + i * order_stride, mask=inside, other=0)
    valid, at = in_range(index, count, False)
    mask = inside[:, None] & (column < width)
    # A division of 64 bits takes as long as all else.
    token = (at.to(tl.int32) // k).to(tl.int64) if NARROW else at // k
    pointers = as_bits(x_ptr) + token[:, None] * x_row + column * x_column
    bits = tl.load(pointers, mask=mask & valid[:, None], other=0)
    bits = tl.where(valid[:, None], bits, nan_bits(y_ptr.dtype.element_ty))
    tl.store(as_bits(y_ptr) + i[:, None] * y_row + column * y_column, bits, mask=mask)
    report(flag_ptr, code, inside & (valid == 0), i, index, count)


@triton.jit
def invert_order(order_ptr, positions_ptr, flag_ptr, count, code, order_stride, BLOCK: tl.constexpr):
    """positions[order[i]] = i; -1, which stands there before, stays where no entry comes from."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    index = tl.load(order_ptr + i * order_stride, mask=inside, other=0)
    valid, at = in_range(index, count, False)
    tl.store(positions_ptr + at, i, mask=inside & valid)
    report(flag_ptr, code, inside & (valid == 0), i, index, count)


@triton.jit
def _terms(
    x_ptr, w_ptr, positions_ptr, t, first, k, column, width, x_row, x_column, w_row, w_column,
    KB: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """[KB, BLOCK] terms of a token's entries from `first` on; NaN for an entry that no row belongs to."""
    e = first + tl.arange(0, KB).to(tl.int64)
    at = tl.load(positions_ptr + t * k + e, mask=e < k, other=0)
    mask = ((e < k) & (at >= 0))[:, None] & (column < width)[None, :]
    x = ops.widen(tl.load(x_ptr + at[:, None] * x_row + column[None, :] * x_column, mask=mask, other=0.0), False)
    if WEIGHTED:
        w = tl.load(w_ptr + t * w_row + e * w_column, mask=e < k, other=0.0)
        return tl.where(at >= 0, w, float("nan"))[:, None] * x
    else:
        return tl.where((at >= 0)[:, None], x, float("nan"))


@triton.jit
def _column_sums(p, scale, magic, low_scale, KB: tl.constexpr):
    """The sums of the parts of [KB, BLOCK] terms over the first axis, and a float sum for those that are not finite."""
    high, low = sums.split_term_bits(p, scale[None, :], magic[None, :], low_scale[None, :])
    a, b = terms.limb_parts(tl.sum(high, axis=0), tl.sum(low, axis=0), magic, KB)
    return a, b, tl.sum(p * _SMALL, axis=0)


@triton.jit
def combine_rows(
    x_ptr, w_ptr, positions_ptr, y_ptr, k, width, x_row, x_column, w_row, w_column, y_row, y_column,
    KB: tl.constexpr, BLOCK: tl.constexpr, HELD: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """y[t] = Σ_i w[t, i] x[positions[t k + i]], without weights the sum of the rows. HELD: KB holds all k of them."""
    t, column = _part(width, BLOCK)
    p = _terms(
        x_ptr, w_ptr, positions_ptr, t, 0, k, column, width, x_row, x_column, w_row, w_column, KB, WEIGHTED
    )  # fmt: skip
    key = tl.max(ops.magnitude_key(p), axis=0)
    if not HELD:
        for first in range(KB, k, KB):
            more = _terms(
                x_ptr, w_ptr, positions_ptr, t, first, k, column, width, x_row, x_column, w_row, w_column, KB, WEIGHTED
            )  # fmt: skip
            key = tl.maximum(key, tl.max(ops.magnitude_key(more), axis=0))
    exponent, scale, magic, low_scale = sums.term_scale(key)
    a, b, special = _column_sums(p, scale, magic, low_scale, KB)
    if not HELD:
        for first in range(KB, k, KB):
            more = _terms(
                x_ptr, w_ptr, positions_ptr, t, first, k, column, width, x_row, x_column, w_row, w_column, KB, WEIGHTED
            )  # fmt: skip
            more_a, more_b, more_special = _column_sums(more, scale, magic, low_scale, KB)
            a += more_a
            b += more_b
            special += more_special
    s = terms.sum_of_parts(a, b, exponent, special, key)
    y = ops.narrow(s, y_ptr.dtype.element_ty, False)
    tl.store(y_ptr + t * y_row + column * y_column, y, mask=column < width)


@triton.jit
def _products(dy_ptr, x_ptr, t, at, column, width, dy_row, dy_column, x_row, x_column):
    """(dy of a token, its products with a row)."""
    mask = column < width
    g = ops.widen(tl.load(dy_ptr + t * dy_row + column * dy_column, mask=mask, other=0.0), False)
    x = ops.widen(tl.load(x_ptr + at * x_row + column * x_column, mask=mask & (at >= 0), other=0.0), False)
    return g, tl.where(mask, g * tl.where(at >= 0, x, float("nan")), 0.0)


@triton.jit
def _row_sums(p, scale, magic, low_scale, BLOCK: tl.constexpr, V: tl.constexpr):
    """[BLOCK // V] sums of the parts of [BLOCK] terms, V of which are neighbours, and [BLOCK] scaled terms."""
    high, low = sums.split_term_bits(p, scale, magic, low_scale)
    high = tl.sum(tl.reshape(high, (BLOCK // V, V)), axis=1)
    low = tl.sum(tl.reshape(low, (BLOCK // V, V)), axis=1)
    a, b = terms.limb_parts(high, low, magic, V)
    return a, b, p * _SMALL


@triton.jit
def combine_backward(
    dy_ptr, x_ptr, w_ptr, positions_ptr, dx_ptr, dw_ptr, k, width, dy_row, dy_column, x_row, x_column, w_row, w_column,
    dx_row, dx_column, dw_row, dw_column, BLOCK: tl.constexpr, V: tl.constexpr, HELD: tl.constexpr,
):  # fmt: skip
    """One entry a program: dx[p] = w dy[t] and dw = Σ_d dy[t] x[p], p the entry's position. HELD: BLOCK holds a row."""
    entry = tl.program_id(0)
    t = (entry // k).to(tl.int64)
    e = entry - t * k
    at = tl.load(positions_ptr + entry)
    w = tl.load(w_ptr + t * w_row + e * w_column)
    column = tl.arange(0, BLOCK).to(tl.int64)
    g, p = _products(dy_ptr, x_ptr, t, at, column, width, dy_row, dy_column, x_row, x_column)
    key = ops.magnitude_key(p)
    if not HELD:
        for start in range(BLOCK, width, BLOCK):
            _, more = _products(dy_ptr, x_ptr, t, at, column + start, width, dy_row, dy_column, x_row, x_column)
            key = tl.maximum(key, ops.magnitude_key(more))
    key = tl.max(key, axis=0)
    exponent, scale, magic, low_scale = sums.term_scale(key)
    a, b, special = _row_sums(p, scale, magic, low_scale, BLOCK, V)
    dx = dx_ptr + at * dx_row
    mask = (column < width) & (at >= 0)
    tl.store(dx + column * dx_column, ops.narrow(w * g, dx_ptr.dtype.element_ty, False), mask=mask)
    if not HELD:
        for start in range(BLOCK, width, BLOCK):
            g, p = _products(dy_ptr, x_ptr, t, at, column + start, width, dy_row, dy_column, x_row, x_column)
            more_a, more_b, more_special = _row_sums(p, scale, magic, low_scale, BLOCK, V)
            a += more_a
            b += more_b
            special += more_special
            mask = (column + start < width) & (at >= 0)
            y = ops.narrow(w * g, dx_ptr.dtype.element_ty, False)
            tl.store(dx + (column + start) * dx_column, y, mask=mask)
    a, b, special = tl.sum(a, axis=0), tl.sum(b, axis=0), tl.sum(special, axis=0)
    lane = tl.arange(0, 1)
    total = terms.sum_of_parts(
        tl.zeros((1,), tl.int64) + a,
        tl.zeros((1,), tl.int64) + b,
        tl.zeros((1,), exponent.dtype) + exponent,
        tl.zeros((1,), special.dtype) + special,
        tl.zeros((1,), key.dtype) + key,
    )
    tl.store(dw_ptr + t * dw_row + e * dw_column + lane, ops.narrow(total, dw_ptr.dtype.element_ty, False))


# --- auxiliary losses ------------------------------------------------------------------------------------------------
@triton.jit
def balance(totals_ptr, means_ptr, loss_ptr, n, entries, loss_stride, BLOCK: tl.constexpr):
    """N Σ f P of a problem from its experts' counts and mean probabilities, which follow those of the one before.

    NaN where an expert was out of range, which the bin after all counts.
    """
    problem = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)[:, None]
    mask = e < n
    dtype: tl.constexpr = loss_ptr.dtype.element_ty
    outside = tl.load(totals_ptr + tl.num_programs(0).to(tl.int64) * n) > 0
    totals_ptr += problem * n
    means_ptr += problem * n
    f = ops.divide(
        tl.load(totals_ptr + e, mask=mask, other=0).to(dtype), tl.zeros((BLOCK, 1), dtype) + wide_int(entries).to(dtype)
    )
    terms_ = tl.where(mask, f * tl.load(means_ptr + e, mask=mask, other=0.0), 0.0)
    total = pieces.lane_sum(terms_) * wide_int(n).to(dtype)
    total = tl.where(outside, float("nan"), total)
    one = problem * loss_stride + tl.arange(0, 1)[None, :]
    tl.store(loss_ptr + one, ops.narrow(total, dtype, False))


@triton.jit
def balance_backward(
    totals_ptr,
    dloss_ptr,
    out_ptr,
    problems,
    tokens,
    n,
    entries,
    dloss_stride,
    out_row,
    out_column,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Dloss n f / tokens in every row of a problem; NaN where an expert was out of range."""
    dtype: tl.constexpr = dloss_ptr.dtype.element_ty
    outside = tl.load(totals_ptr + wide_int(problems) * n) > 0
    pid = tl.program_id(0).to(tl.int64)
    programs = tl.num_programs(0) // problems
    problem = pid // programs
    pid -= problem * programs
    totals_ptr += problem * n
    dloss_ptr += problem * dloss_stride
    out_ptr += problem * tokens * out_row
    parts = tl.cdiv(n, BLOCK)
    block = pid // parts
    e = (pid - block * parts) * BLOCK + tl.arange(0, BLOCK)
    f = ops.divide(
        tl.load(totals_ptr + e, mask=e < n, other=0).to(dtype), tl.zeros((BLOCK,), dtype) + wide_int(entries).to(dtype)
    )
    g = tl.load(dloss_ptr) * wide_int(n).to(dtype)
    y = ops.divide(g * f, tl.zeros((BLOCK,), dtype) + wide_int(tokens).to(dtype))
    y = tl.where(outside, float("nan"), y)
    y = ops.narrow(y, out_ptr.dtype.element_ty, False)[None, :]
    row = (block * ROWS + tl.arange(0, ROWS))[:, None]
    mask = (row < tokens) & (e < n)[None, :]
    y = tl.broadcast_to(y, (ROWS, BLOCK))
    tl.store(out_ptr + row * out_row + e[None, :] * out_column, y, mask=mask)


@triton.jit
def z_loss_rows(
    x_ptr,
    dloss_ptr,
    out_ptr,
    rows_,
    tokens,
    n,
    dloss_stride,
    x_row,
    x_column,
    out_row,
    out_column,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    V: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """The squared logsumexp of every row in the work type, or the gradient of a problem's mean of them over tokens."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = pieces.columns(BLOCK, GROUP, V)
    mask = (row < rows_)[None, :, None, None] & (column < n)
    pointers = x_ptr + pieces.broad(row * x_row) + column.to(tl.int64) * x_column
    x = ops.widen(tl.load(pointers, mask=mask, other=float("-inf")), NATIVE)
    wide: tl.constexpr = x.dtype == tl.float64
    e, error, m, valid, base, floor, bias, hi, lo = pieces.exponentials(x, NATIVE)
    top, middle, low = rows.log_sum(
        hi, lo, m, base, floor, bias, valid, False, False, wide, x.dtype, NATIVE
    )  # fmt: skip
    lse = tl.where(valid, top + (middle + low), m)
    if BACKWARD:
        count = tl.zeros((ROWS,), x.dtype) + wide_int(tokens).to(x.dtype)
        g = tl.load(dloss_ptr + row // tokens * dloss_stride, mask=row < rows_, other=0.0)
        factor = ops.divide((lse + lse) * g, count)
        r, r_low = pieces.factors(hi, lo, valid, x.dtype)
        p = pieces.quotients(e, error, x, pieces.broad(m), tl.zeros_like(x) + pieces.broad(r), pieces.broad(r_low))
        y = ops.narrow(pieces.broad(factor) * p, out_ptr.dtype.element_ty, NATIVE)
        tl.store(out_ptr + pieces.broad(row * out_row) + column.to(tl.int64) * out_column, y, mask=mask)
    else:
        tl.store(out_ptr + row, ops.narrow(lse * lse, out_ptr.dtype.element_ty, False), mask=row < rows_)
