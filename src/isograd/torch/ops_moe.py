"""Operators around the experts: counting and sorting entries, moving rows there and back, auxiliary losses.

    expert_counts(Tensor experts, SymInt num_experts) -> Tensor
    expert_permutation(Tensor experts, SymInt num_experts) -> (Tensor, Tensor)
    moe_permute(Tensor x, Tensor order, SymInt k) -> Tensor
    moe_permute_backward(Tensor dy, Tensor order, SymInt k) -> Tensor
    moe_combine(Tensor expert_out, Tensor weights, Tensor order) -> Tensor
    moe_combine_backward(Tensor dy, Tensor expert_out, Tensor weights, Tensor order) -> (Tensor, Tensor)
    load_balancing_loss(Tensor probabilities, Tensor experts) -> Tensor
    load_balancing_loss_backward(Tensor dloss, Tensor experts, SymInt[] size, ScalarType dtype) -> Tensor
    router_z_loss(Tensor logits) -> Tensor
    router_z_loss_backward(Tensor dloss, Tensor logits) -> Tensor

The permutation is linear, the combination bilinear, the load-balancing loss linear in the probabilities: their
derivatives of any order are the same operators again.
"""

from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError
from isograd.router import plans
from isograd.torch import define
from isograd.torch.ops import FORWARD
from isograd.torch.tensors import (
    NAMES,
    Shape,
    empty,
    like,
    require_device,
    require_same_dtype,
    require_storage,
    run,
    usable,
    usable_index,
    wide,
    work_dtype,
    zeros_or,
)

Pair = tuple[Tensor, Tensor]


# --- counting and sorting --------------------------------------------------------------------------------------------
def _counts_fake(experts: Tensor, num_experts: int) -> Tensor:
    return empty((num_experts,), experts, torch.int64)


def _counts(experts: Tensor, num_experts: int) -> Tensor:
    entries = usable_index("expert_counts", "experts", experts)
    counts = _counts_fake(experts, num_experts)
    fields = (entries.shape, num_experts, NAMES[entries.dtype])
    run(plans.ExpertCountsPlan, counts.device, fields, experts=entries, counts=counts)
    return counts


def _permutation_fake(experts: Tensor, num_experts: int) -> Pair:
    return empty((experts.numel(),), experts, torch.int64), empty((num_experts + 1,), experts, torch.int64)


def _permutation(experts: Tensor, num_experts: int) -> Pair:
    entries = usable_index("expert_permutation", "experts", experts)
    order, offsets = _permutation_fake(experts, num_experts)
    fields = (entries.shape, num_experts, NAMES[entries.dtype])
    run(plans.ExpertPermutationPlan, order.device, fields, experts=entries, order=order, offsets=offsets)
    return order, offsets


EXPERT_COUNTS: define.Operator = define.operator(
    "expert_counts(Tensor experts, SymInt num_experts) -> Tensor",
    run=_counts,
    fake=_counts_fake,
    batch=define.one_by_one,
)
EXPERT_PERMUTATION: define.Operator = define.operator(
    "expert_permutation(Tensor experts, SymInt num_experts) -> (Tensor, Tensor)",
    run=_permutation,
    fake=_permutation_fake,
    batch=define.one_by_one,
)


# --- rows there and back ---------------------------------------------------------------------------------------------
def _require_rows(operation: str, tensor: Tensor, name: str, rows: int | None = None) -> None:
    require_storage(operation, tensor, name)
    if tensor.dim() != 2 or (rows is not None and tensor.shape[0] != rows):
        expected = "two dimensions" if rows is None else f"{rows} rows"
        raise InvalidProblemError(f"{operation}: {name} has shape {tuple(tensor.shape)}; expected {expected}")


def _require_order(operation: str, order: Tensor, entries: int | None, k: int) -> None:
    if order.dtype is not torch.int64 or order.dim() != 1:
        raise InvalidProblemError(
            f"{operation}: order has shape {tuple(order.shape)} and dtype {order.dtype}; expected a vector of "
            "torch.int64"
        )
    if entries is not None and order.shape[0] != entries:
        raise InvalidProblemError(f"{operation}: order has {order.shape[0]} elements; expected {entries}")
    if k < 1 or order.shape[0] % k:
        raise InvalidProblemError(f"{operation}: k is {k}; expected a divisor of {order.shape[0]}, the size of order")


def _permute_fake(x: Tensor, order: Tensor, k: int) -> Tensor:
    require_device("moe_permute", x=x, order=order)
    _require_rows("moe_permute", x, "x")
    _require_order("moe_permute", order, x.shape[0] * k, k)
    return empty((x.shape[0] * k, x.shape[1]), x)


def _permute(x: Tensor, order: Tensor, k: int) -> Tensor:
    y = _permute_fake(x, order, k)
    rows, places = usable("moe_permute", "x", x), usable_index("moe_permute", "order", order)
    fields = (*x.shape[:1], k, x.shape[1], NAMES[x.dtype])
    run(plans.MoePermutePlan, x.device, fields, x=rows, order=places, y=y)
    return y


def _permute_backward_fake(dy: Tensor, order: Tensor, k: int) -> Tensor:
    name = "moe_permute_backward"
    require_device(name, dy=dy, order=order)
    _require_rows(name, dy, "dy")
    _require_order(name, order, dy.shape[0], k)
    return empty((dy.shape[0] // k, dy.shape[1]), dy)


def _permute_backward(dy: Tensor, order: Tensor, k: int) -> Tensor:
    name = "moe_permute_backward"
    dx = _permute_backward_fake(dy, order, k)
    rows, places = usable(name, "dy", dy), usable_index(name, "order", order)
    fields = (*dx.shape[:1], k, dx.shape[1], NAMES[dx.dtype])
    run(plans.MoePermuteBackwardPlan, dx.device, fields, dy=rows, order=places, dx=dx)
    return dx


def _require_combination(
    operation: str, expert_out: Tensor, weights: Tensor, order: Tensor, dy: Tensor | None = None
) -> None:
    require_device(operation, dy=dy, expert_out=expert_out, weights=weights, order=order)
    _require_rows(operation, expert_out, "expert_out")
    work = work_dtype(expert_out.dtype)
    if weights.dim() != 2 or weights.dtype is not work or weights.numel() != expert_out.shape[0]:
        raise InvalidProblemError(
            f"{operation}: weights has shape {tuple(weights.shape)} and dtype {weights.dtype}; expected one {work} for "
            f"each of {expert_out.shape[0]} rows"
        )
    _require_order(operation, order, expert_out.shape[0], weights.shape[1])
    if dy is not None:
        _require_rows(operation, dy, "dy", weights.shape[0])
        require_same_dtype(operation, dy, "dy", expert_out, "expert_out")


def _combine_fake(expert_out: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    _require_combination("moe_combine", expert_out, weights, order)
    return empty((weights.shape[0], expert_out.shape[1]), expert_out)


def _combine(expert_out: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    name = "moe_combine"
    y = _combine_fake(expert_out, weights, order)
    rows, w = usable(name, "expert_out", expert_out), usable(name, "weights", weights)
    places = usable_index(name, "order", order)
    fields = (*weights.shape, y.shape[1], NAMES[y.dtype])
    run(plans.MoeCombinePlan, y.device, fields, expert_out=rows, weights=w, order=places, y=y)
    return y


def _combine_backward_fake(dy: Tensor, expert_out: Tensor, weights: Tensor, order: Tensor) -> Pair:
    _require_combination("moe_combine_backward", expert_out, weights, order, dy)
    return empty(expert_out.shape, expert_out), empty(weights.shape, weights)


def _combine_backward(dy: Tensor, expert_out: Tensor, weights: Tensor, order: Tensor) -> Pair:
    name = "moe_combine_backward"
    d_expert_out, dweights = _combine_backward_fake(dy, expert_out, weights, order)
    run(
        plans.MoeCombineBackwardPlan,
        dy.device,
        (*weights.shape, dy.shape[1], NAMES[dy.dtype]),
        dy=usable(name, "dy", dy),
        expert_out=usable(name, "expert_out", expert_out),
        weights=usable(name, "weights", weights),
        order=usable_index(name, "order", order),
        d_expert_out=d_expert_out,
        dweights=dweights,
    )
    return d_expert_out, dweights


def _save_permute(node: Any, inputs: tuple[Any, ...], y: Tensor) -> tuple[Tensor]:
    _, order, node.k = inputs
    return (order,)


def _save_combine(node: Any, inputs: tuple[Any, ...], y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    node.likes = like(inputs[0]), like(inputs[1])
    return inputs


def _push_combine(
    node: Any, saved: tuple[Tensor, Tensor, Tensor], t_rows: Tensor | None, t_weights: Tensor | None, _: None
) -> Tensor:
    rows, weights, order = saved
    t = MOE_COMBINE(zeros_or(t_rows, node.likes[0]), weights, order)
    return t if t_weights is None else t + MOE_COMBINE(rows, t_weights, order)  # type: ignore[no-any-return]


def _save_combine_backward(node: Any, inputs: tuple[Any, ...], output: Pair) -> tuple[Tensor, ...]:
    return inputs


def _differentiate_combine_backward(
    node: Any, saved: tuple[Tensor, Tensor, Tensor, Tensor], g_rows: Tensor | None, g_weights: Tensor | None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    dy, rows, weights, order = saved
    if g_rows is None and g_weights is None:
        return None, None, None
    g_rows = torch.zeros_like(rows) if g_rows is None else g_rows
    g_weights = torch.zeros_like(weights) if g_weights is None else g_weights
    # With <a, combine(b, w)> = <rows of combine_backward(a, b, w), b> = <weights of combine_backward(a, b, w), w>.
    by_dy = MOE_COMBINE(g_rows, weights, order) + MOE_COMBINE(rows, g_weights, order)
    by_rows = MOE_COMBINE_BACKWARD(dy, rows, g_weights, order)[0]
    by_weights = MOE_COMBINE_BACKWARD(dy, g_rows, weights, order)[1]
    return by_dy, by_rows, by_weights


def _push_combine_backward(
    node: Any,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    t_dy: Tensor | None,
    t_rows: Tensor | None,
    t_weights: Tensor | None,
    _: None,
) -> Pair:
    dy, rows, weights, order = saved
    d_rows, d_weights = MOE_COMBINE_BACKWARD(torch.zeros_like(dy) if t_dy is None else t_dy, rows, weights, order)
    if t_weights is not None:
        d_rows = d_rows + MOE_COMBINE_BACKWARD(dy, rows, t_weights, order)[0]
    if t_rows is not None:
        d_weights = d_weights + MOE_COMBINE_BACKWARD(dy, t_rows, weights, order)[1]
    return d_rows, d_weights


def _batch_tokens(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
    """Over a batch, whose members' tokens lie one behind the other; `order` counts from those of its own member."""
    place = next(i for i, a in enumerate(op._schema.arguments) if a.name == "order")
    members = [a if d is None and not isinstance(a, Tensor) else define.batched(a, d, size)
               for a, d in zip(args, in_dims, strict=True)]  # fmt: skip
    order = members[place]
    step = order.shape[1]
    if size == 0 or step == 0 or any(isinstance(m, Tensor) and m.dim() != (2 if m is order else 3) for m in members):
        return define.one_by_one(op, size, in_dims, *args)
    # What is no place of its member stays none of the whole, and is told as that.
    inside = (order >= 0) & (order < step)
    first = torch.arange(size, device=order.device).unsqueeze(1) * step
    members[place] = torch.where(inside, order + first, torch.full_like(order, -1))
    result = op(*[m.flatten(0, 1) if isinstance(m, Tensor) else m for m in members])
    parts = [t.unflatten(0, (size, -1)) for t in ((result,) if isinstance(result, Tensor) else result)]
    return (parts[0], 0) if isinstance(result, Tensor) else (tuple(parts), (0,) * len(parts))


MOE_PERMUTE: define.Operator = define.operator(
    "moe_permute(Tensor x, Tensor order, SymInt k) -> Tensor",
    run=_permute,
    fake=_permute_fake,
    gradient=define.Gradient(
        _save_permute,
        lambda node, saved, dy: (MOE_PERMUTE_BACKWARD(dy, saved[0], node.k),),
        lambda node, saved, t, *rest: MOE_PERMUTE(t, saved[0], node.k),
    ),
    batch=_batch_tokens,
)
MOE_PERMUTE_BACKWARD: define.Operator = define.operator(
    "moe_permute_backward(Tensor dy, Tensor order, SymInt k) -> Tensor",
    run=_permute_backward,
    fake=_permute_backward_fake,
    gradient=define.Gradient(
        _save_permute,
        lambda node, saved, g: (MOE_PERMUTE(g, saved[0], node.k),),
        lambda node, saved, t, *rest: MOE_PERMUTE_BACKWARD(t, saved[0], node.k),
    ),
    batch=_batch_tokens,
)
MOE_COMBINE: define.Operator = define.operator(
    "moe_combine(Tensor expert_out, Tensor weights, Tensor order) -> Tensor",
    run=_combine,
    fake=_combine_fake,
    gradient=define.Gradient(
        _save_combine,
        lambda node, saved, dy: MOE_COMBINE_BACKWARD(dy, *saved),
        _push_combine,
    ),
    batch=_batch_tokens,
)
MOE_COMBINE_BACKWARD: define.Operator = define.operator(
    "moe_combine_backward(Tensor dy, Tensor expert_out, Tensor weights, Tensor order) -> (Tensor, Tensor)",
    run=_combine_backward,
    fake=_combine_backward_fake,
    gradient=define.Gradient(_save_combine_backward, _differentiate_combine_backward, _push_combine_backward),
    batch=_batch_tokens,
)


# --- auxiliary losses ------------------------------------------------------------------------------------------------
def _require_tokens(operation: str, experts: Tensor, shape: Shape, name: str) -> None:
    if not len(shape) or experts.dim() != len(shape) or tuple(experts.shape[:-1]) != tuple(shape[:-1]):
        raise InvalidProblemError(
            f"{operation}: experts has shape {tuple(experts.shape)} and {name} {tuple(shape)}; expected the same tokens"
        )


def _balance_fake(probabilities: Tensor, experts: Tensor) -> Tensor:
    name = "load_balancing_loss"
    require_device(name, probabilities=probabilities, experts=experts)
    require_storage(name, probabilities, "probabilities")
    _require_tokens(name, experts, probabilities.shape, "probabilities")
    return empty((), probabilities, work_dtype(probabilities.dtype))


def _balance(probabilities: Tensor, experts: Tensor) -> Tensor:
    name = "load_balancing_loss"
    loss = _balance_fake(probabilities, experts)
    p, chosen = usable(name, "probabilities", probabilities), usable_index(name, "experts", experts)
    fields = (p.shape, experts.shape[-1], NAMES[p.dtype], NAMES[chosen.dtype])
    run(plans.LoadBalancingLossPlan, p.device, fields, probabilities=p, experts=chosen, loss=loss)
    return loss


def _balance_backward_fake(dloss: Tensor, experts: Tensor, size: Shape, dtype: torch.dtype) -> Tensor:
    name = "load_balancing_loss_backward"
    require_device(name, dloss=dloss, experts=experts)
    _require_scalar(name, dloss, dtype)
    _require_tokens(name, experts, size, "size")
    return empty(size, dloss, dtype)


def _require_scalar(operation: str, dloss: Tensor, dtype: torch.dtype) -> None:
    if dloss.dim() or dloss.dtype is not work_dtype(dtype):
        raise InvalidProblemError(
            f"{operation}: dloss has shape {tuple(dloss.shape)} and dtype {dloss.dtype}; expected a scalar of "
            f"{work_dtype(dtype)}"
        )


def _balance_backward(dloss: Tensor, experts: Tensor, size: Shape, dtype: torch.dtype) -> Tensor:
    name = "load_balancing_loss_backward"
    dp = _balance_backward_fake(dloss, experts, size, dtype)
    chosen = usable_index(name, "experts", experts)
    fields = (dp.shape, experts.shape[-1], NAMES[dtype], NAMES[chosen.dtype])
    g = usable(name, "dloss", dloss).view(())
    run(plans.LoadBalancingLossBackwardPlan, dp.device, fields, dloss=g, experts=chosen, dprobabilities=dp)
    return dp


def _z_fake(logits: Tensor) -> Tensor:
    require_storage("router_z_loss", logits, "logits")
    return empty((), logits, work_dtype(logits.dtype))


def _z(logits: Tensor) -> Tensor:
    loss = _z_fake(logits)
    x = usable("router_z_loss", "logits", logits)
    run(plans.RouterZLossPlan, x.device, (x.shape, NAMES[x.dtype]), logits=x, loss=loss)
    return loss


def _z_backward_fake(dloss: Tensor, logits: Tensor) -> Tensor:
    name = "router_z_loss_backward"
    require_device(name, dloss=dloss, logits=logits)
    require_storage(name, logits, "logits")
    _require_scalar(name, dloss, logits.dtype)
    return empty(logits.shape, logits)


def _z_backward(dloss: Tensor, logits: Tensor) -> Tensor:
    name = "router_z_loss_backward"
    dx = _z_backward_fake(dloss, logits)
    x, g = usable(name, "logits", logits), usable(name, "dloss", dloss).view(())
    out = dx if dx.dim() else dx.view(1)
    run(plans.RouterZLossBackwardPlan, x.device, (x.shape, NAMES[x.dtype]), dloss=g, logits=x, dlogits=out)
    return dx


def _save_balance(node: Any, inputs: tuple[Any, ...], loss: Tensor) -> tuple[Tensor]:
    probabilities, experts = inputs
    node.size, node.dtype = probabilities.shape, probabilities.dtype
    return (experts,)


def _save_balance_backward(node: Any, inputs: tuple[Any, ...], dp: Tensor) -> tuple[Tensor]:
    _, experts, node.size, node.dtype = inputs
    return (experts,)


def _save_z_backward(node: Any, inputs: tuple[Any, ...], dx: Tensor) -> tuple[Tensor, ...]:
    return inputs


def _z_slope(logits: Tensor) -> tuple[Tensor, Tensor, float]:
    """Logsumexp and softmax of every token, and 2 / tokens."""
    (x,) = wide(logits)
    lse = x.logsumexp(-1, keepdim=True)
    return lse, FORWARD["softmax"](x, -1), 2.0 / max(lse.numel(), 1)


def _differentiate_z_backward(node: Any, saved: Pair, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    dloss, logits = saved
    lse, p, factor = _z_slope(logits)
    (g_wide,) = wide(g)
    along = (p * g_wide).sum(-1, keepdim=True)
    by_dloss = (along * lse).sum() * factor if node.needs_input_grad[0] else None
    if not node.needs_input_grad[1]:
        return by_dloss, None
    return by_dloss, (factor * dloss * p * (along + lse * (g_wide - along))).to(logits.dtype)


def _push_z_backward(node: Any, saved: Pair, t_dloss: Tensor | None, t_logits: Tensor | None) -> Tensor:
    dloss, logits = saved
    t = ROUTER_Z_LOSS_BACKWARD(torch.zeros_like(dloss) if t_dloss is None else t_dloss, logits)
    if t_logits is None:
        return t  # type: ignore[no-any-return]
    lse, p, factor = _z_slope(logits)
    (t_wide,) = wide(t_logits)
    along = (p * t_wide).sum(-1, keepdim=True)
    return t + (factor * dloss * p * (along + lse * (t_wide - along))).to(logits.dtype)  # type: ignore[no-any-return]


def _push_z(node: Any, saved: tuple[Tensor], t: Tensor) -> Tensor:
    lse, p, factor = _z_slope(saved[0])
    return (p * wide(t)[0] * lse).sum() * factor


LOAD_BALANCING_LOSS: define.Operator = define.operator(
    "load_balancing_loss(Tensor probabilities, Tensor experts) -> Tensor",
    run=_balance,
    fake=_balance_fake,
    gradient=define.Gradient(
        _save_balance,
        lambda node, saved, g: (LOAD_BALANCING_LOSS_BACKWARD(g, saved[0], node.size, node.dtype),),
        lambda node, saved, t, *rest: LOAD_BALANCING_LOSS(t, saved[0]),
    ),
    batch=define.one_by_one,
)
LOAD_BALANCING_LOSS_BACKWARD: define.Operator = define.operator(
    "load_balancing_loss_backward(Tensor dloss, Tensor experts, SymInt[] size, ScalarType dtype) -> Tensor",
    run=_balance_backward,
    fake=_balance_backward_fake,
    gradient=define.Gradient(
        _save_balance_backward,
        lambda node, saved, g: (LOAD_BALANCING_LOSS(g, saved[0]),),
        lambda node, saved, t, *rest: LOAD_BALANCING_LOSS_BACKWARD(t, saved[0], node.size, node.dtype),
    ),
    batch=define.one_by_one,
)
ROUTER_Z_LOSS: define.Operator = define.operator(
    "router_z_loss(Tensor logits) -> Tensor",
    run=_z,
    fake=_z_fake,
    gradient=define.Gradient(
        lambda node, inputs, loss: inputs,
        lambda node, saved, g: (ROUTER_Z_LOSS_BACKWARD(g, saved[0]),),
        _push_z,
    ),
    batch=define.one_by_one,
)
ROUTER_Z_LOSS_BACKWARD: define.Operator = define.operator(
    "router_z_loss_backward(Tensor dloss, Tensor logits) -> Tensor",
    run=_z_backward,
    fake=_z_backward_fake,
    gradient=define.Gradient(_save_z_backward, _differentiate_z_backward, _push_z_backward),
    batch=define.one_by_one,
)
