"""Attention over a sequence that is spread over ranks, with the bits of the whole sequence.

No number is added to another rank's. A rank computes whole rows: of o and dq, from its queries and all keys that they
see, and of dk and dv, from its keys and all queries that see them. Both are calls of the operators of `igt.attention`
on rows that begin and end where tiles do, so that sums have the terms and the order that they have in one process.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from isograd.errors import InvalidProblemError, IsogradError, UnsupportedError
from isograd.flash_attention import problem
from isograd.flash_attention.options import AttentionOptions, Window
from isograd.torch.attention_dense import Operands
from isograd.torch.distributed.agreement import agree, carrier
from isograd.torch.distributed.context_pieces import Pieces
from isograd.torch.distributed.vocab_parts import checked_part, given_group
from isograd.torch.dot_product import Precision, checked_head_dims, checked_precision, padded
from isograd.torch.indexing import enter
from isograd.torch.ops_attention import ATTENTION, ATTENTION_BACKWARD, as_autocast, require_operands, rows_like
from isograd.typing import Layout

_NAME = "context_parallel_attention"
_NONE = (None,) * 6  # bias, mask, segments and packed sequences


class _Call(NamedTuple):
    """What is the same in both passes: query i sees the keys i - before to i + after, None: all."""

    pieces: Pieces
    before: int | None
    after: int | None
    scale: float | None
    softcap: float
    preference: str | None

    def options(self, left: int | None, right: int | None) -> tuple[Any, ...]:
        """What the operators take behind sinks, for a window counted from the first rows of both sides."""
        return (None, False, "upper_left", left, right, self.scale, self.softcap, 0.0, self.preference)


class _Attention(torch.autograd.Function):
    """The rows of o for the queries of this rank."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        pieces = call.pieces
        cut = pieces.cut(call.before, call.after)
        keys, values = (pieces.gather(x)[:, :, cut.other_first : cut.other_end] for x in (k, v))
        options = call.options(cut.before, cut.after)
        o, lse = ATTENTION(pieces.place(q, cut), keys, values, *_NONE, sinks, *options)
        if o.shape[2] != pieces.length:
            o = rows_like(q, o.shape[3]).copy_(pieces.own(o, cut))
            lse = pieces.own(lse, cut).contiguous()
        ctx.save_for_backward(q, k, v, sinks, o, lse)
        ctx.call = call
        return o  # type: ignore[no-any-return]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        by_q, *others, _ = ctx.needs_input_grad
        dq = _query_gradient(ctx.call, do, *ctx.saved_tensors) if by_q else None
        rest = _key_gradients(ctx.call, others[2], do, *ctx.saved_tensors) if any(others) else (None, None, None)
        return dq, *[g if wanted else None for g, wanted in zip(rest, others, strict=True)], None


def _reads_all_keys(q: Tensor, preference: str | None) -> bool:
    """Whether dq may have the fixed point of the kernel on Hopper: it asks for hidden keys too."""
    return q.is_cuda and preference is None


def _query_gradient(
    call: _Call, do: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, o: Tensor, lse: Tensor
) -> Tensor:
    """Dq of this rank's queries."""
    pieces = call.pieces
    cut = pieces.cut(call.before, call.after, whole=_reads_all_keys(q, call.preference))
    keys, values = (pieces.gather(x)[:, :, cut.other_first : cut.other_end] for x in (k, v))
    do, q, o, lse = (pieces.place(x, cut) for x in (do, q, o, lse))
    options = call.options(cut.before, cut.after)
    dq, *_ = ATTENTION_BACKWARD(do, None, o, lse, False, False, q, keys, values, *_NONE, sinks, *options)
    return pieces.own(dq, cut)


def _key_gradients(
    call: _Call, by_sinks: bool, do: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *results: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Dk and dv of this rank's keys, and dsinks: all of it on the rank that has the first row, zeros on others."""
    pieces = call.pieces
    cut = pieces.cut(call.after, call.before)
    by_sinks = by_sinks and pieces.first == 0 < pieces.length
    if by_sinks:  # a sum over all rows; those that see no key of this rank cost little
        cut = cut._replace(other_end=pieces.total)
    do, q, o, lse = (pieces.gather(x)[:, :, cut.other_first : cut.other_end] for x in (do, q, *results))
    k, v = (pieces.place(x, cut) for x in (k, v))
    options = call.options(cut.after, cut.before)
    _, dk, dv, _, dsinks = ATTENTION_BACKWARD(do, None, o, lse, False, by_sinks, q, k, v, *_NONE, sinks, *options)
    if sinks is not None and not by_sinks:
        dsinks = torch.zeros_like(sinks)
    return pieces.own(dk, cut), pieces.own(dv, cut), dsinks


def _cast(x: Tensor, *welcome: torch.dtype) -> Tensor:
    """As `igt.attention` does under autocast."""
    device = x.device.type
    return as_autocast(device, x, *welcome) if torch.is_autocast_enabled(device) else x


def _checked(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, dropout_p: float, layout: Any, precision: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Q, k and v as [B, H, L, D], and sinks, in the dtypes that they are computed in."""
    layout = problem.checked_layout(_NAME, layout)
    given = {"q": q, "k": k, "v": v}
    q, k, v = (
        problem.rows(_NAME, name, _cast(checked_part(_NAME, name, x)), layout) for name, x in given.items()
    )  # fmt: skip
    if sinks is not None:
        sinks = _cast(checked_part(_NAME, "sinks", sinks), torch.float32)
    checked_precision(_NAME, precision, q, k, v)
    if precision is not None and q.dtype not in (torch.float16, torch.bfloat16):
        raise UnsupportedError(
            f"{_NAME}: precision is {precision!r} for {str(q.dtype).removeprefix('torch.')}; accepted with it: "
            "float16, bfloat16"
        )
    if dropout_p != 0:
        raise UnsupportedError(f"{_NAME}: dropout_p is {dropout_p!r}; accepted: 0.0")
    checked_head_dims(_NAME, q=q, k=k, v=v)
    require_operands(_NAME, Operands(q, k, v, *_NONE, sinks, None))
    if q.shape[2] != k.shape[2]:
        raise InvalidProblemError(
            f"{_NAME}: q has {q.shape[2]} rows and k and v have {k.shape[2]}; expected the same piece of one sequence"
        )
    return q, k, v, sinks


def _agreed(group: Any, x: Any, failed: IsogradError | None, what: Mapping[str, Any], length: int) -> Pieces:
    """The pieces of all ranks, after these have said the same and none has failed; a collective call."""
    if group is not None:
        lengths = agree(_NAME, [group], carrier(group, x), failed, what, length)
        return Pieces(group, tuple(lengths), dist.get_rank(group))
    if failed is not None:
        raise failed
    return Pieces(None, (length,), 0)


def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any = None,
    *,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    layout: Layout = "BHLD",
    precision: Precision | None = None,
) -> Tensor:
    """Attention over a sequence that is spread over the ranks of a group: `igt.attention` for this rank's queries.

    q: [B, Hq, L, D], k: [B, Hkv, L, D], v: [B, Hkv, L, Dv], the same L positions of the sequence; the result:
    [B, Hq, L, Dv]. With layout="BLHD" the axes are [B, L, H, D]. The pieces follow each other in the order of the
    ranks; they may have different lengths, and a rank none. sinks: [Hq], the same on all ranks. Dtypes, head dimensions
    and options as for `igt.attention`; positions count from the beginning of the sequence. precision: "int16" for
    float16 and bfloat16, with the same bits on every machine. group: by default all ranks, or none where
    `torch.distributed` is not initialized. A call is a collective of the group, and so is its backward pass.

    The bits of the result and of the gradients of q, k and v are those of `igt.attention` of the whole sequence, for
    any number of ranks and any pieces: nothing is added over ranks. The gradient of sinks is a sum over all queries.
    The rank that has the first one gets all of it and the others zeros, so that adding it over ranks, as is done with
    those of weights, gives its bits too. Differentiable once.

    Forward every rank gathers k and v, backward these again and then q, o, its gradient and lse; what is gathered is
    not kept, only the rank's own q, k, v, o and lse. Forward a rank computes the scores of its queries: of equal pieces
    under a causal mask the last takes longest. Backward it computes them twice, by its queries and by its keys, which
    balances a causal mask. Up to 383 rows before and behind a piece are computed with it, and with a window whose left
    side is no multiple of 384 as many before; on a GPU, but for "int16", dq with a left side costs that of all queries
    from that side on.

    Raises, on all ranks: InvalidProblemError if they differ in shapes but for L, in dtypes, options or requires_grad;
    else as `igt.attention`, with InvalidProblemError on ranks whose own arguments are right. UnsupportedError for
    dropout, for precision="int16" with other dtypes and for a device without kernels; CPUs and CUDA devices have them.
    A GPU is waited for before anything is gathered, as the ranks say what they have.
    """
    enter(_NAME)
    group, failed, what, grads, length = given_group(_NAME, group), None, None, None, 0
    options = AttentionOptions(causal, "lower_right", window, scale, softcap)
    try:
        q, k, v, sinks = _checked(q, k, v, sinks, dropout_p, layout, precision)
        options = options.validated(_NAME, q.shape[3])
        length, tensors = q.shape[2], (q, k, v, *(() if sinks is None else (sinks,)))
        what = (*q.shape[:2], k.shape[1], q.shape[3], v.shape[3], [str(x.dtype) for x in tensors])
        grads = [x.requires_grad for x in tensors] if torch.is_grad_enabled() else None
    except IsogradError as error:
        failed = error
    said = {"shapes but for the length, dtypes or sinks": what, "options": (options, precision), "requires_grad": grads}
    pieces = _agreed(group, q, failed, said, length)
    before, after = (None if side is None else min(side, pieces.total) for side in options.reach())
    preference = None if precision is None else "order_free"
    call = _Call(pieces, before, after, options.scale, options.softcap, preference)
    o: Tensor = _Attention.apply(padded(q), padded(k), padded(v), sinks, call)  # type: ignore[no-untyped-call]
    return o[..., : v.shape[3]].permute(problem.LAYOUTS[layout])
