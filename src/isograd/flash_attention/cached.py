"""Attention of the newest queries of sequences over their keys and values in a cache: a step of decoding, or some."""

from __future__ import annotations

import functools
from typing import Any, Literal, Unpack, overload

from isograd.core import arrays, encoder, functional, registry
from isograd.core.checks import checked_preference, checked_shape
from isograd.core.faults import named
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.flash_attention import problem as steps
from isograd.flash_attention.descriptors import AttentionWithCacheDescriptor
from isograd.flash_attention.options import AttentionOptions, Window
from isograd.flash_attention.plans import AttentionPlan, AttentionWithCachePlan
from isograd.runtime.fenv import default_environment
from isograd.typing import AttentionWithCacheKeywords, DataT, Layout, SupportsDLPack


@functools.lru_cache(maxsize=4096)
def _selected(
    descriptor: AttentionWithCacheDescriptor, device: str, preference: str | None, generation: int
) -> AttentionWithCachePlan:
    name = descriptor.operation
    found = AttentionPlan.select(descriptor.whole(), device, preference).kernel.name
    served = [e.kernel.name for e in registry.kernels() if e[:3] == (name, device, descriptor.dtype)]
    if served and found not in served:
        raise UnsupportedError(
            f"{name}: the forward pass takes the kernel {found!r} here, which has no cache, and others have other "
            f"bits; accepted: one of {served} by preference, in both"
        )
    return AttentionWithCachePlan.select(descriptor, device, found)


def plan_of(descriptor: AttentionWithCacheDescriptor, device: str, preference: str | None) -> AttentionWithCachePlan:
    """The plan of the kernel that a forward pass over whole sequences takes: another one would have other bits."""
    with named(descriptor.operation), default_environment():  # a cache compares numbers, subnormal ones too
        return _selected(descriptor, device, preference, registry.generation())


def sizes(operation: str, q: Any, k: Any, v: Any, block_table: Any) -> dict[str, Any]:
    """The sizes of a descriptor from arrays [B, H, L, D], with a block table [pages, H, page_size, D] for k and v."""
    fields = steps.sizes(q, k, v)
    if block_table is not None:
        shape = checked_shape(operation, "block_table", block_table.shape)
        if len(shape) != 2:
            raise InvalidProblemError(
                f"{operation}: block_table has shape {shape}; expected two axes, [B, pages of a sequence]"
            )
        page_size = k.shape[2]
        if not page_size:
            raise InvalidProblemError(f"{operation}: k_cache has pages of no rows; expected at least one row")
        fields |= {"k_length": shape[1] * page_size, "page_size": page_size, "pages": k.shape[0]}
    return fields


@overload
def attention_with_cache(
    q: DataT,
    k_cache: DataT,
    v_cache: DataT,
    cache_seqlens: SupportsDLPack,
    *,
    return_lse: Literal[False] = ...,
    out: DataT | None = ...,
    **options: Unpack[AttentionWithCacheKeywords],
) -> DataT: ...
@overload
def attention_with_cache(
    q: DataT,
    k_cache: DataT,
    v_cache: DataT,
    cache_seqlens: SupportsDLPack,
    *,
    return_lse: Literal[True],
    out: DataT | None = ...,
    **options: Unpack[AttentionWithCacheKeywords],
) -> tuple[DataT, DataT]: ...
def attention_with_cache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cache_seqlens: Any,
    *,
    block_table: Any = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Any = None,
    layout: Layout = "BHLD",
    preference: str | None = None,
    return_lse: bool = False,
    out: Any = None,
) -> Any:
    """The newest rows of causal `attention` over keys and values in a cache, with the bits of the whole forward pass.

    q: [B, Hq, Lq, D], the last Lq queries of each sequence, whose keys and values are in the cache already. k_cache:
    [B, Hkv, K, D], v_cache: [B, Hkv, K, Dv], room for K keys. With block_table, int32 [B, P], they are [pages, Hkv,
    page_size, D] and [pages, Hkv, page_size, Dv], and sequence b has its keys in the pages block_table[b, 0],
    block_table[b, 1] and so on. With layout="BLHD" the axes of heads and rows change places in all of these, and in o.
    Dtypes, strides and kinds of arrays are those of `attention`.

    cache_seqlens: int32 [B], the keys of each sequence, those of q included; row i of sequence b is level with key
    cache_seqlens[b] - Lq + i and sees no key behind it. A row in front of the first key is 0, its lse -inf. What the
    cache holds behind the last key, and in pages that no sequence uses, is not looked at, NaN included.

    window, scale, softcap, sinks, preference, return_lse, out: as of `attention`.

    Bits: o and lse of a row are those of `attention(q_all, k_all, v_all, causal=True, ...)` over the whole sequence, of
    the same dtype, options and preference, on the same device, whatever Lq, K, page_size and the pages are; later keys
    of that pass have to be finite (`docs/attention.md`). There is no gradient.

    Raises InvalidProblemError for arguments that do not fit together, UnsupportedError for other dtypes, head
    dimensions, devices without such a kernel, and what requires a gradient, DeviceMismatchError for several devices.
    On the CPU, InvalidProblemError for a length below 0 or above K, IndexOutOfRangeError for a page that is used and
    not there; on a GPU, where nothing waits, the rows of that sequence are NaN and `isograd.check` raises.
    """
    name = "attention_with_cache"
    preference = checked_preference(name, preference)
    layout_ = steps.checked_layout(name, layout)
    if functional.tape_of(q, k_cache, v_cache, sinks) is not None:
        raise UnsupportedError(f"{name}: there is a tape variable; it has no gradient and accepts arrays alone")
    given = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": cache_seqlens}
    given |= {key: x for key, x in (("block_table", block_table), ("sinks", sinks)) if x is not None}
    taken, restore = functional.inputs(name, **given)
    functional.refuse_gradients(name, dict(zip(given, taken, strict=True)), "by a forward pass alone; use")
    extra = dict(zip(given, taken, strict=True))
    like = extra.pop("q")
    device, dtype = arrays.describe(like, name, "q")
    q, k, v = (
        steps.rows(name, argument, x, layout_)
        for argument, x in (("q", like), ("k_cache", extra.pop("k_cache")), ("v_cache", extra.pop("v_cache")))
    )
    options = AttentionOptions(True, "lower_right", window, scale, softcap).validated(name, max(q.shape[3], 1))
    fields = sizes(name, q, k, v, extra.get("block_table"))
    if "sinks" in extra:
        fields["sinks_dtype"] = arrays.describe(extra["sinks"], name, "sinks")[1]
    descriptor = AttentionWithCacheDescriptor(**fields, dtype=dtype, options=options)
    call = steps.Problem(name, fields, {"q": q, "k": k, "v": v, **extra}, layout_, device, like)
    with named(name, k="k_cache", v="v_cache", o="out"):
        plan = plan_of(descriptor, device, preference)
        o = call.empty(descriptor.o_shape, dtype) if out is None else out
        lse = functional.empty(descriptor.lse_shape, descriptor.work, like)
        arrays.describe(encoder.unwrapped(o), name, "o")
        functional.run(plan, **call.inputs, o=call.view(o), lse=lse)
    o = restore(functional.promised(name, o)) if out is None else out
    return (o, restore(functional.promised(name, lse))) if return_lse else o
