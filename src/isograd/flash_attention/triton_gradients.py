# mypy: ignore-errors
# ruff: noqa: N803
"""The gradients of the bias and of the sinks in Triton, and the check of cu_seqlens.

A tile of dbias goes over everything that its bias was broadcast to, in a fixed order, and computes S and dP once more:
the sum needs neither memory of its own nor atomics.
"""

import triton
import triton.language as tl

from isograd.flash_attention import triton_masks as masks
from isograd.flash_attention.triton_rows import load_rows
from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def attention_backward_bias(
    do_ptr, q_ptr, k_ptr, v_ptr, dbias_ptr, rows_ptr, bias_ptr, mask_ptr, q_segments_ptr, k_segments_ptr, seed_low,
    seed_high, counts, batch, heads, group, lq, lk, pitch, do_strides, q_strides, k_strides, v_strides, dbias_strides,
    bias_strides, mask_strides, left, right, a, b, threshold, inverse,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, LOWER_RIGHT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, MASK: tl.constexpr, SEGMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, EXACT: tl.constexpr, SUM_QUERIES: tl.constexpr, SUM_KEYS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of dbias. `counts`: how many batch elements, heads, tiles of queries and tiles of keys each tile adds up.

    Each of the four is 1 where the bias has the axis. Other arguments as in `attention_backward_keys`.
    """
    q_tiles, k_tiles = tl.cdiv(lq, BM), tl.cdiv(lk, BN)
    pid = tl.program_id(0)
    over_k, over_q, over_h = k_tiles // counts[3], q_tiles // counts[2], heads // counts[1]
    mine_k, mine_q = pid % over_k, (pid // over_k) % over_q
    head = pid // (over_k * over_q)
    mine_h, mine_z = head % over_h, head // over_h
    if LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    rows = memory.wide_int(pitch) * heads * batch
    total = tl.zeros((BM, BN), tl.float32)
    for n in range(counts[0] * counts[1] * counts[2] * counts[3]):
        tile_k, tile_q = n % counts[3], (n // counts[3]) % counts[2]
        member = n // (counts[3] * counts[2])
        z, h = mine_z + member // counts[1], mine_h + member % counts[1]
        row, column = (mine_q + tile_q) * BM, (mine_k + tile_k) * BN
        rows_here, columns_here = row + tl.arange(0, BM), column + tl.arange(0, BN)
        zb, hq, hk = z.to(tl.int64), h.to(tl.int64), (h // group).to(tl.int64)
        inside, known = rows_here < lq, columns_here < lk
        q = load_rows(q_ptr, zb * q_strides[0] + hq * q_strides[1], rows_here, inside, q_strides[2], D, BD)
        k = load_rows(k_ptr, zb * k_strides[0] + hk * k_strides[1], columns_here, known, k_strides[2], D, BD)
        do = load_rows(do_ptr, zb * do_strides[0] + hq * do_strides[1], rows_here, inside, do_strides[2], DV, BDV)
        v = load_rows(v_ptr, zb * v_strides[0] + hk * v_strides[1], columns_here, known, v_strides[2], DV, BDV)
        i, j = rows_here[:, None], columns_here[None, :]
        q_segment, k_segment = i, j
        if SEGMENTS:
            q_segment = tl.load(q_segments_ptr + zb * lq + i, mask=i < lq, other=0)
            k_segment = tl.load(k_segments_ptr + zb * lk + j, mask=j < lk, other=0)
        s, _ = masks.scores(
            tl.dot(q, tl.trans(k), input_precision=PRECISION), i, j, lq, lk, left, right, a, b,
            bias_ptr + zb * bias_strides[0] + hq * bias_strides[1], bias_strides,
            mask_ptr + zb * mask_strides[0] + hq * mask_strides[1], mask_strides, q_segment, k_segment,
            LEFT, RIGHT, SOFTCAP, False, True, MASK, SEGMENTS, True,
        )  # fmt: skip
        at = rows_ptr + (zb * heads + hq) * pitch + rows_here
        lse, delta = tl.load(at), tl.load(at + rows)
        rest = lse
        if EXACT:
            rest = tl.load(at + 2 * rows)
        p = masks.probabilities(s, a, lse[:, None], rest[:, None], False, EXACT)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            number = z * heads + h
            keep = masks.kept(row, column, number, seed_low, seed_high, threshold, BM, BN)
            dp = tl.where(keep, dp * inverse, 0.0)
        total += p * (dp - delta[:, None])
    row, column = mine_q * BM, mine_k * BN
    i, j = (row + tl.arange(0, BM))[:, None], (column + tl.arange(0, BN))[None, :]
    if SUM_QUERIES:
        total = tl.sum(total, 0, keep_dims=True)
        i = tl.zeros((1, 1), tl.int32)
    if SUM_KEYS:
        total = tl.sum(total, 1, keep_dims=True)
        j = tl.zeros((1, 1), tl.int32)
    at = dbias_ptr + mine_z.to(tl.int64) * dbias_strides[0] + mine_h.to(tl.int64) * dbias_strides[1]
    at = at + i.to(tl.int64) * dbias_strides[2] + j.to(tl.int64) * dbias_strides[3]
    tl.store(at, ops.narrow(total, dbias_ptr.dtype.element_ty, False), mask=(i < lq) & (j < lk))


@triton.jit
def sink_terms(rows_ptr, sinks_ptr, terms_ptr, count, heads, pitch, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    """-exp(sink - lse) * D of all rows [B, H, pitch] of `attention_rows`, `count` in all."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    lse = tl.load(rows_ptr + at, mask=inside, other=0.0)
    delta = tl.load(rows_ptr + at + count, mask=inside, other=0.0)
    rest = lse
    if EXACT:
        rest = tl.load(rows_ptr + at + 2 * count, mask=inside, other=0.0)
    sink = tl.load(sinks_ptr + (at // pitch) % heads, mask=inside, other=0.0).to(tl.float32)
    share = masks.probabilities(sink, masks.LOG2E, lse, rest, True, EXACT)
    tl.store(terms_ptr + at, ops.negate(share) * delta, mask=inside)


@triton.jit
def check_starts(starts_ptr, flag_ptr, sequences, tokens, code, BLOCK: tl.constexpr):
    """Note a start of a sequence that is not 0 at the beginning, below its predecessor, or beyond the tokens."""
    for first in range(0, sequences + 1, BLOCK):
        n = first + tl.arange(0, BLOCK)
        inside = n <= sequences
        start = tl.load(starts_ptr + n, mask=inside, other=0)
        before = tl.load(starts_ptr + n - 1, mask=inside & (n > 0), other=0)
        bad = inside & ((start < before) | (start < 0) | (start > tokens) | ((n == 0) & (start != 0)))
        memory.report(flag_ptr, code, bad, n.to(tl.int64), start.to(tl.int64), memory.wide_int(tokens) + 1)
