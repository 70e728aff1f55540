# ruff: noqa: N803
"""The forward pass of attention in Triton (FlashAttention-2, Dao 2023): a program keeps a tile of queries.

    m' = max(m, max_j s_j),  l' = l * 2^(m - m') + sum_j 2^(s_j - m'),  o' = o * 2^(m - m') + 2^(s - m') v

with s in base 2. Every multiplication that is added to something is written as an fma, so that the bits do not depend
on what the compiler would fuse in one specialisation and not in another.
"""

import triton
import triton.language as tl

from isograd.attention import triton_masks as masks
from isograd.numerics import triton_ops as ops
from isograd.numerics.triton_memory import wide_int


@triton.jit
def _steps(
    acc, total, m, q, k_rows, v_rows, first, begin, end, lq, lk, left, right, a, b, bias_base, bias_strides, mask_base,
    mask_strides, q_segment, k_segments_ptr, number, seed_low, seed_high, threshold,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, PARTIAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go over tiles of keys; PARTIAL: some of their pairs are hidden by their positions."""
    i = (first + tl.arange(0, BM))[:, None]
    if OVERLAP:
        qk_next = tl.dot(q, tl.trans(k_rows.load([begin * BN, 0])), input_precision=PRECISION)
    for n in tl.range(begin, end, num_stages=STAGES):
        column = n * BN
        j = (column + tl.arange(0, BN))[None, :]
        if OVERLAP:
            # The product that the next step needs runs while this one takes the exponentials.
            qk = qk_next
            qk_next = tl.dot(q, tl.trans(k_rows.load([column + BN, 0])), input_precision=PRECISION)
        else:
            qk = tl.dot(q, tl.trans(k_rows.load([column, 0])), input_precision=PRECISION)
        k_segment = j
        if SEGMENTS:
            k_segment = tl.load(k_segments_ptr + j, mask=j < lk, other=0)
        s, _ = masks.scores(
            qk, i, j, lq, lk, left, right, a, b, bias_base, bias_strides, mask_base, mask_strides, q_segment,
            k_segment, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, PARTIAL,
        )  # fmt: skip
        top = tl.max(s, 1)
        if DIRECT:
            top = top * a
        top = tl.maximum(m, top)
        base = top
        if PARTIAL or BIAS or MASK or SEGMENTS:
            base = tl.where(top == float("-inf"), 0.0, top)  # nothing visible yet
        if DIRECT:
            p = tl.exp2(tl.fma(s, a, -base[:, None]))
        else:
            p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        total = tl.fma(total, alpha, tl.sum(p, 1))
        if DROPOUT:
            p = tl.where(masks.kept(first, column, number, seed_low, seed_high, threshold, BM, BN), p, 0.0)
        acc = acc * alpha[:, None]
        v = v_rows.load([column, 0])
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = top
    return acc, total, m


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def attention_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bias_ptr, mask_ptr, q_segments_ptr, k_segments_ptr, q_starts_ptr, k_starts_ptr,
    sinks_ptr, seed_low, seed_high,
    tiles, batch, heads, group, lq, lk, sequences, together, q_strides, k_strides, v_strides, o_strides, bias_strides,
    mask_strides, left, right, a, b, threshold, inverse,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, LOWER_RIGHT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of o and lse. Strides are (batch, head, row); those of bias and mask (batch, head, query, key).

    left, right: the window, without the offset of the alignment. a, b: factors of the scores, see `masks.scores`.
    """
    tile, h, z = masks.place(tiles, heads, batch, together, RIGHT)
    q_first, k_first = tile * 0, tile * 0
    tokens = wide_int(lq)
    if PACKED:
        z, tile = masks.find_sequence(q_starts_ptr, sequences, lq, tile, BM)
        q_first, lq = masks.rows_of_sequence(q_starts_ptr, z, sequences, lq)
        k_first, lk = masks.rows_of_sequence(k_starts_ptr, z, sequences, lk)
        lk = tl.where(z < sequences, lk, 0)
    first = tile * BM
    if first >= lq:
        return
    if LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    zb = (tile * 0 if PACKED else z).to(tl.int64)
    hq, hk = h.to(tl.int64), (h // group).to(tl.int64)
    q_at = zb * q_strides[0] + hq * q_strides[1] + q_first.to(tl.int64) * q_strides[2]
    k_at = zb * k_strides[0] + hk * k_strides[1] + k_first.to(tl.int64) * k_strides[2]
    v_at = zb * v_strides[0] + hk * v_strides[1] + k_first.to(tl.int64) * v_strides[2]
    o_at = zb * o_strides[0] + hq * o_strides[1] + q_first.to(tl.int64) * o_strides[2]
    q_rows = masks.tile_rows(q_ptr, q_at, lq, q_strides[2], D, BM, BD)
    k_rows = masks.tile_rows(k_ptr, k_at, lk, k_strides[2], D, BN, BD)
    v_rows = masks.tile_rows(v_ptr, v_at, lk, v_strides[2], DV, BN, BDV)
    bias_base = bias_ptr + zb * bias_strides[0] + hq * bias_strides[1]
    mask_base = mask_ptr + zb * mask_strides[0] + hq * mask_strides[1]
    i = first + tl.arange(0, BM)
    q_segment = i[:, None]
    if SEGMENTS:
        q_segment = tl.load(q_segments_ptr + zb * lq + i, mask=i < lq, other=0)[:, None]
    number = z * heads + h

    acc = tl.zeros((BM, BDV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    q = q_rows.load([first, 0])
    begin, full, full_end, end = masks.other_tiles(first, lk, left, right, BM, BN, LEFT, RIGHT)
    if LEFT:
        acc, total, m = _steps(
            acc, total, m, q, k_rows, v_rows, first, begin, full, lq, lk, left, right, a, b, bias_base, bias_strides,
            mask_base, mask_strides, q_segment, k_segments_ptr + zb * lk, number, seed_low, seed_high, threshold,
            LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, DROPOUT, True, BM, BN, STAGES, OVERLAP, PRECISION,
        )  # fmt: skip
    acc, total, m = _steps(
        acc, total, m, q, k_rows, v_rows, first, full, full_end, lq, lk, left, right, a, b, bias_base, bias_strides,
        mask_base, mask_strides, q_segment, k_segments_ptr + zb * lk, number, seed_low, seed_high, threshold,
        LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, DROPOUT, False, BM, BN, STAGES, OVERLAP, PRECISION,
    )  # fmt: skip
    acc, total, m = _steps(
        acc, total, m, q, k_rows, v_rows, first, full_end, end, lq, lk, left, right, a, b, bias_base, bias_strides,
        mask_base, mask_strides, q_segment, k_segments_ptr + zb * lk, number, seed_low, seed_high, threshold,
        LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, DROPOUT, True, BM, BN, STAGES, OVERLAP, PRECISION,
    )  # fmt: skip

    if SINKS:
        sink = tl.load(sinks_ptr + h).to(tl.float32) * masks.LOG2E
        if PACKED:
            sink = tl.where(z < sequences, sink, float("-inf"))
        top = tl.maximum(m, sink)
        base = tl.where(top == float("-inf"), 0.0, top)
        alpha = tl.exp2(m - base)
        total = tl.fma(total, alpha, tl.exp2(sink - base))
        acc = acc * alpha[:, None]
        m = top
    high, low = ops.two_sum(m, tl.log2(total))
    lse = tl.fma(high, masks.LN2, tl.fma(high, masks.LN2_LOW, low * masks.LN2))
    lse = tl.where(tl.abs(high) < float("inf"), lse, high)
    tl.store(lse_ptr + (zb * heads + hq) * tokens + q_first + i, ops.narrow(lse, tl.float32, False), mask=i < lq)
    factor = tl.where(total == 0.0, 0.0, inverse / total)
    o_rows = masks.tile_rows(o_ptr, o_at, lq, o_strides[2], DV, BM, BDV)
    o_rows.store([first, 0], ops.narrow(acc * factor[:, None], o_ptr.dtype.element_ty, False))
