# mypy: ignore-errors
# ruff: noqa: N803
"""What the backward pass of attention needs of every row beforehand, and dQ from integers afterwards.

The fixed point. A kernel over tiles of keys may add its parts of dQ as int32, whose sums have no order. The element d
of row i of dQ / scale is the sum over j of dS_ij K_jd. With sum_j P_ij = 1, |dP_ij| <= |dO_i| |V_j| and
|D_i| <= |dO_i| max_j |V_j| (+ |dlse_i|; Euclidean norms of rows; 1 / (1 - p) times all of it with dropout) the sum over
any set of keys is at most

    R_i c_d,  R_i = 2 |dO_i| max_j |V_j| / (1 - p) + |dlse_i|,  c_d = max_j |K_jd|

where j runs over the keys of the row's own sequence and head. With the least e_i >= -96 and f_d >= -126 such that
2^e_i >= R_i and 2^f_d >= c_d the integer is rint(x 2^(30 - e_i - f_d)). A tile's part, and the sum of all of them, is
at most 2^30 in magnitude but for the rounding of P and dS, which is less than 1 part in 50, and for the halves that
rint adds: both stay below 2^31, and sums that wrap around on the way do no harm. Each of t tiles of keys is off by at
most half a quantum, so that dQ is off by at most t / 2 * scale * 2^(e_i + f_d - 30), about its root for errors that are
independent. Where R_i, c_d or lse_i is not finite the row is marked, and its dQ is NaN whatever the integers say:
nothing else reads them.
"""

import triton
import triton.language as tl

from isograd.flash_attention import triton_masks as masks
from isograd.numerics import triton_memory as memory
from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms

_LARGEST = tl.constexpr(0x7E800000)  # the bits of 2**126
_LEAST_ROW = tl.constexpr(-96)  # of the exponents of rows, so that a quantum is a normal number


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def row_sums(o, do):
    """Order-free sums of the products in each row of two tiles (rule 4)."""
    p = o.to(tl.float32) * do.to(tl.float32)
    key = tl.reduce(terms.term_key(p), 1, _maximum)
    exponent, scale, magic, low_scale = sums.term_scale(key)
    parts, _ = terms.term_parts(p, scale[:, None], magic[:, None], low_scale[:, None])
    special = tl.sum(terms.special_terms(p), 1)
    total = tl.sum(parts, 1)
    return terms.sum_of_parts(total, total, exponent, special, key)


@triton.jit
def exponent_above(bits, least: tl.constexpr):
    """The least e >= `least` with 2**e >= the magnitude whose bits these are; at most 126."""
    e = ((bits + 0x7FFFFF) >> 23) - 127
    return tl.minimum(tl.maximum(e, least), 126)


@triton.jit
def norms(x):
    """Euclidean norms of rows, at most 1 part in 1000 too large and never too small; NaN or infinite if they are."""
    largest = tl.reduce(ops.magnitude_key(x.to(tl.float32)), 1, _maximum)
    e = tl.minimum(tl.maximum((largest >> 23) - 127, -126), 126)
    y = x.to(tl.float32) * ops.pow2_32(-e)[:, None]
    return tl.sqrt(tl.sum(y * y, 1)) * 1.0005 * ops.pow2_32(e)


@triton.jit
def load_rows(ptr, at, i, inside, stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """A tile of rows of WIDTH elements, zero where a row is not inside and beyond its end."""
    d = tl.arange(0, BLOCK)
    pointers = ptr + at + i.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(pointers, mask=inside[:, None] & (d < WIDTH)[None, :], other=0.0)


@triton.jit
def attention_delta(
    o_ptr, do_ptr, delta_ptr, tiles, heads, length, o_strides, do_strides, delta_strides,
    DV: tl.constexpr, BDV: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row sums of o * do with the bits of the reference; strides are (batch, head, row)."""
    pid = tl.program_id(0).to(tl.int64)
    head = pid // tiles
    i = (pid - head * tiles) * ROWS + tl.arange(0, ROWS)
    z, h = head // heads, head % heads
    inside = i < length
    o = load_rows(o_ptr, z * o_strides[0] + h * o_strides[1], i, inside, o_strides[2], DV, BDV)
    do = load_rows(do_ptr, z * do_strides[0] + h * do_strides[1], i, inside, do_strides[2], DV, BDV)
    at = delta_ptr + z * delta_strides[0] + h * delta_strides[1] + i * delta_strides[2]
    tl.store(at, ops.narrow(row_sums(o, do), tl.float32, False), mask=inside)


@triton.jit
def attention_bounds(
    k_ptr, v_ptr, bounds_ptr, k_starts_ptr, tiles, heads, lk, sequences, k_strides, v_strides,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Bounds of the keys of every sequence and head: bits of max |K_jd| for each d, then of max |V_j|, from zeros."""
    pid = tl.program_id(0)
    head = pid // tiles
    tile = pid - head * tiles
    z, h = head // heads, head % heads
    first = tile * 0
    if PACKED:
        z, tile = masks.find_sequence(k_starts_ptr, sequences, lk, tile, ROWS)
        first, lk = masks.rows_of_sequence(k_starts_ptr, z, sequences, lk)
    i = tile * ROWS + tl.arange(0, ROWS)
    if tile * ROWS >= lk:
        return
    inside, first = i < lk, first.to(tl.int64)
    zb = (tile * 0 if PACKED else z).to(tl.int64)
    k_at = zb * k_strides[0] + h.to(tl.int64) * k_strides[1] + first * k_strides[2]
    v_at = zb * v_strides[0] + h.to(tl.int64) * v_strides[1] + first * v_strides[2]
    k = load_rows(k_ptr, k_at, i, inside, k_strides[2], D, BD)
    v = load_rows(v_ptr, v_at, i, inside, v_strides[2], DV, BDV)
    to = bounds_ptr + (z.to(tl.int64) * heads + h) * (BD + 1)
    columns = tl.reduce(ops.magnitude_key(k.to(tl.float32)), 0, _maximum)
    tl.atomic_max(to + tl.arange(0, BD), columns, sem="relaxed")
    tl.atomic_max(to + BD, tl.max(ops.magnitude_key(norms(v)), 0), sem="relaxed")


@triton.jit(do_not_specialize=["lq"])
def attention_rows(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, bounds_ptr, rows_ptr, fixed_ptr, q_starts_ptr, batch, heads, group, lq, pitch,
    sequences, o_strides, do_strides, inverse,
    D: tl.constexpr, DV: tl.constexpr, BD: tl.constexpr, BDV: tl.constexpr, DLSE: tl.constexpr, FIXED: tl.constexpr,
    EXACT: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows [2 or 3, B, H, pitch]: lse in base 2, +inf where no key is visible or no row is; D; a third number.

    With FIXED that is 2**(30 - e_i), NaN where marked, and the integers of dq [B, H, L, D] become 0; with EXACT it is
    what rounding has left of the first. A sequence's rows start at a multiple of masks.PAD, see
    `masks.slot_of_sequence`; what lies between belongs to no row.
    """
    pid = tl.program_id(0)
    head = pid // (pitch // ROWS)
    slot = (pid - head * (pitch // ROWS)) * ROWS
    z, h = head // heads, head % heads
    zb = z.to(tl.int64)
    first, row = slot * 0, slot
    count = memory.wide_int(batch) * heads * pitch
    tokens = lq
    if PACKED:
        z, block = masks.find_sequence(q_starts_ptr, sequences, lq, slot // masks.PAD, masks.PAD)
        first, lq = masks.rows_of_sequence(q_starts_ptr, z, sequences, lq)
        row = block * masks.PAD + slot % masks.PAD
    i = row + tl.arange(0, ROWS)
    wide = first.to(tl.int64)
    if FIXED:
        d = tl.arange(0, BD)
        at = fixed_ptr + ((zb * heads + h) * tokens + wide + i)[:, None] * D + d[None, :]
        tl.store(at, tl.zeros((ROWS, BD), tl.int32), mask=(i < lq)[:, None] & (d < D)[None, :])
    if PACKED:
        lq = tl.where(z < sequences, lq, 0)  # tokens behind the last sequence add nothing to a sum
    inside = i < lq
    o_at = zb * o_strides[0] + h.to(tl.int64) * o_strides[1] + wide * o_strides[2]
    do_at = zb * do_strides[0] + h.to(tl.int64) * do_strides[1] + wide * do_strides[2]
    do = load_rows(do_ptr, do_at, i, inside, do_strides[2], DV, BDV)
    delta = row_sums(load_rows(o_ptr, o_at, i, inside, o_strides[2], DV, BDV), do)
    lse_at = (zb * heads + h) * tokens + wide + i
    lse = tl.load(lse_ptr + lse_at, mask=inside, other=float("-inf"))
    if DLSE:
        # Rows that see nothing have no gradient: probabilities of 0 times an infinity would not be 0.
        dlse = tl.where(lse == float("-inf"), 0.0, tl.load(dlse_ptr + lse_at, mask=inside, other=0.0))
        delta = delta - dlse
    lse2 = tl.where(lse == float("-inf"), float("inf"), lse * masks.LOG2E)
    to = rows_ptr + (zb * heads + h) * pitch + slot + tl.arange(0, ROWS)
    tl.store(to, lse2)
    tl.store(to + count, delta)
    if EXACT:
        rest = tl.fma(lse, masks.LOG2E_LOW, tl.fma(lse, masks.LOG2E, -lse2))
        tl.store(to + 2 * count, tl.where(tl.abs(lse2) < float("inf"), rest, 0.0))
    if FIXED:
        bounds = bounds_ptr + (z.to(tl.int64) * (heads // group) + h // group) * (BD + 1)
        columns = tl.max(tl.load(bounds + tl.arange(0, BD)), 0)
        bound = norms(do) * (ops.as_float(tl.load(bounds + BD)) * inverse) * 2.0
        if DLSE:
            bound = bound + tl.abs(dlse)
        bits = ops.magnitude_key(bound * 1.0005)
        good = (bits <= _LARGEST) & (columns <= _LARGEST) & (lse < float("inf")) | (i >= lq)  # no row: dq is 0
        factor = ops.pow2_32(30 - exponent_above(bits, _LEAST_ROW))
        tl.store(to + 2 * count, tl.where(good, factor, float("nan")))


@triton.jit
def fixed_to_float(
    fixed_ptr, rows_ptr, bounds_ptr, dq_ptr, q_starts_ptr, tiles, batch, heads, group, lq, pitch, sequences, dq_strides,
    scale,
    D: tl.constexpr, BD: tl.constexpr, PACKED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Fill dq from its integers [B, H, L, D] and what `attention_bounds` and `attention_rows` have said."""
    pid = tl.program_id(0)
    head = pid // tiles
    tile = pid - head * tiles
    z, h = head // heads, head % heads
    first, slot = tile * 0, tile * 0
    tokens = lq
    if PACKED:
        z, tile = masks.find_sequence(q_starts_ptr, sequences, lq, tile, ROWS)
        slot = masks.slot_of_sequence(q_starts_ptr, z, lq)
        first, lq = masks.rows_of_sequence(q_starts_ptr, z, sequences, lq)
    i = tile * ROWS + tl.arange(0, ROWS)
    if tile * ROWS >= lq:
        return
    inside, wide = i < lq, first.to(tl.int64)
    zb = (tile * 0 if PACKED else z).to(tl.int64)
    at = (zb * heads + h) * tokens + wide
    fixed = load_rows(fixed_ptr, at * D, i, inside, D, D, BD)
    factor_at = (zb * heads + h + 2 * memory.wide_int(batch) * heads) * pitch + slot + i
    factor = tl.load(rows_ptr + factor_at, mask=inside, other=1.0)
    quantum = tl.where(factor == factor, ops.as_float(0x7F000000 - ops.as_int(factor)), factor)  # 1 / 2**x
    d = tl.arange(0, BD)
    bounds = bounds_ptr + (z.to(tl.int64) * (heads // group) + h // group) * (BD + 1) + d
    column = ops.pow2_32(exponent_above(tl.load(bounds), -126))
    dq = (fixed.to(tl.float32) * quantum[:, None]) * column[None, :] * scale
    dq_at = zb * dq_strides[0] + h.to(tl.int64) * dq_strides[1] + wide * dq_strides[2]
    pointers = dq_ptr + dq_at + i.to(tl.int64)[:, None] * dq_strides[2] + d[None, :]
    dq = ops.narrow(dq, dq_ptr.dtype.element_ty, False)
    tl.store(pointers, dq, mask=inside[:, None] & (d < D)[None, :])
