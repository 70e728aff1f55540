# ruff: noqa: N803
"""The backward pass of attention in Triton: a program keeps a tile of keys, another kernel a tile of queries.

    P = 2^(s - lse),  dS = P * (dP - D),  dP = dO v^T,  dV = P^T dO,  dK = scale * dS^T q,  dQ = scale * dS k

with s and lse in base 2. `attention_backward_keys` gives dK and dV, summed over the query heads that share a head of
keys in the order of the heads. For dQ there are two ways, neither with a float atomic:

- `attention_backward_queries` computes S and dP once more;
- `attention_backward_keys` adds its part of dQ as integers to int32 (FIXED), whose sums have no order, by reductions
  of the tensor memory accelerator (NVIDIA, compute capability 9.0 and later); `triton_rows.fixed_to_float` reads them.

The fixed point. The element d of row i of dQ / scale is the sum over j of dS_ij K_jd. With sum_j P_ij = 1,
|dP_ij| <= |dO_i| |V_j| and |D_i| <= |dO_i| max_j |V_j| (+ |dlse_i|; Euclidean norms of rows; 1 / (1 - p) times all of
it with dropout) the sum over any set of keys is at most

    R_i c_d,  R_i = 2 |dO_i| max_j |V_j| / (1 - p) + |dlse_i|,  c_d = max_j |K_jd|

where j runs over the keys of the row's own sequence and head. With the least e_i >= -96 and f_d >= -126 such that
2^e_i >= R_i and 2^f_d >= c_d the integer is rint(x 2^(30 - e_i - f_d)). A tile's part, and the sum of all of them, is at most 2^30 in magnitude but for the rounding
of P and dS, which is less than 1 part in 50, and for the halves that rint adds: both stay below 2^31, and sums that
wrap around on the way do no harm. Each of t tiles of keys is off by at most half a quantum, so that dQ is off by at most
t / 2 * scale * 2^(e_i + f_d - 30), about its root for errors that are independent. Where R_i, c_d or lse_i is not finite
the row is marked, and its dQ is NaN whatever the integers say: nothing else reads them.
"""

import triton
import triton.language as tl

from isograd.attention import triton_masks as masks
from isograd.attention.triton_rows import exponent_above, load_row_values
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums


@triton.jit
def to_fixed(x, NATIVE: tl.constexpr):
    """The nearest int32; NaN becomes some integer."""
    if not NATIVE:
        x = tl.where(x == x, x, 0.0)
    return sums.round_to_int32(x, NATIVE)


@triton.jit
def _key_steps(
    dk, dv, k, v, q_rows, do_rows, fixed_rows, row_ptr, rows, first, begin, end, lq, lk, left, right, a, b, bias_base,
    bias_strides, mask_base, mask_strides, q_segments_ptr, k_segment, column_factor, number, seed_low, seed_high,
    threshold, inverse,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, PARTIAL: tl.constexpr, FIXED: tl.constexpr,
    NATIVE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go over tiles of queries. The tiles of S and dP are transposed: P^T and dS^T are then used as they are."""
    j = (first + tl.arange(0, BN))[:, None]
    for n in tl.range(begin, end, num_stages=STAGES):
        row = n * BM
        rows_here = row + tl.arange(0, BM)
        i = rows_here[None, :]
        inside = rows_here < lq
        lse, rest, delta = load_row_values(row_ptr + rows_here, rows, inside, EXACT)
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
        p = masks.probabilities(s, a, lse[None, :], rest[None, :], DIRECT, EXACT)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            keep = tl.trans(masks.kept(row, first, number, seed_low, seed_high, threshold, BM, BN))
            dropped = tl.where(keep, p, 0.0)
            dp = tl.where(keep, dp * inverse, 0.0)
        dv = tl.dot(dropped.to(do.dtype), do, dv, input_precision=PRECISION)
        ds = p * (dp - delta[None, :])
        if SOFTCAP:
            ds = ds * tl.fma(-t, t, 1.0)
        ds = ds.to(q.dtype)
        dk = tl.dot(ds, q, dk, input_precision=PRECISION)
        if FIXED:
            factor = tl.load(row_ptr + 2 * rows + rows_here, mask=inside, other=0.0)
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)
            dq = (dq * column_factor[None, :]) * factor[:, None]
            fixed_rows.atomic_add([row, 0], to_fixed(dq, NATIVE))
    return dk, dv


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def attention_backward_keys(
    do_ptr, q_ptr, k_ptr, v_ptr, dk_ptr, dv_ptr, rows_ptr, fixed_ptr, bounds_ptr, bias_ptr, mask_ptr, q_segments_ptr,
    k_segments_ptr, q_starts_ptr, k_starts_ptr, seed_low, seed_high,
    tiles, batch, heads, group, lq, lk, sequences, together, do_strides, q_strides, k_strides, v_strides, dk_strides,
    dv_strides, bias_strides, mask_strides, left, right, a, b, threshold, inverse, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, LOWER_RIGHT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, FIXED: tl.constexpr,
    NATIVE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of dk and dv; with FIXED also the integers of dq. `rows_ptr`: [3, B, H, L] of `attention_rows`.

    Arguments as in `attention_forward`; bounds: [sequences, heads of keys, BD + 1], the bits of c_d, then of |V|.
    """
    tile, h, z = masks.place(tiles, heads // group, batch, together, False)
    q_first, k_first = tile * 0, tile * 0
    q_tokens, k_tokens = lq, lk
    if PACKED:
        z, tile = masks.find_sequence(k_starts_ptr, sequences, lk, tile, BN)
        q_first, lq = masks.rows_of_sequence(q_starts_ptr, z, sequences, lq)
        k_first, lk = masks.rows_of_sequence(k_starts_ptr, z, sequences, lk)
        lq = tl.where(z < sequences, lq, 0)
    first = tile * BN
    if first >= lk:
        return
    if LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    zb = (tile * 0 if PACKED else z).to(tl.int64)
    hk = h.to(tl.int64)
    k_at = zb * k_strides[0] + hk * k_strides[1] + k_first.to(tl.int64) * k_strides[2]
    v_at = zb * v_strides[0] + hk * v_strides[1] + k_first.to(tl.int64) * v_strides[2]
    k = masks.tile_rows(k_ptr, k_at, lk, k_strides[2], D, BN, BD).load([first, 0])
    v = masks.tile_rows(v_ptr, v_at, lk, v_strides[2], DV, BN, BDV).load([first, 0])
    j = first + tl.arange(0, BN)
    k_segment = j[:, None]
    if SEGMENTS:
        k_segment = tl.load(k_segments_ptr + zb * k_tokens + j, mask=j < lk, other=0)[:, None]
    column_factor = tl.zeros((BD,), tl.float32)
    if FIXED:
        bounds = bounds_ptr + (z.to(tl.int64) * (heads // group) + hk) * (BD + 1) + tl.arange(0, BD)
        column_factor = ops.pow2_32(-exponent_above(tl.load(bounds), -126))

    dk = tl.zeros((BN, BD), tl.float32)
    dv = tl.zeros((BN, BDV), tl.float32)
    begin, full, full_end, end = masks.other_tiles(first, lq, -right, -left, BN, BM, RIGHT, LEFT)
    if not LEFT:
        full_end = end  # rows of a last tile that are not there have P = 0, no mask is needed
    if first + BN > lk:
        full, full_end = end, end
    rows = (zb * 0 + batch) * heads * q_tokens
    for member in range(0, group):
        hq = hk * group + member
        q_at = zb * q_strides[0] + hq * q_strides[1] + q_first.to(tl.int64) * q_strides[2]
        do_at = zb * do_strides[0] + hq * do_strides[1] + q_first.to(tl.int64) * do_strides[2]
        row_at = (zb * heads + hq) * q_tokens + q_first
        q_rows = masks.tile_rows(q_ptr, q_at, lq, q_strides[2], D, BM, BD)
        do_rows = masks.tile_rows(do_ptr, do_at, lq, do_strides[2], DV, BM, BDV)
        fixed_rows = q_rows
        if FIXED:
            fixed_rows = masks.tile_rows(fixed_ptr, row_at * D, lq, D, D, BM, BD)
        bias_base = bias_ptr + zb * bias_strides[0] + hq * bias_strides[1]
        mask_base = mask_ptr + zb * mask_strides[0] + hq * mask_strides[1]
        q_segments = q_segments_ptr + zb * q_tokens
        number = z * heads + hq
        dk, dv = _key_steps(
            dk, dv, k, v, q_rows, do_rows, fixed_rows, rows_ptr + row_at, rows, first, begin, full, lq, lk, left,
            right, a, b, bias_base, bias_strides, mask_base, mask_strides, q_segments, k_segment, column_factor,
            number, seed_low, seed_high, threshold, inverse, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS,
            DROPOUT, True, FIXED, NATIVE, BM, BN, STAGES, EXACT, PRECISION,
        )  # fmt: skip
        dk, dv = _key_steps(
            dk, dv, k, v, q_rows, do_rows, fixed_rows, rows_ptr + row_at, rows, first, full, full_end, lq, lk, left,
            right, a, b, bias_base, bias_strides, mask_base, mask_strides, q_segments, k_segment, column_factor,
            number, seed_low, seed_high, threshold, inverse, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS,
            DROPOUT, False, FIXED, NATIVE, BM, BN, STAGES, EXACT, PRECISION,
        )  # fmt: skip
        if LEFT:
            dk, dv = _key_steps(
                dk, dv, k, v, q_rows, do_rows, fixed_rows, rows_ptr + row_at, rows, first, full_end, end, lq, lk, left,
                right, a, b, bias_base, bias_strides, mask_base, mask_strides, q_segments, k_segment, column_factor,
                number, seed_low, seed_high, threshold, inverse, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS,
                DROPOUT, True, FIXED, NATIVE, BM, BN, STAGES, EXACT, PRECISION,
            )  # fmt: skip

    dk_at = zb * dk_strides[0] + hk * dk_strides[1] + k_first.to(tl.int64) * dk_strides[2]
    dv_at = zb * dv_strides[0] + hk * dv_strides[1] + k_first.to(tl.int64) * dv_strides[2]
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


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def attention_backward_queries(
    do_ptr, q_ptr, k_ptr, v_ptr, dq_ptr, rows_ptr, bias_ptr, mask_ptr, q_segments_ptr, k_segments_ptr, q_starts_ptr,
    k_starts_ptr, seed_low, seed_high,
    tiles, batch, heads, group, lq, lk, sequences, together, do_strides, q_strides, k_strides, v_strides, dq_strides,
    bias_strides, mask_strides, left, right, a, b, threshold, inverse, scale,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, LOWER_RIGHT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, DIRECT: tl.constexpr, BIAS: tl.constexpr,
    MASK: tl.constexpr, SEGMENTS: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of dq, by computing S and dP once more. Arguments as in `attention_backward_keys`."""
    tile, h, z = masks.place(tiles, heads, batch, together, RIGHT)
    q_first, k_first = tile * 0, tile * 0
    q_tokens, k_tokens = lq, lk
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
    do_at = zb * do_strides[0] + hq * do_strides[1] + q_first.to(tl.int64) * do_strides[2]
    k_at = zb * k_strides[0] + hk * k_strides[1] + k_first.to(tl.int64) * k_strides[2]
    v_at = zb * v_strides[0] + hk * v_strides[1] + k_first.to(tl.int64) * v_strides[2]
    q = masks.tile_rows(q_ptr, q_at, lq, q_strides[2], D, BM, BD).load([first, 0])
    do = masks.tile_rows(do_ptr, do_at, lq, do_strides[2], DV, BM, BDV).load([first, 0])
    k_rows = masks.tile_rows(k_ptr, k_at, lk, k_strides[2], D, BN, BD)
    v_rows = masks.tile_rows(v_ptr, v_at, lk, v_strides[2], DV, BN, BDV)
    i = first + tl.arange(0, BM)
    row_ptr = rows_ptr + (zb * heads + hq) * q_tokens + q_first
    rows = (zb * 0 + batch) * heads * q_tokens
    lse, rest, delta = load_row_values(row_ptr + i, rows, i < lq, EXACT)
    bias_base = bias_ptr + zb * bias_strides[0] + hq * bias_strides[1]
    mask_base = mask_ptr + zb * mask_strides[0] + hq * mask_strides[1]
    q_segment = i[:, None]
    if SEGMENTS:
        q_segment = tl.load(q_segments_ptr + zb * q_tokens + i, mask=i < lq, other=0)[:, None]
    k_segments = k_segments_ptr + zb * k_tokens
    number = z * heads + h

    dq = tl.zeros((BM, BD), tl.float32)
    begin, full, full_end, end = masks.other_tiles(first, lk, left, right, BM, BN, LEFT, RIGHT)
    if LEFT:
        dq = _query_steps(
            dq, q, do, k_rows, v_rows, lse, rest, delta, first, begin, full, lq, lk, left, right, a, b, bias_base,
            bias_strides, mask_base, mask_strides, q_segment, k_segments, number, seed_low, seed_high, threshold,
            inverse, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, DROPOUT, True, BM, BN, STAGES, EXACT, PRECISION,
        )  # fmt: skip
    dq = _query_steps(
        dq, q, do, k_rows, v_rows, lse, rest, delta, first, full, full_end, lq, lk, left, right, a, b, bias_base,
        bias_strides, mask_base, mask_strides, q_segment, k_segments, number, seed_low, seed_high, threshold,
        inverse, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, DROPOUT, False, BM, BN, STAGES, EXACT, PRECISION,
    )  # fmt: skip
    dq = _query_steps(
        dq, q, do, k_rows, v_rows, lse, rest, delta, first, full_end, end, lq, lk, left, right, a, b, bias_base,
        bias_strides, mask_base, mask_strides, q_segment, k_segments, number, seed_low, seed_high, threshold,
        inverse, LEFT, RIGHT, SOFTCAP, DIRECT, BIAS, MASK, SEGMENTS, DROPOUT, True, BM, BN, STAGES, EXACT, PRECISION,
    )  # fmt: skip
    dq_at = zb * dq_strides[0] + hq * dq_strides[1] + q_first.to(tl.int64) * dq_strides[2]
    dq_rows = masks.tile_rows(dq_ptr, dq_at, lq, dq_strides[2], D, BM, BD)
    dq_rows.store([first, 0], ops.narrow(dq * scale, dq_ptr.dtype.element_ty, False))
