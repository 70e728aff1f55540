"""Bounds on the errors of order-free attention, evaluated step by step in binary64.

With u = 2^-24, η = 2^-18 the error of the exponential, 2^E the power of two above a row (rule 10), K head dimensions:

    product of rows a, b    2^-16 (2^E Σ|b| + 2^F Σ|a|) + (K 2^-32 + 2^-23) 2^(E + F) + u |a·b|
    e_ij, of a score        |scale| times that + 8u (|scale q·k| + |s_ij|) + 2u |bias|
    p relative              forward: d = expm1(e) + η; backward: expm1(e + 4u (1 + |s| + |lse|)) + η
    dS                      P (d (|dP| + |D|) + (1 + d) (dP's error + 4u Σ|o do| + 2u (|dP| + |D|))) + 3u of that
    sum Σ_j w_ij x_jd over blocks of weights with an error ε_ij and rows of 2^E_j; W_ij = (|w| + ε) 2^E_j:
                            Σ ε|x| + 2^-16 ΣW + Σ_blocks (2.02 · 2^-16 n + 2^-20) max W + u (blocks + 4) Σ (|w| + ε) |x|
    o                       such a sum, with P for w and d P for ε, and |o| times the error of l; + 4u |o| + ulp/2
    lse                     error of l + 3u (1 + |lse|)
    l relative              Σ P d + n 2^-21 max P + u (blocks + 4)

Rows' largest scores beyond 2^21 (in powers of two), and p beyond 2^64, have an infinite bound, as what overflows has.
The gradients are compared with what `attention_backward` is given: o and lse as they are.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from isograd.core.descriptor import ErrorBound
from isograd.flash_attention import reference as dense
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.order_free.reference import BLOCK, HIGH, REACH, TINY, numbers_of
from isograd.flash_attention.reference import AttentionGradients, Dense, Floats, Inputs
from isograd.numerics import int16
from isograd.numerics.bounds import LARGEST, ulp

_U, _ETA, _TINY = 2.0**-24, 2.0**-18, 2.0**-110
_LOG2E = float(np.log2(np.e))


def _tops(x: Floats) -> Floats:
    """2^E of rows, 0 for a row of zeros."""
    e = int16.largest_exponents(x, -1)
    return np.where(e == int16.ZERO, 0.0, np.ldexp(1.0, np.maximum(e, -1000).astype(np.int64)))


def _product(a: Floats, b: Floats) -> Floats:
    """The error of the products of rows, [.., n, K] and [.., m, K]."""
    e, f = _tops(a)[..., None], _tops(b)[..., None, :]
    a, b = np.abs(a), np.abs(b)
    halves = 2.0**-16 * (e * b.sum(axis=-1)[..., None, :] + f * a.sum(axis=-1)[..., None])
    rest = (a.shape[-1] * 2.0**-32 + 2.0**-23) * e * f
    return np.asarray(halves + rest + _U * (a @ np.swapaxes(b, -1, -2)) + _TINY)


def _half_ulp(x: Floats, dtype: str) -> Floats:
    return ulp(x, dtype) * 0.51  # the result passes through binary32


def _bounded(bound: Floats, sizes: Any, dtype: str) -> Floats:
    room = LARGEST[dtype] * (1 - 2.0**-6)
    return np.where(np.isnan(bound) | ~(np.maximum(sizes, bound) <= room), np.inf, bound)


def _sum(w: Floats, error: Floats, x: Floats, total_blocks: int) -> tuple[Floats, Floats]:
    """The error of Σ_j w_ij x_jd, and the sums of absolute terms: [.., n, m], [.., m, d] to [.., n, d]."""
    sizes = np.abs(w) + error
    tops = sizes * _tops(x)[..., None, :]
    most = np.zeros(tops.shape[:-1])
    for start in range(0, tops.shape[-1], BLOCK):
        part = tops[..., start : start + BLOCK]
        most = most + (2.02 * 2.0**-16 * part.shape[-1] + 2.0**-20) * part.max(axis=-1, initial=0)
    absolute = np.abs(x)
    # Where a weight overflows the whole row is NaN.
    total = np.where(tops.max(axis=-1, initial=0)[..., None] > LARGEST["float32"], np.inf, sizes @ absolute)
    of_rows = 2.0**-16 * tops.sum(axis=-1) + most + _TINY * (w.shape[-1] + total_blocks)
    return error @ absolute + of_rows[..., None] + _U * (total_blocks + 4) * total, total


def _off(rounded: Any, exact: float) -> float:
    """The relative error of a number in binary32; infinite where it overflows."""
    found = abs(float(rounded) / exact - 1) if exact else 0.0
    return found if np.isfinite(found) else np.inf


def _blocks(length: int) -> int:
    return -(-length // BLOCK)


class _Scores(NamedTuple):
    """A dense problem, and the errors of its scores; held: rows whose scores are out of reach."""

    d: Dense
    options: AttentionOptions
    seen: Any
    error: Floats
    held: Any


def _scores(q: Floats, k: Floats, v: Floats, options: AttentionOptions, inputs: Inputs, first: int) -> _Scores:
    options = options.validated("attention", q.shape[-1])
    d = dense.dense(q, k, v, options, inputs, first)
    seen = d.scores > -np.inf
    scores = np.where(seen, d.scores, 0)
    scale, numbers = abs(options.scale or 0), numbers_of(options)
    plain = scale * np.abs(d.q @ np.swapaxes(d.k, 2, 3))
    factor = scale / options.softcap if options.softcap else scale * _LOG2E
    error = scale * _product(d.q, d.k) + 8 * _U * (plain + np.abs(scores)) + _TINY
    error = error + plain * _off(abs(numbers.factor) * np.float32(TINY), factor * TINY)
    error = error + np.abs(scores) * _off(numbers.cap, options.softcap * _LOG2E)
    # Factors of rows and of pairs may be subnormal, or overflow.
    unit = options.softcap or 1.0
    keys = _tops(d.k)[..., None, :]
    error = error + unit * 2.0**-119 * (1 + keys)
    factors = factor * TINY * _tops(d.q)[..., None] * np.maximum(keys, 4.0) / 16
    over = (seen & ~(factors < LARGEST["float32"])).any(axis=-1)
    if inputs.bias is not None:
        bias = np.abs(np.asarray(inputs.bias).astype(np.float64))
        error = error + 2 * _U * np.where(np.isfinite(bias), bias, 0)
    top = np.max(d.scores, axis=-1, initial=-np.inf)
    if inputs.sinks is not None:
        top = np.maximum(top, np.asarray(inputs.sinks).astype(np.float64)[:, None])
    # A score that is held at -2^21 weighs nothing beside one that is not.
    error = np.where(seen & (scores * _LOG2E > -REACH), error, 0)
    held = (top > -np.inf) & ((top + 1) * _LOG2E > REACH) | ((top - 1000) * _LOG2E < -REACH) & (top > -np.inf)
    return _Scores(d, options, seen, error, held | over)


def _of_l(s: _Scores, weights: Floats, of_p: Floats, inputs: Inputs) -> Floats:
    """The relative error of l."""
    n = weights.shape[-1]
    most = weights.max(axis=-1, initial=0)
    total = (weights * of_p).sum(axis=-1)
    if inputs.sinks is not None:
        sinks = np.asarray(inputs.sinks).astype(np.float64)[:, None]
        share = np.exp(sinks - np.where(np.isneginf(s.d.lse), np.inf, s.d.lse))
        total = total + share * (np.expm1(4 * _U * np.where(np.isfinite(sinks), np.abs(sinks), 0)) + _ETA + 2.0**-22)
    return np.asarray(total + n * 2.0**-21 * most + _U * (_blocks(n) + 4))


def _dense_forward(s: _Scores, inputs: Inputs, dtype: str) -> tuple[Floats, Floats]:
    weights = s.d.probabilities()
    of_p = np.where(s.seen, np.expm1(s.error) + _ETA, 0)
    of_l = _of_l(s, weights, of_p, inputs)
    of_l = np.where(s.held | (of_l > 0.5), np.inf, of_l / (1 - np.minimum(of_l, 0.5)))
    kept = np.max(s.d.keep, initial=0) if s.options.dropout_p else 1.0
    # P is cut relative to the block's largest weight, whatever dropout keeps of it.
    error, sizes = _sum(weights, weights * of_p, s.d.v, _blocks(weights.shape[-1]))
    o = (s.d.keep * weights) @ s.d.v
    there = ~np.isneginf(s.d.lse)
    of_o = kept * error * (1 + of_l[..., None]) + np.abs(o) * (of_l[..., None] + 4 * _U)
    of_o = np.where(there[..., None], of_o + _half_ulp(o, dtype), 0)
    lse = np.where(there, np.abs(s.d.lse), 0)
    of_lse = np.where(there, of_l + 3 * _U * (1 + lse), 0)
    of_o = _bounded(of_o, s.seen @ np.abs(s.d.v), "float32")  # before the division by l
    return _bounded(of_o, kept * sizes, dtype), _bounded(of_lse, lse, "float32")


def _parts(q: Floats, k: Floats, inputs: Inputs) -> list[tuple[int, slice, slice, Inputs]]:
    """(number, rows of q, rows of k, inputs) of the problems that are dense ones."""
    if inputs.cu_seqlens is None:
        return [(0, slice(0, q.shape[2]), slice(0, k.shape[2]), inputs)]
    return [(*part, Inputs(sinks=inputs.sinks)) for part in dense.sequences(inputs.cu_seqlens)]


def _forward(
    q: Floats, k: Floats, v: Floats, options: AttentionOptions | None = None, **operands: Any
) -> tuple[Floats, Floats]:
    """(bound of o, bound of lse)."""
    options, inputs = options or AttentionOptions(), dense.inputs_of(operands)
    of_o, of_lse = np.zeros((*q.shape[:3], v.shape[3])), np.zeros(q.shape[:3])
    with np.errstate(all="ignore"):
        for number, i, j, inner in _parts(q, k, inputs):
            s = _scores(q[:, :, i], k[:, :, j], v[:, :, j], options, inner, number)
            of_o[:, :, i], of_lse[:, :, i] = _dense_forward(s, inner, q.dtype.name)
    return of_o, of_lse


def _dense_backward(
    do: Floats, s: _Scores, heads: int, inputs: Inputs, o: Floats, lse: Floats, dlse: Any,
    exact: AttentionGradients[Any], dtype: str,
) -> AttentionGradients[Any]:  # fmt: skip
    d, present = s.d, ~np.isneginf(lse)
    do, dlse = np.where(present[..., None], do, 0), 0 if dlse is None else np.where(present, np.abs(dlse), 0)
    level = np.where(np.isfinite(lse), np.abs(lse), 0)[..., None]
    scores = np.where(s.seen, d.scores, 0)
    p = d.probabilities(lse)
    high = s.seen & ((scores - np.where(present, lse, np.inf)[..., None]) * _LOG2E > HIGH - 1)
    of_p = np.where(s.seen, np.expm1(s.error + 4 * _U * (1 + np.abs(scores) + level)) + _ETA, 0)
    of_p = np.where(high | s.held[..., None] & s.seen, np.inf, of_p)
    keep = np.asarray(d.keep)
    kept = np.max(keep, initial=0)
    dp = keep * np.abs(do @ np.swapaxes(d.v, 2, 3))
    of_dp = keep * (_product(do, d.v) + 4 * _U * np.abs(do @ np.swapaxes(d.v, 2, 3)))
    rows = (np.abs(o * do).sum(axis=-1) + dlse)[..., None]
    size = p * (dp + rows)
    error = np.where(p > 0, p * of_p, 0) * (dp + rows) + p * (1 + of_p) * (of_dp + 4 * _U * rows + 2 * _U * dp)
    error = np.where(np.maximum(p, 1) * (dp + rows) > LARGEST["float32"] / 2, np.inf, error)
    error = np.where(s.seen, error + 3 * _U * size + _TINY * (1 + dp + rows), 0)
    if s.options.softcap:
        error = error * np.abs(d.slope) + size * (2 * s.error / s.options.softcap + 8 * _U)
        size = size * np.abs(d.slope)
    scale = abs(s.options.scale or 0)
    m, n = p.shape[-1], _blocks(p.shape[-2]) * (p.shape[1] // heads if heads else 1)
    of_weights = np.where(s.seen, np.where(p > 0, p * of_p, 0) + _TINY, 0)
    of_dq, in_dq = _sum(size, error, d.k, _blocks(m))
    by_keys = _sum(np.swapaxes(size, 2, 3), np.swapaxes(error, 2, 3), d.q, n)
    of_dk, in_dk = (dense.grouped(x, heads) for x in by_keys)
    shares, of_shares = (np.swapaxes((keep > 0) * x, 2, 3) for x in (p, of_weights))
    of_dv, in_dv = (dense.grouped(kept * x, heads) for x in _sum(shares, of_shares, do, n))

    off = _off(np.float32(scale), scale) + 2 * _U

    def finished(bound: Floats, sizes: Floats, result: Floats, factor: float) -> Floats:
        total = factor * bound + off * factor * sizes + _half_ulp(result, dtype)
        return _bounded(total, np.maximum(sizes, factor * sizes), dtype)

    of_dsinks = None
    if inputs.sinks is not None:
        sinks = np.asarray(inputs.sinks).astype(np.float64)[:, None]
        share = np.exp(sinks - np.where(present, lse, np.inf))
        bent = np.where(np.isfinite(sinks), np.abs(sinks), 0) + level[..., 0]
        relative = np.expm1(8 * _U * (1 + bent)) + _U * (share[:, 0].size + 8)
        of_dsinks = (share * relative * rows[..., 0] + _TINY * (rows[..., 0] + share + 1)).sum(axis=(0, 2))
        of_dsinks = of_dsinks + _half_ulp(exact.dsinks, inputs.sinks.dtype.name)
        within = (share * rows[..., 0]).sum(axis=(0, 2))
        of_dsinks = _bounded(of_dsinks, within, inputs.sinks.dtype.name)
    return AttentionGradients(
        finished(of_dq, in_dq, exact.dq, scale),
        finished(of_dk, in_dk, exact.dk, scale),
        finished(of_dv, in_dv, exact.dv, 1.0),
        None,
        of_dsinks,
    )


def _backward(
    do: Floats, q: Floats, k: Floats, v: Floats, o: Floats, lse: Floats,
    options: AttentionOptions | None = None, dlse: Floats | None = None, **operands: Any,
) -> tuple[Floats, ...]:  # fmt: skip
    """The bounds of the gradients that there are, but for one of a bias."""
    options, inputs = options or AttentionOptions(), dense.inputs_of(operands)
    exact = dense.oracle_attention_backward(do, q, k, v, options, inputs, dlse, o, lse)
    wide = [x.astype(np.float64) for x in (do, o, lse)]
    dlse = None if dlse is None else dlse.astype(np.float64)
    result = AttentionGradients(*(np.zeros(x.shape) for x in (q, k, v)))
    of_dsinks = None if inputs.sinks is None else np.zeros(q.shape[1])
    with np.errstate(all="ignore"):
        for number, i, j, inner in _parts(q, k, inputs):
            s = _scores(q[:, :, i], k[:, :, j], v[:, :, j], options, inner, number)
            part = exact._replace(dq=exact.dq[:, :, i], dk=exact.dk[:, :, j], dv=exact.dv[:, :, j])
            some = (wide[0][:, :, i], s, k.shape[1], inner, wide[1][:, :, i], wide[2][:, :, i])
            of = _dense_backward(*some, None if dlse is None else dlse[:, :, i], part, q.dtype.name)
            result.dq[:, :, i], result.dk[:, :, j], result.dv[:, :, j] = of[:3]
            if of_dsinks is not None:
                of_dsinks += of.dsinks
    return tuple([x for x in (*result[:3], of_dsinks) if x is not None])


def _with_cache(*args: Any, **operands: Any) -> tuple[Floats, ...]:
    return dense.over_cache(_forward, *args, **operands)


_EVALUATE: dict[str, Any] = {
    "attention": _forward,
    "attention_backward": _backward,
    "attention_with_cache": _with_cache,
}
_FORMULAS = {
    "attention": "Σ P d|v| + 2^-16 Σ P 2^E + Σ_blocks (2^-14.98 n + 2^-20) max P 2^E + |o| (Σ P d + n 2^-21 max P) "
    "+ ulp(o)/2, d = expm1(|scale| (2^-16 (2^E Σ|k| + 2^F Σ|q|) + 2^-23 2^(E + F))) + 2^-18",
    "attention_backward": "dS's error through the products + 2^-16 Σ|dS| 2^E + Σ_blocks (2^-14.98 n + 2^-20) max |dS| "
    "2^E + ulp/2",
}
_FORMULAS["attention_with_cache"] = _FORMULAS["attention"]


def error_bound(operation: str) -> ErrorBound:
    """The bound of an operation; call it with the operands of its plan by their names, and `options`."""
    return ErrorBound(_FORMULAS[operation], functools.partial(_EVALUATE[operation]))
