"""The operator of attention over keys and values in a cache.

    attention_with_cache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table=None,
                         Tensor? sinks=None, SymInt? left=None, float? scale=None, float softcap=0.0,
                         str? preference=None) -> (Tensor, Tensor)

q is [B, Hq, Lq, D], the cache [B, Hkv, K, D], or [pages, Hkv, page_size, D] with a block_table, in any strides; o lies
in memory as q does. left: of the window. It has no gradient.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError
from isograd.flash_attention import cached
from isograd.flash_attention.descriptors import AttentionWithCacheDescriptor
from isograd.flash_attention.options import AttentionOptions
from isograd.torch import define
from isograd.torch.ops_attention import (
    as_autocast,
    known_options,
    options_of,
    require_dtype,
    require_head_dims,
    require_heads,
    require_shape,
    rows_like,
)
from isograd.torch.tensors import (
    NAMES,
    empty,
    launch,
    require_device,
    require_same_dtype,
    require_storage,
    usable,
    work_dtype,
)

_NAME = "attention_with_cache"


class Call(NamedTuple):
    """The arguments."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_seqlens: Tensor
    block_table: Tensor | None = None
    sinks: Tensor | None = None
    left: int | None = None
    scale: float | None = None
    softcap: float = 0.0
    preference: str | None = None


_TENSORS = Call._fields[:6]


def _require(call: Call, *, known: bool = False) -> AttentionOptions:
    """Raise for what does not fit together; the checked options."""
    q, k, v, lengths = call.q, call.k_cache, call.v_cache, call.cache_seqlens
    table, sinks = call.block_table, call.sinks
    require_device(_NAME, **{name: getattr(call, name) for name in _TENSORS})
    require_storage(_NAME, q, "q")
    for name, tensor in (("q", q), ("k_cache", k), ("v_cache", v)):
        require_same_dtype(_NAME, tensor, name, q, "q")
        if tensor.dim() != 4:
            raise InvalidProblemError(f"{_NAME}: {name} has shape {tuple(tensor.shape)}; expected four axes")
    batch, heads, _, head_dim = q.shape
    require_dtype(_NAME, "cache_seqlens", lengths, torch.int32)
    require_shape(_NAME, "cache_seqlens", lengths, (batch,))
    rows: tuple[int, ...] = (batch, *k.shape[1:3])
    if table is not None:
        require_dtype(_NAME, "block_table", table, torch.int32)
        if table.dim() != 2 or table.shape[0] != batch:
            raise InvalidProblemError(
                f"{_NAME}: block_table has shape {tuple(table.shape)}; expected ({batch}, pages of a sequence)"
            )
        if k.shape[2] == 0:
            raise InvalidProblemError(f"{_NAME}: k_cache has pages of no rows; expected at least one row")
        rows = tuple(k.shape[:3])
    require_shape(_NAME, "k_cache", k, (*rows, head_dim))
    require_shape(_NAME, "v_cache", v, (*rows, v.shape[3]))
    require_heads(_NAME, heads, k.shape[1])
    if sinks is not None:
        require_dtype(_NAME, "sinks", sinks, q.dtype, work_dtype(q.dtype))
        require_shape(_NAME, "sinks", sinks, (heads,))
    require_head_dims(_NAME, q=q, k_cache=k, v_cache=v)
    checked: Any = known_options if known else options_of
    options: AttentionOptions = checked(
        _NAME, head_dim, True, "lower_right", call.left, None, call.scale, call.softcap
    )  # fmt: skip
    return options


def _results(call: Call) -> tuple[Tensor, Tensor]:
    q = call.q
    return rows_like(q, call.v_cache.shape[3]), empty(q.shape[:3], q, work_dtype(q.dtype))


def _fake(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args, **kwargs)
    _require(call)
    return _results(call)


def _forward(*args: Any) -> tuple[Tensor, Tensor]:
    call = Call(*args)
    options = _require(call, known=True)
    o, lse = _results(call)
    q, k, v = (usable(_NAME, name, getattr(call, name)) for name in ("q", "k_cache", "v_cache"))
    operands = {"q": q, "k": k, "v": v, "cache_seqlens": call.cache_seqlens, "o": o, "lse": lse}
    fields = cached.sizes(_NAME, q, k, v, call.block_table)
    if call.block_table is not None:
        operands["block_table"] = call.block_table
    if call.sinks is not None:
        operands["sinks"] = usable(_NAME, "sinks", call.sinks)
        fields["sinks_dtype"] = NAMES[call.sinks.dtype]
    descriptor = AttentionWithCacheDescriptor(**fields, dtype=NAMES[q.dtype], options=options)
    launch(cached.plan_of(descriptor, q.device.type, call.preference), **operands)
    return o, lse


def _autocast(device: str, *args: Any) -> tuple[Tensor, Tensor]:
    """As attention under autocast: q, k and v in its dtype; sinks may stay in float32."""
    call = Call(*args)
    rows: Any = {name: as_autocast(device, getattr(call, name)) for name in ("q", "k_cache", "v_cache")}
    sinks = as_autocast(device, call.sinks, torch.float32)
    return ATTENTION_WITH_CACHE(*call._replace(**rows, sinks=sinks))  # type: ignore[no-any-return]


ATTENTION_WITH_CACHE: define.Operator = define.operator(
    "attention_with_cache(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? block_table=None, "
    "Tensor? sinks=None, SymInt? left=None, float? scale=None, float softcap=0.0, str? preference=None) "
    "-> (Tensor, Tensor)",
    run=_forward,
    fake=_fake,
    batch=define.one_by_one,
    autocast={name: functools.partial(_autocast, name.lower()) for name in ("CUDA", "CPU")},
)
