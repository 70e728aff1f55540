"""Attention over keys and values in a cache, in steps of decoding and in evaluations of what was decoded."""

from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from isograd.core import functional
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.flash_attention import problem
from isograd.flash_attention.options import AttentionOptions, Window
from isograd.torch.dot_product import WIDEST, Precision
from isograd.torch.indexing import enter
from isograd.torch.ops_attention_with_cache import ATTENTION_WITH_CACHE
from isograd.torch.tensors import require_dense, require_tensor
from isograd.typing import Layout


class _Options(TypedDict, total=False):
    block_table: Tensor | None
    window: Window | None
    scale: float | None
    softcap: float
    sinks: Tensor | None
    layout: Layout
    precision: Precision | None


@overload
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Tensor: ...
@overload
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_Options],
) -> tuple[Tensor, Tensor]: ...
def attention_with_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor,
    *,
    block_table: Tensor | None = None,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    layout: str = "BHLD",
    precision: Precision | None = None,
    return_lse: bool = False,
) -> Any:
    """`isograd.attention_with_cache`: the newest rows of causal `igt.attention` over a cache, with that pass's bits.

    Shapes, dtypes, options and errors are those of `isograd.attention_with_cache`; cache_seqlens and block_table are
    int32 and are not read on the host where they are on a GPU. precision: that of the `igt.attention` whose bits are
    asked for; "int16" accepts float16 and bfloat16. o lies in memory as q does. Autocast casts as for `igt.attention`,
    the cache too.

    There is no gradient: with gradients on, an operand that requires one is an UnsupportedError.
    """
    name = "attention_with_cache"
    enter(name)
    layout = problem.checked_layout(name, layout)
    given: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    given |= {} if sinks is None else {"sinks": sinks}
    for argument, tensor in given.items():
        require_dense(name, tensor, argument)
    for argument, tensor in (("cache_seqlens", cache_seqlens), ("block_table", block_table)):
        if tensor is not None or argument == "cache_seqlens":
            require_tensor(name, tensor, argument)
    functional.refuse_gradients(name, given, "by a forward pass alone; use")
    if precision not in (None, "int16"):
        raise InvalidProblemError(f"{name}: precision is {precision!r}; accepted: int16, None")
    q, k_cache, v_cache = (
        problem.rows(name, argument, given[argument], layout) for argument in ("q", "k_cache", "v_cache")
    )
    dtype = torch.get_autocast_dtype(q.device.type) if torch.is_autocast_enabled(q.device.type) else q.dtype
    if precision is not None and dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(f"{name}: precision is 'int16' for {dtype}; accepted with float16 and bfloat16")
    left = None if window is None else window[0]
    if not torch.compiler.is_compiling():  # a trace may have symbols, which the call that computes checks as numbers
        options = AttentionOptions(True, "lower_right", window, scale, softcap).validated(name, max(q.shape[3], 1))
        scale, softcap = options.scale, options.softcap
        left = None if options.window is None or options.window[0] is None else min(options.window[0], WIDEST)
    preference = None if precision is None else "order_free"
    o, lse = ATTENTION_WITH_CACHE(
        q, k_cache, v_cache, cache_seqlens, block_table, sinks, left, scale, softcap, preference
    )
    o = o.permute(problem.LAYOUTS[layout])
    return (o, lse) if return_lse else o
