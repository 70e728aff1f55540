"""The router family on NVIDIA and AMD GPUs, compiled by Triton; scratch memory comes from torch's allocator."""

from typing import Any

import torch

from isograd.core.kernel import launcher
from isograd.ops.router import triton_launch as launch
from isograd.ops.router import triton_losses_launch as losses

Tensor = torch.Tensor
MOST_EXPERTS = 4096  # experts that one program holds
_LONGEST = 16384  # elements of a row that renormalize holds


def _too_long(p: Any) -> str | None:
    return f"more than {_LONGEST} elements along the axis" if p.shape[p.axis] > _LONGEST else None


def _too_many(p: Any) -> str | None:
    return f"more than {MOST_EXPERTS} experts" if p.shape[-1] > MOST_EXPERTS else None


@launcher("top_k")
def top_k(p: Any, x: Tensor, values: Tensor, indices: Tensor) -> None:
    """Fill values and indices."""
    launch.top_k(x, values, indices, p.axis)


@launcher("renormalize", _too_long)
def renormalize(p: Any, w: Tensor, t: Tensor) -> None:
    """Fill t."""
    launch.renormalize(w, t, p.axis)


@launcher("renormalize_backward", _too_long)
def renormalize_backward(p: Any, dt: Tensor, w: Tensor, dw: Tensor) -> None:
    """Fill dw."""
    launch.renormalize(w, dw, p.axis, dt)


@launcher("moe_router", _too_many)
def moe_router(p: Any, logits: Tensor, weights: Tensor, experts: Tensor, bias: Tensor | None = None) -> None:
    """Fill weights and experts."""
    softmax, options = p.scoring == "softmax", {"groups": p.groups, "group_k": p.group_k, "scale": p.scale}
    launch.moe_router(logits, bias, weights, experts, softmax=softmax, renormalize=p.renormalize, **options)


@launcher("moe_router_backward", _too_many)
def moe_router_backward(p: Any, dweights: Tensor, logits: Tensor, experts: Tensor, dlogits: Tensor) -> None:
    """Fill dlogits."""
    softmax = p.scoring == "softmax"
    launch.moe_router_backward(
        dweights, logits, experts, dlogits, softmax=softmax, renormalize=p.renormalize, scale=p.scale
    )


@launcher("expert_counts")
def expert_counts(p: Any, experts: Tensor, counts: Tensor) -> None:
    """Fill counts."""
    launch.expert_counts(experts, counts)


@launcher("expert_permutation")
def expert_permutation(p: Any, experts: Tensor, order: Tensor, offsets: Tensor) -> None:
    """Fill order and offsets."""
    launch.expert_permutation(experts, order, offsets)


@launcher("moe_permute")
def moe_permute(p: Any, x: Tensor, order: Tensor, y: Tensor) -> None:
    """Fill y."""
    launch.moe_permute(x, order, y, p.k)


@launcher("moe_permute_backward")
def moe_permute_backward(p: Any, dy: Tensor, order: Tensor, dx: Tensor) -> None:
    """Fill dx."""
    launch.moe_combine(p.operation, dy, None, order, dx)


@launcher("moe_combine")
def moe_combine(p: Any, expert_out: Tensor, weights: Tensor, order: Tensor, y: Tensor) -> None:
    """Fill y."""
    launch.moe_combine(p.operation, expert_out, weights, order, y)


@launcher("moe_combine_backward")
def moe_combine_backward(p: Any, **arrays: Tensor) -> None:
    """Fill d_expert_out and dweights."""
    launch.moe_combine_backward(**arrays)


@launcher("load_balancing_loss", _too_many)
def load_balancing_loss(p: Any, probabilities: Tensor, experts: Tensor, loss: Tensor) -> None:
    """Fill loss."""
    losses.load_balancing_loss(probabilities, experts, loss, p.batched)


@launcher("load_balancing_loss_backward", _too_many)
def load_balancing_loss_backward(p: Any, dloss: Tensor, experts: Tensor, dprobabilities: Tensor) -> None:
    """Fill dprobabilities."""
    losses.load_balancing_loss_backward(dloss, experts, dprobabilities, p.batched)


@launcher("router_z_loss", _too_many)
def router_z_loss(p: Any, logits: Tensor, loss: Tensor) -> None:
    """Fill loss."""
    losses.router_z_loss(logits, loss, p.batched)


@launcher("router_z_loss_backward", _too_many)
def router_z_loss_backward(p: Any, dloss: Tensor, logits: Tensor, dlogits: Tensor) -> None:
    """Fill dlogits."""
    losses.router_z_loss_backward(dloss, logits, dlogits, p.batched)
