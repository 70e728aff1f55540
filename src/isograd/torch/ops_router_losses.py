"""Operators of the router's auxiliary losses.

    load_balancing_loss(Tensor probabilities, Tensor experts, bool batched=False) -> Tensor
    load_balancing_loss_backward(Tensor dloss, Tensor experts, SymInt[] size, ScalarType dtype, bool batched=False)
        -> Tensor
    router_z_loss(Tensor logits, bool batched=False) -> Tensor
    router_z_loss_backward(Tensor dloss, Tensor logits, bool batched=False) -> Tensor

With `batched` every place in the first dimension is a problem of its own, with a loss. The load-balancing loss is
linear in the probabilities: its derivatives of any order are the same operators again.
"""

from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError
from isograd.ops.softmax.torch import FORWARD
from isograd.router import plans
from isograd.torch import define
from isograd.torch.tensors import (
    NAMES,
    Shape,
    empty,
    require_device,
    require_storage,
    run,
    usable,
    usable_index,
    wide,
    work_dtype,
)

Pair = tuple[Tensor, Tensor]


# --- the load-balancing loss -----------------------------------------------------------------------------------------
def _loss_shape(shape: Shape, batched: bool) -> Shape:
    return tuple(shape[:1]) if batched else ()


def _require_loss(operation: str, dloss: Tensor, shape: Shape, dtype: torch.dtype) -> None:
    if tuple(dloss.shape) != shape or dloss.dtype is not work_dtype(dtype):
        raise InvalidProblemError(
            f"{operation}: dloss has shape {tuple(dloss.shape)} and dtype {dloss.dtype}; expected {shape} and "
            f"{work_dtype(dtype)}"
        )


def _require_tokens(operation: str, experts: Tensor, shape: Shape, name: str) -> None:
    if not len(shape) or experts.dim() != len(shape) or tuple(experts.shape[:-1]) != tuple(shape[:-1]):
        raise InvalidProblemError(
            f"{operation}: experts has shape {tuple(experts.shape)} and {name} {tuple(shape)}; expected the same tokens"
        )


def _balance_fake(probabilities: Tensor, experts: Tensor, batched: bool = False) -> Tensor:
    name = "load_balancing_loss"
    require_device(name, probabilities=probabilities, experts=experts)
    require_storage(name, probabilities, "probabilities")
    _require_tokens(name, experts, probabilities.shape, "probabilities")
    return empty(_loss_shape(probabilities.shape, batched), probabilities, work_dtype(probabilities.dtype))


def _balance(probabilities: Tensor, experts: Tensor, batched: bool = False) -> Tensor:
    name = "load_balancing_loss"
    loss = _balance_fake(probabilities, experts, batched)
    p, chosen = usable(name, "probabilities", probabilities), usable_index(name, "experts", experts)
    fields = (p.shape, experts.shape[-1], NAMES[p.dtype], NAMES[chosen.dtype], batched)
    run(plans.LoadBalancingLossPlan, p.device, fields, probabilities=p, experts=chosen, loss=loss)
    return loss


def _balance_backward_fake(
    dloss: Tensor, experts: Tensor, size: Shape, dtype: torch.dtype, batched: bool = False
) -> Tensor:
    name = "load_balancing_loss_backward"
    require_device(name, dloss=dloss, experts=experts)
    _require_loss(name, dloss, _loss_shape(size, batched), dtype)
    _require_tokens(name, experts, size, "size")
    return empty(size, dloss, dtype)


def _balance_backward(dloss: Tensor, experts: Tensor, size: Shape, dtype: torch.dtype, batched: bool = False) -> Tensor:
    name = "load_balancing_loss_backward"
    dp = _balance_backward_fake(dloss, experts, size, dtype, batched)
    chosen = usable_index(name, "experts", experts)
    fields = (dp.shape, experts.shape[-1], NAMES[dtype], NAMES[chosen.dtype], batched)
    g = usable(name, "dloss", dloss).view(dloss.shape)
    run(plans.LoadBalancingLossBackwardPlan, dp.device, fields, dloss=g, experts=chosen, dprobabilities=dp)
    return dp


def _save_balance(node: Any, inputs: tuple[Any, ...], loss: Tensor) -> tuple[Tensor]:
    probabilities, experts, node.batched = inputs
    node.size, node.dtype = probabilities.shape, probabilities.dtype
    return (experts,)


def _save_balance_backward(node: Any, inputs: tuple[Any, ...], dp: Tensor) -> tuple[Tensor]:
    _, experts, node.size, node.dtype, node.batched = inputs
    return (experts,)


def _problems(tensor: Tensor, batched: bool) -> Tensor:
    """A batch of problems, or of batches of them, as one of problems."""
    return tensor.flatten(0, 1) if batched else tensor


def _batch_balance(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    probabilities: Tensor,
    experts: Tensor,
    batched: bool = False,
) -> tuple[Tensor, int]:
    p, chosen = (define.batched(t, d, size) for t, d in zip((probabilities, experts), in_dims, strict=False))
    return op(_problems(p, batched), _problems(chosen, batched), True).view(p.shape[: 1 + batched]), 0


def _batch_balance_backward(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    dloss: Tensor,
    experts: Tensor,
    shape: Shape,
    dtype: torch.dtype,
    batched: bool = False,
) -> tuple[Tensor, int]:
    g, chosen = (define.batched(t, d, size) for t, d in zip((dloss, experts), in_dims, strict=False))
    sizes = [size * shape[0], *shape[1:]] if batched else [size, *shape]
    return op(g.flatten(), _problems(chosen, batched), sizes, dtype, True).view(size, *shape), 0


LOAD_BALANCING_LOSS: define.Operator = define.operator(
    "load_balancing_loss(Tensor probabilities, Tensor experts, bool batched=False) -> Tensor",
    run=_balance,
    fake=_balance_fake,
    gradient=define.Gradient(
        _save_balance,
        lambda node, saved, g: (LOAD_BALANCING_LOSS_BACKWARD(g, saved[0], node.size, node.dtype, node.batched),),
        lambda node, saved, t, *rest: LOAD_BALANCING_LOSS(t, saved[0], node.batched),
    ),
    batch=_batch_balance,
)
LOAD_BALANCING_LOSS_BACKWARD: define.Operator = define.operator(
    "load_balancing_loss_backward(Tensor dloss, Tensor experts, SymInt[] size, ScalarType dtype, bool batched=False) "
    "-> Tensor",
    run=_balance_backward,
    fake=_balance_backward_fake,
    gradient=define.Gradient(
        _save_balance_backward,
        lambda node, saved, g: (LOAD_BALANCING_LOSS(g, saved[0], node.batched),),
        lambda node, saved, t, *rest: LOAD_BALANCING_LOSS_BACKWARD(t, saved[0], node.size, node.dtype, node.batched),
    ),
    batch=_batch_balance_backward,
)


# --- the z-loss ------------------------------------------------------------------------------------------------------
def _z_fake(logits: Tensor, batched: bool = False) -> Tensor:
    require_storage("router_z_loss", logits, "logits")
    return empty(_loss_shape(logits.shape, batched), logits, work_dtype(logits.dtype))


def _z(logits: Tensor, batched: bool = False) -> Tensor:
    loss = _z_fake(logits, batched)
    x = usable("router_z_loss", "logits", logits)
    run(plans.RouterZLossPlan, x.device, (x.shape, NAMES[x.dtype], batched), logits=x, loss=loss)
    return loss


def _z_backward_fake(dloss: Tensor, logits: Tensor, batched: bool = False) -> Tensor:
    name = "router_z_loss_backward"
    require_device(name, dloss=dloss, logits=logits)
    require_storage(name, logits, "logits")
    _require_loss(name, dloss, _loss_shape(logits.shape, batched), logits.dtype)
    return empty(logits.shape, logits)


def _z_backward(dloss: Tensor, logits: Tensor, batched: bool = False) -> Tensor:
    name = "router_z_loss_backward"
    dx = _z_backward_fake(dloss, logits, batched)
    x, g = usable(name, "logits", logits), usable(name, "dloss", dloss).view(dloss.shape)
    out = dx if dx.dim() else dx.view(1)
    run(plans.RouterZLossBackwardPlan, x.device, (x.shape, NAMES[x.dtype], batched), dloss=g, logits=x, dlogits=out)
    return dx


def _save_z(node: Any, inputs: tuple[Any, ...], output: Tensor) -> tuple[Tensor, ...]:
    *saved, node.batched = inputs
    return tuple(saved)


class _Tokens:
    """Logsumexp, softmax and the factor 2 / tokens, for the derivatives that no kernel has."""

    def __init__(self, logits: Tensor, batched: bool) -> None:
        (x,) = wide(logits)
        self.lse, self.p = x.logsumexp(-1, keepdim=True), FORWARD["softmax"](x, -1)
        self.batched = batched
        self.factor = 2.0 / max((self.lse[0] if batched else self.lse).numel(), 1)

    def slope(self, t: Tensor) -> Tensor:
        """The derivatives of the losses along t."""
        terms = (self.p * wide(t)[0]).sum(-1, keepdim=True) * self.lse
        return (terms.flatten(1).sum(1) if self.batched else terms.sum()) * self.factor

    def curvature(self, dloss: Tensor, t: Tensor) -> Tensor:
        """The Hessian of Σ dloss · loss times t, in t's dtype."""
        (t_wide,) = wide(t)
        along = (self.p * t_wide).sum(-1, keepdim=True)
        g = dloss.view(-1, *(1,) * (t.dim() - 1)) if self.batched else dloss
        return (self.factor * g * self.p * (along + self.lse * (t_wide - along))).to(t.dtype)


def _differentiate_z_backward(node: Any, saved: Pair, g: Tensor) -> tuple[Tensor | None, Tensor | None]:
    dloss, logits = saved
    tokens = _Tokens(logits, node.batched)
    by_dloss = tokens.slope(g) if node.needs_input_grad[0] else None
    return by_dloss, tokens.curvature(dloss, g) if node.needs_input_grad[1] else None


def _push_z_backward(node: Any, saved: Pair, t_dloss: Tensor | None, t_logits: Tensor | None, *rest: None) -> Tensor:
    dloss, logits = saved
    t = ROUTER_Z_LOSS_BACKWARD(torch.zeros_like(dloss) if t_dloss is None else t_dloss, logits, node.batched)
    return t if t_logits is None else t + _Tokens(logits, node.batched).curvature(dloss, t_logits)  # type: ignore[no-any-return]


def _batch_z(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], logits: Tensor, batched: bool = False
) -> tuple[Tensor, int]:
    x = define.batched(logits, in_dims[0], size)
    x = x.unsqueeze(1) if x.dim() == 1 else x
    return op(_problems(x, batched), True).view(x.shape[: 1 + batched]), 0


def _batch_z_backward(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    dloss: Tensor,
    logits: Tensor,
    batched: bool = False,
) -> tuple[Tensor, int]:
    g, x = (define.batched(t, d, size) for t, d in zip((dloss, logits), in_dims, strict=False))
    whole = _problems(x.unsqueeze(1) if x.dim() == 1 else x, batched)
    return op(g.flatten(), whole, True).view(x.shape), 0


ROUTER_Z_LOSS: define.Operator = define.operator(
    "router_z_loss(Tensor logits, bool batched=False) -> Tensor",
    run=_z,
    fake=_z_fake,
    gradient=define.Gradient(
        _save_z,
        lambda node, saved, g: (ROUTER_Z_LOSS_BACKWARD(g, saved[0], node.batched),),
        lambda node, saved, t, *rest: _Tokens(saved[0], node.batched).slope(t),
    ),
    batch=_batch_z,
)
ROUTER_Z_LOSS_BACKWARD: define.Operator = define.operator(
    "router_z_loss_backward(Tensor dloss, Tensor logits, bool batched=False) -> Tensor",
    run=_z_backward,
    fake=_z_backward_fake,
    gradient=define.Gradient(_save_z, _differentiate_z_backward, _push_z_backward),
    batch=_batch_z_backward,
)
