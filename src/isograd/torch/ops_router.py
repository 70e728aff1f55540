"""Operators that choose: the largest elements, and the experts of every token.

    top_k(Tensor input, SymInt k, int dim=-1) -> (Tensor, Tensor)
    moe_router(Tensor logits, SymInt k, str scoring="softmax", bool renormalize=False, Tensor? bias=None,
               SymInt groups=1, SymInt group_k=1, float scale=1.0) -> (Tensor, Tensor)
    moe_router_backward(Tensor dweights, Tensor logits, Tensor experts, str scoring="softmax", bool renormalize=False,
                        float scale=1.0) -> Tensor

The choice itself has no derivative. First derivatives have the library's bits, second ones are written with torch's own
sums.
"""

from typing import Any

import torch
from torch import Tensor

from isograd.core.faults import named
from isograd.errors import InvalidProblemError
from isograd.ops.softmax.torch import BACKWARD, FORWARD
from isograd.router.plans import MoeRouterBackwardPlan, MoeRouterPlan, TopKPlan
from isograd.torch import define
from isograd.torch.ops_gather import GATHER, GATHER_BACKWARD
from isograd.torch.tensors import (
    NAMES,
    Described,
    empty,
    like,
    normalized_dim,
    require_device,
    require_storage,
    run,
    usable,
    usable_index,
    wide,
    work_dtype,
    zeros_or,
)

Pair = tuple[Tensor, Tensor]


# --- top_k -----------------------------------------------------------------------------------------------------------
def _top_k_fake(input: Tensor, k: int, dim: int = -1) -> Pair:  # noqa: A002
    require_storage("topk", input, "input")
    dim = normalized_dim("topk", dim, input.shape)
    size = input.shape[dim] if input.dim() else 1
    if not 1 <= k <= size:
        raise InvalidProblemError(f"topk: k is {k}; accepted: 1 to {size}, the size along dim {dim}")
    shape = (*input.shape[:dim], k, *input.shape[dim + 1 :]) if input.dim() else ()
    return empty(shape, input), empty(shape, input, torch.int64)


def _top_k(input: Tensor, k: int, dim: int = -1) -> Pair:  # noqa: A002
    values, indices = _top_k_fake(input, k, dim)
    x = usable("topk", "input", input)
    if values.numel() == 0:
        return values, indices
    dim = normalized_dim("topk", dim, x.shape)
    v, i = (values, indices) if input.dim() else (values.view(1), indices.view(1))
    with named("topk", shape="input", axis="dim"):
        run(TopKPlan, x.device, (x.shape, k, NAMES[x.dtype], dim), x=x, values=v, indices=i)
    return values, indices


def _save_top_k(node: Any, inputs: tuple[Any, ...], output: Pair) -> tuple[Tensor]:
    input, _, node.dim = inputs  # noqa: A001
    node.size = input.shape
    return (output[1],)


def _differentiate_top_k(node: Any, saved: tuple[Tensor], dvalues: Tensor | None, _: Any) -> tuple[Tensor | None]:
    if dvalues is None:
        return (None,)
    return (GATHER_BACKWARD(dvalues, node.dim, saved[0], node.size, True),)


def _batch_top_k(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    input: Tensor,  # noqa: A002
    k: int,
    dim: int = -1,
) -> tuple[Pair, tuple[int, int]]:
    x = define.batched(input, in_dims[0], size)
    shape = x.shape[1:]
    values, indices = op(x if shape else x.unsqueeze(1), k, normalized_dim("topk", dim, shape) + 1)
    return ((values, indices) if shape else (values.squeeze(1), indices.squeeze(1))), (0, 0)


TOP_K: define.Operator = define.operator(
    "top_k(Tensor input, SymInt k, int dim=-1) -> (Tensor, Tensor)",
    run=_top_k,
    fake=_top_k_fake,
    gradient=define.Gradient(
        _save_top_k,
        _differentiate_top_k,
        lambda node, saved, t, *rest: (GATHER(t, node.dim, saved[0]), None),
    ),
    batch=_batch_top_k,
)


# --- the router ------------------------------------------------------------------------------------------------------
def _router_fake(
    logits: Tensor,
    k: int,
    scoring: str = "softmax",
    renormalize: bool = False,
    bias: Tensor | None = None,
    groups: int = 1,
    group_k: int = 1,
    scale: float = 1.0,
) -> Pair:
    name = "moe_router"
    require_device(name, logits=logits, bias=bias)
    require_storage(name, logits, "logits")
    work = work_dtype(logits.dtype)
    if logits.dim() == 0 or not 1 <= k <= logits.shape[-1]:
        raise InvalidProblemError(f"{name}: k is {k} for logits of shape {tuple(logits.shape)}")
    if bias is not None and (bias.dtype is not work or bias.shape not in (logits.shape[-1:], logits.shape)):
        raise InvalidProblemError(
            f"{name}: bias has shape {tuple(bias.shape)} and dtype {bias.dtype}; expected "
            f"{(logits.shape[-1],)} and {work}"
        )
    shape = (*logits.shape[:-1], k)
    return empty(shape, logits, work), empty(shape, logits, torch.int64)


def _router(
    logits: Tensor,
    k: int,
    scoring: str = "softmax",
    renormalize: bool = False,
    bias: Tensor | None = None,
    groups: int = 1,
    group_k: int = 1,
    scale: float = 1.0,
) -> Pair:
    weights, experts = _router_fake(logits, k, scoring, renormalize, bias, groups, group_k, scale)
    x = usable("moe_router", "logits", logits)
    rows = bias is not None and bias.dim() > 1
    fields = (x.shape, k, NAMES[x.dtype], scoring, renormalize, bias is not None, groups, group_k, scale, rows)
    operands = {"logits": x, "weights": weights, "experts": experts}
    if bias is not None:
        operands["bias"] = usable("moe_router", "bias", bias)
    run(MoeRouterPlan, x.device, fields, **operands)
    return weights, experts


def _router_backward_fake(
    dweights: Tensor,
    logits: Tensor,
    experts: Tensor,
    scoring: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
) -> Tensor:
    name = "moe_router_backward"
    require_device(name, dweights=dweights, logits=logits, experts=experts)
    require_storage(name, logits, "logits")
    if dweights.shape != experts.shape or dweights.shape[:-1] != logits.shape[:-1]:
        raise InvalidProblemError(
            f"{name}: dweights has shape {tuple(dweights.shape)} and experts {tuple(experts.shape)} for logits of "
            f"shape {tuple(logits.shape)}"
        )
    if dweights.dtype is not work_dtype(logits.dtype):
        raise InvalidProblemError(f"{name}: dweights has dtype {dweights.dtype}; expected {work_dtype(logits.dtype)}")
    return empty(logits.shape, logits)


def _router_backward(
    dweights: Tensor,
    logits: Tensor,
    experts: Tensor,
    scoring: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
) -> Tensor:
    name = "moe_router_backward"
    dlogits = _router_backward_fake(dweights, logits, experts, scoring, renormalize, scale)
    dw, x, chosen = (
        usable(name, "dweights", dweights),
        usable(name, "logits", logits),
        usable_index(name, "experts", experts),
    )
    fields = (x.shape, experts.shape[-1], NAMES[x.dtype], scoring, renormalize, scale, NAMES[chosen.dtype])
    run(MoeRouterBackwardPlan, x.device, fields, dweights=dw, logits=x, experts=chosen, dlogits=dlogits)
    return dlogits


def _save_router(node: Any, inputs: tuple[Any, ...], output: Pair) -> Pair:
    logits, _, scoring, renormalize, *_, scale = inputs
    node.options = scoring, renormalize, scale
    return logits, output[1]


def _save_router_backward(node: Any, inputs: tuple[Any, ...], dlogits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dweights, logits, experts, *node.options = inputs
    node.likes = like(dweights), like(logits)
    return dweights, logits, experts


def _scores(logits: Tensor, scoring: str) -> Tensor:
    (x,) = wide(logits)
    return FORWARD["softmax"](x, -1) if scoring == "softmax" else x.sigmoid()


def _score_tangent(s: Tensor, t: Tensor, scoring: str) -> Tensor:
    """The directional derivative of the scores; their Jacobian is symmetric, so it is their gradient as well."""
    return BACKWARD["softmax"](t, s, -1) if scoring == "softmax" else s * (1 - s) * t


def _reciprocal(total: Tensor) -> Tensor:
    return torch.where(total == 0, torch.zeros_like(total), 1 / total)


def _weight_tangent(
    logits: Tensor, experts: Tensor, t: Tensor, scoring: str, renormalize: bool, scale: float
) -> Tensor:
    """The directional derivative of the weights along t."""
    s = _scores(logits, scoring)
    a = GATHER(_score_tangent(s, t.to(s.dtype), scoring), -1, experts)
    if renormalize:
        w = GATHER(s, -1, experts)
        r = _reciprocal(w.sum(-1, keepdim=True))
        a = (a - w * r * a.sum(-1, keepdim=True)) * r
    return a * scale  # type: ignore[no-any-return]


def _curvature(
    dweights: Tensor, logits: Tensor, experts: Tensor, t: Tensor, scoring: str, renormalize: bool, scale: float
) -> Tensor:
    """The Hessian of Σ dweights · weights with respect to the logits, times t."""
    s = _scores(logits, scoring)
    t = t.to(s.dtype)
    p, q = dweights * scale, torch.zeros_like(dweights)  # the derivatives by the tangents of the weights, and by them
    if renormalize:
        a, w = GATHER(_score_tangent(s, t, scoring), -1, experts), GATHER(s, -1, experts)
        r = _reciprocal(w.sum(-1, keepdim=True))
        total, along = a.sum(-1, keepdim=True), (p * w).sum(-1, keepdim=True)
        q = (2 * r * along * total - (p * a).sum(-1, keepdim=True) - p * total) * r * r
        p = (p - along * r) * r
    p, q = (GATHER_BACKWARD(v, -1, experts, s.shape) for v in (p, q))
    if scoring == "softmax":
        m = (s * t).sum(-1, keepdim=True)
        inner = p * (t - m) - t * (p * s).sum(-1, keepdim=True) + q
    else:
        inner = p * (1 - 2 * s) * t + q
    return _score_tangent(s, inner, scoring).to(logits.dtype)


def _differentiate_router(node: Any, saved: Pair, dweights: Tensor | None, _: Any) -> tuple[Tensor | None]:
    if dweights is None:
        return (None,)
    return (MOE_ROUTER_BACKWARD(dweights, *saved, *node.options),)


def _differentiate_router_backward(
    node: Any, saved: tuple[Tensor, Tensor, Tensor], g: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    dweights, logits, experts = saved
    by_weights = _weight_tangent(logits, experts, g, *node.options) if node.needs_input_grad[0] else None
    by_logits = _curvature(dweights, logits, experts, g, *node.options) if node.needs_input_grad[1] else None
    return by_weights, by_logits


def _push_router_backward(
    node: Any,
    saved: tuple[Tensor, Tensor, Tensor],
    t_dweights: Tensor | None,
    t_logits: Tensor | None,
    *rest: None,
) -> Tensor:
    dweights, logits, experts = saved
    likes: tuple[Described, Described] = node.likes
    t = MOE_ROUTER_BACKWARD(zeros_or(t_dweights, likes[0]), logits, experts, *node.options)
    if t_logits is not None:  # the Hessian is symmetric
        t = t + _curvature(dweights, logits, experts, t_logits, *node.options)
    return t  # type: ignore[no-any-return]


def _batch_router(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    x, bias = define.batched(args[0], in_dims[0], size), args[4] if len(args) > 4 else None
    if bias is not None and (in_dims[4] is not None or bias.dim() > 1):  # one for each: as one for every token
        if x.is_mps:  # whose kernels take none
            return define.one_by_one(op, size, in_dims, *args)
        bias = define.batched(bias, in_dims[4], size)
        missing = (1,) * (x.dim() - bias.dim())
        bias = bias.reshape(size, *missing, *bias.shape[1:]).expand(x.shape)
        args = (*args[:4], bias, *args[5:])
    return op(x, *args[1:]), (0, 0)


def _batch_router_backward(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Tensor, int]:
    tensors = [define.batched(t, d, size) for t, d in zip(args[:3], in_dims[:3], strict=True)]
    return op(*tensors, *args[3:]), 0


MOE_ROUTER: define.Operator = define.operator(
    'moe_router(Tensor logits, SymInt k, str scoring="softmax", bool renormalize=False, Tensor? bias=None, '
    "SymInt groups=1, SymInt group_k=1, float scale=1.0) -> (Tensor, Tensor)",
    run=_router,
    fake=_router_fake,
    gradient=define.Gradient(
        _save_router,
        _differentiate_router,
        lambda node, saved, t, *rest: (_weight_tangent(saved[0], saved[1], t, *node.options), None),
    ),
    batch=_batch_router,
)
MOE_ROUTER_BACKWARD: define.Operator = define.operator(
    'moe_router_backward(Tensor dweights, Tensor logits, Tensor experts, str scoring="softmax", '
    "bool renormalize=False, float scale=1.0) -> Tensor",
    run=_router_backward,
    fake=_router_backward_fake,
    gradient=define.Gradient(_save_router_backward, _differentiate_router_backward, _push_router_backward),
    batch=_batch_router_backward,
)
