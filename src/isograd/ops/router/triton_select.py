# mypy: ignore-errors
# ruff: noqa: N803, RET505
# A branch on a constant that returns needs its else: Triton compiles what follows a lone return as well.
"""Pieces of the router's Triton kernels: a token's scores, the largest of them, sums over the chosen ones.

A tile has the shape [q, rows, p, v] of `softmax/triton_rows.py`: the experts of a token over q threads, p accesses of
each, v experts of an access. What concerns the chosen experts alone has the shape [lanes, rows].
"""

import triton
import triton.language as tl

from isograd.numerics import triton_ops as ops
from isograd.numerics import triton_sum as sums
from isograd.numerics import triton_terms as terms
from isograd.rows import triton_rows as rows

LOWEST_32, LOWEST_64 = tl.constexpr(-0x80000000), tl.constexpr(-0x8000000000000000)
_FAR = tl.constexpr(0x7FFFFFFF)
_MAGIC_BITS_32 = ops.MAGIC_BITS_32
_DOWN_64 = tl.constexpr(2.0**-512)


@triton.jit
def broad(v):
    """A value a row as a tile."""
    return v[None, :, None, None]


@triton.jit
def columns(BLOCK: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr):
    """[q, 1, p, v] int32 indices of experts; GROUP of them belong to a thread."""
    q = tl.arange(0, BLOCK // GROUP)[:, None, None] * V
    p = tl.arange(0, GROUP // V)[None, :, None] * (BLOCK // GROUP * V)
    return (p + q + tl.arange(0, V)[None, None, :])[:, None, :, :]


@triton.jit
def row_max(v):
    """Integer maximum over the experts of each row."""
    return tl.max(tl.max(tl.max(v, axis=3), axis=2), axis=0)


@triton.jit
def row_min(v):
    """Integer minimum over the experts of each row."""
    return tl.min(tl.min(tl.min(v, axis=3), axis=2), axis=0)


@triton.jit
def lowest_like(key):
    """A key below every other."""
    if key.dtype == tl.int64:
        return tl.full(key.shape, LOWEST_64, tl.int64)
    else:
        return tl.full(key.shape, LOWEST_32, tl.int32)


@triton.jit
def selection_key(x):
    """Keys in the order of top_k: adding +0 makes the zeros equal."""
    return ops.max_key(x + 0.0)


# --- scores ----------------------------------------------------------------------------------------------------------
@triton.jit
def sigmoid(x):
    """The logistic function."""
    z = ops.exp(tl.where(x < 0.0, x, ops.negate(x)))
    return ops.divide(tl.where(x < 0.0, z, 1.0), 1.0 + z)


@triton.jit
def exponentials(x, NATIVE: tl.constexpr):
    """The exponentials of a tile, and what the softmax of its rows needs besides them.

    (e, error, m, valid, base, floor, bias, hi, lo): the scaled exponentials and their rounding errors; the rows'
    maxima, whether they are finite and what follows from them; the exact sums, for binary32 in lo alone.
    """
    key = tl.max(ops.max_key(rows.thread_maximum(x)), axis=0)
    m = ops.from_key(key)
    base, floor, bias = rows.row_shift(m, False)
    e, error = rows.exponential(x, broad(base), broad(floor), broad(bias), False)
    high, low = rows.exponential_terms(e, error, False, False, NATIVE)
    if x.dtype == tl.float64:
        high, low = rows.exponential_sums(high, low, False, False)
        hi, lo = rows.wide_sum(high, low, tl.float64)
    elif x.shape[0] * x.shape[2] * x.shape[3] <= 256:
        # Sums of 256 limbs fit 32 bits, which a warp adds up in one instruction.
        count: tl.constexpr = x.shape[2] * x.shape[3]
        surplus: tl.constexpr = (count * _MAGIC_BITS_32 + 2**31) % 2**32 - 2**31
        low_surplus: tl.constexpr = (2 * count * _MAGIC_BITS_32 + 2**31) % 2**32 - 2**31
        high = tl.sum(rows.thread_sum(high) - surplus, axis=0)
        low = tl.sum(rows.thread_sum(low) - low_surplus, axis=0)
        lo = (high.to(tl.int64) << 23) + low.to(tl.int64)
        hi = lo
    else:
        high, low = rows.exponential_sums(high, low, False, False)
        lo = rows.narrow_sum(high, low)
        hi = lo
    return e, error, m, ops.is_finite(m), base, floor, bias, hi, lo


@triton.jit
def factors(hi, lo, valid, dtype: tl.constexpr):
    """1 / sum of the exponentials of rows as a pair, NaN where a row has no finite maximum."""
    return rows.softmax_factors(hi, lo, valid, False, False, dtype == tl.float64, dtype)


@triton.jit
def quotients(e, error, x, m, r, r_low):
    """Softmax from exponentials; the row's largest carry their rounding error. m and r_low broadcast to the others."""
    low = e * r_low
    y = tl.fma(e, r, tl.where(x == m, tl.fma(error, r, low), low))
    if x.dtype == tl.float64:
        y *= _DOWN_64
    return y


@triton.jit
def scores(x, SOFTMAX: tl.constexpr, NATIVE: tl.constexpr):
    """The scores of a tile; padding is -inf."""
    if SOFTMAX:
        e, error, m, valid, _, _, _, hi, lo = exponentials(x, NATIVE)
        r, r_low = factors(hi, lo, valid, x.dtype)
        return quotients(e, error, x, broad(m), tl.zeros_like(x) + broad(r), broad(r_low))
    else:
        return sigmoid(x)


# --- the largest, in any case ----------------------------------------------------------------------------------------
@triton.jit
def pop(key, column):
    """(the largest key of each row, its lowest column, the keys without it)."""
    best = row_max(key)
    at = row_min(tl.where(key == broad(best), column, _FAR))
    return best, at, tl.where(column == broad(at), lowest_like(key), key)


@triton.jit
def group_keys(key, column, size, GROUPS: tl.constexpr, groups):
    """[GROUPS, rows] keys of the groups' scores: the sum of the two largest of `size` neighbours."""
    g = tl.arange(0, GROUPS)[:, None]
    found = tl.zeros((GROUPS, key.shape[1]), key.dtype)
    found = lowest_like(found)
    for i in range(groups):
        inside = tl.where(column // size == i, key, lowest_like(key))
        best, _, rest = pop(inside, column)
        if size > 1:
            best = selection_key(ops.from_key(best) + ops.from_key(row_max(rest)))
        found = tl.where(g == i, best[None, :], found)
    return found


@triton.jit
def mask_groups(key, column, size, groups, group_k, GROUPS: tl.constexpr):
    """Keys with those of all but the best groups set below every other."""
    found = group_keys(key, column, size, GROUPS, groups)
    g = tl.arange(0, GROUPS)[:, None]
    kept = tl.zeros(key.shape, tl.int32)
    for _ in range(group_k):
        best = tl.max(found, axis=0)
        at = tl.min(tl.where(found == best[None, :], g, _FAR), axis=0)
        found = tl.where(g == at[None, :], lowest_like(found), found)
        kept = tl.where(column // size == broad(at), 1, kept)
    return tl.where(kept > 0, key, lowest_like(key))


@triton.jit
def select(key, column, bits, k, K: tl.constexpr):
    """[K, rows] (integers of `bits` at the k largest keys, their columns), the largest key first."""
    lane = tl.arange(0, K)[:, None]
    found = tl.zeros((K, key.shape[1]), bits.dtype)
    where = tl.zeros((K, key.shape[1]), tl.int32)
    for i in range(k):
        _, at, key = pop(key, column)
        value = row_max(tl.where(column == broad(at), bits, lowest_like(bits)))
        found = tl.where(lane == i, value[None, :], found)
        where = tl.where(lane == i, at[None, :], where)
    return found, where


# --- the largest of binary32 scores, one a lane ----------------------------------------------------------------------
@triton.jit
def _two_largest(a, b, c, d):
    """The two largest of two pairs, each with the larger one first."""
    return tl.maximum(a, c), tl.maximum(tl.minimum(a, c), tl.maximum(b, d))


@triton.jit
def best_groups(key, column, SIZE: tl.constexpr, GROUPS: tl.constexpr, GROUP_K: tl.constexpr):
    """`mask_groups` for at most as many groups as a row has lanes, and at most 32."""
    group = column // SIZE
    lane = tl.arange(0, key.shape[0])[:, None]
    found = lowest_like(tl.zeros((key.shape[0], key.shape[1]), tl.int32))
    for i in range(GROUPS):
        inside = tl.where(group == i, key, LOWEST_32)
        best, second = tl.reduce((inside, lowest_like(inside)), 3, _two_largest)
        best, second = tl.reduce((best, second), 2, _two_largest)
        best, second = tl.reduce((best, second), 0, _two_largest)
        if SIZE > 1:
            best = selection_key(ops.from_key(best) + ops.from_key(second))
        found = tl.where(lane == i, best[None, :], found)
    kept = tl.zeros((key.shape[1],), tl.int32)
    for _ in range(GROUP_K):
        best = tl.max(found, axis=0)
        at = tl.min(tl.where(found == best[None, :], lane, _FAR), axis=0)
        found = tl.where(lane == at[None, :], LOWEST_32, found)
        kept |= 1 << at
    return tl.where(((broad(kept) >> group) & 1) > 0, key, LOWEST_32)


@triton.jit
def select_lanes(key, column, K: tl.constexpr):
    """[q, rows] columns of the K largest int32 keys, the largest first, in the lanes below K; of equal ones the first.

    A key above its column, counted down, is one integer, unlike any other's.
    """
    packed = (key.to(tl.int64) << 32) | (_FAR - column).to(tl.int64)
    lane = tl.arange(0, key.shape[0])[:, None]
    found = tl.zeros((key.shape[0], key.shape[1]), tl.int64)
    for i in range(K):
        best = row_max(packed)
        packed = tl.where(packed == broad(best), LOWEST_64, packed)
        found = tl.where(lane == i, best[None, :], found)
    return _FAR - found.to(tl.int32)


# --- the largest of well-separated float32 rows ----------------------------------------------------------------------
@triton.jit
def _order(a, b):
    return tl.maximum(a, b), tl.minimum(a, b)


@triton.jit
def _sort4(a, b, c, d):
    a, b = _order(a, b)
    c, d = _order(c, d)
    a, c = _order(a, c)
    b, d = _order(b, d)
    b, c = _order(b, c)
    return a, b, c, d


@triton.jit
def _merge4(a, b, c, d, e, f, g, h):
    """The four largest of two descending fours, descending."""
    a, b = tl.maximum(a, h), tl.maximum(b, g)
    c, d = tl.maximum(c, f), tl.maximum(d, e)
    a, c = _order(a, c)
    b, d = _order(b, d)
    a, b = _order(a, b)
    c, d = _order(c, d)
    return a, b, c, d


@triton.jit
def heads(packed):
    """The four largest integers that every thread holds of each row, descending; a thread has a multiple of four."""
    q: tl.constexpr = packed.shape[0]
    r: tl.constexpr = packed.shape[1]
    p: tl.constexpr = packed.shape[2] * packed.shape[3] // 4
    even, odd = tl.split(tl.reshape(packed, (q, r, p, 2, 2)))
    a, b = tl.split(even)
    c, d = tl.split(odd)
    a, b, c, d = _sort4(a, b, c, d)
    if p == 1:
        return tl.reshape(a, (q, r)), tl.reshape(b, (q, r)), tl.reshape(c, (q, r)), tl.reshape(d, (q, r))
    else:
        return tl.reduce((a, b, c, d), 2, _merge4)


@triton.jit
def pack(x, column, LOW: tl.constexpr):
    """The leading bits of a float32's key above its column, counted down: unlike, and ordered but for the bits cut."""
    b = ops.as_int(x)
    key = b ^ ((b >> 31) & 0x7FFFFFFF)
    low: tl.constexpr = (1 << LOW) - 1
    return (key & ~low) | (low - column)


@triton.jit
def unpack_column(packed, LOW: tl.constexpr):
    """The column that `pack` has put in."""
    low: tl.constexpr = (1 << LOW) - 1
    return low - (packed & low)


@triton.jit
def select_separated(packed, K: tl.constexpr, LOW: tl.constexpr, EXACT: tl.constexpr):
    """The K + 1 largest packed integers of each row, and doubts about their order.

    ([q, rows] the largest in the lanes in order, [rows] the last of them, rows whose logits do not tell their order,
    rows in which a thread may have had more of them than it gave).

    The order of logits is that of their softmax where neighbours are at least 2^-18 apart, which is far more than the
    softmax's error. Where a logit is known from its leading bits (EXACT), equal ones are in order as well.
    """
    a, b, c, d = heads(packed)
    lane = tl.arange(0, packed.shape[0])[:, None]
    found = tl.zeros(a.shape, tl.int32)
    for i in tl.static_range(K):
        best = tl.max(a, axis=0)[None, :]
        won = a == best
        found = tl.where(lane == i, best, found)
        a, b, c, d = tl.where(won, b, a), tl.where(won, c, b), tl.where(won, d, c), tl.where(won, LOWEST_32, d)
    last = tl.max(a, axis=0)
    found = tl.where(lane == K, last[None, :], found)
    following = tl.where(lane < K, lane + 1, 0) + tl.zeros_like(found)
    after = tl.gather(found, following, 0)
    low: tl.constexpr = (1 << LOW) - 1
    apart = (ops.from_key(found & ~low) - ops.from_key(after | low)) >= 0.000003814697265625
    if EXACT:
        apart = apart | (((found ^ after) & ~low) == 0)
    close = ((lane < K) & (apart == 0)).to(tl.int32)
    return found, last, tl.max(close, axis=0), tl.max((a == LOWEST_32).to(tl.int32), axis=0)


@triton.jit
def count_from(packed, last):
    """How many of each row's packed integers are not below `last`."""
    reached = (packed >= broad(last)).to(tl.int32)
    return tl.sum(tl.sum(tl.sum(reached, axis=3), axis=2), axis=0)


# --- sums over the chosen --------------------------------------------------------------------------------------------
@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def lane_sum(p):
    """The order-free sum over the first axis of a tile of two, which stays with size 1."""
    key = tl.max(terms.term_key(p), axis=0)
    exponent, scale, magic, low_scale = sums.term_scale(key)
    if p.dtype == tl.float32 and p.shape[0] <= 256:
        # Sums of 256 limbs fit 32 bits, which a warp adds up in one instruction.
        high, low = sums.split_term_bits(p, scale[None, :], magic[None, :], low_scale[None, :])
        high = tl.sum(high - ops.as_int(magic)[None, :], axis=0)
        a = (high.to(tl.int64) << 23) + tl.sum(low - _MAGIC_BITS_32, axis=0).to(tl.int64)
        b = a
    else:
        a, b = terms.term_parts(p, scale[None, :], magic[None, :], low_scale[None, :])
        a, b = tl.sum(a, axis=0), tl.sum(b, axis=0)
    mark = tl.reduce(terms.mark_of(terms.special_terms(p)).to(tl.int32), 0, _either)
    special = tl.where(mark == 1, float("inf"), tl.where(mark == 2, float("-inf"), float("nan")))
    return terms.sum_of_parts(a, b, exponent, special.to(p.dtype), key)[None, :]


@triton.jit
def renormalized(w):
    """(weights divided by their sum over the first axis, the sum); 0 where it is 0. Padding is 0."""
    total = lane_sum(w)
    return tl.where(total == 0.0, 0.0, ops.divide(w, tl.zeros_like(w) + total)), total


@triton.jit
def renormalized_gradient(g, w):
    """The gradient of weights from that of the renormalized ones; padding is 0 in both."""
    t, total = renormalized(w)
    rest = g - lane_sum(g * t)
    return tl.where(total == 0.0, 0.0, ops.divide(rest, tl.zeros_like(w) + total))
