"""The operators of gumbel_softmax.

    gumbel_softmax(Tensor logits, float tau=1.0, bool hard=False, int dim=-1, SymInt seed=0, SymInt offset=0,
                   bool batched=False) -> Tensor
    gumbel_softmax_backward(Tensor dy, Tensor y, float tau=1.0, int dim=-1) -> Tensor

seed and offset are words of 64 bits; those from 2^63 on are passed as negative numbers. With `batched` every place in
the first dimension has the same noise.
"""

from typing import Any

import torch
from torch import Tensor

from isograd.losses.simplex_plans import (
    GumbelSoftmaxBackwardPlan,
    GumbelSoftmaxPlan,
)
from isograd.torch import define
from isograd.torch.tensors import (
    NAMES,
    empty,
    launch,
    normalized_dim,
    require_same,
    require_storage,
    run,
    usable,
    wide,
)

_WORD = (1 << 64) - 1


# --- gumbel_softmax --------------------------------------------------------------------------------------------------
def _gumbel_fake(
    logits: Tensor,
    tau: float = 1.0,
    hard: bool = False,
    dim: int = -1,
    seed: int = 0,
    offset: int = 0,
    batched: bool = False,
) -> Tensor:
    require_storage("gumbel_softmax", logits, "logits")
    normalized_dim("gumbel_softmax", dim, logits.shape)
    return empty(logits.shape, logits)


def _gumbel(
    logits: Tensor,
    tau: float = 1.0,
    hard: bool = False,
    dim: int = -1,
    seed: int = 0,
    offset: int = 0,
    batched: bool = False,
) -> Tensor:
    y = _gumbel_fake(logits, tau, hard, dim, seed, offset, batched)
    x = usable("gumbel_softmax", "logits", logits)
    fields = (x.shape, NAMES[x.dtype], dim, tau, hard, seed & _WORD, offset & _WORD, batched)
    # Not through the cache of plans: a seed that changes with every call would fill it.
    plan = GumbelSoftmaxPlan.select(GumbelSoftmaxPlan.descriptor_type(*fields), x.device.type)
    launch(plan, logits=x, y=y if y.dim() else y.view(1))
    return y


def _gumbel_backward_fake(dy: Tensor, y: Tensor, tau: float = 1.0, dim: int = -1) -> Tensor:
    require_same("gumbel_softmax_backward", dy, y)
    require_storage("gumbel_softmax_backward", y, "y")
    normalized_dim("gumbel_softmax_backward", dim, y.shape)
    return empty(y.shape, y)


def _gumbel_backward(dy: Tensor, y: Tensor, tau: float = 1.0, dim: int = -1) -> Tensor:
    name = "gumbel_softmax_backward"
    dx = _gumbel_backward_fake(dy, y, tau, dim)
    g, p = usable(name, "dy", dy), usable(name, "y", y)
    out = dx if dx.dim() else dx.view(1)
    run(GumbelSoftmaxBackwardPlan, p.device, (p.shape, NAMES[p.dtype], dim, tau), dy=g, y=p, dx=out)
    return dx


def _save_gumbel(node: Any, inputs: tuple[Any, ...], y: Tensor) -> tuple[Tensor]:
    logits, *node.options = inputs
    return (logits if node.options[1] else y,)


def _soft(node: Any, saved: tuple[Tensor]) -> Tensor:
    """The soft result, whose gradient a hard one has as well."""
    tau, hard, *rest = node.options
    return GUMBEL_SOFTMAX(saved[0], tau, False, *rest) if hard else saved[0]


def _slope_gumbel(node: Any, saved: tuple[Tensor], g: Tensor) -> Tensor:
    tau, _, dim, *_ = node.options
    return GUMBEL_SOFTMAX_BACKWARD(g, _soft(node, saved), tau, dim)  # type: ignore[no-any-return]


def _save_gumbel_backward(node: Any, inputs: tuple[Any, ...], dx: Tensor) -> tuple[Tensor, Tensor]:
    dy, y, node.tau, node.dim = inputs
    return dy, y


def _differentiate_gumbel_backward(
    node: Any, saved: tuple[Tensor, Tensor], h: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    dy, y = saved
    by_dy = GUMBEL_SOFTMAX_BACKWARD(h, y, node.tau, node.dim) if node.needs_input_grad[0] else None
    if not node.needs_input_grad[1]:
        return by_dy, None
    h, g, p = wide(h, dy, y)
    s = (p * g).sum(node.dim, keepdim=True)
    by_y = (h * (g - s) - g * (h * p).sum(node.dim, keepdim=True)) / node.tau
    return by_dy, by_y.to(y.dtype)


def _push_gumbel_backward(
    node: Any, saved: tuple[Tensor, Tensor], t_dy: Tensor | None, t_y: Tensor | None, *rest: None
) -> Tensor:
    dy, y = saved
    t = GUMBEL_SOFTMAX_BACKWARD(torch.zeros_like(dy) if t_dy is None else t_dy, y, node.tau, node.dim)
    if t_y is None:
        return t  # type: ignore[no-any-return]
    g, p, h = wide(dy, y, t_y)
    s = (p * g).sum(node.dim, keepdim=True)
    extra = (h * (g - s) - p * (h * g).sum(node.dim, keepdim=True)) / node.tau
    return t + extra.to(y.dtype)  # type: ignore[no-any-return]


def _batch(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    dy: Tensor,
    y: Tensor,
    tau: float = 1.0,
    dim: int = -1,
) -> tuple[Tensor, int]:
    """The gradient over a batch."""
    dy, y = (define.batched(t, d, size) for t, d in zip((dy, y), in_dims, strict=False))
    shape = y.shape[1:]
    if not shape:
        dy, y = dy.unsqueeze(1), y.unsqueeze(1)
    result = op(dy, y, tau, normalized_dim(op.__name__, dim, shape) + 1)
    return (result if shape else result.squeeze(1)), 0


def _batch_gumbel(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    logits: Tensor,
    tau: float = 1.0,
    hard: bool = False,
    dim: int = -1,
    seed: int = 0,
    offset: int = 0,
    batched: bool = False,
) -> tuple[Tensor, int]:
    """The noise belongs to the place in a member, or in a member's member."""
    x = define.batched(logits, in_dims[0], size)
    dim = normalized_dim(op.__name__, dim, x.shape[1:]) + 1
    whole = x.flatten(0, 1) if batched else x.unsqueeze(1) if x.dim() == 1 else x
    return op(whole, tau, hard, dim - batched, seed, offset, True).view(x.shape), 0


GUMBEL_SOFTMAX: define.Operator = define.operator(
    "gumbel_softmax(Tensor logits, float tau=1.0, bool hard=False, int dim=-1, SymInt seed=0, SymInt offset=0, "
    "bool batched=False) -> Tensor",
    run=_gumbel,
    fake=_gumbel_fake,
    gradient=define.Gradient(
        _save_gumbel,
        lambda node, saved, dy: (_slope_gumbel(node, saved, dy),),
        lambda node, saved, t, *rest: _slope_gumbel(node, saved, t),  # the Jacobian is symmetric
    ),
    batch=_batch_gumbel,
)
GUMBEL_SOFTMAX_BACKWARD: define.Operator = define.operator(
    "gumbel_softmax_backward(Tensor dy, Tensor y, float tau=1.0, int dim=-1) -> Tensor",
    run=_gumbel_backward,
    fake=_gumbel_backward_fake,
    gradient=define.Gradient(_save_gumbel_backward, _differentiate_gumbel_backward, _push_gumbel_backward),
    batch=_batch,
)
