"""Attention in NumPy: the definition, evaluated densely in binary64, which is also the oracle of all kernels.

With s = cap(scale · q kᵀ) + bias over the visible keys, cap(x) = softcap · tanh(x / softcap) or x:

    lse = log(Σ_j exp(s_ij) [+ exp(sink)]),  P = exp(s - lse),  o = (keep ∘ P / (1 - p)) v
    D = Σ o · do - dlse,  dP = keep ∘ (do vᵀ) / (1 - p),  dS = P ∘ (dP - D)
    dq = scale · (dS ∘ cap') k,  dk = scale · (dS ∘ cap')ᵀ q,  dv = (keep ∘ P / (1 - p))ᵀ do
    dbias = dS summed where the bias was broadcast,  dsink = -Σ exp(sink - lse) · D

Rows without a visible key and without a sink have o = 0, lse = -inf and no gradient. Only `attention_delta` has bits
of its own: rule 4 of `docs/arithmetic.md`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from isograd.flash_attention.options import DROPOUT_WORD, AttentionOptions
from isograd.numerics import reference as ref
from isograd.numerics.random import philox
from isograd.runtime.fenv import default_environment

Floats = NDArray[Any]
Pair = tuple[Any, Any] | None
_WIDE = np.float64


ArrayT = TypeVar("ArrayT")


class AttentionGradients(NamedTuple, Generic[ArrayT]):
    """The result of `attention_backward`; dbias and dsinks are None where there is no bias, no sink."""

    dq: ArrayT
    dk: ArrayT
    dv: ArrayT
    dbias: Any = None  # not `ArrayT | None`: whoever passed a bias would have to rule None out
    dsinks: Any = None


class Inputs(NamedTuple):
    """The operands besides q, k and v, as `isograd.attention` takes them."""

    bias: Any = None
    mask: Any = None
    segment_ids: Pair = None
    cu_seqlens: Pair = None
    sinks: Any = None


NO_INPUTS = Inputs()


def inputs_of(operands: Mapping[str, Any]) -> Inputs:
    """The inputs by the names of a plan's operands; others are ignored."""

    def pair(first: str, second: str) -> Pair:
        return (operands[first], operands[second]) if first in operands else None

    return Inputs(
        operands.get("bias"),
        operands.get("mask"),
        pair("q_segment_ids", "k_segment_ids"),
        pair("cu_seqlens_q", "cu_seqlens_k"),
        operands.get("sinks"),
    )


# --- what is visible, what is dropped --------------------------------------------------------------------------------
def visible(options: AttentionOptions, q_length: int, k_length: int) -> NDArray[np.bool_]:
    """[Lq, Lk]: whether the positions let query i see key j."""
    level = np.arange(q_length)[:, None] + options.offset(q_length, k_length)
    j = np.arange(k_length)[None]
    # No distance is larger than both lengths together.
    left, right = (None if side is None else min(side, q_length + k_length) for side in options.reach())
    seen = np.ones((q_length, k_length), np.bool_)
    if left is not None:
        seen &= j >= level - left
    if right is not None:
        seen &= j <= level + right
    return seen


def kept(options: AttentionOptions, first: int, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """[B, Hq, Lq, Lk]: which probabilities dropout keeps; `first` is the number of the first sequence.

    Key j takes word j & 3 of the block with the counter (j >> 2, i, sequence · Hq + head, DROPOUT_WORD).
    """
    batch, heads, q_length, k_length = shape
    blocks = -(-k_length // 4)
    counter = np.empty((batch, heads, q_length, blocks, 4), np.uint32)
    counter[..., 0] = np.arange(blocks, dtype=np.uint32)
    counter[..., 1] = np.arange(q_length, dtype=np.uint32)[:, None]
    numbers = (np.arange(batch, dtype=np.uint32)[:, None] + first) * heads + np.arange(heads, dtype=np.uint32)
    counter[..., 2] = numbers[:, :, None, None]
    counter[..., 3] = DROPOUT_WORD
    words = philox(counter, (options.seed & 0xFFFFFFFF, options.seed >> 32))
    words = words.reshape(batch, heads, q_length, 4 * blocks)[..., :k_length]
    return np.asarray(words >= options.dropout_threshold)


def sequences(cu_seqlens: Any) -> Iterator[tuple[int, slice, slice]]:
    """(number, rows of q, rows of k) of the packed sequences."""
    q, k = (np.asarray(c, np.int64) for c in cu_seqlens)
    for n in range(len(q) - 1):
        yield n, slice(q[n], q[n + 1]), slice(k[n], k[n + 1])


# --- one dense problem -----------------------------------------------------------------------------------------------
class Dense(NamedTuple):
    """The intermediate results of a dense problem, heads of k and v repeated."""

    q: Floats
    k: Floats
    v: Floats
    scores: Floats
    slope: Any  # cap'
    keep: Any  # keep / (1 - p)
    lse: Floats

    def probabilities(self, lse: Floats | None = None) -> Floats:
        """P, zero in rows without anything visible."""
        lse = self.lse if lse is None else lse
        p = np.exp(self.scores - np.where(lse == -np.inf, 0, lse)[..., None])
        return np.where((lse == -np.inf)[..., None], 0, p)


def dense(
    q: Floats, k: Floats, v: Floats, options: AttentionOptions, inputs: Inputs = NO_INPUTS, first: int = 0
) -> Dense:
    """All of a problem without cu_seqlens; `first` is the number of its first sequence."""
    options = options.validated("attention", q.shape[-1])
    groups = q.shape[1] // k.shape[1] if k.shape[1] else 1
    q, k, v = (x.astype(_WIDE) for x in (q, k, v))
    k, v = np.repeat(k, groups, 1), np.repeat(v, groups, 1)
    scores: Any = (options.scale or 0.0) * (q @ np.swapaxes(k, 2, 3))
    slope: Any = 1.0
    if options.softcap:
        bent = np.tanh(scores / options.softcap)
        scores, slope = options.softcap * bent, 1 - bent * bent
    if inputs.bias is not None:
        scores = scores + np.asarray(inputs.bias).astype(_WIDE)
    seen = visible(options, q.shape[2], k.shape[2])
    if inputs.mask is not None:
        seen = seen & np.asarray(inputs.mask)
    if inputs.segment_ids is not None:
        q_ids, k_ids = (np.asarray(ids) for ids in inputs.segment_ids)
        seen = seen & (q_ids[:, None, :, None] == k_ids[:, None, None, :])
    scores = np.where(seen, scores, -np.inf)
    top = np.max(scores, axis=-1, initial=-np.inf)
    if inputs.sinks is not None:
        sinks = np.asarray(inputs.sinks).astype(_WIDE)[:, None]
        top = np.maximum(top, sinks)
    base = np.where(top == -np.inf, 0, top)
    with np.errstate(divide="ignore"):
        total = np.exp(scores - base[..., None]).sum(axis=-1)
        if inputs.sinks is not None:
            total = total + np.exp(sinks - base)
        lse = np.log(total) + base
    keep: Any = 1.0
    if options.dropout_p:
        keep = kept(options, first, scores.shape) * options.dropout_factor
    return Dense(q, k, v, scores, slope, keep, lse)


def grouped(x: Floats, heads: int) -> Floats:
    """The sum over the query heads that share a head of k and v."""
    groups = x.shape[1] // heads if heads else 1
    return np.asarray(x.reshape(x.shape[0], heads, groups, *x.shape[2:]).sum(axis=2))


# --- the oracle ------------------------------------------------------------------------------------------------------
def oracle_attention(
    q: Floats, k: Floats, v: Floats, options: AttentionOptions | None = None, inputs: Inputs = NO_INPUTS
) -> tuple[Floats, Floats]:
    """(o, lse) in binary64 of q [B, Hq, Lq, D], k [B, Hkv, Lk, D] and v [B, Hkv, Lk, Dv]."""
    options = options or AttentionOptions()
    if inputs.cu_seqlens is None:
        d = dense(q, k, v, options, inputs)
        return (d.keep * d.probabilities()) @ d.v, d.lse
    o = np.zeros((*q.shape[:3], v.shape[3]))
    lse = np.full(q.shape[:3], -np.inf)
    for n, i, j in sequences(inputs.cu_seqlens):
        d = dense(q[:, :, i], k[:, :, j], v[:, :, j], options, Inputs(sinks=inputs.sinks), n)
        o[:, :, i], lse[:, :, i] = (d.keep * d.probabilities()) @ d.v, d.lse
    return o, lse


def over_cache(
    compute: Callable[..., tuple[Floats, ...]],
    q: Floats,
    k: Floats,
    v: Floats,
    cache_seqlens: Any,
    options: AttentionOptions | None = None,
    block_table: Any = None,
    **operands: Any,
) -> tuple[Floats, ...]:
    """What a function of (q, k, v, options, **operands) returns for each sequence of a cache, one after the other.

    k and v: [B, Hkv, K, D], or [pages, Hkv, page_size, D] with a block_table. The options are made causal.
    """
    options = replace(options or AttentionOptions(), causal=True)

    def used(cache: Floats, n: int) -> Floats:
        length = int(cache_seqlens[n])
        if block_table is None:
            return cache[n : n + 1, :, :length]
        pages = cache[np.asarray(block_table)[n, : -(-length // cache.shape[2])]].swapaxes(0, 1)
        rows: Floats = pages.reshape(1, cache.shape[1], -1, cache.shape[3])
        return rows[:, :, :length]

    found = [compute(q[n : n + 1], used(k, n), used(v, n), options, **operands) for n in range(len(q))]
    if not found:
        shapes = (1, *q.shape[1:]), *[(1, x.shape[1], 0, x.shape[3]) for x in (k, v)]
        parts = compute(*[np.zeros(shape, q.dtype) for shape in shapes], options, **operands)
        found = [tuple([part[:0] for part in parts])]
    return tuple([np.concatenate(parts) for parts in zip(*found, strict=True)])


def _dense_backward(
    do: Floats, d: Dense, heads: int, scale: Any, inputs: Inputs, o: Floats, lse: Floats, dlse: Any
) -> AttentionGradients[Any]:
    p = d.probabilities(lse)
    seeing = lse != -np.inf  # the others have no gradient, whatever is asked of them
    do = np.where(seeing[..., None], do, 0)
    delta = np.where(seeing, (o * do).sum(axis=-1) - (0 if dlse is None else dlse), 0)
    ds = p * (d.keep * (do @ np.swapaxes(d.v, 2, 3)) - delta[..., None])
    inner = ds * d.slope
    dbias = dsinks = None
    if inputs.bias is not None:
        shape = np.shape(inputs.bias)
        axes = tuple(axis for axis in range(4) if shape[axis] == 1)
        dbias = ds.sum(axis=axes, keepdims=True)
    if inputs.sinks is not None:
        share = np.exp(np.asarray(inputs.sinks).astype(_WIDE)[:, None] - np.where(lse == -np.inf, np.inf, lse))
        dsinks = -(share * delta).sum(axis=(0, 2))
    # The scale comes last: with it an element of dS may overflow where its product with a small k or slope does not.
    return AttentionGradients(
        scale * (inner @ d.k),
        scale * grouped(np.swapaxes(inner, 2, 3) @ d.q, heads),
        grouped(np.swapaxes(d.keep * p, 2, 3) @ do, heads),
        dbias,
        dsinks,
    )


def oracle_attention_backward(
    do: Floats,
    q: Floats,
    k: Floats,
    v: Floats,
    options: AttentionOptions | None = None,
    inputs: Inputs = NO_INPUTS,
    dlse: Floats | None = None,
    o: Floats | None = None,
    lse: Floats | None = None,
) -> AttentionGradients[Any]:
    """The gradients in binary64; a bias has four axes here.

    With o and lse given, they are taken as they are, rounded, which is what `attention_backward` computes; without
    them the exact ones are used.
    """
    options = (options or AttentionOptions()).validated("attention_backward", q.shape[-1])
    if o is None or lse is None:
        o, lse = oracle_attention(q, k, v, options, inputs)
    do, o, lse = do.astype(_WIDE), o.astype(_WIDE), lse.astype(_WIDE)
    dlse = None if dlse is None else dlse.astype(_WIDE)
    heads = k.shape[1]
    if inputs.cu_seqlens is None:
        d = dense(q, k, v, options, inputs)
        return _dense_backward(do, d, heads, options.scale, inputs, o, lse, dlse)
    dsinks = None if inputs.sinks is None else np.zeros(q.shape[1])
    result = AttentionGradients(np.zeros(q.shape), np.zeros(k.shape), np.zeros(v.shape), None, dsinks)
    inner = Inputs(sinks=inputs.sinks)
    for n, i, j in sequences(inputs.cu_seqlens):
        d = dense(q[:, :, i], k[:, :, j], v[:, :, j], options, inner, n)
        g = None if dlse is None else dlse[:, :, i]
        part = _dense_backward(do[:, :, i], d, heads, options.scale, inner, o[:, :, i], lse[:, :, i], g)
        result.dq[:, :, i], result.dk[:, :, j], result.dv[:, :, j] = part[:3]
        if dsinks is not None:
            dsinks += part.dsinks
    return result


# --- the pre-pass ----------------------------------------------------------------------------------------------------
def attention_delta(o: Floats, do: Floats) -> Floats:
    """The bits of delta: the order-free sums over the last axis of the products, rounded in the work type."""
    with default_environment(), np.errstate(all="ignore"):
        terms = ref.widen(o) * ref.widen(do)
        sums = ref.order_free_sum(terms.reshape(-1, terms.shape[-1]))
    return sums.reshape(o.shape[:-1])
