"""Attention by order-free products, all scores at once, with the bits of its pieces: those of every machine.

    S = cap(scale · q kᵀ) + bias,  P = softmax(S [and the sink]),  o = (keep ∘ P) v

Products are those of 16-bit integers (rule 10) with results of float32, where everything between them is. Queries that
share a head of k and v are rows of one product, so its gradients are products as well. cap(x) = c · tanh(x / c), and
tanh(x) is the difference of the two elements of softmax(x, -x).
"""

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor

from isograd.flash_attention.cpu import checked_ends
from isograd.flash_attention.options import AttentionOptions
from isograd.torch.attention_dense import Operands, kept, places_of, visible
from isograd.torch.broadcasting import add
from isograd.torch.exported import softmax
from isograd.torch.ops_attention import require_operands
from isograd.torch.ops_matmul import MATMUL

_NARROW = (torch.float16, torch.bfloat16)


def _require_ends(name: str, x: Operands) -> None:
    """Raise for ends of packed sequences on the CPU that are none; a trace and a transform have no numbers."""
    for argument, ends, rows in (("cu_seqlens_q", x.cu_seqlens_q, x.q), ("cu_seqlens_k", x.cu_seqlens_k, x.k)):
        if type(ends) is Tensor and ends.is_cpu and not is_functorch_wrapped_tensor(ends):
            checked_ends(name, argument, ends.numpy(), rows.shape[2])


def _capped(scores: Tensor, softcap: float) -> Tensor:
    bent = scores / softcap
    first, second = softmax(torch.stack([bent, -bent], -1), -1).unbind(-1)
    return softcap * (first - second)


def attend(name: str, x: Operands, options: AttentionOptions) -> Tensor:
    """The result [B, Hq, Lq, Dv] in q's dtype, of operands in four axes and options whose scale is filled in."""
    if torch.is_autocast_enabled(x.q.device.type):
        dtype = torch.get_autocast_dtype(x.q.device.type)
        x = x._replace(q=x.q.to(dtype), k=x.k.to(dtype), v=x.v.to(dtype))
        wide = {argument: getattr(x, argument) for argument in ("bias", "sinks")}
        x = x._replace(**{key: t.to(dtype) for key, t in wide.items() if t is not None and t.dtype in _NARROW})
    require_operands(name, x)
    if not torch.compiler.is_compiling():
        _require_ends(name, x)
    with torch.autocast(x.q.device.type, enabled=False):
        return _attend(x, options)


def _attend(x: Operands, options: AttentionOptions) -> Tensor:
    (b, heads, q_length, head_dim), (_, kv_heads, k_length, v_dim) = x.q.shape, x.v.shape
    rows, scale = heads // max(kv_heads, 1) * q_length, options.scale
    assert scale is not None
    q, k, v = x.q.float(), x.k.float(), x.v.float()
    scores: Tensor = MATMUL(q.reshape(b, kv_heads, rows, head_dim), k.mT, "int16")
    scores = scores.view(b, heads, q_length, k_length) * scale
    if options.softcap:
        scores = _capped(scores, options.softcap)
    if x.bias is not None:
        scores = add(scores, x.bias.float())
    at = places_of(x, options)
    nothing = torch.full((), -torch.inf, device=q.device)
    scores = torch.where(visible(x, options, at), scores, nothing)
    if x.sinks is not None:
        column = add(scores.new_zeros(b, heads, q_length, 1), x.sinks.float()[:, None, None])
        if at.outside is not None:
            column = torch.where(at.q_sequence != at.outside, column, nothing)
        scores = torch.cat([scores, column], -1)
    some = (scores != -torch.inf).any(-1, keepdim=True)  # a row that sees nothing is 0
    p = torch.where(some, softmax(torch.where(some, scores, 0.0), -1), 0.0)[..., :k_length]
    if options.dropout_p:
        p = p * kept(x, options, at)
    o: Tensor = MATMUL(p.reshape(b, kv_heads, rows, k_length), v, "int16")
    return o.view(b, heads, q_length, v_dim).to(x.q.dtype)
