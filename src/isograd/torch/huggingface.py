"""isograd's attention for the models of Hugging Face transformers."""

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from isograd.errors import UnsupportedError
from isograd.torch.dot_product import Precision, attention
from isograd.torch.tensors import work_dtype

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k")


def _sinks(s_aux: Tensor | None, query: Tensor) -> Tensor | None:
    if s_aux is None or s_aux.dtype in (query.dtype, work_dtype(query.dtype)):
        return s_aux
    return s_aux.to(work_dtype(query.dtype))


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    precision: Precision | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: [B, H, L, D] in, ([B, L, H, D], None) out.

    attention_mask: boolean or added to the scores, holding all that is hidden; None for a causal module whose every key
    up to the query is visible, and for one that sees everything. sliding_window, softcap, s_aux (the sinks) and
    position_bias (added to the scores) as the models pass them; a sliding window is in the mask already where there is
    one. cu_seq_lens_q and cu_seq_lens_k: ends of sequences packed into one row; the mask is not read then. Weights are
    not returned, whatever output_attentions says.
    """
    if kwargs.get("output_attentions"):
        warnings.warn("isograd's attention does not return weights; use the eager implementation", stacklevel=2)
    if query.dtype is torch.float64:
        precision = None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    options: dict[str, Any] = {
        "scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": _sinks(s_aux, query),
        "dropout_p": dropout,
        "precision": precision,
    }
    window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    if all(kwargs.get(name) is not None for name in _PACKED):
        if position_bias is not None:
            raise UnsupportedError("attention: position_bias is given for packed sequences; accepted: None")
        ends = tuple([kwargs[name].to(torch.int32) for name in _PACKED])
        o = attention(query, key, value, causal=causal, window=window, cu_seqlens=ends, **options)
        return o.transpose(1, 2), None
    bias = mask = None
    if attention_mask is not None and attention_mask.dtype is torch.bool:
        mask = attention_mask
    elif attention_mask is not None:
        bias = attention_mask
    if position_bias is not None:
        bias = position_bias if bias is None else bias + position_bias
    # One query is the last of its sequence and sees all keys. Several without a mask are the first ones of theirs, the
    # keys behind them places that a cache has not filled yet.
    causal = causal and attention_mask is None and query.shape[2] > 1
    options |= {"bias": bias, "mask": mask, "causal": causal, "alignment": "upper_left"}
    return attention(query, key, value, **options).transpose(1, 2), None


def register_transformers(name: str = "isograd", *, precision: Precision | None = None) -> None:
    """Make isograd's attention an attention implementation of Hugging Face transformers.

        isograd.torch.register_transformers()
        model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="isograd")

    Grouped heads, sliding windows, soft caps, sinks, position biases, padding, caches and packed sequences are served,
    with gradients for all of them. Masks are those of transformers' "sdpa": none for a batch without padding, else
    boolean [B, 1, Lq, Lk], also for a sliding window shorter than the sequence. A query that sees no key gives 0.
    precision: that of `isograd.torch.attention`; one with "int16" needs a name of its own, and takes float64 without.

    Raises ImportError where transformers is missing or older than its `AttentionInterface` (4.53).
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError(
            "isograd.torch.register_transformers needs transformers 4.53 or newer: pip install transformers"
        ) from error
    forward = attention_forward if precision is None else functools.partial(attention_forward, precision=precision)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, sdpa_mask)
