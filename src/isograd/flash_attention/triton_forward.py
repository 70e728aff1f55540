# mypy: ignore-errors
# ruff: noqa: N803
"""The forward pass of attention in Triton (FlashAttention-2, Dao 2023): a program keeps a tile of queries.

    m' = max(m, max_j s_j),  l' = l * 2^(m - m') + sum_j 2^(s_j - m'),  o' = o * 2^(m - m') + 2^(s - m') v

with s in base 2. Every multiplication that is added to something is written as an fma, so that the bits do not depend
on what the compiler would fuse in one specialisation and not in another.
"""

import triton
import triton.language as tl

from isograd.flash_attention import triton_cache as cache
from isograd.flash_attention import triton_masks as masks
from isograd.numerics import triton_ops as ops
from isograd.numerics.triton_memory import wide_int


@triton.jit
def _steps(
    acc, total, m, q, k_rows, v_rows, first, begin, end, lq, lk, left, right, a, b, bias_base, bias_strides, mask_base,
    mask_strides, q_segment, k_segments_ptr, number, seed_low, seed_high, threshold,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, PARTIAL: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, PAGE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go over tiles of keys; PARTIAL: some of their pairs are hidden by their positions."""
    i = (first + tl.arange(0, BM))[:, None]
    for n in tl.range(begin, end, num_stages=STAGES):
        column = n * BN
        j = (column + tl.arange(0, BN))[None, :]
        k = cache.tile(k_rows, column, lk, D, BN, BD, PAGE)
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
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
        p = masks.probabilities(s, a, base[:, None], base, DIRECT, False)
        alpha = tl.exp2(m - base)
        total = tl.fma(total, alpha, tl.sum(p, 1))
        if DROPOUT:
            p = tl.where(masks.kept(first, column, number, seed_low, seed_high, threshold, BM, BN), p, 0.0)
        acc = acc * alpha[:, None]
        v = cache.tile(v_rows, column, lk, DV, BN, BDV, PAGE)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = top
    return acc, total, m


@triton.jit(do_not_specialize=["seed_low", "seed_high", "tiles", "lq", "lk"])
def attention_forward(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, bias_ptr, mask_ptr, q_segments_ptr, k_segments_ptr, q_starts_ptr, k_starts_ptr,
    sinks_ptr, used_ptr, table_ptr, seed_low, seed_high,
    tiles, batch, heads, group, lq, lk, sequences, together, pages, q_strides, k_strides, v_strides, o_strides,
    bias_strides, mask_strides, left, right, a, b, threshold, inverse,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, LOWER_RIGHT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr, SINKS: tl.constexpr, DROPOUT: tl.constexpr,
    CACHED: tl.constexpr, PAGE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of o and lse. Strides are (batch, head, row); those of bias and mask (batch, head, query, key).

    left, right: the window, without the offset of the alignment. a, b: factors of the scores, see `masks.scores`.
    CACHED: sequences have as many keys as `check_cache` says; PAGE: these are in pages, `pages` of a sequence's each.
    """
    tile, h, z = masks.place(tiles, heads, batch, together, RIGHT)
    tokens, k_tokens = wide_int(lq), wide_int(lk)
    z, zb, tile, q_first, lq, k_first, lk = masks.locate(
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
    hq, hk = h.to(tl.int64), h // group
    q = masks.tile_rows(q_ptr, masks.offset(zb, h, q_first, q_strides), lq, q_strides[2], D, BM, BD).load([first, 0])
    if PAGE:
        k_rows = cache.place(k_ptr, table_ptr, zb, hk.to(tl.int64), pages, k_strides)
        v_rows = cache.place(v_ptr, table_ptr, zb, hk.to(tl.int64), pages, v_strides)
    else:
        k_rows = masks.tile_rows(k_ptr, masks.offset(zb, hk, k_first, k_strides), lk, k_strides[2], D, BN, BD)
        v_rows = masks.tile_rows(v_ptr, masks.offset(zb, hk, k_first, v_strides), lk, v_strides[2], DV, BN, BDV)
    bias_base = bias_ptr + zb * bias_strides[0] + hq * bias_strides[1]
    mask_base = mask_ptr + zb * mask_strides[0] + hq * mask_strides[1]
    i = first + tl.arange(0, BM)
    q_segment = i[:, None]
    if SEGMENTS:
        q_segment = tl.load(q_segments_ptr + zb * tokens + i, mask=i < lq, other=0)[:, None]
    number = z * heads + h

    acc = tl.zeros((BM, BDV), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    m = tl.full((BM,), float("-inf"), tl.float32)
    edges = masks.other_tiles(first, lk, left, right, BM, BN, LEFT, RIGHT)
    for part in tl.static_range(3):
        if LEFT or part > 0:
            acc, total, m = _steps(
                acc, total, m, q, k_rows, v_rows, first, edges[part], edges[part + 1], lq, lk, left, right, a, b,
                bias_base, bias_strides, mask_base, mask_strides, q_segment, k_segments_ptr + zb * k_tokens, number,
                seed_low, seed_high, threshold, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, DROPOUT, part != 1,
                D, DV, BD, BDV, PAGE, BM, BN, STAGES, PRECISION,
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
    if CACHED:
        lse = tl.where(used < 0, float("nan"), lse)
    tl.store(lse_ptr + (zb * heads + hq) * tokens + q_first + i, ops.narrow(lse, tl.float32, False), mask=i < lq)
    factor = tl.where(total == 0.0, 0.0, inverse / total)
    if CACHED:
        factor = tl.where(used < 0, float("nan"), factor)
    o = acc * factor[:, None]
    o = tl.where(o == 0.0, 0.0, o)  # no -0: its sign would be that of products of 0 with values of later keys
    o_rows = masks.tile_rows(o_ptr, masks.offset(zb, h, q_first, o_strides), lq, o_strides[2], DV, BM, BDV)
    o_rows.store([first, 0], ops.narrow(o, o_ptr.dtype.element_ty, False))
