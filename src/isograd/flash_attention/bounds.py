"""The error bounds that plans of the attention family promise, evaluated densely in binary64.

u is half an ulp of 1 in the work type, n the number of keys, m that of the queries which share a key, and

    e_ij = |scale| (D + 4) u Σ|q k| + 8u |s_ij| + u |bias_ij|          how far a score may be off
    r    = half an ulp of 1 in the storage type where the kernel rounds P and dS to it, else 0
    t    = 2^-126 (float64: 2^-1022), what a probability or a product loses where it underflows; it enters as P, dS and
           each of the absolute terms of a sum do

    o      (expm1(2 max_j e_ij + 16u (1 + max_j |s_ij|) + 2u (n + 16)) + u (n + 8) + r) · Σ P |v|  + ulp/2
    lse    the argument of that expm1 + u |lse|
    P      a relative d_ij = expm1(e_ij + 8u (1 + |s_ij| + |lse_i|)), the backward's
    dS     P (d (|dP| + |D|) + (1 + d) (u (Dv + 4) Σ|do v| + 4u (Σ|o do| + |dlse|)) + 4u (|dP| + |D|))
    dq, dk, dv  what dS and P carry through the products, plus u (terms + 4) + r of their absolute terms, plus ulp/2
    dq     in fixed point also 2^-29 scale for every tile of keys, times R_i c_d of `triton_rows`, which holds for an
           lse that is no less than the logarithm of Σ exp s

Where a score or one of the sums of absolute values above overflows, the bound is infinite: for what belongs to a pair
of query and key in the query's whole row, and so for all keys. The gradients are compared with what
`attention_backward` is given: o and lse as they are.
"""

import functools
from typing import Any

import numpy as np

from isograd.core.descriptor import ErrorBound
from isograd.flash_attention import reference
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.reference import AttentionGradients, Floats, Inputs
from isograd.numerics import reference as ref
from isograd.numerics.bounds import LARGEST, ulp

# Half an ulp of 1, and half of the smallest subnormal, where probabilities are stored in 16 bits.
_NARROWED = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-8, 2.0**-134)}
# What a probability in the work type may lose where it underflows: GPUs flush what is not normal.
_UNDERFLOW = {"float64": 2.0**-1022}


def _unit(dtype: str) -> float:
    return 2.0**-53 if dtype == "float64" else 2.0**-24


def _bounded(bound: Floats, sizes: Any, dtype: str) -> Floats:
    """The bound, infinite where a sum of absolute values may not fit a dtype, or is no number."""
    room = LARGEST[dtype] * (1 - 2.0**-6)
    return np.where(np.isnan(bound) | ~(np.maximum(sizes, bound) <= room), np.inf, bound)


def _half_ulp(x: Floats, dtype: str) -> Floats:
    # A 16-bit result passes through binary32, which makes half an ulp a little longer.
    return ulp(x, dtype) * 0.51


class _Scores:
    """Scores of a dense problem and their errors."""

    def __init__(
        self, q: Floats, k: Floats, v: Floats, options: AttentionOptions, inputs: Inputs, first: int, narrowed: bool
    ) -> None:
        self.dtype = q.dtype.name
        self.u = u = _unit(self.dtype)
        self.narrowing, self.tiny = _NARROWED.get(self.dtype, (0.0, 0.0)) if narrowed else (0.0, 0.0)
        self.lost = _UNDERFLOW.get(self.dtype, 2.0**-126)
        self.tiny += self.lost
        self.work = "float64" if self.dtype == "float64" else "float32"
        self.options = options = options.validated("attention", q.shape[-1])
        self.dense = d = reference.dense(q, k, v, options, inputs, first)
        self.seen = d.scores > -np.inf
        self.scores = np.where(self.seen, d.scores, 0)
        sizes = np.abs(d.q) @ np.swapaxes(np.abs(d.k), 2, 3)
        scale = abs(options.scale or 0)
        self.error = scale * (q.shape[-1] + 4) * u * sizes + 8 * u * np.abs(self.scores)
        apart = np.abs(d.q).sum(axis=-1)[..., None] + np.abs(d.k).sum(axis=-1)[:, :, None]
        apart = (1 + scale) * (apart + q.shape[-1])
        self.error = self.error + self.lost * (apart + sizes + options.softcap)
        sizes = np.maximum(sizes, np.max(np.abs(d.q), axis=-1, initial=0)[..., None]) * max(scale, 1)
        if options.softcap:
            sizes = np.maximum(sizes, np.maximum(sizes, scale) / options.softcap)
        if inputs.bias is not None:
            bias = np.abs(np.asarray(inputs.bias).astype(np.float64))
            self.error = self.error + u * np.where(np.isfinite(bias), bias, 0)
            sizes = sizes + np.where(np.isfinite(bias), bias, 0)
        self.error = np.where(self.seen, self.error, 0)
        self.sizes = sizes


def _dense_forward(s: _Scores, inputs: Inputs) -> tuple[Floats, Floats]:
    d, u, n = s.dense, s.u, s.scores.shape[3]
    largest = np.max(np.abs(s.scores), axis=-1, initial=0)
    if inputs.sinks is not None:
        sinks = np.asarray(inputs.sinks).astype(np.float64)[:, None]
        largest = np.maximum(largest, np.where(np.isfinite(sinks), np.abs(sinks), 0))
    exponent = 2 * np.max(s.error, axis=-1, initial=0) + 16 * u * (1 + largest) + 2 * u * (n + 16)
    weights = np.abs(d.keep * d.probabilities())
    sizes = weights @ np.abs(d.v)
    relative = np.expm1(exponent) + u * (n + 8) + s.narrowing
    of_all = (s.seen * d.keep) @ np.abs(d.v)
    of_o = relative[..., None] * sizes + s.tiny * of_all + s.lost * (2 * n + 1) * np.max(d.keep, initial=1)
    of_o = of_o + _half_ulp((d.keep * d.probabilities()) @ d.v, s.dtype)
    lse = np.where(np.isfinite(d.lse), np.abs(d.lse), 0)
    most = np.max(s.sizes, axis=-1, initial=0)
    of_o = _bounded(_bounded(of_o, np.maximum(of_all, most[..., None]), s.work), sizes, s.dtype)
    return of_o, _bounded(exponent + u * lse, most, s.work)


def _forward(
    narrowed: bool, q: Floats, k: Floats, v: Floats, options: AttentionOptions | None = None, **operands: Any
) -> tuple[Floats, Floats]:
    """(bound of o, bound of lse)."""
    options, inputs = options or AttentionOptions(), reference.inputs_of(operands)
    if inputs.cu_seqlens is None:
        return _dense_forward(_Scores(q, k, v, options, inputs, 0, narrowed), inputs)
    of_o, of_lse = np.zeros((*q.shape[:3], v.shape[3])), np.zeros(q.shape[:3])
    inner = Inputs(sinks=inputs.sinks)
    for number, i, j in reference.sequences(inputs.cu_seqlens):
        s = _Scores(q[:, :, i], k[:, :, j], v[:, :, j], options, inner, number, narrowed)
        of_o[:, :, i], of_lse[:, :, i] = _dense_forward(s, inner)
    return of_o, of_lse


def _dense_backward(
    do: Floats,
    s: _Scores,
    heads: int,
    inputs: Inputs,
    o: Floats,
    lse: Floats,
    dlse: Any,
    exact: AttentionGradients[Any],
) -> AttentionGradients[Any]:
    d, u = s.dense, s.u
    seeing = lse != -np.inf
    do, dlse = np.where(seeing[..., None], do, 0), None if dlse is None else np.where(seeing, dlse, 0)
    bent = np.where(np.isfinite(lse), np.abs(lse), 0)[..., None]
    p = d.probabilities(lse)
    of_p = np.expm1(s.error + 8 * u * (1 + np.abs(s.scores) + bent))
    products = np.abs(do) @ np.swapaxes(np.abs(d.v), 2, 3)
    dp = d.keep * products
    apart = np.abs(do).sum(axis=-1)[..., None] + np.abs(d.v).sum(axis=-1)[:, :, None]
    of_dp = u * (d.v.shape[3] + 4) * dp + s.lost * (2 * d.v.shape[3] + 1 + apart) * np.maximum(d.keep, 1)
    rows = np.abs(o * do).sum(axis=-1) + (0 if dlse is None else np.abs(dlse))
    size = dp + rows[..., None]
    of_ds = p * (of_p * size + (1 + of_p) * (of_dp + 4 * u * rows[..., None]) + 4 * u * size)
    ds = p * size
    of_ds = of_ds + s.tiny * s.seen * (size + 1)
    # A tile's hidden keys, whose probabilities are 0, are multiplied by what overflows for the others.
    within = np.maximum.reduce([*np.broadcast_arrays(ds, p, size, products, s.sizes)])
    of_ds = _bounded(of_ds, within.max(axis=-1, keepdims=True, initial=0), s.work)
    groups = s.scores.shape[1] // heads if heads else 1
    inner = ds * np.abs(d.slope)
    of_inner = of_ds * np.abs(d.slope)
    if s.options.softcap:
        of_inner = of_inner + ds * (s.error / s.options.softcap + 8 * u)
    scale = abs(s.options.scale or 0)
    queries, keys = s.scores.shape[2] * groups, s.scores.shape[3]

    def carried(error: Floats, sizes: Floats, terms: int) -> Floats:
        return np.asarray(error + (u * (terms + 4) + s.narrowing) * (sizes + error) + s.tiny * s.seen)

    def through(
        error: Floats, sizes: Floats, factor: Floats, scale: float, turned: bool = False
    ) -> tuple[Floats, Floats]:
        """The bound of a product and the sum of its absolute terms, which may be formed before or after the scale."""
        terms = queries if turned else keys
        error = carried(error, sizes, terms)
        if turned:
            error, sizes = np.swapaxes(error, 2, 3), np.swapaxes(sizes, 2, 3)
        lost = s.lost * (1 + (1 + scale) * (terms + sizes.sum(axis=-1, keepdims=True)))
        return scale * (error @ factor) + lost, max(scale, 1) * (sizes @ factor)

    weights = d.keep * p
    of_weights = np.where(np.isfinite(of_ds), weights * of_p, np.inf)
    of_dq, in_dq = through(of_inner, inner, np.abs(d.k), scale)
    of_dk, in_dk = through(of_inner, inner, np.abs(d.q), scale, turned=True)
    of_dv, in_dv = through(of_weights, weights, np.abs(do), 1.0, turned=True)
    of_dk, in_dk, of_dv, in_dv = (reference.grouped(x, heads) for x in (of_dk, in_dk, of_dv, in_dv))
    of_dbias = of_dsinks = None
    if inputs.bias is not None:
        axes = tuple(axis for axis in range(4) if np.shape(inputs.bias)[axis] == 1)
        terms = s.scores.size / max(exact.dbias.size, 1)
        of_dbias = (of_ds + u * (terms + 4) * (ds + of_ds)).sum(axis=axes, keepdims=True)
        of_dbias = of_dbias + _half_ulp(exact.dbias, inputs.bias.dtype.name)
        of_dbias = _bounded(of_dbias, ds.sum(axis=axes, keepdims=True), inputs.bias.dtype.name)
    if inputs.sinks is not None:
        sinks = inputs.sinks.astype(np.float64)[:, None]
        share = np.exp(sinks - np.where(lse == -np.inf, np.inf, lse))
        size = np.where(np.isfinite(sinks), np.abs(sinks), 0)
        relative = np.expm1(8 * u * (1 + size + bent[..., 0])) + u * (share[:, 0].size + 8)
        of_rows = s.lost * (d.v.shape[3] + 1)
        of_dsinks = (share * relative * rows + s.tiny * (rows + 1) + share * of_rows).sum(axis=(0, 2))
        of_dsinks = of_dsinks + _half_ulp(exact.dsinks, inputs.sinks.dtype.name)
        within = np.maximum(share * rows, np.maximum(share, rows)).sum(axis=(0, 2))
        of_dsinks = _bounded(of_dsinks, within, inputs.sinks.dtype.name)
    return AttentionGradients(
        _bounded(of_dq + _half_ulp(exact.dq, s.dtype), in_dq, s.dtype),
        _bounded(of_dk + _half_ulp(exact.dk, s.dtype), in_dk, s.dtype),
        _bounded(of_dv + _half_ulp(exact.dv, s.dtype), in_dv, s.dtype),
        of_dbias,
        of_dsinks,
    )


def _fixed_point(do: Floats, k: Floats, v: Floats, scale: float, dlse: Any, tile_keys: int) -> Floats:
    """What the rounding of every tile's part of dq to fixed point may add up to."""
    groups = do.shape[1] // k.shape[1]
    longest = np.repeat(np.linalg.norm(v.astype(np.float64), axis=-1).max(axis=2), groups, 1)[..., None]
    reach = 2 * np.linalg.norm(do, axis=-1) * longest + (0 if dlse is None else np.abs(dlse))
    columns = np.repeat(np.abs(k.astype(np.float64)).max(axis=2), groups, 1)
    tiles = -(-k.shape[2] // tile_keys)
    return np.asarray(scale * tiles * 2.0**-29 * 1.01 * reach[..., None] * columns[:, :, None, :])


def _present(bounds: AttentionGradients[Any]) -> tuple[Floats, ...]:
    return tuple([x for x in bounds if x is not None])


def _backward(
    narrowed: bool,
    do: Floats,
    q: Floats,
    k: Floats,
    v: Floats,
    o: Floats,
    lse: Floats,
    options: AttentionOptions | None = None,
    dlse: Floats | None = None,
    tile_keys: int | None = None,
    **operands: Any,
) -> tuple[Floats, ...]:
    """The bounds of the gradients that there are."""
    options, inputs = options or AttentionOptions(), reference.inputs_of(operands)
    exact = reference.oracle_attention_backward(do, q, k, v, options, inputs, dlse, o, lse)
    wide = [x.astype(np.float64) for x in (do, o, lse)]
    dlse = None if dlse is None else dlse.astype(np.float64)
    if inputs.cu_seqlens is None:
        s = _Scores(q, k, v, options, inputs, 0, narrowed)
        found = _dense_backward(wide[0], s, k.shape[1], inputs, wide[1], wide[2], dlse, exact)
        if tile_keys is not None:
            found = found._replace(dq=found.dq + _fixed_point(wide[0], k, v, s.options.scale or 0.0, dlse, tile_keys))
        return _present(found)
    result = AttentionGradients(*(np.zeros(x.shape) for x in (q, k, v)))
    of_dsinks = None if inputs.sinks is None else np.zeros(q.shape[1])
    inner = Inputs(sinks=inputs.sinks)
    for number, i, j in reference.sequences(inputs.cu_seqlens):
        s = _Scores(q[:, :, i], k[:, :, j], v[:, :, j], options, inner, number, narrowed)
        part = exact._replace(dq=exact.dq[:, :, i], dk=exact.dk[:, :, j], dv=exact.dv[:, :, j])
        of = _dense_backward(
            *(wide[0][:, :, i], s, k.shape[1], inner, wide[1][:, :, i], wide[2][:, :, i]),
            None if dlse is None else dlse[:, :, i],
            part,
        )
        result.dq[:, :, i], result.dk[:, :, j], result.dv[:, :, j] = of[:3]
        if tile_keys is not None and j.stop > j.start:
            given = wide[0][:, :, i], k[:, :, j], v[:, :, j]
            part_dlse = None if dlse is None else dlse[:, :, i]
            result.dq[:, :, i] += _fixed_point(*given, s.options.scale or 0.0, part_dlse, tile_keys)
        if of_dsinks is not None:
            of_dsinks += of.dsinks
    return _present(result._replace(dsinks=of_dsinks))


def _delta(narrowed: bool, o: Floats, do: Floats) -> Floats:
    """Rule 4's bound of the sum, and a rounding for each product."""
    work = np.dtype(ref.work_dtype(o.dtype)).name
    u, quanta, tiny = (2.0**-53, 2.0**-88, -1074) if work == "float64" else (2.0**-24, 2.0**-44, -149)
    with np.errstate(all="ignore"):
        products = o.astype(np.longdouble) * do.astype(np.longdouble)
        terms, total = np.abs(products), products.sum(axis=-1)
        of_sum = o.shape[-1] * (quanta * terms.max(axis=-1, initial=0) + np.ldexp(np.longdouble(1), tiny))
        bound = np.asarray(u * terms.sum(axis=-1) + of_sum + ulp(total, work) * 0.51, np.longdouble)
        large = np.isfinite(total) & (np.maximum(terms.max(axis=-1, initial=0), np.abs(total) + bound) > LARGEST[work])
        return np.where(large, np.inf, bound)


def _with_cache(narrowed: bool, *args: Any, **operands: Any) -> tuple[Floats, ...]:
    return reference.over_cache(functools.partial(_forward, narrowed), *args, **operands)


_EVALUATE: dict[str, Any] = {
    "attention": _forward,
    "attention_backward": _backward,
    "attention_delta": _delta,
    "attention_with_cache": _with_cache,
}
_FORMULAS = {
    "attention": "(expm1(2e + 16u(1 + |s|) + 2u(n + 16)) + u(n + 8) + r)·Σ P|v| + ulp(o)/2, e = |scale|(D + 4)u·Σ|qk|",
    "attention_backward": "P(d(|dP| + |D|) + (1 + d)(u(Dv + 4)Σ|do·v| + 4u·Σ|o·do|)) through the products + ulp/2",
    "attention_delta": "u·Σ|o·do| + n·q/2 + ulp(delta)/2",
}
_FORMULAS["attention_with_cache"] = _FORMULAS["attention"]


def error_bound(operation: str, narrowed: bool = False, tile_keys: int | None = None) -> ErrorBound:
    """The bound of an operation; call it with the operands of its plan by their names, and `options`.

    narrowed: whether the kernel rounds probabilities to the storage type before it multiplies by them. tile_keys: of a
    backward pass that adds dq up in fixed point, the keys of a tile.
    """
    if tile_keys is None:
        return ErrorBound(_FORMULAS[operation], functools.partial(_EVALUATE[operation], narrowed))
    formula = _FORMULAS[operation] + "; dq: + 2^-29·scale·R·c for every tile of keys, R·c the fixed point's bound"
    return ErrorBound(formula, functools.partial(_EVALUATE[operation], narrowed, tile_keys=tile_keys))
