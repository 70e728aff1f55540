"""The modules that `convert` knows, by the names of their classes, and what it makes of them."""

import itertools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn import Module

from isograd.ops.router import torch as routing
from isograd.torch import rotary_positions
from isograd.torch.exported import gelu, gelu_mul, layer_norm, rms_norm, silu, silu_mul
from isograd.torch.indexing import embedding
from isograd.torch.product_functions import grouped_linear, linear
from isograd.torch.switch import use
from isograd.torch.tensors import work_dtype

Call = Callable[..., Any]
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # they compute nothing themselves
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# --- torch.nn --------------------------------------------------------------------------------------------------------
def _embedding(m: Any, input: Tensor) -> Tensor:  # noqa: A002
    return embedding(input, m.weight, m.padding_idx, m.max_norm, m.norm_type, m.scale_grad_by_freq, m.sparse)


def _widest(x: Tensor, *weights: Tensor | None) -> tuple[Tensor, ...]:
    """In the dtype that holds all; None stays."""
    dtype = x.dtype
    for weight in weights:
        dtype = dtype if weight is None else torch.promote_types(dtype, weight.dtype)
    return tuple([t if t is None else t.to(dtype) for t in (x, *weights)])  # type: ignore[misc]


def _stored(y: Tensor, x: Tensor) -> Tensor:
    """The result of a norm of x in torch's dtype: x's, but float32 under CUDA autocast."""
    return y if x.is_cuda and torch.is_autocast_enabled("cuda") else y.to(x.dtype)


def _layer_norm(m: Any, input: Tensor) -> Tensor:  # noqa: A002
    x, weight, bias = _widest(input, m.weight, m.bias)
    return _stored(layer_norm(x, m.normalized_shape, weight, bias, m.eps), input)


def _torch_rms_norm(m: Any, x: Tensor) -> Tensor:
    eps = torch.finfo(work_dtype(x.dtype)).eps if m.eps is None else m.eps
    wide, weight = _widest(x, m.weight)
    return _stored(rms_norm(wide, m.normalized_shape, weight, eps), x)


def _silu(m: Any, input: Tensor) -> Tensor:  # noqa: A002
    return silu(input)


def _gelu(m: Any, input: Tensor) -> Tensor:  # noqa: A002
    return gelu(input, getattr(m, "approximate", "none"))


def _gelu_tanh(m: Any, input: Tensor) -> Tensor:  # noqa: A002
    return gelu(input, "tanh")


def _switched(m: Any, *args: Any, **kwargs: Any) -> Any:
    with use():
        return type(m).forward(m, *args, **kwargs)


def _switched_products(m: Any, *args: Any, **kwargs: Any) -> Any:
    with use(products="int16"):
        return type(m).forward(m, *args, **kwargs)


def _linear(m: Any, input: Tensor) -> Tensor:  # noqa: A002
    return linear(input, m.weight, m.bias)


# --- transformers ----------------------------------------------------------------------------------------------------
def _rms_norm(m: Any, hidden_states: Tensor) -> Tensor:
    """The result has the wider dtype of the two."""
    x, weight = _widest(hidden_states, m.weight)
    return rms_norm(x, weight.shape, weight, m.variance_epsilon)


def _olmo_rms_norm(m: Any, hidden_states: Tensor) -> Tensor:
    return _rms_norm(m, hidden_states).to(hidden_states.dtype)


def _olmo_layer_norm(m: Any, hidden_states: Tensor) -> Tensor:
    return layer_norm(hidden_states, m.normalized_shape, None, None, 1e-5)


def _gemma_rms_norm(m: Any, x: Tensor) -> Tensor:
    """1 + weight needs the work type, in which the norm is computed therefore."""
    dtype = work_dtype(x.dtype)
    return rms_norm(x.to(dtype), m.weight.shape, 1.0 + m.weight.to(dtype), m.eps).to(x.dtype)


def _scaled_embedding(m: Any, input_ids: Tensor) -> Tensor:
    scale: Tensor = m.embed_scale.to(m.weight.dtype)
    return _embedding(m, input_ids) * scale


def _conv1d(m: Any, x: Tensor) -> Tensor:
    """A linear layer whose weight lies transposed."""
    return linear(x, m.weight.t(), m.bias)


def _routed(
    m: Any, hidden_states: Tensor, renormalize: bool, product: Call = F.linear
) -> tuple[Tensor, Tensor, Tensor]:
    logits = product(hidden_states.reshape(-1, m.hidden_dim), m.weight)
    weights, experts = routing.moe_router(logits, m.top_k, renormalize=renormalize)
    return logits, weights, experts


def _mixtral_router(m: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _routed(m, hidden_states, True)


def _mixtral_router_products(m: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _routed(m, hidden_states, True, linear)


def _router(m: Any, hidden_states: Tensor, product: Call = F.linear) -> tuple[Tensor, Tensor, Tensor]:
    logits, weights, experts = _routed(m, hidden_states, m.norm_topk_prob, product)
    return logits, weights.to(logits.dtype), experts


def _router_products(m: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _router(m, hidden_states, linear)


def _silu_mul(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return silu_mul(gate, up)


def _gelu_mul(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return gelu_mul(gate, up, getattr(m, "approximate", "none"))


def _gelu_tanh_mul(m: Any, gate: Tensor, up: Tensor) -> Tensor:
    return gelu_mul(gate, up, "tanh")


# By themselves, and of a gate.
_ACTIVATIONS: dict[str, tuple[Call, Call]] = {
    "torch.nn.modules.activation.SiLU": (_silu, _silu_mul),
    "torch.nn.modules.activation.GELU": (_gelu, _gelu_mul),
    "transformers.activations.SiLUActivation": (_silu, _silu_mul),
    "transformers.activations.GELUActivation": (_gelu, _gelu_mul),
    "transformers.activations.GELUTanh": (_gelu_tanh, _gelu_tanh_mul),
    "transformers.activations.NewGELUActivation": (_gelu_tanh, _gelu_tanh_mul),
}


def _gated(m: Module, gate: Tensor, up: Tensor) -> Tensor:
    """`m(gate) * up` for the activations that `_refused` lets pass; hooks of the activation see a call of its own."""
    if m._forward_pre_hooks or m._forward_hooks or m._backward_pre_hooks or m._backward_hooks:
        return cast(Tensor, m(gate)) * up
    result: Tensor = _ACTIVATIONS[_name_of(type(m))][1](m, gate, up)
    return result


def _mlp(m: Any, x: Tensor) -> Any:
    return m.down_proj(_gated(m.act_fn, m.gate_proj(x), m.up_proj(x)))


def _torch_grouped(rows: Tensor, weight: Tensor, offsets: list[int]) -> Tensor:
    """Products of torch's, of the rows of each expert."""
    parts = torch.split(rows, [end - start for start, end in itertools.pairwise(offsets)])
    return torch.cat([F.linear(part, one) for part, one in zip(parts, weight.unbind(), strict=True)])


def _experts(
    m: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor, product: Call = _torch_grouped
) -> Tensor:
    """Rows sorted by expert, products for each, and an order-free sum over every token's experts."""
    order, offsets = routing.expert_permutation(top_k_index, m.num_experts)
    rows = routing.moe_permute(hidden_states, order, top_k_index.shape[-1])
    # Those of a GPU stay there for products that take them, so that nothing waits for the routing.
    ends = offsets if offsets.is_cuda and product is grouped_linear else offsets.tolist()
    gate, value = product(rows, m.gate_up_proj, ends).chunk(2, dim=-1)
    results = product(_gated(m.act_fn, gate, value), m.down_proj, ends)
    y = routing.moe_combine(results, top_k_weights.to(work_dtype(results.dtype)), order)
    return y.to(hidden_states.dtype)


def _experts_products(m: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    return _experts(m, hidden_states, top_k_index, top_k_weights, grouped_linear)


# --- the tables ------------------------------------------------------------------------------------------------------
_KNOWN: dict[str, tuple[Call, str]] = {
    "torch.nn.modules.sparse.Embedding": (_embedding, "isograd.torch.embedding"),
    "torch.nn.modules.normalization.LayerNorm": (_layer_norm, "isograd.torch.layer_norm"),
    "torch.nn.modules.normalization.RMSNorm": (_torch_rms_norm, "isograd.torch.rms_norm"),
}
for _name in (
    "activation.Softmax",
    "activation.LogSoftmax",
    "activation.MultiheadAttention",
    "loss.CrossEntropyLoss",
    "loss.KLDivLoss",
    "transformer.TransformerEncoder",
    "transformer.TransformerEncoderLayer",
):
    _KNOWN[f"torch.nn.modules.{_name}"] = _switched, "its functions, as in isograd.torch.use"

for _name, (_call, _) in _ACTIVATIONS.items():
    _KNOWN[_name] = _call, f"isograd.torch.{'silu' if _call is _silu else 'gelu'}"

# By order-free products, in place of what stands in the other tables.
_BY_PRODUCTS: dict[str, tuple[Call, str]] = {
    "torch.nn.modules.linear.Linear": (_linear, "isograd.torch.linear in int16"),
    "transformers.pytorch_utils.Conv1D": (_conv1d, "isograd.torch.linear in int16"),
}
for _name in ("activation.MultiheadAttention", "transformer.TransformerEncoder", "transformer.TransformerEncoderLayer"):
    _note = 'its functions, as in isograd.torch.use(products="int16")'
    _BY_PRODUCTS[f"torch.nn.modules.{_name}"] = _switched_products, _note

_NATIVE = "native product: bits fixed on one kind of machine"
_NO_OPERATION = "no operation of isograd's"
_LEFT = {
    "torch.nn.modules.linear.Linear": _NATIVE,
    "torch.nn.modules.dropout.Dropout": "torch's generator; isograd.torch.use(samples=...) replaces what it calls",
}

_FAMILIES = {
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2Moe",
    "qwen3_moe": "Qwen3Moe",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "olmo": "Olmo",
    "olmo2": "Olmo2",
    "olmo3": "Olmo3",
    "olmoe": "Olmoe",
    "gemma": "Gemma",
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
}
for _folder, _family in _FAMILIES.items():
    _place = f"transformers.models.{_folder}.modeling_{_folder}.{_family}"
    _norm = _gemma_rms_norm if "gemma" in _folder else _olmo_rms_norm if _folder in ("olmo2", "olmo3") else _rms_norm
    _KNOWN[f"{_place}RMSNorm"] = _norm, "isograd.torch.rms_norm"
    _KNOWN[f"{_place}LayerNorm"] = _olmo_layer_norm, "isograd.torch.layer_norm"
    _KNOWN[f"{_place}TopKRouter"] = (
        _mixtral_router if _folder == "mixtral" else _router,
        "isograd.torch.moe_router; its product is native",
    )
    _KNOWN[f"{_place}MLP"] = _mlp, "isograd.torch.silu_mul or gelu_mul"
    _KNOWN[f"{_place}Experts"] = (
        _experts,
        "isograd.torch.moe_permute, silu_mul or gelu_mul, and moe_combine; its products are native",
    )
    _KNOWN[f"{_place}TextScaledWordEmbedding"] = _scaled_embedding, "isograd.torch.embedding"
    _positions = rotary_positions.wide_positions if _folder in ("olmo", "olmo2") else rotary_positions.positions
    _KNOWN[f"{_place}RotaryEmbedding"] = _positions, "isograd.rotary_table"
    _KNOWN[f"{_place}Attention"] = rotary_positions.attention, "its rotary positions by isograd.torch.rotary"
    _BY_PRODUCTS[f"{_place}TopKRouter"] = (
        _mixtral_router_products if _folder == "mixtral" else _router_products,
        "isograd.torch.linear in int16, moe_router",
    )
    _BY_PRODUCTS[f"{_place}Experts"] = (
        _experts_products,
        "isograd.torch.moe_permute, grouped_linear in int16, silu_mul or gelu_mul, and moe_combine",
    )


def _name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def find(module: Module, products: str | None = None) -> tuple[Call | None, str]:
    """The replacement of a module's forward and its name, or None and the reason why it has none.

    A subclass is known if it has the forward of a class that is, as those of fully_shard.
    """
    for kind in type(module).__mro__:
        name = _name_of(kind)
        entry = _BY_PRODUCTS.get(name) if products else None
        entry = entry or _KNOWN.get(name)
        if entry is None and name not in _LEFT:
            continue
        if type(module).forward is not kind.forward:  # type: ignore[attr-defined]
            return None, f"not known: has a forward of its own, not that of {kind.__qualname__}"
        if entry is None:
            return None, _LEFT[name]
        call, note = entry
        why = _refused(module, call)
        return (None, why) if why else (call, note)
    return None, "not known"


def _refused(module: Any, call: Call) -> str:
    """What settings of a module isograd has nothing for."""
    if call in (_embedding, _scaled_embedding):
        given = [name for name in ("max_norm", "scale_grad_by_freq", "sparse") if getattr(module, name)]
        return f"no operation of isograd's with {', '.join(given)}" if given else ""
    if call is _silu and getattr(module, "inplace", False):
        return f"{_NO_OPERATION} in place"
    if call in (_mlp, _experts, _experts_products) and _name_of(type(module.act_fn)) not in _ACTIVATIONS:
        return f"{_NO_OPERATION} for its activation, {type(module.act_fn).__name__}"
    if call in (rotary_positions.positions, rotary_positions.wide_positions):
        kind = getattr(module, "rope_type", None)
        kind = kind if isinstance(kind, str) else "of each layer"
        return "" if kind == "default" else f"{_NO_OPERATION} for rotary positions of the kind {kind}"
    if call is rotary_positions.attention and not rotary_positions.applies(type(module)):
        return f"{_NO_OPERATION} for its rotary positions"
    if call in (_experts, _experts_products) and getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    return ""


def takes_attention(module: Any) -> bool:
    """Whether a module is a model of transformers, whose configuration names its attention."""
    return any(_name_of(kind) == "transformers.modeling_utils.PreTrainedModel" for kind in type(module).__mro__)


def attention_is_left(model: Any) -> str | None:
    """Why a model of transformers keeps its attention, or None."""
    if not model._supports_attention_backend:
        return "does not take its attention from transformers' interface"
    config = model.config
    heads = getattr(config, "num_attention_heads", None)
    size = getattr(config, "head_dim", None) or (config.hidden_size // heads if isinstance(heads, int) else 0)
    if size > 256:
        return f"its heads have {size} elements; accepted: up to 256"
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()} - set(_FLOATS)
    return f"has parameters of {min(map(str, dtypes))}" if dtypes else None
