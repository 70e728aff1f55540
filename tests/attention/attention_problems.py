"""Problems of attention: shapes, options and values, how they are run, and the plain computation in PyTorch."""

from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch

import isograd as ig
from isograd.core import arrays
from isograd.flash_attention import reference
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.reference import Inputs

LENGTHS = (1, 2, 63, 64, 65, 113, 127, 128, 200, 255, 512, 1024, 2048)
DIMS = (16, 40, 64, 72, 96, 128, 192, 256)
HEADS = ((1, 1), (4, 4), (2, 1), (4, 2), (8, 1))
# One option alone, then pairs that share code. Beside fields of AttentionOptions: which operands there are.
FLAVOURS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "causal, upper left": {"causal": True, "alignment": "upper_left"},
    "window": {"window": (33, 10)},
    "window, left side": {"window": (70, None)},
    "window, right side": {"window": (None, 4)},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "dropout": {"dropout_p": 0.2, "seed": 2**63 + 11},
    "bias": {"bias": (True, True, True, True)},
    "bias of heads and keys": {"bias": (False, True, False, True)},
    "bias of queries": {"bias": (False, False, True, False)},
    "bias of batches": {"bias": (True, False, False, False)},
    "mask": {"mask": (True, False, True, True)},
    "mask of keys": {"mask": (True, False, False, True)},
    "segments": {"segments": True},
    "packed": {"packed": True},
    "sinks": {"sinks": True},
    "causal window": {"causal": True, "window": (20, 3)},
    "window, upper left": {"window": (20, 3), "alignment": "upper_left"},
    "softcap and bias": {"softcap": 1.5, "bias": (True, False, True, True)},
    "softcap and sinks": {"softcap": 1.5, "sinks": True},
    "bias and mask": {"bias": (False, True, True, True), "mask": (True, True, True, True)},
    "bias and dropout": {"bias": (False, True, False, True), "dropout_p": 0.3, "seed": 5},
    "softcap and dropout": {"softcap": 2.0, "dropout_p": 0.3, "seed": 6},
    "causal and segments": {"causal": True, "segments": True},
    "causal and mask": {"causal": True, "mask": (True, False, True, True)},
    "causal and sinks": {"causal": True, "sinks": True},
    "causal, packed": {"causal": True, "packed": True},
    "window, packed, sinks": {"window": (30, 5), "packed": True, "sinks": True},
    "dropout, packed": {"dropout_p": 0.1, "seed": 7, "packed": True},
}


class Problem(NamedTuple):
    """Arrays of one dtype, [B, H, L, D], options and what else there is."""

    do: Any
    q: Any
    k: Any
    v: Any
    dlse: Any
    options: AttentionOptions
    inputs: Inputs

    @property
    def arguments(self):
        """The keyword arguments of `isograd.attention`."""
        return {**asdict(self.options), **{k: v for k, v in self.inputs._asdict().items() if v is not None}}


def stored(x, dtype):
    return np.asarray(x, np.float32 if dtype != "float64" else np.float64).astype(arrays.numpy_dtype(dtype))


def _ends(rng, tokens):
    """cu_seqlens of five sequences, one of them empty, that leave some tokens over."""
    cuts = np.sort(rng.integers(0, max(tokens - 2, 0) + 1, 4))
    return np.array([0, cuts[0], cuts[1], cuts[1], *cuts[2:]], np.int32)


def make(rng, flavour, dtype, batch=2, heads=(4, 2), q_length=70, k_length=150, head_dim=16, v_dim=24):
    """A problem with random values."""
    fields = dict(FLAVOURS[flavour])
    present = {name: fields.pop(name, None) for name in ("bias", "mask", "segments", "packed", "sinks")}
    if present["packed"]:
        batch = 1
    scores = (batch, heads[0], q_length, k_length)

    def broadcast(kept):
        return tuple(n if keep else 1 for n, keep in zip(scores, kept, strict=True))

    def normal(*shape):
        return stored(rng.standard_normal(shape), dtype)

    inputs = Inputs(
        bias=normal(*broadcast(present["bias"])) if present["bias"] else None,
        mask=rng.random(broadcast(present["mask"])) < 0.7 if present["mask"] else None,
        segment_ids=(
            rng.integers(0, 3, (batch, q_length), dtype=np.int32),
            rng.integers(0, 3, (batch, k_length), dtype=np.int32),
        )
        if present["segments"]
        else None,
        cu_seqlens=(_ends(rng, q_length), _ends(rng, k_length)) if present["packed"] else None,
        sinks=normal(heads[0]) if present["sinks"] else None,
    )
    return Problem(
        normal(batch, heads[0], q_length, v_dim),
        normal(batch, heads[0], q_length, head_dim),
        normal(batch, heads[1], k_length, head_dim),
        normal(batch, heads[1], k_length, v_dim),
        stored(rng.standard_normal((batch, heads[0], q_length)), "float64" if dtype == "float64" else "float32"),
        AttentionOptions(**fields),
        inputs,
    )


def run(p, dlse=False):
    """(o, lse, gradients) of isograd."""
    o, lse = ig.attention(p.q, p.k, p.v, return_lse=True, **p.arguments)
    extra = {"dlse": p.dlse} if dlse else {}
    return o, lse, ig.attention_backward(p.do, p.q, p.k, p.v, o, lse, **extra, **p.arguments)


def exact(p, dlse=False):
    """(o, lse, gradients) of the oracle."""
    o, lse = reference.oracle_attention(p.q, p.k, p.v, p.options, p.inputs)
    given = p.dlse if dlse else None
    return o, lse, reference.oracle_attention_backward(p.do, p.q, p.k, p.v, p.options, p.inputs, given)


def exact_backward(p, o, lse, dlse=False):
    """The gradients of the oracle for a given o and lse, which the bounds are about."""
    given = p.dlse if dlse else None
    return reference.oracle_attention_backward(p.do, p.q, p.k, p.v, p.options, p.inputs, given, o, lse)


def plans(p, dlse=False):
    """The plans of both directions."""
    (batch, heads, q_length, head_dim), (_, kv_heads, k_length, _) = p.q.shape, p.k.shape
    i = p.inputs
    fields = {
        "batch": batch,
        "heads": heads,
        "kv_heads": kv_heads,
        "q_length": q_length,
        "k_length": k_length,
        "head_dim": head_dim,
        "v_dim": p.v.shape[3],
        "dtype": p.q.dtype.name,
        "options": p.options,
        "bias_shape": None if i.bias is None else i.bias.shape,
        "mask_shape": None if i.mask is None else i.mask.shape,
        "segments": i.segment_ids is not None,
        "sequences": None if i.cu_seqlens is None else len(i.cu_seqlens[0]) - 1,
        "sinks_dtype": None if i.sinks is None else i.sinks.dtype.name,
    }
    flags = {"dlse": dlse, "dbias": i.bias is not None, "dsinks": i.sinks is not None}
    return (
        ig.AttentionPlan.select(ig.AttentionDescriptor(**fields)),
        ig.AttentionBackwardPlan.select(ig.AttentionBackwardDescriptor(**fields, **flags)),
    )


def operands(p):
    """The optional inputs by the names of the plans' operands."""
    found = {name: x for name in ("bias", "mask", "sinks") if (x := getattr(p.inputs, name)) is not None}
    for names, pair in (
        (("q_segment_ids", "k_segment_ids"), p.inputs.segment_ids),
        (("cu_seqlens_q", "cu_seqlens_k"), p.inputs.cu_seqlens),
    ):
        if pair is not None:
            found |= dict(zip(names, pair, strict=True))
    return found


def bounds(p, o, lse, dlse=False):
    """What the plans promise: the bounds of (o, lse), and those of the gradients by their names."""
    forward, backward = plans(p, dlse)
    extra = {"options": p.options, **operands(p)}
    of = forward.precision_guarantee.error_bound(q=p.q, k=p.k, v=p.v, **extra)
    given = {"dlse": p.dlse} if dlse else {}
    of_gradients = backward.precision_guarantee.error_bound(
        do=p.do, q=p.q, k=p.k, v=p.v, o=o, lse=lse, **given, **extra
    )
    return of, dict(zip(backward.outputs, of_gradients, strict=True))


# --- the plain computation -------------------------------------------------------------------------------------------
def _tensor(x):
    if x.dtype.name == "bfloat16":
        return torch.from_numpy(x.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def _plain_dense(q, k, v, options, inputs, first):
    """softmax(cap(scale q kᵀ) + bias) v in the dtype of the tensors, every step rounded to it."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    options = options.validated("attention", q.shape[3])
    s = (q * options.scale) @ k.mT
    if options.softcap:
        s = options.softcap * torch.tanh(s / options.softcap)
    if inputs.bias is not None:
        s = s + inputs.bias
    seen = torch.from_numpy(reference.visible(options, q.shape[2], k.shape[2]))
    if inputs.mask is not None:
        seen = seen & torch.from_numpy(inputs.mask)
    if inputs.segment_ids is not None:
        ids = [torch.from_numpy(x) for x in inputs.segment_ids]
        seen = seen & (ids[0][:, None, :, None] == ids[1][:, None, None, :])
    s = s.masked_fill(~seen, -torch.inf)
    if inputs.sinks is not None:
        s = torch.cat([inputs.sinks[:, None, None].expand(*s.shape[:3], 1), s], -1)
    dead = (s == -torch.inf).all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(dead, 0), -1).masked_fill(dead, 0)
    if inputs.sinks is not None:
        p = p[..., 1:]
    if options.dropout_p:
        keep = reference.kept(options, first, tuple(p.shape))
        p = p.masked_fill(torch.from_numpy(~keep), 0) * options.dropout_factor
    return p @ v


def plain(p):
    """(o, gradients) of a plain PyTorch computation in the problem's dtype, as NumPy arrays of float64."""
    leaves = [_tensor(x).requires_grad_() for x in (p.q, p.k, p.v)]
    q, k, v = leaves
    extra = {
        name: _tensor(x).requires_grad_() for name in ("bias", "sinks") if (x := getattr(p.inputs, name)) is not None
    }
    inputs = p.inputs._replace(**extra)
    if inputs.cu_seqlens is None:
        o = _plain_dense(q, k, v, p.options, inputs, 0)
    else:
        parts, last = [], 0
        for n, i, j in reference.sequences(inputs.cu_seqlens):
            parts.append(_plain_dense(q[:, :, i], k[:, :, j], v[:, :, j], p.options, Inputs(sinks=inputs.sinks), n))
            last = i.stop
        o = torch.cat([*parts, torch.zeros_like(q[:, :, last:, :1]).expand(-1, -1, -1, v.shape[3])], 2)
    wanted = [*leaves, *extra.values()]
    found = torch.autograd.grad(o, wanted, _tensor(p.do), allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
    gradients = [g.double().numpy() for g in found]
    named = dict(zip(("dq", "dk", "dv", *(f"d{name}" for name in extra)), gradients, strict=True))
    return o.detach().double().numpy(), named
