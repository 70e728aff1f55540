# mypy: ignore-errors
# ruff: noqa: N803
"""The backward pass of order-free attention in Triton: one kernel keeps a tile of keys, another one a tile of queries.

Both compute the scores and do · v of a block of 128 columns in two halves, and with them the weights of the rows that
they add up; rule 23, see `reference.py`. What hides a pair leaves weights of 0.
"""

import triton
import triton.language as tl

from isograd.flash_attention import triton_masks as masks
from isograd.flash_attention.order_free import triton_integers as integers
from isograd.flash_attention.order_free import triton_scores as scoring
from isograd.numerics import triton_ops as ops
from isograd.numerics.triton_memory import wide_int

BLOCK, HALF = integers.BLOCK, integers.HALF
_HIGH = tl.constexpr(64.0)


@triton.jit
def probabilities(t, level, careful):
    """2**(t - level), at most 2**64, and 0 below 2**-126."""
    x = t - level
    # At -127 the sum of the bits is a zero.
    m, k = integers.exp2_parts(tl.minimum(tl.where(x < -126.0, -127.0, x), _HIGH))
    p = ops.as_float(ops.as_int(m) + (k << 23))
    if careful:
        p = tl.where(x == x, p, float("nan"))
    return p


@triton.jit
def _visible(weights, t, raw_ptr, careful, HIDES: tl.constexpr):
    """Weights, 0 where a pair is hidden; at raw_ptr: -inf of queries that are absent."""
    if careful:
        weights = tl.where((t != scoring.HIDDEN) & (tl.load(raw_ptr) != float("-inf")), weights, 0.0)
    else:
        if HIDES:
            weights = tl.where(t != scoring.HIDDEN, weights, 0.0)
    return weights


@triton.jit
def gradient(p, g, delta, slope, keep, SOFTCAP: tl.constexpr, DROPOUT: tl.constexpr):
    """Return p (g - D), g being 0 where dropped, times the slope of a soft cap."""
    if DROPOUT:
        g = tl.where(keep, g, 0.0)
    s = p * (g - delta)
    if SOFTCAP:
        s = s * slope
    return s


# --- over keys -------------------------------------------------------------------------------------------------------
@triton.jit
def _query_half(
    k_high, k_low, v_high, v_low, q_rows, do_rows, numbers_ptr, count, of_k, of_v, factor, inverse, row, slot, j, lq,
    lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides, q_segments_ptr, k_segment, first, number,
    seed_low, seed_high, threshold, careful,
    BD: tl.constexpr, BDV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, PARTIAL: tl.constexpr,
    BN: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Weights of do in dv (VALUES) and of q in dk (KEYS) [BN, 64], of 64 queries."""
    here = row + tl.arange(0, HALF)
    i = here[None, :]
    at = numbers_ptr + here
    total = integers.exact(k_high, k_low, q_rows.load([slot + row, 0]).T, q_rows.load([slot + row, BD]).T)
    q_segment = i
    if SEGMENTS:
        q_segment = tl.load(q_segments_ptr + i, mask=i < lq, other=0)
    of_q = tl.load(at + 2 * count)
    factor = (of_q * factor)[None, :] * of_k[:, None]
    t, slope = scoring.scores(
        total, factor, i, j, lq, lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides, q_segment,
        k_segment, careful, LEFT, RIGHT, SOFTCAP, BIAS, MASK, SEGMENTS, PARTIAL,
    )  # fmt: skip
    p = probabilities(t, tl.load(at)[None, :], careful)
    of_do = tl.load(at + 3 * count)
    raw, keep, of_dv, of_dk = (at + 4 * count)[None, :], at, p, p
    hides: tl.constexpr = PARTIAL or MASK or SEGMENTS
    if DROPOUT:
        keep = tl.trans(masks.kept(row, first, number, seed_low, seed_high, threshold, HALF, BN))
    if VALUES:
        of_dv = p * of_do[None, :]
        if DROPOUT:
            of_dv = tl.where(keep, of_dv, 0.0)
        of_dv = _visible(of_dv, t, raw, careful, hides)
    if KEYS:
        total = integers.exact(v_high, v_low, do_rows.load([slot + row, 0]).T, do_rows.load([slot + row, BDV]).T)
        g = total.to(tl.float32) * ((of_do * inverse)[None, :] * of_v[:, None])
        s = gradient(p, g, tl.load(at + count)[None, :], slope, keep, SOFTCAP, DROPOUT)
        of_dk = _visible(s * of_q[None, :], t, raw, careful, hides)
    return of_dv, of_dk


@triton.jit
def _key_steps(
    dk, dv, dk_bad, dv_bad, k_high, k_low, v_high, v_low, q_rows, do_rows, q_columns, do_columns, numbers_ptr,
    worst_ptr, count, of_k, of_v, factor, inverse, worst, reach, slot, first, begin, end, lq, lk, left, right, cap,
    bias_base, bias_strides, mask_base, mask_strides, q_segments_ptr, k_segment, number, seed_low, seed_high, threshold,
    BD: tl.constexpr, BDV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, PARTIAL: tl.constexpr,
    BN: tl.constexpr, STAGES: tl.constexpr, VALUES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Go over blocks of queries, for dv (VALUES) and dk (KEYS). Tiles are transposed: their rows are keys."""
    j = (first + tl.arange(0, BN))[:, None]
    for n in tl.range(begin, end, num_stages=STAGES):
        row = n * BLOCK
        careful = scoring.is_careful(worst, tl.load(worst_ptr + n), reach)
        if SOFTCAP or BIAS:
            careful = True
        of_dv0, of_dk0 = _query_half(
            k_high, k_low, v_high, v_low, q_rows, do_rows, numbers_ptr, count, of_k, of_v, factor, inverse, row, slot,
            j, lq, lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides, q_segments_ptr, k_segment,
            first, number, seed_low, seed_high, threshold, careful, BD, BDV, LEFT, RIGHT, SOFTCAP, BIAS, MASK, SEGMENTS,
            DROPOUT, PARTIAL, BN, VALUES, KEYS,
        )  # fmt: skip
        of_dv1, of_dk1 = _query_half(
            k_high, k_low, v_high, v_low, q_rows, do_rows, numbers_ptr, count, of_k, of_v, factor, inverse, row + HALF,
            slot, j, lq, lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides, q_segments_ptr,
            k_segment, first, number, seed_low, seed_high, threshold, careful, BD, BDV, LEFT, RIGHT, SOFTCAP, BIAS,
            MASK, SEGMENTS, DROPOUT, PARTIAL, BN, VALUES, KEYS,
        )  # fmt: skip
        if VALUES:
            high, low, exponent, bad = integers.weights(of_dv0, of_dv1, BN)
            dv_bad |= bad.to(tl.int32)
            y = integers.exact(high, low, do_columns.load([0, slot + row]).T, do_columns.load([BDV, slot + row]).T)
            dv = tl.fma(y.to(tl.float32), integers.power(exponent - 20)[:, None], dv)
        if KEYS:
            high, low, exponent, bad = integers.weights(of_dk0, of_dk1, BN)
            dk_bad |= bad.to(tl.int32)
            y = integers.exact(high, low, q_columns.load([0, slot + row]).T, q_columns.load([BD, slot + row]).T)
            dk = tl.fma(y.to(tl.float32), integers.power(exponent - 20)[:, None], dk)
    return dk, dv, dk_bad, dv_bad


@triton.jit
def _columns(ptr, offset, pitch, WIDTH: tl.constexpr):
    """A descriptor of columns of digits [2 WIDTH, pitch] in tiles of a block."""
    return tl.make_tensor_descriptor(
        ptr + offset, shape=[2 * WIDTH, pitch], strides=[wide_int(pitch), 1], block_shape=[WIDTH, BLOCK]
    )


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def order_free_backward_keys(
    q_digits_ptr, k_digits_ptr, q_numbers_ptr, k_numbers_ptr, dk_ptr, dv_ptr, bias_ptr, mask_ptr, q_segments_ptr,
    k_segments_ptr, q_starts_ptr, k_starts_ptr, seed_low, seed_high,
    tiles, batch, heads, group, lq, lk, q_pitch, k_pitch, sequences, together, dk_strides, dv_strides, bias_strides,
    mask_strides, left, right, factor, cap, reach, threshold, scale, kept,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, LOWER_RIGHT: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr,
    SEGMENTS: tl.constexpr, PACKED: tl.constexpr, DROPOUT: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """A tile of dk and dv, summed over the query heads that share it; arguments as in `order_free_forward`.

    TURNS: 1, or 2 where the scores are computed once for dv and once more for dk.
    """
    kv_heads = heads // group
    tile, h, z = masks.place(tiles, kv_heads, batch, together, False)
    q_tokens, k_tokens = wide_int(lq), wide_int(lk)
    all_q, all_k = lq, lk
    z, zb, tile, k_first, lk, _, lq = masks.locate(
        k_starts_ptr, q_starts_ptr, z, tile, lk, lq, sequences, BN, PACKED
    )  # fmt: skip
    first = tile * BN
    if first >= lk:
        return
    if LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    slot, k_slot = tile * 0, first
    if PACKED:
        slot = masks.slot_of_sequence(q_starts_ptr, z, all_q).to(tl.int32)
        k_slot += masks.slot_of_sequence(k_starts_ptr, z, all_k).to(tl.int32)
    k_head = zb * kv_heads + h
    k_at = k_head * k_pitch
    count, each = wide_int(q_pitch) * heads * batch, wide_int(k_pitch) * kv_heads * batch
    k_rows = masks.tile_rows(k_digits_ptr, k_at * (2 * BD), k_pitch, 2 * BD, 2 * BD, BN, BD)
    v_rows = masks.tile_rows(
        k_digits_ptr, each * (4 * BD) + k_at * (2 * BDV), k_pitch, 2 * BDV, 2 * BDV, BN, BDV
    )  # fmt: skip
    k_high, k_low = k_rows.load([k_slot, 0]), k_rows.load([k_slot, BD])
    v_high, v_low = v_rows.load([k_slot, 0]), v_rows.load([k_slot, BDV])
    k_numbers = k_numbers_ptr + k_at + k_slot + tl.arange(0, BN)
    of_k = tl.load(k_numbers)
    of_v = tl.load(k_numbers + each)
    worst = tl.load(k_numbers_ptr + 2 * each + (k_at + k_slot) // BLOCK)
    j = first + tl.arange(0, BN)
    k_segment = j[:, None]
    if SEGMENTS:
        k_segment = tl.load(k_segments_ptr + zb * k_tokens + j, mask=j < lk, other=0)[:, None]
    dk, dv = tl.zeros((BN, BD), tl.float32), tl.zeros((BN, BDV), tl.float32)
    dk_bad, dv_bad = tl.zeros((BN,), tl.int32), tl.zeros((BN,), tl.int32)
    # Queries and keys beyond the ends see and are seen like others: their rows of zeros add nothing, or stay here.
    begin, full, full_end, end = masks.other_tiles(first, lq, -right, -left, BN, BLOCK, RIGHT, LEFT)
    if not LEFT:
        full_end = end
    edges = (begin, full, full_end, end)
    dk_at, dv_at = masks.offset(zb, h, k_first, dk_strides), masks.offset(zb, h, k_first, dv_strides)
    for turn in tl.static_range(TURNS):
        for member in range(group):
            hq = h * group + member
            q_at = (zb * heads + hq) * q_pitch
            q_rows = masks.tile_rows(q_digits_ptr, q_at * (2 * BD), q_pitch, 2 * BD, 2 * BD, HALF, BD)
            q_columns = _columns(q_digits_ptr, (count + q_at) * (2 * BD), q_pitch, BD)
            do_at = count * (4 * BD) + q_at * (2 * BDV)
            do_rows = masks.tile_rows(q_digits_ptr, do_at, q_pitch, 2 * BDV, 2 * BDV, HALF, BDV)
            do_columns = _columns(q_digits_ptr, do_at + count * (2 * BDV), q_pitch, BDV)
            bias_base = bias_ptr + zb * bias_strides[0] + hq.to(tl.int64) * bias_strides[1]
            mask_base = mask_ptr + zb * mask_strides[0] + hq.to(tl.int64) * mask_strides[1]
            for part in tl.static_range(3):
                if LEFT or part < 2:
                    dk, dv, dk_bad, dv_bad = _key_steps(
                        dk, dv, dk_bad, dv_bad, k_high, k_low, v_high, v_low, q_rows, do_rows, q_columns, do_columns,
                        q_numbers_ptr + q_at + slot, q_numbers_ptr + 5 * count + (q_at + slot) // BLOCK, count, of_k,
                        of_v, factor * integers.TINY, kept * integers.TINY, worst, reach, slot, first, edges[part],
                        edges[part + 1], lq, lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides,
                        q_segments_ptr + zb * q_tokens, k_segment, z * heads + hq, seed_low, seed_high, threshold, BD,
                        BDV, LEFT, RIGHT, SOFTCAP, BIAS, MASK, SEGMENTS, DROPOUT, part != 1, BN, STAGES, turn == 0,
                        turn == TURNS - 1,
                    )  # fmt: skip
        if turn == 0:
            dv = tl.where(dv_bad[:, None] > 0, float("nan"), dv * kept)
            dv_rows = masks.tile_rows(dv_ptr, dv_at, lk, dv_strides[2], DV, BN, BDV)
            dv_rows.store([first, 0], ops.narrow(dv, dv_ptr.dtype.element_ty, False))
        if turn == TURNS - 1:
            dk = tl.where(dk_bad[:, None] > 0, float("nan"), dk * scale)
            dk_rows = masks.tile_rows(dk_ptr, dk_at, lk, dk_strides[2], D, BN, BD)
            dk_rows.store([first, 0], ops.narrow(dk, dk_ptr.dtype.element_ty, False))


# --- over queries ----------------------------------------------------------------------------------------------------
@triton.jit
def _key_half(
    q_high, q_low, do_high, do_low, k_rows, v_rows, numbers_ptr, count, rows, of_do, level, raw, delta, column, slot, i,
    lq, lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides, q_segment, k_segments_ptr, first,
    number, seed_low, seed_high, threshold, careful,
    BD: tl.constexpr, BDV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, PARTIAL: tl.constexpr,
    BM: tl.constexpr,
):  # fmt: skip
    """Weights of k in dq [BM, 64], of 64 keys."""
    here = column + tl.arange(0, HALF)
    of_k = tl.load(numbers_ptr + here)[None, :]
    total = integers.exact(q_high, q_low, k_rows.load([slot + column, 0]).T, k_rows.load([slot + column, BD]).T)
    k_segment = here[None, :]
    if SEGMENTS:
        k_segment = tl.load(k_segments_ptr + here, mask=here < lk, other=0)[None, :]
    t, slope = scoring.scores(
        total, rows[:, None] * of_k, i, here[None, :], lq, lk, left, right, cap, bias_base, bias_strides, mask_base,
        mask_strides, q_segment, k_segment, careful, LEFT, RIGHT, SOFTCAP, BIAS, MASK, SEGMENTS, PARTIAL,
    )  # fmt: skip
    p = probabilities(t, level[:, None], careful)
    keep = here
    if DROPOUT:
        keep = masks.kept(first, column, number, seed_low, seed_high, threshold, BM, HALF)
    total = integers.exact(do_high, do_low, v_rows.load([slot + column, 0]).T, v_rows.load([slot + column, BDV]).T)
    g = total.to(tl.float32) * (of_do[:, None] * tl.load(numbers_ptr + count + here)[None, :])
    s = gradient(p, g, delta[:, None], slope, keep, SOFTCAP, DROPOUT)
    return _visible(s * of_k, t, raw[:, None], careful, PARTIAL or MASK or SEGMENTS)


@triton.jit
def _query_steps(
    dq, bad, q_high, q_low, do_high, do_low, k_rows, v_rows, k_columns, numbers_ptr, worst_ptr, count, rows, of_do,
    level, raw, delta, worst, reach, slot, first, begin, end, lq, lk, left, right, cap, bias_base, bias_strides,
    mask_base, mask_strides, q_segment, k_segments_ptr, number, seed_low, seed_high, threshold,
    BD: tl.constexpr, BDV: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, MASK: tl.constexpr, SEGMENTS: tl.constexpr, DROPOUT: tl.constexpr, PARTIAL: tl.constexpr,
    BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i = (first + tl.arange(0, BM))[:, None]
    for n in tl.range(begin, end, num_stages=STAGES):
        column = n * BLOCK
        careful = scoring.is_careful(worst, tl.load(worst_ptr + n), reach)
        if SOFTCAP or BIAS:
            careful = True
        left_half = _key_half(
            q_high, q_low, do_high, do_low, k_rows, v_rows, numbers_ptr, count, rows, of_do, level, raw, delta, column,
            slot, i, lq, lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides, q_segment,
            k_segments_ptr, first, number, seed_low, seed_high, threshold, careful, BD, BDV, LEFT, RIGHT, SOFTCAP,
            BIAS, MASK, SEGMENTS, DROPOUT, PARTIAL, BM,
        )  # fmt: skip
        right_half = _key_half(
            q_high, q_low, do_high, do_low, k_rows, v_rows, numbers_ptr, count, rows, of_do, level, raw, delta,
            column + HALF, slot, i, lq, lk, left, right, cap, bias_base, bias_strides, mask_base, mask_strides,
            q_segment, k_segments_ptr, first, number, seed_low, seed_high, threshold, careful, BD, BDV, LEFT, RIGHT,
            SOFTCAP, BIAS, MASK, SEGMENTS, DROPOUT, PARTIAL, BM,
        )  # fmt: skip
        high, low, exponent, wrong = integers.weights(left_half, right_half, BM)
        bad |= wrong.to(tl.int32)
        y = integers.exact(high, low, k_columns.load([0, slot + column]).T, k_columns.load([BD, slot + column]).T)
        dq = tl.fma(y.to(tl.float32), integers.power(exponent - 20)[:, None], dq)
    return dq, bad


@triton.jit(do_not_specialize=["seed_low", "seed_high"])
def order_free_backward_queries(
    q_digits_ptr, k_digits_ptr, q_numbers_ptr, k_numbers_ptr, dq_ptr, bias_ptr, mask_ptr, q_segments_ptr,
    k_segments_ptr, q_starts_ptr, k_starts_ptr, seed_low, seed_high,
    tiles, batch, heads, group, lq, lk, q_pitch, k_pitch, sequences, together, dq_strides, bias_strides, mask_strides,
    left, right, factor, cap, reach, threshold, scale, kept,
    D: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, LOWER_RIGHT: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, MASK: tl.constexpr, SEGMENTS: tl.constexpr,
    PACKED: tl.constexpr, DROPOUT: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of dq; arguments as in `order_free_forward`."""
    tile, h, z = masks.place(tiles, heads, batch, together, RIGHT)
    q_tokens, k_tokens = wide_int(lq), wide_int(lk)
    all_q, all_k = lq, lk
    z, zb, tile, q_first, lq, _, lk = masks.locate(
        q_starts_ptr, k_starts_ptr, z, tile, lq, lk, sequences, BM, PACKED
    )  # fmt: skip
    first = tile * BM
    if first >= lq:
        return
    if LOWER_RIGHT:
        left += lk - lq
        right += lk - lq
    hq, kv_heads = h.to(tl.int64), heads // group
    q_slot, slot = first, tile * 0
    if PACKED:
        q_slot += masks.slot_of_sequence(q_starts_ptr, z, all_q).to(tl.int32)
        slot = masks.slot_of_sequence(k_starts_ptr, z, all_k).to(tl.int32)
    q_at, k_at = (zb * heads + hq) * q_pitch, (zb * kv_heads + h // group) * k_pitch
    each, count = wide_int(q_pitch) * heads * batch, wide_int(k_pitch) * kv_heads * batch
    do_at, v_at = each * (4 * BD) + q_at * (2 * BDV), count * (4 * BD) + k_at * (2 * BDV)
    q_rows = masks.tile_rows(q_digits_ptr, q_at * (2 * BD), q_pitch, 2 * BD, 2 * BD, BM, BD)
    do_rows = masks.tile_rows(q_digits_ptr, do_at, q_pitch, 2 * BDV, 2 * BDV, BM, BDV)
    k_rows = masks.tile_rows(k_digits_ptr, k_at * (2 * BD), k_pitch, 2 * BD, 2 * BD, HALF, BD)
    v_rows = masks.tile_rows(k_digits_ptr, v_at, k_pitch, 2 * BDV, 2 * BDV, HALF, BDV)
    k_columns = _columns(k_digits_ptr, (count + k_at) * (2 * BD), k_pitch, BD)
    q_high, q_low = q_rows.load([q_slot, 0]), q_rows.load([q_slot, BD])
    do_high, do_low = do_rows.load([q_slot, 0]), do_rows.load([q_slot, BDV])
    numbers = q_numbers_ptr + q_at + q_slot + tl.arange(0, BM)
    level, delta, raw = tl.load(numbers), tl.load(numbers + each), numbers + 4 * each
    rows = tl.load(numbers + 2 * each) * (factor * integers.TINY)
    of_do = tl.load(numbers + 3 * each) * (kept * integers.TINY)
    worst = tl.load(q_numbers_ptr + 5 * each + (q_at + q_slot) // BLOCK)
    bias_base = bias_ptr + zb * bias_strides[0] + hq * bias_strides[1]
    mask_base = mask_ptr + zb * mask_strides[0] + hq * mask_strides[1]
    i = first + tl.arange(0, BM)
    q_segment = i[:, None]
    if SEGMENTS:
        q_segment = tl.load(q_segments_ptr + zb * q_tokens + i, mask=i < lq, other=0)[:, None]
    dq, bad = tl.zeros((BM, BD), tl.float32), tl.zeros((BM,), tl.int32)
    edges = masks.other_tiles(first, lk, left, right, BM, BLOCK, LEFT, RIGHT)
    for part in tl.static_range(3):
        if LEFT or part > 0:
            dq, bad = _query_steps(
                dq, bad, q_high, q_low, do_high, do_low, k_rows, v_rows, k_columns, k_numbers_ptr + k_at + slot,
                k_numbers_ptr + 2 * count + (k_at + slot) // BLOCK, count, rows, of_do, level, raw, delta, worst,
                reach, slot, first, edges[part], edges[part + 1], lq, lk, left, right, cap, bias_base, bias_strides,
                mask_base, mask_strides, q_segment, k_segments_ptr + zb * k_tokens, z * heads + h, seed_low, seed_high,
                threshold, BD, BDV, LEFT, RIGHT, SOFTCAP, BIAS, MASK, SEGMENTS, DROPOUT, part != 1, BM, STAGES,
            )  # fmt: skip
    if PACKED:
        scale = tl.where(z < sequences, scale, 0.0)  # rows behind the last sequence are +0 for any scale
    dq = tl.where(bad[:, None] > 0, float("nan"), dq * scale)
    dq_rows = masks.tile_rows(dq_ptr, masks.offset(zb, h, q_first, dq_strides), lq, dq_strides[2], D, BM, BD)
    dq_rows.store([first, 0], ops.narrow(dq, dq_ptr.dtype.element_ty, False))
