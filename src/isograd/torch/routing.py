"""Mixture-of-experts routing on tensors: the functions of `isograd` with derivatives.

weights, experts = igt.moe_router(logits, k, renormalize=True)          # [T, k]
order, offsets = igt.expert_permutation(experts, num_experts)
rows = igt.moe_permute(x, order, k)                                     # [T k, D], contiguous for every expert
...                                                                     # expert e: rows[offsets[e]:offsets[e + 1]]
y = igt.moe_combine(rows, weights, order)                               # [T, D]
"""

from typing import Any, NamedTuple

from torch import Tensor

from isograd.core.checks import MOST_ELEMENTS, real_number
from isograd.errors import InvalidProblemError
from isograd.router.descriptors import checked_scoring
from isograd.torch import ops_moe, ops_router_losses
from isograd.torch.indexing import enter
from isograd.torch.ops_router import MOE_ROUTER
from isograd.torch.tensors import checked_index, integer, require_dense
from isograd.typing import Scoring


class Routing(NamedTuple):
    """The result of `moe_router`."""

    weights: Tensor
    experts: Tensor


class Permutation(NamedTuple):
    """The result of `expert_permutation`."""

    order: Tensor
    offsets: Tensor


def moe_router(
    logits: Tensor,
    k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    bias: Tensor | None = None,
    groups: int = 1,
    group_k: int = 1,
    scale: float = 1.0,
) -> Routing:
    """The k experts of every token and their weights; arguments, results and bits as `isograd.moe_router`.

    The weights [..., k] are in the work type (float32 for 16-bit logits) and differentiable twice with respect to the
    logits [..., E]; the choice itself has no gradient, and bias, which serves the choice alone, gets none.

    Raises InvalidProblemError for arguments that do not fit together, DeviceMismatchError for two devices,
    UnsupportedError for another dtype or a device without a kernel.
    """
    name = "moe_router"
    enter(name)
    require_dense(name, logits, "logits")
    if bias is not None:
        require_dense(name, bias, "bias")
        if bias.dim() != 1:
            raise InvalidProblemError(
                f"{name}: bias has shape {tuple(bias.shape)}; expected one number for each expert"
            )
        bias = bias.detach()
    checked_scoring(name, scoring)
    factor = real_number(name, "scale", scale)
    k, groups, group_k = integer(name, "k", k), integer(name, "groups", groups), integer(name, "group_k", group_k)
    return Routing(*MOE_ROUTER(logits, k, scoring, bool(renormalize), bias, groups, group_k, factor))


def _counted(operation: str, num_experts: Any) -> int:
    """A number of experts that an array has room for."""
    count = integer(operation, "num_experts", num_experts)
    if not 1 <= count <= MOST_ELEMENTS:
        raise InvalidProblemError(f"{operation}: num_experts is {count}; accepted: at least 1, up to 2^56")
    return count


def expert_counts(experts: Tensor, num_experts: int) -> Tensor:
    """How many entries every expert has: [num_experts], int64; arguments and errors as `isograd.expert_counts`."""
    enter("expert_counts")
    experts = checked_index("expert_counts", experts, "experts")
    count = _counted("expert_counts", num_experts)
    return ops_moe.EXPERT_COUNTS(experts, count)  # type: ignore[no-any-return]


def expert_permutation(experts: Tensor, num_experts: int) -> Permutation:
    """Sort entries by expert, stably: (order, offsets); arguments and errors as `isograd.expert_permutation`."""
    enter("expert_permutation")
    experts = checked_index("expert_permutation", experts, "experts")
    count = _counted("expert_permutation", num_experts)
    return Permutation(*ops_moe.EXPERT_PERMUTATION(experts, count))


def moe_permute(x: Tensor, order: Tensor, k: int) -> Tensor:
    """The tokens' rows in the order of the experts: `y[i] = x[order[i] // k]`.

    x: [T, D]. order: [T k], int64, from `expert_permutation`. The gradient is an order-free sum over each token's k
    rows. Differentiable any number of times.
    """
    enter("moe_permute")
    require_dense("moe_permute", x, "x")
    order = checked_index("moe_permute", order, "order")
    return ops_moe.MOE_PERMUTE(x, order, integer("moe_permute", "k", k))  # type: ignore[no-any-return]


def moe_combine(expert_out: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """The weighted sum of every token's k rows, order-free.

    expert_out: [T k, D] in the order of the experts. weights: [T, k] in the work type (float32 for 16 bits). order:
    [T k], int64, a permutation. Differentiable any number of times with respect to expert_out and weights.
    """
    enter("moe_combine")
    require_dense("moe_combine", expert_out, "expert_out")
    require_dense("moe_combine", weights, "weights")
    return ops_moe.MOE_COMBINE(  # type: ignore[no-any-return]
        expert_out, weights, checked_index("moe_combine", order, "order")
    )


def load_balancing_loss(probabilities: Tensor, experts: Tensor, num_experts: int | None = None) -> Tensor:
    """The load-balancing loss `E Σ_e f_e P_e`; arguments and bits as `isograd.load_balancing_loss`.

    A scalar in the work type, linear in the probabilities; the counts have no gradient.
    """
    name = "load_balancing_loss"
    enter(name)
    require_dense(name, probabilities, "probabilities")
    if num_experts is not None and integer(name, "num_experts", num_experts) != probabilities.shape[-1]:
        raise InvalidProblemError(
            f"{name}: num_experts is {num_experts} for probabilities of shape {tuple(probabilities.shape)}"
        )
    experts = checked_index(name, experts, "experts")
    return ops_router_losses.LOAD_BALANCING_LOSS(probabilities, experts)  # type: ignore[no-any-return]


def router_z_loss(logits: Tensor) -> Tensor:
    """The mean over tokens of the squared logsumexp of the logits [..., E], a scalar in the work type.

    Differentiable twice.
    """
    enter("router_z_loss")
    require_dense("router_z_loss", logits, "logits")
    return ops_router_losses.ROUTER_Z_LOSS(logits)  # type: ignore[no-any-return]
