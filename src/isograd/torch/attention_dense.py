"""Attention in torch's own operations, all scores at once: the derivatives that no kernel has.

With the notation of `isograd.flash_attention.reference`, a dot for the tangents along given directions of q, k, v, bias
and sinks, and the sink as one more key whose value is 0:

    ṡ = cap' · scale (q̇ kᵀ + q k̇ᵀ) + ḃ,  l̇ = Σ P ṡ,  Ṗ = P (ṡ - l̇),  ȯ = (keep ∘ Ṗ) v + (keep ∘ P) v̇

and likewise for the gradients. Memory and time grow with the square of the length; all is differentiable again.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from isograd.flash_attention.options import DROPOUT_WORD, AttentionOptions
from isograd.torch.tensors import wide, work_dtype

_MASK = 0xFFFFFFFF


class Operands(NamedTuple):
    """What attention reads, as the operator takes it; tangents have those of q, k, v, bias and sinks."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    q_segment_ids: Tensor | None = None
    k_segment_ids: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    sinks: Tensor | None = None
    seed: Tensor | None = None


class Tangents(NamedTuple):
    """Directions in which the operands move; None stands for zeros."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None


# --- who sees whom, what is dropped ----------------------------------------------------------------------------------
class Places(NamedTuple):
    """Where rows of q [.., Lq, 1] and of k [.., Lk] stand: number of the sequence, position in it, and its offset."""

    q_sequence: Tensor
    i: Tensor
    k_sequence: Tensor
    j: Tensor
    offset: Any
    outside: int | None  # the number that stands for no sequence


def _packed(cu_seqlens: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """The sequence of each token (their number for none) and the position in it."""
    ends = cu_seqlens.long()
    rows = torch.arange(tokens, device=ends.device)
    sequence = torch.searchsorted(ends[1:].contiguous(), rows, right=True)
    return sequence, rows - ends[sequence]


def places_of(x: Operands, options: AttentionOptions) -> Places:
    """Where the rows of an attention stand."""
    q_length, k_length, device = x.q.shape[2], x.k.shape[2], x.q.device
    lower_right = options.alignment == "lower_right"
    if x.cu_seqlens_q is None or x.cu_seqlens_k is None:
        batch = torch.arange(x.q.shape[0], device=device)[:, None, None, None]
        i, j = torch.arange(q_length, device=device)[:, None], torch.arange(k_length, device=device)
        return Places(batch, i, batch, j, k_length - q_length if lower_right else 0, None)
    q_sequence, i = (t[:, None] for t in _packed(x.cu_seqlens_q, q_length))
    k_sequence, j = _packed(x.cu_seqlens_k, k_length)
    lengths = [torch.diff(ends.long(), append=ends[-1:].long()) for ends in (x.cu_seqlens_q, x.cu_seqlens_k)]
    offset = (lengths[1] - lengths[0])[q_sequence] if lower_right else 0
    return Places(q_sequence, i, k_sequence, j, offset, len(x.cu_seqlens_q) - 1)


def visible(x: Operands, options: AttentionOptions, at: Places) -> Tensor:
    """Whether query i sees key j, in a shape that broadcasts to [B, Hq, Lq, Lk]."""
    left, right = options.reach()
    level = at.i + at.offset
    seen = (at.q_sequence == at.k_sequence) & (at.j == at.j)
    if at.outside is not None:
        seen = seen & (at.q_sequence != at.outside)
    if left is not None:
        seen = seen & (at.j >= level - left)
    if right is not None:
        seen = seen & (at.j <= level + right)
    if x.mask is not None:
        seen = seen & x.mask
    if x.q_segment_ids is not None and x.k_segment_ids is not None:
        seen = seen & (x.q_segment_ids[:, None, :, None] == x.k_segment_ids[:, None, None, :])
    return seen


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of the product of two words, without an integer that overflows."""
    low, high = (a & 0xFFFF) * b, (a >> 16) * b
    return ((low >> 16) + high) >> 16, (((high & 0xFFFF) << 16) + low) & _MASK


def kept(x: Operands, options: AttentionOptions, at: Places) -> Tensor:
    """[.., Lq, Lk]: 1 / (1 - p) where dropout keeps a probability, else 0; `isograd.flash_attention.reference.kept`."""
    assert x.seed is not None
    heads = x.q.shape[1]
    number = at.q_sequence * heads + torch.arange(heads, device=x.q.device)[:, None, None]
    c0, c1, c2, c3 = at.j >> 2, at.i, number & _MASK, torch.full_like(at.j, DROPOUT_WORD)
    k0, k1 = x.seed & _MASK, (x.seed >> 32) & _MASK
    for _ in range(10):
        (high0, low0), (high2, low2) = _product(c0, 0xD2511F53), _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    choice = at.j & 3
    word = torch.where(choice < 2, torch.where(choice == 0, c0, c1), torch.where(choice == 2, c2, c3))
    return (word >= options.dropout_threshold).to(work_dtype(x.q.dtype)) * options.dropout_factor


# --- the intermediate results ----------------------------------------------------------------------------------------
class _Dense:
    """Probabilities and what they are made of, in the work type, heads of k and v repeated.

    p [B, Hq, Lq, Lk + 1] ends with the sink's share. slope and bend: cap' and cap'' at the scores.
    """

    def __init__(self, x: Operands, options: AttentionOptions) -> None:
        self.options = options
        self.scale = options.scale or 0.0
        self.kv_heads = x.k.shape[1]
        self.groups = x.q.shape[1] // self.kv_heads if self.kv_heads else 1
        q, k, v = wide(x.q, x.k, x.v)
        self.q, self.k, self.v = q, self.repeated(k), self.repeated(v)
        scores = self.scale * (self.q @ self.k.mT)
        self.slope: Any = 1.0
        self.bend: Any = 0.0
        if options.softcap:
            bent = torch.tanh(scores / options.softcap)
            scores, self.slope = options.softcap * bent, 1 - bent * bent
            self.bend = -2 / options.softcap * bent * self.slope
        if x.bias is not None:
            scores = scores + wide(x.bias)[0]
        at = places_of(x, options)
        self.seen = visible(x, options, at)
        nothing = torch.full((), -torch.inf, dtype=q.dtype, device=q.device)
        column = nothing if x.sinks is None else wide(x.sinks)[0].to(q.dtype)[:, None, None]
        if at.outside is not None:
            column = torch.where(at.q_sequence != at.outside, column, nothing)
        column = column.expand(*scores.shape[:3], 1)
        scores = torch.cat([torch.where(self.seen, scores, nothing), column], -1)
        top = scores.detach().amax(-1, keepdim=True)
        e = torch.exp(scores - torch.where(top == -torch.inf, 0, top))
        total = e.sum(-1, keepdim=True)
        self.p = e / torch.where(total == 0, 1, total)
        self.keep: Any = kept(x, options, at) if options.dropout_p else 1.0

    def repeated(self, t: Tensor) -> Tensor:
        """A head of k or v for each head of q."""
        return t if self.groups == 1 else t.repeat_interleave(self.groups, 1)

    def grouped(self, t: Tensor) -> Tensor:
        """The sum over the heads of q that share a head of k and v."""
        return t if self.groups == 1 else t.reshape(t.shape[0], self.kv_heads, self.groups, *t.shape[2:]).sum(2)

    def moved(self, t: Tangents) -> tuple[Any, Tensor]:
        """The tangents of q·k, scaled, and of p."""
        raw: Any = 0.0
        if t.q is not None:
            raw = self.scale * (wide(t.q)[0] @ self.k.mT)
        if t.k is not None:
            raw = raw + self.scale * (self.q @ self.repeated(wide(t.k)[0]).mT)
        scores = self.slope * raw if t.bias is None else self.slope * raw + wide(t.bias)[0]
        scores = torch.where(self.seen, scores, torch.zeros_like(self.p[..., :-1]))
        column = torch.zeros_like(self.p[..., -1:])
        if t.sinks is not None:
            column = column + wide(t.sinks)[0].to(column.dtype)[:, None, None]
        scores = torch.cat([scores, column], -1)
        self.lse_tangent = (self.p * scores).sum(-1)
        return raw, self.p * (scores - self.lse_tangent[..., None])


# --- derivatives -----------------------------------------------------------------------------------------------------
def tangents(x: Operands, options: AttentionOptions, t: Tangents) -> tuple[Tensor, Tensor]:
    """The tangents of o and lse, in their dtypes."""
    d = _Dense(x, options)
    _, moved = d.moved(t)
    o = (d.keep * moved[..., :-1]) @ d.v
    if t.v is not None:
        o = o + (d.keep * d.p[..., :-1]) @ d.repeated(wide(t.v)[0])
    return o.to(x.q.dtype), d.lse_tangent


def gradient_tangents(
    x: Operands, options: AttentionOptions, do: Tensor, dlse: Tensor | None, t: Tangents
) -> tuple[Tensor | None, ...]:
    """The tangents of dq, dk, dv, dbias and dsinks while do and dlse stay, in their dtypes.

    As the gradients are those of one function, this is also their gradient along t.
    """
    d = _Dense(x, options)
    (do,) = wide(do)
    raw, moved = d.moved(t)
    dp = torch.nn.functional.pad(d.keep * (do @ d.v.mT), (0, 1))
    delta = (d.p * dp).sum(-1, keepdim=True)
    delta_moved = (moved * dp).sum(-1, keepdim=True)
    dp_moved: Any = 0.0
    if t.v is not None:
        dp_moved = torch.nn.functional.pad(d.keep * (do @ d.repeated(wide(t.v)[0]).mT), (0, 1))
        delta_moved = delta_moved + (d.p * dp_moved).sum(-1, keepdim=True)
    if dlse is not None:
        delta = delta - dlse[..., None]
    ds_moved = moved * (dp - delta) + d.p * (dp_moved - delta_moved)
    ds = (d.p * (dp - delta))[..., :-1]
    inner, inner_moved = d.slope * ds, d.slope * ds_moved[..., :-1] + d.bend * raw * ds
    dq, dk = inner_moved @ d.k, inner_moved.mT @ d.q
    if t.k is not None:
        dq = dq + inner @ d.repeated(wide(t.k)[0])
    if t.q is not None:
        dk = dk + inner.mT @ wide(t.q)[0]
    dv = (d.keep * moved[..., :-1]).mT @ do
    dbias = None if x.bias is None else ds_moved[..., :-1].sum_to_size(x.bias.shape).to(x.bias.dtype)
    dsinks = None if x.sinks is None else ds_moved[..., -1].sum((0, 2)).to(x.sinks.dtype)
    return (
        (d.scale * dq).to(x.q.dtype),
        d.grouped(d.scale * dk).to(x.k.dtype),
        d.grouped(dv).to(x.v.dtype),
        dbias,
        dsinks,
    )
