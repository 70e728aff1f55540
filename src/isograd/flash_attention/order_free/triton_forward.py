# mypy: ignore-errors
# ruff: noqa: N803
"""The forward pass of order-free attention in Triton: a program keeps a tile of queries; rule 23, see `reference.py`.

Keys come in blocks of 128, each in two halves for the scores. A block's sums are exact; they are added to what came
before by one fma, after a rescaling by powers of two.
"""

import triton
import triton.language as tl

from isograd.flash_attention import triton_masks as masks
from isograd.flash_attention.order_free import triton_integers as integers
from isograd.flash_attention.order_free import triton_scores as scoring
from isograd.numerics import constants as c
from isograd.numerics import triton_ops as ops
from isograd.numerics.triton_memory import wide_int

BLOCK, HALF = integers.BLOCK, integers.HALF
NOTHING = tl.constexpr(-(1 << 24))  # M of a row that has seen nothing: what it fades by is 0
_LN2, _LN2_REST = tl.constexpr(c.LN2_32), tl.constexpr(c.LN2_REST_32)
_SINK_SCALE = tl.constexpr(2.0**-22)


@triton.jit
def _half(
    q_high, q_low, k_rows, numbers_ptr, rows, column, i, lq, lk, left, right, cap, bias_base, bias_strides, mask_base,
    mask_strides, q_segment, k_segments_ptr, k_shift, careful,
    BD: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """(scores of 64 keys, which rows see a NaN)."""
    here = column + tl.arange(0, HALF)
    high, low = k_rows.load([k_shift + column, 0]), k_rows.load([k_shift + column, BD])
    scale = tl.load(numbers_ptr + here)
    total = integers.exact(q_high, q_low, high.T, low.T)
    k_segment = here[None, :]
    if SEGMENTS:
        k_segment = tl.load(k_segments_ptr + here, mask=here < lk, other=0)[None, :]
    t, _ = scoring.scores(
        total, rows[:, None] * scale[None, :], i, here[None, :], lq, lk, left, right, cap, bias_base, bias_strides,
        mask_base, mask_strides, q_segment, k_segment, careful, LEFT, RIGHT, SOFTCAP, BIAS, MASK, SEGMENTS, PARTIAL,
    )  # fmt: skip
    bad = tl.zeros_like(rows).to(tl.int32)
    if careful:
        bad = tl.max((t != t).to(tl.int32), 1)
        t = tl.where(t == t, t, 0.0)
    return t, bad


@triton.jit
def _weights(
    t, exponent, of_shares, of_weights, first, column, number, seed_low, seed_high, threshold,
    BM: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """(sums of shares; high and low digits of P) of 64 keys."""
    m, k = integers.exp2_parts(t)
    shares = tl.sum(integers.rounded(m, k + of_shares[:, None]) - ops.MAGIC_BITS_32, 1)
    p = integers.rounded(m, k + (exponent[None, :] + of_weights[:, None]))
    if DROPOUT:
        p = tl.where(masks.kept(first, column, number, seed_low, seed_high, threshold, BM, HALF), p, 0)
    high, low = integers.digits(p)
    return shares, high, low


@triton.jit
def _steps(
    o, sums, top, bad, q_high, q_low, k_rows, v_columns, numbers_ptr, worst_ptr, rows, worst, reach, count, first,
    begin, end, lq, lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides, q_segment, k_segments_ptr,
    k_shift, number, seed_low, seed_high, threshold,
    BD: tl.constexpr, BDV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, PARTIAL: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Go over blocks of keys; PARTIAL: some of their pairs are hidden by their positions."""
    i = (first + tl.arange(0, BM))[:, None]
    for n in tl.range(begin, end, num_stages=STAGES):
        column = n * BLOCK
        careful = scoring.is_careful(worst, tl.load(worst_ptr + n), reach)
        if SOFTCAP or BIAS:
            careful = True
        t0, bad0 = _half(
            q_high, q_low, k_rows, numbers_ptr, rows, column, i, lq, lk, left, right, cap, bias_base, bias_strides,
            mask_base, mask_strides, q_segment, k_segments_ptr, k_shift, careful, BD, LEFT, RIGHT, SOFTCAP, BIAS, MASK,
            SEGMENTS, PARTIAL,
        )  # fmt: skip
        t1, bad1 = _half(
            q_high, q_low, k_rows, numbers_ptr, rows, column + HALF, i, lq, lk, left, right, cap, bias_base,
            bias_strides, mask_base, mask_strides, q_segment, k_segments_ptr, k_shift, careful, BD, LEFT, RIGHT,
            SOFTCAP, BIAS, MASK, SEGMENTS, PARTIAL,
        )  # fmt: skip
        bad |= bad0 | bad1
        here = column + tl.arange(0, HALF)
        level0, level1 = tl.load(numbers_ptr + count + here), tl.load(numbers_ptr + count + here + HALF)
        exponent0 = ops.as_int(tl.load(numbers_ptr + 2 * count + here))
        exponent1 = ops.as_int(tl.load(numbers_ptr + 2 * count + here + HALF))
        greatest = tl.maximum(tl.max(t0, 1), tl.max(t1, 1))
        weighed = tl.maximum(tl.max(t0 + level0[None, :], 1), tl.max(t1 + level1[None, :], 1))
        some = greatest >= -scoring.REACH
        u = integers.above(tl.where(some, weighed, -1.0))
        mine = integers.above(tl.where(some, greatest + integers.MARGIN, -1.0))
        new = tl.where(some, tl.maximum(top, mine), top)
        of_shares, of_weights = (22 - mine) - ops.MAGIC_BITS_32, (15 - u) - ops.MAGIC_BITS_32
        shares0, high0, low0 = _weights(
            t0, exponent0, of_shares, of_weights, first, column, number, seed_low, seed_high, threshold, BM, DROPOUT
        )  # fmt: skip
        shares1, high1, low1 = _weights(
            t1, exponent1, of_shares, of_weights, first, column + HALF, number, seed_low, seed_high, threshold, BM,
            DROPOUT,
        )  # fmt: skip
        high, low = integers.joined(high0, high1, BM), integers.joined(low0, low1, BM)
        fade = integers.power(top - new)
        added = tl.fma((shares0 + shares1).to(tl.float32), integers.power(mine - 22 - new), sums * fade)
        place = k_shift + column
        y = integers.exact(high, low, v_columns.load([0, place]).T, v_columns.load([BDV, place]).T)
        weighted = tl.fma(y.to(tl.float32), integers.power(u - 22 - new)[:, None], o * fade[:, None])
        if PARTIAL or BIAS or MASK or SEGMENTS:
            sums, o = tl.where(some, added, sums), tl.where(some[:, None], weighted, o)
        else:
            sums, o = added, weighted
        top = new
    return o, sums, top, bad


@triton.jit
def with_sink(sink, top, sums):
    """(M, l, whether the sink is no number) of rows that start with a sink."""
    t = sink * masks.LOG2E
    t = tl.where(t == t, tl.minimum(tl.maximum(t, -scoring.REACH), scoring.REACH), 0.0)
    start = integers.above(t + integers.MARGIN)
    m, k = integers.exp2_parts(t)
    share = integers.rounded(m, k + ((22 - start) - ops.MAGIC_BITS_32)) - ops.MAGIC_BITS_32
    share = share.to(tl.float32) * _SINK_SCALE
    there = sink != float("-inf")
    return tl.where(there, start, top), tl.where(there, share, sums), ((sink < float("inf")) == 0).to(tl.int32)


@triton.jit
def log_sum(top, sums):
    """RN(M ln 2 + log l)."""
    high, low = ops.log_pair_32(sums)
    m = top.to(tl.float32)
    a = m * _LN2
    rest = tl.fma(m, _LN2_REST, tl.fma(m, _LN2, ops.negate(a)))
    s, e = ops.two_sum(a, high)
    return s + (e + (low + rest))


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def order_free_forward(
    q_digits_ptr, k_digits_ptr, q_numbers_ptr, k_numbers_ptr, o_ptr, lse_ptr, bias_ptr, mask_ptr, q_segments_ptr,
    k_segments_ptr, q_starts_ptr, k_starts_ptr, sinks_ptr, used_ptr, seed_low, seed_high,
    tiles, batch, heads, group, lq, lk, q_pitch, k_pitch, sequences, together, o_strides, bias_strides, mask_strides,
    left, right, cap, reach, threshold, inverse,
    DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, LOWER_RIGHT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, SEGMENTS: tl.constexpr,
    PACKED: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr, CACHED: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of o and lse from what `triton_cut.py` has cut. Strides are (batch, head, row), or with the key's last.

    left, right: the window, without the offset of the alignment. reach: as in `is_careful`. CACHED: sequences have as
    many keys as `triton_cache.check_cache` says.
    """
    tile, h, z = masks.place(tiles, heads, batch, together, RIGHT)
    tokens, k_tokens = wide_int(lq), wide_int(lk)
    q_tokens, all_k = lq, lk
    z, zb, tile, q_first, lq, _, lk = masks.locate(
        q_starts_ptr, k_starts_ptr, z, tile, lq, lk, sequences, BM, PACKED
    )  # fmt: skip
    first = tile * BM
    if first >= lq:
        return
    if CACHED:
        used = tl.load(used_ptr + z)
        lk = tl.maximum(used, 0)
    if LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    hq, kv_heads = h.to(tl.int64), heads // group
    head, k_head = zb * heads + hq, zb * kv_heads + h // group
    q_slot, k_shift = first, tile * 0
    if PACKED:
        q_slot += masks.slot_of_sequence(q_starts_ptr, z, q_tokens).to(tl.int32)
        k_shift = masks.slot_of_sequence(k_starts_ptr, tl.minimum(z, sequences), all_k).to(tl.int32)
    k_at = k_head * k_pitch + k_shift
    each, count = wide_int(q_pitch) * heads * batch, wide_int(k_pitch) * kv_heads * batch
    q_rows = masks.tile_rows(q_digits_ptr, head * q_pitch * (2 * BD), q_pitch, 2 * BD, 2 * BD, BM, BD)
    k_rows = masks.tile_rows(k_digits_ptr, k_head * k_pitch * (2 * BD), k_pitch, 2 * BD, 2 * BD, HALF, BD)
    v_columns = tl.make_tensor_descriptor(
        k_digits_ptr + count * (2 * BD) + k_head * k_pitch * (2 * BDV), shape=[2 * BDV, k_pitch],
        strides=[wide_int(k_pitch), 1], block_shape=[BDV, BLOCK],
    )  # fmt: skip
    q_high, q_low = q_rows.load([q_slot, 0]), q_rows.load([q_slot, BD])
    q_at = head * q_pitch + q_slot
    rows = tl.load(q_numbers_ptr + q_at + tl.arange(0, BM))
    worst = tl.load(q_numbers_ptr + each + q_at // BLOCK)
    bias_base = bias_ptr + zb * bias_strides[0] + hq * bias_strides[1]
    mask_base = mask_ptr + zb * mask_strides[0] + hq * mask_strides[1]
    i = first + tl.arange(0, BM)
    q_segment = i[:, None]
    if SEGMENTS:
        q_segment = tl.load(q_segments_ptr + zb * tokens + i, mask=i < lq, other=0)[:, None]

    o = tl.zeros((BM, BDV), tl.float32)
    sums = tl.zeros((BM,), tl.float32)
    top = tl.full((BM,), NOTHING, tl.int32)
    bad = tl.zeros((BM,), tl.int32)
    if CACHED:
        bad += (used < 0).to(tl.int32)
    if SINKS:
        sink = tl.load(sinks_ptr + h).to(tl.float32)
        if PACKED:
            sink = tl.where(z < sequences, sink, float("-inf"))
        top, sums, wrong = with_sink(sink, top, sums)
        bad += wrong
    edges = masks.other_tiles(first, lk, left, right, BM, BLOCK, LEFT, RIGHT)
    for part in tl.static_range(3):
        if LEFT or part > 0:
            o, sums, top, bad = _steps(
                o, sums, top, bad, q_high, q_low, k_rows, v_columns, k_numbers_ptr + k_at,
                k_numbers_ptr + 3 * count + k_at // BLOCK, rows, worst, reach, count, first, edges[part],
                edges[part + 1], lq, lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides, q_segment,
                k_segments_ptr + zb * k_tokens, k_shift, z * heads + h, seed_low, seed_high, threshold, BD, BDV, LEFT,
                RIGHT, SOFTCAP, BIAS, MASK, SEGMENTS, DROPOUT, part != 1, BM, STAGES,
            )  # fmt: skip

    there = top > NOTHING
    sums = tl.where(there, sums, 1.0)
    lse = tl.where(there, log_sum(tl.where(there, top, 0), sums), float("-inf"))
    lse = tl.where(bad > 0, float("nan"), lse)
    tl.store(lse_ptr + head * tokens + q_first + i, ops.narrow(lse, tl.float32, False), mask=i < lq)
    factor = tl.where(there, ops.divide(1.0, sums) * inverse, 0.0)
    factor = tl.where(bad > 0, float("nan"), factor)
    o_rows = masks.tile_rows(o_ptr, masks.offset(zb, h, q_first, o_strides), lq, o_strides[2], DV, BM, BDV)
    o_rows.store([first, 0], ops.narrow(o * factor[:, None], o_ptr.dtype.element_ty, False))
