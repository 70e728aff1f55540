"""Operators around the experts: counting and sorting entries, moving rows there and back.

    expert_counts(Tensor experts, SymInt num_experts) -> Tensor
    expert_permutation(Tensor experts, SymInt num_experts) -> (Tensor, Tensor)
    moe_permute(Tensor x, Tensor order, SymInt k) -> Tensor
    moe_permute_backward(Tensor dy, Tensor order, SymInt k) -> Tensor
    moe_combine(Tensor expert_out, Tensor weights, Tensor order) -> Tensor
    moe_combine_backward(Tensor dy, Tensor expert_out, Tensor weights, Tensor order) -> (Tensor, Tensor)

The permutation is linear and the combination bilinear: their derivatives of any order are the same operators again.
"""

from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError
from isograd.router import plans
from isograd.torch import define, members
from isograd.torch.tensors import (
    NAMES,
    empty,
    like,
    require_device,
    require_same_dtype,
    require_storage,
    run,
    usable,
    usable_index,
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


def _batch_counts(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], experts: Tensor, num_experts: int
) -> tuple[Tensor, int]:
    entries = members.placed(define.batched(experts, in_dims[0], size), num_experts)
    return members.parted(op(entries, size * num_experts), size, num_experts), 0


def _batch_permutation(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], experts: Tensor, num_experts: int
) -> tuple[Pair, tuple[int, int]]:
    """Over a batch: sorted by expert, the entries of a member stay together, from its first expert's on."""
    entries = members.lines(members.placed(define.batched(experts, in_dims[0], size), num_experts))
    order, offsets = op(entries, size * num_experts)
    first = torch.arange(size, device=order.device).unsqueeze(1) * entries.shape[1]
    return (order.view(entries.shape) - first, offsets.unfold(0, num_experts + 1, num_experts) - first), (0, 0)


EXPERT_COUNTS: define.Operator = define.operator(
    "expert_counts(Tensor experts, SymInt num_experts) -> Tensor",
    run=_counts,
    fake=_counts_fake,
    batch=_batch_counts,
)
EXPERT_PERMUTATION: define.Operator = define.operator(
    "expert_permutation(Tensor experts, SymInt num_experts) -> (Tensor, Tensor)",
    run=_permutation,
    fake=_permutation_fake,
    batch=_batch_permutation,
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
    batches = [a if d is None and not isinstance(a, Tensor) else define.batched(a, d, size)
               for a, d in zip(args, in_dims, strict=True)]  # fmt: skip
    order = batches[place]
    step = order.shape[1]
    if size == 0 or step == 0 or any(isinstance(b, Tensor) and b.dim() != (2 if b is order else 3) for b in batches):
        return define.one_by_one(op, size, in_dims, *args)
    batches[place] = members.placed(order, step)
    result = op(*[b.flatten(0, 1) if isinstance(b, Tensor) else b for b in batches])
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
