"""Order-free attention in NumPy: rule 23 of `docs/arithmetic.md`, whose bits every kernel named `order_free` returns.

Rows of q, k, v and do become integers of 16 bits with a power of two as their scale (rule 10). Scores and do · v are
exact sums of their products. The probabilities of a block of 128 keys, or of 128 queries, times the scale of the rows
that they weigh, become such integers as well: so what they weigh need not be cut a second time. Exact within a block,
blocks in ascending order by one fma each; neither tiles nor threads nor other rows leave a trace.
"""

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.flash_attention import reference as dense
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.reference import NO_INPUTS, AttentionGradients, Inputs
from isograd.numerics import constants as c
from isograd.numerics import int16
from isograd.numerics import reference as ref
from isograd.runtime.fenv import default_environment

Floats = NDArray[Any]
_F = np.float32

BLOCK: Final = 128  # keys, and queries, of a block
REACH: Final = 2.0**21  # scores, in powers of two, are held within it
MARGIN: Final = 2.0**-6  # what keeps every exponential below a power of two
HIGH: Final = 64.0  # probabilities, whatever lse is given, are held at 2^HIGH
NO_ROW: Final = -float(1 << 14)  # stands for the exponent of a row of v that is zero
LEAST: Final = -110  # the least exponent of weights: 2^(15 - LEAST) is a normal number
TINY: Final = 2.0**-18  # what scales of two rows, 2^(E - 2) 2^(F - 2), leave to 2^(E + F - 22)


class Rows(NamedTuple):
    """The integers of rows [L, D], 2^(E - 2) in binary32 (0: no exponent), exponents E and which rows are finite."""

    integers: Floats
    scale: Floats
    exponent: Any
    finite: Any


def cut(x: Floats) -> Rows:
    """The rows of a matrix as integers."""
    integers, exponent = int16.rounded(x, None, -1)
    some = (integers != 0).any(axis=-1)
    scale = np.where(some, np.ldexp(1.0, exponent[:, 0] - 2), 0).astype(_F)
    return Rows(integers, scale, np.where(some, exponent[:, 0], NO_ROW), np.isfinite(x).all(axis=-1))


def exact(a: Floats, b: Floats) -> Floats:
    """RN(⌊(Σ + 128) / 256⌋) of the product of integers, in binary32."""
    return np.asarray(((int16.exact_sums(a, b) + 128) >> 8).astype(_F))


def power(x: Any) -> Floats:
    """2^x in binary32: subnormal below -126, zero below -149."""
    return np.asarray(np.ldexp(1.0, np.maximum(x, -300).astype(np.int64)).astype(_F))


def _polynomial(f: Floats) -> Floats:
    c0, c1, c2, c3 = (_F(x) for x in c.EXP2_POLY_SHORT)
    return ref.fma(ref.fma(ref.fma(c3, f, c2), f, c1), f, c0)


def exp2_parts(t: Any) -> tuple[Floats, Any]:
    """2^t = m 2^k with k = rint(t) and the shorter polynomial, for |t| below 2^22."""
    k = (t + _F(c.MAGIC_32)) - _F(c.MAGIC_32)
    f = t - k
    return ref.fma(_polynomial(f), f, _F(1)), k.astype(np.int64)


class Numbers(NamedTuple):
    """The numbers of a problem in binary32: factors of scores, and of the results."""

    factor: Any  # of a score's integer: scale · log2 e, or scale / softcap
    cap: Any  # softcap · log2 e; 0 without
    kept: Any  # 1 / (1 - p)
    scale: Any


def numbers_of(options: AttentionOptions) -> Numbers:
    """Each by one operation of binary64 and a rounding to binary32."""
    scale = options.scale or 0.0
    with default_environment(), np.errstate(all="ignore"):
        factor = np.float64(scale) / options.softcap if options.softcap else np.float64(scale) * c.LOG2E_64
        return Numbers(_F(factor), _F(options.softcap * c.LOG2E_64), _F(options.dropout_factor), _F(scale))


class Problem(NamedTuple):
    """One head of one sequence: its rows, what is visible and kept [Lq, Lk], and terms of a bias."""

    q: Rows
    k: Rows
    v: Rows
    seen: Any
    keep: Any
    bias: Any
    numbers: Numbers

    def scores(self) -> tuple[Floats, Any, Floats]:
        """(t, visible, slope) [Lq, Lk]: base-2 scores, held; NaN stands for +inf as well."""
        n = self.numbers
        rows = self.q.scale * (n.factor * _F(TINY))
        factors = np.where(self.q.finite, rows, _F(np.nan))[:, None] * self._key_scale()
        t = exact(self.q.integers, self.k.integers.T) * factors
        slope, seen = np.ones_like(t), self.seen
        if n.cap:
            h = ref.tanh(t)
            t, slope = h * n.cap, ref.fma(-h, h, _F(1))
        if self.bias is not None:
            bias = ref.widen(self.bias)
            t, seen = t + bias * _F(c.LOG2E_32), seen & (bias != -np.inf)
        t = np.where(t == np.inf, _F(np.nan), t)
        return np.clip(t, -_F(REACH), _F(REACH)), seen, slope

    def _key_scale(self) -> Floats:
        return np.where(self.k.finite & self.v.finite, self.k.scale, _F(np.nan))


def blocks(length: int) -> list[slice]:
    """The canonical blocks of a sequence's keys or queries."""
    return [slice(start, min(start + BLOCK, length)) for start in range(0, length, BLOCK)]


# --- forward ---------------------------------------------------------------------------------------------------------
def _above(x: Any) -> Any:
    """⌊x⌋ + 1 of x + the margin, which is rounded once; -inf stays."""
    return np.floor(x) + 1


def _sink_state(sink: Any, rows: int) -> tuple[Any, Floats]:
    """(M, l) that rows start with."""
    if sink is None or sink == -np.inf:
        return np.full(rows, -np.inf), np.zeros(rows, _F)
    if not np.isfinite(sink):
        return np.zeros(rows), np.full(rows, np.nan, _F)
    t = np.clip(_F(sink) * _F(c.LOG2E_32), -_F(REACH), _F(REACH))
    top = _above(t + _F(MARGIN))
    m, k = exp2_parts(t)
    share = np.rint(np.ldexp(np.float64(m), int(22 + k - top)))
    return np.full(rows, np.float64(top)), np.full(rows, np.ldexp(share, -22), _F)


def log_sum(top: Any, sums: Floats) -> Floats:
    """RN(M ln 2 + log l) by a pair for each."""
    high, low = ref.log_pair(sums)
    m = top.astype(_F)
    a = m * _F(c.LN2_32)
    rest = ref.fma(m, _F(c.LN2_REST_32), ref.fma(m, _F(c.LN2_32), -a))
    s, e = ref.two_sum(a, high)
    return np.asarray(s + (e + (low + rest)))


def _forward(p: Problem, sink: Any) -> tuple[Floats, Floats]:
    """(o, lse) in binary32."""
    t, seen, _ = p.scores()
    bad = (seen & np.isnan(t)).any(axis=-1)
    t = np.where(np.isnan(t), _F(0), t)
    top, sums = _sink_state(sink, len(t))
    bad |= np.isnan(sums)
    o = np.zeros((len(t), p.v.integers.shape[1]), _F)
    level = (p.v.exponent + MARGIN).astype(_F)
    for keys in blocks(t.shape[1]):
        visible, x = seen[:, keys], t[:, keys]
        some = visible.any(axis=-1)
        n = _above(np.where(visible, x + _F(MARGIN), -_F(np.inf)).max(axis=-1)).astype(np.float64)
        u = _above(np.where(visible, x + level[keys], -_F(np.inf)).max(axis=-1)).astype(np.float64)
        n, u = np.where(some, n, 0), np.where(some, u, 0)
        m, k = exp2_parts(x)
        shares = np.rint(np.ldexp(np.where(visible, m, 0).astype(np.float64), (22 + k - n[:, None]).astype(int)))
        places = (15 + k + p.v.exponent[keys] - u[:, None]).astype(int)
        weights = np.rint(np.ldexp(np.where(visible & p.keep[:, keys], m, 0).astype(np.float64), places))
        new = np.where(some, np.maximum(top, n), top)
        base = np.where(new == -np.inf, 0, new)
        fade = power(top - base)
        sums_new = ref.fma(shares.sum(axis=-1).astype(_F), power(n - 22 - base), sums * fade)
        o_new = ref.fma(exact(weights, p.v.integers[keys]), power(u - 22 - base)[:, None], o * fade[:, None])
        sums, o, top = np.where(some, sums_new, sums), np.where(some[:, None], o_new, o), new
    there = top != -np.inf
    r = (_F(1) / np.where(there, sums, _F(1))) * p.numbers.kept
    o = np.where(there[:, None], o * r[:, None], _F(0))
    lse = np.where(there, log_sum(np.where(there, top, 0), np.where(there, sums, _F(1))), -_F(np.inf))
    return np.where(bad[:, None], _F(np.nan), o), np.where(bad, _F(np.nan), lse)


# --- backward --------------------------------------------------------------------------------------------------------
class Gradients(NamedTuple):
    """What a head adds: dq [Lq, D] and the weights [Lq, Lk] of q in dk and of do in dv, with what may be NaN."""

    dq: Floats
    of_dk: Floats
    of_dv: Floats


def weigh(weights: Floats, rows: Rows, total: Floats, part: slice) -> Floats:
    """The next term of sums Σ_j w_ij x_j over a block of rows: fma(RN(T), 2^(G - 20), total)."""
    greatest = np.maximum(int16.largest_exponents(weights, -1), LEAST)
    integers = np.rint(np.ldexp(weights.astype(np.float64), (15 - greatest[:, None]).astype(int)))
    return ref.fma(exact(integers, rows.integers[part]), power(greatest - 20)[:, None], total)


def poisoned(weights: Floats, total: Floats) -> Floats:
    """NaN throughout a row where a weight is not finite."""
    whole: Any = np.isfinite(weights).all(axis=-1)
    return np.where(whole[:, None], total, _F(np.nan))


def _backward(p: Problem, do: Rows, lse: Floats, delta: Floats) -> Gradients:
    t, seen, slope = p.scores()
    present: Any = lse != -np.inf
    seen = seen & present[:, None]
    n = p.numbers
    x = t - np.where(present, lse * _F(c.LOG2E_32), 0).astype(_F)[:, None]
    low = x < _F(-126)
    m, k = exp2_parts(np.where(np.isnan(x) | low, _F(0), np.minimum(x, _F(HIGH))))
    probability = np.where(np.isnan(x), _F(np.nan), np.where(low, _F(0), np.ldexp(m, k.astype(np.int32))))
    of_do = np.where(do.finite, do.scale, _F(np.nan))
    factors = (of_do * (n.kept * _F(TINY)))[:, None] * np.where(p.v.finite, p.v.scale, _F(np.nan))
    products = exact(do.integers, p.v.integers.T) * factors
    ds = probability * (np.where(p.keep, products, _F(0)) - delta[:, None])
    ds = np.where(seen, ds * slope if n.cap else ds, _F(0))
    of_dv = np.where(seen & p.keep, probability * of_do[:, None], _F(0))
    of_dq = ds * p.k.scale
    dq = np.zeros(p.q.integers.shape, _F)
    for keys in blocks(t.shape[1]):
        dq = weigh(np.where(np.isfinite(of_dq[:, keys]), of_dq[:, keys], _F(0)), p.k, dq, keys)
    return Gradients(poisoned(of_dq, dq) * n.scale, ds * p.q.scale[:, None], of_dv)


def _add(total: Floats, weights: Floats, rows: Rows) -> Floats:
    """Add a head's queries to the sums of its keys, block by block."""
    finite = np.where(np.isfinite(weights), weights, _F(0)).T
    for queries in blocks(weights.shape[0]):
        total = weigh(finite[:, queries], rows, total, queries)
    return poisoned(weights.T, total)


# --- what kernels return ---------------------------------------------------------------------------------------------
class _Head(NamedTuple):
    """A head of a sequence in the arrays: batch, head of q, head of k, rows of q and rows of k."""

    batch: int
    head: int
    kv_head: int
    queries: slice
    keys: slice
    problem: Problem


def _heads(q: Floats, k: Floats, v: Floats, options: AttentionOptions, inputs: Inputs) -> list[_Head]:
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    numbers, found = numbers_of(options), []
    if inputs.cu_seqlens is None:
        parts = [(b, b, slice(0, q.shape[2]), slice(0, k.shape[2])) for b in range(q.shape[0])]
    else:
        parts = [(0, *part) for part in dense.sequences(inputs.cu_seqlens)]
    for batch, number, i, j in parts:
        lengths = i.stop - i.start, j.stop - j.start
        keep: Any = np.ones((q.shape[1], *lengths), np.bool_)
        if options.dropout_p:
            keep = dense.kept(options, number, (1, q.shape[1], *lengths))[0]
        shape = (*q.shape[:2], *lengths)
        seen: Any = dense.visible(options, *lengths)
        if inputs.segment_ids is not None:
            q_ids, k_ids = (np.asarray(ids)[batch] for ids in inputs.segment_ids)
            seen = seen & (q_ids[:, None] == k_ids[None])
        mask = None if inputs.mask is None else np.broadcast_to(np.asarray(inputs.mask), shape)
        bias = None if inputs.bias is None else np.broadcast_to(np.asarray(inputs.bias), shape)
        for head in range(q.shape[1]):
            h = head // groups
            problem = Problem(
                cut(q[batch, head, i]),
                cut(k[batch, h, j]),
                cut(v[batch, h, j]),
                seen if mask is None else seen & mask[batch, head],
                keep[head],
                None if bias is None else bias[batch, head],
                numbers,
            )
            found.append(_Head(batch, head, h, i, j, problem))
    return found


def attention(
    q: Floats, k: Floats, v: Floats, options: AttentionOptions | None = None, inputs: Inputs = NO_INPUTS
) -> tuple[Floats, Floats]:
    """The bits of (o, lse) of q [B, Hq, Lq, D], k [B, Hkv, Lk, D] and v [B, Hkv, Lk, Dv] in float16 or bfloat16."""
    options = (options or AttentionOptions()).validated("attention", q.shape[-1], "float32")
    o = np.zeros((*q.shape[:3], v.shape[3]), q.dtype)
    lse = np.full(q.shape[:3], -np.inf, _F)
    with default_environment(), np.errstate(all="ignore"):
        for part in _heads(q, k, v, options, inputs):
            sink = None if inputs.sinks is None else ref.widen(np.asarray(inputs.sinks))[part.head]
            rows, sums = _forward(part.problem, sink)
            at = part.batch, part.head, part.queries
            o[at], lse[at] = ref.narrow(rows, q.dtype), sums
    return o, lse


def attention_backward(
    do: Floats,
    q: Floats,
    k: Floats,
    v: Floats,
    o: Floats,
    lse: Floats,
    options: AttentionOptions | None = None,
    inputs: Inputs = NO_INPUTS,
    dlse: Floats | None = None,
) -> AttentionGradients[Any]:
    """The bits of the gradients, without one of a bias."""
    options = (options or AttentionOptions()).validated("attention_backward", q.shape[-1], "float32")
    numbers = numbers_of(options)
    dq, dk, dv = np.zeros(q.shape, q.dtype), np.zeros(k.shape, _F), np.zeros(v.shape, _F)
    delta = dense.attention_delta(o, do)
    with default_environment(), np.errstate(all="ignore"):
        delta = delta if dlse is None else delta - dlse
        delta = np.where(lse == -np.inf, _F(0), delta)
        for part in _heads(q, k, v, options, inputs):
            at, to = (part.batch, part.head, part.queries), (part.batch, part.kv_head, part.keys)
            rows = cut(do[at])
            gradients = _backward(part.problem, rows, lse[at], delta[at])
            dq[at] = ref.narrow(gradients.dq, q.dtype)
            dk[to] = _add(dk[to], gradients.of_dk, part.problem.q)
            dv[to] = _add(dv[to], gradients.of_dv, rows)
        dk, dv = ref.narrow(dk * numbers.scale, q.dtype), ref.narrow(dv * numbers.kept, q.dtype)
    dsinks = None
    if inputs.sinks is not None:  # rows behind the last sequence belong to none
        end = q.shape[2] if inputs.cu_seqlens is None else int(inputs.cu_seqlens[0][-1])
        dsinks = _sink_gradient(np.asarray(inputs.sinks), lse[:, :, :end], delta[:, :, :end])
    return AttentionGradients(dq, dk, dv, None, dsinks)


def _sink_gradient(sinks: Floats, lse: Floats, delta: Floats) -> Floats:
    """The order-free sums over a head's rows of RN(-exp(sink - lse) · D)."""
    with default_environment(), np.errstate(all="ignore"):
        far = np.where(lse == -np.inf, _F(np.inf), lse)
        terms = -ref.exp(ref.widen(sinks)[:, None] - far) * delta
        sums = ref.order_free_sum(np.swapaxes(terms, 0, 1).reshape(len(sinks), -1))
    return ref.narrow(sums, sinks.dtype)
