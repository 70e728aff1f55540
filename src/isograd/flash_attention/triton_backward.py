# mypy: ignore-errors
# ruff: noqa: N803
"""The backward pass of attention in Triton: one kernel keeps a tile of keys, another one a tile of queries.

    P = 2^(s - lse),  dS = P * (dP - D),  dP = dO v^T,  dV = P^T dO,  dK = scale * dS^T q,  dQ = scale * dS k

with s and lse in base 2. `attention_backward_keys` gives dK and dV, summed over the query heads that share a head of
keys in the order of the heads. `attention_backward_queries` computes S and dP once more and gives dQ: 7 matrix products
where 5 would do, but no sum ever crosses a program. The other way, parts of dQ added as int32 in fixed point (see
`triton_rows`), took 1.2 to 1.6 times as long here on an H200, since the reductions have to wait within each step.
"""

import triton
import triton.language as tl

from isograd.flash_attention import triton_masks as masks
from isograd.numerics import triton_ops as ops
from isograd.numerics.triton_memory import wide_int


@triton.jit
def _key_steps(
    dk, dv, k, v, q_rows, do_rows, row_values, head, heads, slot, first, begin, end, lq, lk, left, right, a, b,
    bias_base, bias_strides, mask_base, mask_strides, q_segments_ptr, k_segment, number, seed_low, seed_high,
    threshold, inverse,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, PARTIAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go over tiles of queries. The tiles of S and dP are transposed: P^T and dS^T are then used as they are."""
    j = (first + tl.arange(0, BN))[:, None]
    for n in tl.range(begin, end, num_stages=STAGES):
        row = n * BM
        i = (row + tl.arange(0, BM))[None, :]
        lse = row_values.load([head, slot + row])
        delta = row_values.load([head + heads, slot + row])
        rest = lse
        if EXACT:
            rest = row_values.load([head + 2 * heads, slot + row])
        q = q_rows.load([row, 0])
        do = do_rows.load([row, 0])
        st = tl.dot(k, tl.trans(q), input_precision=PRECISION)
        q_segment = i
        if SEGMENTS:
            q_segment = tl.load(q_segments_ptr + i, mask=i < lq, other=0)
        s, t = masks.scores(
            st, i, j, lq, lk, left, right, a, b, bias_base, bias_strides, mask_base, mask_strides, q_segment,
            k_segment, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, PARTIAL,
        )  # fmt: skip
        p = masks.probabilities(s, a, lse, rest, DIRECT, EXACT)
        if DROPOUT:
            dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        else:
            # Starting from -D keeps D out of the registers while the product runs.
            dp = tl.dot(v, tl.trans(do), tl.broadcast_to(-delta, (BN, BM)), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            keep = tl.trans(masks.kept(row, first, number, seed_low, seed_high, threshold, BM, BN))
            dropped = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * inverse, 0.0) - delta
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
        ds = p * dp
        if SOFTCAP:
            ds = ds * tl.fma(-t, t, 1.0)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["seed_low", "seed_high", "tiles", "lq", "lk"])
def attention_backward_keys(
    do_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, rows_ptr, bias_ptr, mask_ptr, q_segments_ptr,
    k_segments_ptr, q_starts_ptr, k_starts_ptr, seed_low, seed_high,
    tiles, batch, heads, group, lq, lk, pitch, sequences, together, do_strides, q_strides, k_strides, v_strides,
    dk_strides, dv_strides, bias_strides, mask_strides, left, right, a, b, threshold, inverse, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, LOWER_RIGHT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of dk and dv. `rows_ptr`: [2 or 3, B, H, pitch] of `attention_rows`; others as in `attention_forward`."""
    tile, h, z = masks.place(tiles, heads // group, batch, together, False)
    q_tokens, k_tokens = wide_int(lq), wide_int(lk)
    z, zb, tile, k_first, lk, q_first, lq = masks.locate(
        k_starts_ptr, q_starts_ptr, z, tile, lk, lq, sequences, BN, PACKED
    )  # fmt: skip
    first = tile * BN
    if first >= lk:
        return
    if LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    k = masks.tile_rows(k_ptr, masks.offset(zb, h, k_first, k_strides), lk, k_strides[2], D, BN, BD).load([first, 0])
    v = masks.tile_rows(v_ptr, masks.offset(zb, h, k_first, v_strides), lk, v_strides[2], DV, BN, BDV).load([first, 0])
    j = first + tl.arange(0, BN)
    k_segment = j[:, None]
    if SEGMENTS:
        k_segment = tl.load(k_segments_ptr + zb * k_tokens + j, mask=j < lk, other=0)[:, None]
    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BDV), tl.float32)
    begin, full, full_end, end = masks.other_tiles(first, lq, -right, -left, BN, BM, RIGHT, LEFT)
    if not LEFT:
        full_end = end  # rows of a last tile that are not there have P = 0, no mask is needed
    if first + BN > lk:
        full, full_end = end, end
    edges = (begin, full, full_end, end)
    slot = tile * 0
    if PACKED:
        slot = masks.slot_of_sequence(q_starts_ptr, z, q_tokens).to(tl.int32)
    row_values = tl.make_tensor_descriptor(
        rows_ptr, shape=[(3 if EXACT else 2) * heads * batch, pitch], strides=[wide_int(pitch), 1], block_shape=[1, BM]
    )
    for member in range(group):
        hq = h * group + member
        head = zb.to(tl.int32) * heads + hq
        q_at, do_at = masks.offset(zb, hq, q_first, q_strides), masks.offset(zb, hq, q_first, do_strides)
        q_rows = masks.tile_rows(q_ptr, q_at, lq, q_strides[2], D, BM, BD)
        do_rows = masks.tile_rows(do_ptr, do_at, lq, do_strides[2], DV, BM, BDV)
        bias_base = bias_ptr + zb * bias_strides[0] + hq.to(tl.int64) * bias_strides[1]
        mask_base = mask_ptr + zb * mask_strides[0] + hq.to(tl.int64) * mask_strides[1]
        for part in tl.static_range(3):
            if LEFT or part < 2:
                dk, dv = _key_steps(
                    dk, dv, k, v, q_rows, do_rows, row_values, head, heads * batch, slot, first, edges[part],
                    edges[part + 1], lq, lk, left, right, a, b, bias_base, bias_strides, mask_base, mask_strides,
                    q_segments_ptr + zb * q_tokens, k_segment, z * heads + hq, seed_low, seed_high, threshold, inverse,
                    LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, DROPOUT, part != 1, BM, BN, STAGES, EXACT,
                    PRECISION,
                )  # fmt: skip

    dk_at, dv_at = masks.offset(zb, h, k_first, dk_strides), masks.offset(zb, h, k_first, dv_strides)
    dk_rows = masks.tile_rows(dk_ptr, dk_at, lk, dk_strides[2], D, BN, BD)
    dv_rows = masks.tile_rows(dv_ptr, dv_at, lk, dv_strides[2], DV, BN, BDV)
    dk_rows.store([first, 0], ops.narrow(dk * scale, dk_ptr.dtype.element_ty, False))
    dv_rows.store([first, 0], ops.narrow(dv * inverse, dv_ptr.dtype.element_ty, False))


@triton.jit
def _query_steps(
    dq, q, do, k_rows, v_rows, lse, rest, delta, first, begin, end, lq, lk, left, right, a, b, bias_base, bias_strides,
    mask_base, mask_strides, q_segment, k_segments_ptr, number, seed_low, seed_high, threshold, inverse,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, PARTIAL: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    i = (first + tl.arange(0, BM))[:, None]
    for n in tl.range(begin, end, num_stages=STAGES):
        column = n * BN
        j = (column + tl.arange(0, BN))[None, :]
        k = k_rows.load([column, 0])
        v = v_rows.load([column, 0])
        qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        k_segment = j
        if SEGMENTS:
            k_segment = tl.load(k_segments_ptr + j, mask=j < lk, other=0)
        s, t = masks.scores(
            qk, i, j, lq, lk, left, right, a, b, bias_base, bias_strides, mask_base, mask_strides, q_segment,
            k_segment, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, PARTIAL,
        )  # fmt: skip
        p = masks.probabilities(s, a, lse[:, None], rest[:, None], DIRECT, EXACT)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            keep = masks.kept(first, column, number, seed_low, seed_high, threshold, BM, BN)
            dp = tl.where(keep, dp * inverse, 0.0)
        ds = p * (dp - delta[:, None])
        if SOFTCAP:
            ds = ds * tl.fma(-t, t, 1.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    return dq


@triton.jit(do_not_specialize=["seed_low", "seed_high", "tiles", "lq", "lk"])
def attention_backward_queries(
    do_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, rows_ptr, bias_ptr, mask_ptr, q_segments_ptr, k_segments_ptr, q_starts_ptr,
    k_starts_ptr, seed_low, seed_high,
    tiles, batch, heads, group, lq, lk, pitch, sequences, together, do_strides, q_strides, k_strides, v_strides,
    dq_strides, bias_strides, mask_strides, left, right, a, b, threshold, inverse, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, LOWER_RIGHT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of dq, by computing S and dP once more. Arguments as in `attention_backward_keys`."""
    tile, h, z = masks.place(tiles, heads, batch, together, RIGHT)
    q_tokens, k_tokens = wide_int(lq), wide_int(lk)
    z, zb, tile, q_first, lq, k_first, lk = masks.locate(
        q_starts_ptr, k_starts_ptr, z, tile, lq, lk, sequences, BM, PACKED
    )  # fmt: skip
    first = tile * BM
    if first >= lq:
        return
    if LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    hq, hk = h.to(tl.int64), h // group
    q_at, do_at = masks.offset(zb, h, q_first, q_strides), masks.offset(zb, h, q_first, do_strides)
    k_at, v_at = masks.offset(zb, hk, k_first, k_strides), masks.offset(zb, hk, k_first, v_strides)
    q = masks.tile_rows(q_ptr, q_at, lq, q_strides[2], D, BM, BD).load([first, 0])
    do = masks.tile_rows(do_ptr, do_at, lq, do_strides[2], DV, BM, BDV).load([first, 0])
    k_rows = masks.tile_rows(k_ptr, k_at, lk, k_strides[2], D, BN, BD)
    v_rows = masks.tile_rows(v_ptr, v_at, lk, v_strides[2], DV, BN, BDV)
    i = first + tl.arange(0, BM)
    row_ptr = rows_ptr + (zb * heads + hq) * pitch + i
    if PACKED:
        row_ptr += masks.slot_of_sequence(q_starts_ptr, z, q_tokens)
    rows = wide_int(pitch) * heads * batch
    lse, delta = tl.load(row_ptr), tl.load(row_ptr + rows)
    rest = lse
    if EXACT:
        rest = tl.load(row_ptr + 2 * rows)
    bias_base = bias_ptr + zb * bias_strides[0] + hq * bias_strides[1]
    mask_base = mask_ptr + zb * mask_strides[0] + hq * mask_strides[1]
    q_segment = i[:, None]
    if SEGMENTS:
        q_segment = tl.load(q_segments_ptr + zb * q_tokens + i, mask=i < lq, other=0)[:, None]
    k_segments = k_segments_ptr + zb * k_tokens
    number = z * heads + h

    dq = tl.zeros((BM, BD), tl.float32)
    edges = masks.other_tiles(first, lk, left, right, BM, BN, LEFT, RIGHT)
    for part in tl.static_range(3):
        if LEFT or part > 0:
            dq = _query_steps(
                dq, q, do, k_rows, v_rows, lse, rest, delta, first, edges[part], edges[part + 1], lq, lk, left, right,
                a, b, bias_base, bias_strides, mask_base, mask_strides, q_segment, k_segments, number, seed_low,
                seed_high, threshold, inverse, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, DROPOUT, part != 1,
                BM, BN, STAGES, EXACT, PRECISION,
            )  # fmt: skip
    dq_rows = masks.tile_rows(dq_ptr, masks.offset(zb, h, q_first, dq_strides), lq, dq_strides[2], D, BM, BD)
    dq_rows.store([first, 0], ops.narrow(dq * scale, dq_ptr.dtype.element_ty, False))
