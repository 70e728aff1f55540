"""Attention in torch's spelling, and with all that `isograd.attention` takes."""

import math
import sys
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from isograd.core.attributes import Word, signed
from isograd.errors import DeviceMismatchError, InvalidProblemError, UnsupportedError
from isograd.flash_attention import problem
from isograd.flash_attention.descriptors import DIM_STEP, LEAST_DIM, MOST_DIM
from isograd.flash_attention.options import AttentionOptions, Window, default_scale
from isograd.torch import attention_products
from isograd.torch.attention_dense import Operands
from isograd.torch.broadcasting import expanded
from isograd.torch.indexing import enter
from isograd.torch.ops_attention import ATTENTION
from isograd.torch.tensors import require_dense, require_tensor
from isograd.typing import Alignment, Layout

Precision = Literal["int16"]
WIDEST = 1 << 62  # wider windows see no more, and the operator's schema holds 64 bits


def _is_causal_bias(mask: Any) -> bool:
    # Its module loads torch._dynamo, for seconds: who has one has loaded it.
    found = sys.modules.get("torch.nn.attention.bias")
    return found is not None and isinstance(mask, found.CausalBias)


def padded(x: Tensor) -> Tensor:
    """Zeros behind a head dimension that no kernel has; they change no score and no value."""
    size = x.shape[-1]
    missing = max(LEAST_DIM, -(-size // DIM_STEP) * DIM_STEP) - size
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def drawn() -> Tensor:
    """A seed from torch's generator on the CPU."""
    return torch.randint(-(1 << 63), (1 << 63) - 1, (), dtype=torch.int64, device="cpu")


def checked_head_dims(name: str, **rows: Tensor) -> None:
    """Raise for head dimensions of q, k and v, by their names, that no padding makes fit."""
    (query, q), (key, k), _ = rows.items()
    for argument, x in rows.items():
        if not 1 <= x.shape[-1] <= MOST_DIM:
            raise UnsupportedError(
                f"{name}: the head dimension of {argument} is {x.shape[-1]}; accepted: 1 to {MOST_DIM}"
            )
    if k.shape[-1] != q.shape[-1]:
        raise InvalidProblemError(
            f"{name}: {query} has shape {tuple(q.shape)} and {key} {tuple(k.shape)}; expected the same head dimension"
        )


def _served(q: Tensor, bias: Tensor | None) -> bool:
    """Whether the kernels for any order compute attention of "int16"; they have no gradient of a bias."""
    dtype = q.dtype
    if torch.is_autocast_enabled(q.device.type) and dtype is not torch.float64:
        dtype = torch.get_autocast_dtype(q.device.type)
    return bias is None and dtype in (torch.float16, torch.bfloat16)


def _attend(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: AttentionOptions,
    *extra: Tensor | None,
    precision: Precision | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The operator on [B, H, L, D]; extra: its tensors from bias to seed. By products of whole rows there is no lse."""
    head_dim, v_dim = q.shape[-1], v.shape[-1]
    if precision is not None and not _served(q, extra[0]):
        return attention_products.attend(name, Operands(q, k, v, *extra), options.validated(name, head_dim)), None
    padded_q = padded(q)
    window: tuple[int | None, ...] = (None, None) if options.window is None else options.window
    if not torch.compiler.is_compiling():  # a trace may have symbols, which the call that computes checks as numbers
        options = options.validated(name, head_dim)
        window = tuple([None if side is None else min(side, WIDEST) for side in options.window or window])
    scale = options.scale
    if scale is None and padded_q.shape[-1] != head_dim:  # in a trace; the operator would go by the padded one
        scale = default_scale(head_dim)
    left, right = window
    o, lse = ATTENTION(
        *(padded_q, padded(k), padded(v), *extra, options.causal, options.alignment, left, right),
        *(scale, options.softcap, options.dropout_p, None if precision is None else "order_free"),
    )
    return (o if o.shape[-1] == v_dim else o[..., :v_dim]), lse


def _seed(name: str, dropout_p: float, seed: int | None, device: torch.device) -> Tensor | None:
    """The seed that a dropout goes by, None without one."""
    if not dropout_p:
        return None
    if seed is not None:
        word = Word().plain(name, "seed", seed)
        if not torch.compiler.is_compiling():
            return torch.tensor(signed(word), device="cpu")
        # In halves: inductor computes a symbol's in int64, where the constants that wrap a whole word are too large.
        high, low = (torch.tensor(half, dtype=torch.int64, device="cpu") for half in (word >> 32, word & 0xFFFFFFFF))
        return (high << 32) | low
    if device.type == "cuda" and not torch.compiler.is_compiling() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(
            f"{name}: a seed for dropout is drawn while a CUDA graph is captured, which would repeat it at every "
            "replay; accepted: a seed of your own"
        )
    return drawn()


def checked_precision(name: str, precision: Any, *rows: Tensor) -> None:
    """Raise for a precision that there is not, and where it does not serve the rows."""
    if precision not in (None, "int16"):
        raise InvalidProblemError(f"{name}: precision is {precision!r}; accepted: int16, None")
    if precision is not None and any(x.dtype is torch.float64 for x in rows):
        raise UnsupportedError(f"{name}: precision is 'int16' for float64; accepted for float64: None")


def _scores_like(name: str, argument: str, tensor: Any) -> Tensor | None:
    """A bias or a mask with axes in front up to four."""
    if tensor is None:
        return None
    require_tensor(name, tensor, argument)
    if _is_causal_bias(tensor):
        raise UnsupportedError(f"{name}: {argument} is a CausalBias; accepted: plain tensors, causal and alignment")
    if tensor.dim() > 4:
        raise InvalidProblemError(
            f"{name}: {argument} has shape {tuple(tensor.shape)}; expected one that broadcasts to [B, Hq, Lq, Lk]"
        )
    return tensor[(None,) * (4 - tensor.dim())]  # type: ignore[no-any-return]


def _pair(name: str, argument: str, value: Any) -> tuple[Any, Any]:
    if value is None:
        return None, None
    found = problem.pair(name, argument, value)
    for tensor in found:
        require_tensor(name, tensor, argument)
    return found


class _AttentionOptions(TypedDict, total=False):
    causal: bool
    window: Window | None
    alignment: Alignment
    scale: float | None
    softcap: float
    bias: Tensor | None
    mask: Tensor | None
    segment_ids: tuple[Tensor, Tensor] | None
    cu_seqlens: tuple[Tensor, Tensor] | None
    sinks: Tensor | None
    dropout_p: float
    seed: int | None
    layout: Layout
    precision: Precision | None


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[_AttentionOptions],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[_AttentionOptions],
) -> tuple[Tensor, Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Window | None = None,
    alignment: Alignment = "lower_right",
    scale: float | None = None,
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    segment_ids: tuple[Tensor, Tensor] | None = None,
    cu_seqlens: tuple[Tensor, Tensor] | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    seed: int | None = None,
    layout: str = "BHLD",
    precision: Precision | None = None,
    return_lse: bool = False,
) -> Any:
    """`isograd.attention` with gradients for q, k, v, bias and sinks, through o and through lse.

    Shapes, dtypes, options and errors are those of `isograd.attention`, but for two things. Head dimensions of any size
    up to 256 are accepted: those that are no multiple of 8 or below 16 are padded with zeros, which costs a copy. And
    seed=None draws the seed of a dropout from torch's generator on the CPU, so `torch.manual_seed` repeats it and no
    GPU is waited for; inside the capture of a CUDA graph, which would repeat it at every replay, give one.

    Results lie in memory as q does, heads outside or inside the length. First derivatives are those of
    `isograd.attention_backward`. Second ones, and forward mode, hold all scores at once and are written with torch's
    own operations; they are differentiable again. Under vmap every member is what it would be alone.

    precision: "int16" has the same bits on every machine, gradients too. In float16 and bfloat16 without a bias it is
    the kernel `order_free` of `isograd.attention`, which holds blocks of 128 keys; a GPU needs those that `igt.matmul`
    needs. Else, not for float64 nor with return_lse, it computes scores and results by the order-free products of
    `igt.matmul` and the softmax of `igt.softmax`: all scores at once, in float32, so memory and time grow with the
    square of the length. There an element of a row is rounded beside the largest one of its column of v, hidden keys
    included, and what lies between the products are torch's elementwise operations, which a rounding mode of the
    caller's reaches.
    """
    name = "attention"
    enter(name)
    layout = problem.checked_layout(name, layout)
    for argument, tensor in (("q", q), ("k", k), ("v", v)):
        require_dense(name, tensor, argument)
    q, k, v = (problem.rows(name, argument, x, layout) for argument, x in (("q", q), ("k", k), ("v", v)))
    checked_head_dims(name, q=q, k=k, v=v)
    checked_precision(name, precision, q, k, v)
    if precision is not None and return_lse and not _served(q, bias):
        raise UnsupportedError(
            f"{name}: return_lse is True with precision {precision!r}; accepted with float16 and bfloat16 and no bias"
        )
    if bias is not None:
        require_dense(name, bias, "bias")
    if sinks is not None:
        require_dense(name, sinks, "sinks")
    options = AttentionOptions(causal, alignment, window, scale, softcap, dropout_p)
    o, lse = _attend(
        *(name, q, k, v, options, _scores_like(name, "bias", bias), _scores_like(name, "mask", mask)),
        *(*_pair(name, "segment_ids", segment_ids), *_pair(name, "cu_seqlens", cu_seqlens), sinks),
        _seed(name, dropout_p, seed, q.device),
        precision=precision,
    )
    o = o.permute(problem.LAYOUTS[layout])
    return (o, lse) if return_lse else o


# --- torch's own signature -------------------------------------------------------------------------------------------
_SDPA = "scaled_dot_product_attention"


def _broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    if all(shape == shapes[0] for shape in shapes[1:]):  # not by hashes, which sizes of a trace lack
        return shapes[0]
    try:
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise InvalidProblemError(
            f"{_SDPA}: the axes before the last two are {', '.join(str(tuple(s)) for s in shapes)} for query, key and "
            "value; expected shapes that broadcast"
        ) from None


def _four_axes(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    """[..., L, D], broadcast to the leading axes, as [B, H, L, D]."""
    if len(lead) == 2 and lead == x.shape[:-2]:
        return x
    lead = (1,) * (2 - len(lead)) + lead
    return expanded(x, (*lead, *x.shape[-2:])).reshape(math.prod(lead[:-1]), lead[-1], *x.shape[-2:])


def _repeated(x: Tensor, times: int) -> Tensor:
    """[..., H, L, D] with every head several times."""
    return expanded(x.unsqueeze(-3), (*x.shape[:-2], times, *x.shape[-2:])).flatten(-4, -3)


def _mask(attn_mask: Tensor, scores: tuple[int, ...]) -> Tensor:
    """A mask as four axes, of which as many as possible are still to be broadcast."""
    given = tuple(attn_mask.shape)
    rank = max(len(scores), 4)
    full = (1,) * (rank - len(scores)) + scores
    sizes = (1,) * (rank - len(given)) + given
    if len(sizes) != rank or any(size not in (1, whole) for size, whole in zip(sizes, full, strict=True)):
        raise InvalidProblemError(
            f"{_SDPA}: attn_mask has shape {given}; expected one that broadcasts to {tuple(scores)}"
        )
    mask = attn_mask.reshape(sizes)
    if rank == 4:
        return mask
    outer = sizes[:-3] if all(size == 1 for size in sizes[:-3]) else full[:-3]
    return expanded(mask, (*outer, *sizes[-3:])).reshape(math.prod(outer), *sizes[-3:])


def _addable(attn_mask: Tensor, query: Tensor) -> bool:
    accepted = (query.dtype, torch.float32)
    wide = query.dtype is torch.float64  # to which every mask is widened
    return wide or attn_mask.dtype in accepted or torch.is_autocast_enabled(query.device.type)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    precision: Precision | None = None,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`: `softmax(scale · q kᵀ + mask) v`.

    query: [..., H, L, E], key: [..., H, S, E], value: [..., H, S, Ev], of any rank from 2, leading axes broadcast;
    float16, bfloat16, float32 or float64 (on the CPU), E and Ev to 256. With enable_gqa each head of key and value
    serves as many heads of query, which must be a multiple of them. attn_mask: boolean, True for keys that take part,
    or added to the scores, of query's dtype or float32; of any shape that broadcasts to [..., H, L, S]; broadcast axes
    take no memory and an additive mask has a gradient; or a `torch.nn.attention.bias.CausalBias`. is_causal: query i
    sees keys 0 to i, aligned to the upper left, and of those the ones that the mask lets through, where torch takes one
    of both only. scale: 1 / sqrt(E) by default. dropout_p: below 1; the seed is drawn as by `attention`, and which
    probabilities it drops is isograd's choice, not torch's.

    A query that sees no key gives 0 and no gradient, where torch gives 0 or NaN depending on its backend. Sizes of E
    and Ev that are no multiple of 8 or below 16 are padded with zeros. Under autocast as torch's; derivatives, vmap and
    layout of the result, and precision, as for `attention`.

    Raises InvalidProblemError for shapes and options that do not fit together, UnsupportedError for other dtypes and
    larger head dimensions, DeviceMismatchError for several devices.
    """
    enter(_SDPA)
    for argument, tensor in (("query", query), ("key", key), ("value", value)):
        require_dense(_SDPA, tensor, argument)
        least = 3 if enable_gqa else 2
        if tensor.dim() < least:
            raise InvalidProblemError(
                f"{_SDPA}: {argument} has shape {tuple(tensor.shape)}; expected at least {least} axes"
            )
    for argument, tensor in (("key", key), ("value", value)):
        if tensor.device != query.device:
            raise DeviceMismatchError(f"{_SDPA}: query is on {query.device}, {argument} is on {tensor.device}")
        if tensor.dtype != query.dtype and not torch.is_autocast_enabled(query.device.type):
            raise InvalidProblemError(
                f"{_SDPA}: {argument} has dtype {tensor.dtype} and query {query.dtype}; expected the same"
            )
    checked_head_dims(_SDPA, query=query, key=key, value=value)
    checked_precision(_SDPA, precision, query, key, value)
    own = 3 if enable_gqa else 2  # axes that are not broadcast
    heads = [tuple(t.shape[-own:-2]) for t in (query, key, value)]
    if enable_gqa and any(h[0] == 0 or heads[0][0] % h[0] for h in heads[1:]):
        counts = ", ".join(str(h[0]) for h in heads)
        raise InvalidProblemError(
            f"{_SDPA}: query, key and value have {counts} heads; expected those of query to be a multiple of the others"
        )
    if heads[1] != heads[2]:
        groups = [heads[0][0] // t[0] for t in heads[1:]]
        key, value = (_repeated(t, g) for t, g in zip((key, value), groups, strict=True))
        heads[1:] = [tuple(t.shape[-3:-2]) for t in (key, value)]
    batch = _broadcast(*[tuple(t.shape[:-own]) for t in (query, key, value)])
    if key.shape[-2] != value.shape[-2]:
        raise InvalidProblemError(
            f"{_SDPA}: key has shape {tuple(key.shape)} and value {tuple(value.shape)}; expected as many rows"
        )
    lead = (*batch, *heads[0])
    bias = mask = None
    alignment = "upper_left"
    if _is_causal_bias(attn_mask):  # its own storage holds nothing
        if is_causal:
            raise InvalidProblemError(
                f"{_SDPA}: attn_mask is a CausalBias and is_causal is True; accepted: one of them"
            )
        is_causal, lower_right = True, attn_mask.variant.name == "LOWER_RIGHT"  # type: ignore[union-attr]
        alignment = "lower_right" if lower_right else alignment
    elif attn_mask is not None:
        require_tensor(_SDPA, attn_mask, "attn_mask")
        viewed = _mask(attn_mask, (*lead, query.shape[-2], key.shape[-2]))
        if attn_mask.dtype is torch.bool:
            mask = viewed
        elif attn_mask.is_floating_point() and _addable(attn_mask, query):
            require_dense(_SDPA, attn_mask, "attn_mask")
            bias = viewed.to(torch.float64) if query.dtype is torch.float64 else viewed
        else:
            raise UnsupportedError(
                f"{_SDPA}: attn_mask has dtype {attn_mask.dtype}; accepted: bool, query's dtype, float32"
            )
    q, k, v = (_four_axes(t, (*batch, *h)) for t, h in zip((query, key, value), heads, strict=True))
    options = AttentionOptions(is_causal, alignment, None, scale, 0.0, dropout_p)
    seed = _seed(_SDPA, dropout_p, None, query.device)
    o, _ = _attend(_SDPA, q, k, v, options, bias, mask, None, None, None, None, None, seed, precision=precision)
    return o if o.dim() == len(lead) + 2 else o.reshape(*lead, *o.shape[-2:])
