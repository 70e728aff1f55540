"""Plans of the router family and the kernels that serve them on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isograd.core.checks import DTYPES, INDEX_DTYPES
from isograd.core.descriptor import Kernel, KernelSku, PrecisionGuarantee
from isograd.core.plan import Plan
from isograd.core.registry import register_kernel
from isograd.router import bounds, cpu, loss_descriptors
from isograd.router import descriptors as d


# --- plans -----------------------------------------------------------------------------------------------------------
class TopKPlan(Plan):
    """A kernel for top_k: `plan.run(x=x, values=values, indices=indices)`."""

    descriptor_type = d.TopKDescriptor
    __slots__ = ()


class RenormalizePlan(Plan):
    """A kernel for renormalize: `plan.run(w=w, t=t)`; t may be w."""

    descriptor_type = d.RenormalizeDescriptor
    __slots__ = ()


class RenormalizeBackwardPlan(Plan):
    """A kernel for its gradient: `plan.run(dt=dt, w=w, dw=dw)`; dw may be either."""

    descriptor_type = d.RenormalizeBackwardDescriptor
    __slots__ = ()


class MoeRouterPlan(Plan):
    """A kernel for the router: `plan.run(logits=x, weights=w, experts=e)`, with bias=b where the descriptor has one."""

    descriptor_type = d.MoeRouterDescriptor
    __slots__ = ()


class MoeRouterBackwardPlan(Plan):
    """A kernel for its gradient: `plan.run(dweights=g, logits=x, experts=e, dlogits=dx)`; dlogits may be the logits."""

    descriptor_type = d.MoeRouterBackwardDescriptor
    __slots__ = ()


class ExpertCountsPlan(Plan):
    """A kernel for expert_counts: `plan.run(experts=e, counts=c)`."""

    descriptor_type = d.ExpertCountsDescriptor
    __slots__ = ()


class ExpertPermutationPlan(Plan):
    """A kernel for expert_permutation: `plan.run(experts=e, order=order, offsets=offsets)`."""

    descriptor_type = d.ExpertPermutationDescriptor
    __slots__ = ()


class MoePermutePlan(Plan):
    """A kernel for moe_permute: `plan.run(x=x, order=order, y=y)`."""

    descriptor_type = d.MoePermuteDescriptor
    __slots__ = ()


class MoePermuteBackwardPlan(Plan):
    """A kernel for its gradient: `plan.run(dy=dy, order=order, dx=dx)`."""

    descriptor_type = d.MoePermuteBackwardDescriptor
    __slots__ = ()


class MoeCombinePlan(Plan):
    """A kernel for moe_combine: `plan.run(expert_out=o, weights=w, order=order, y=y)`."""

    descriptor_type = d.MoeCombineDescriptor
    __slots__ = ()


class MoeCombineBackwardPlan(Plan):
    """A kernel for its gradients: `plan.run(dy=dy, expert_out=o, weights=w, order=order, d_expert_out=do, dweights=g)`.

    d_expert_out may be expert_out.
    """

    descriptor_type = d.MoeCombineBackwardDescriptor
    __slots__ = ()


class LoadBalancingLossPlan(Plan):
    """A kernel for load_balancing_loss: `plan.run(probabilities=p, experts=e, loss=loss)`."""

    descriptor_type = loss_descriptors.LoadBalancingLossDescriptor
    __slots__ = ()


class LoadBalancingLossBackwardPlan(Plan):
    """A kernel for its gradient: `plan.run(dloss=g, experts=e, dprobabilities=dp)`."""

    descriptor_type = loss_descriptors.LoadBalancingLossBackwardDescriptor
    __slots__ = ()


class RouterZLossPlan(Plan):
    """A kernel for router_z_loss: `plan.run(logits=x, loss=loss)`."""

    descriptor_type = loss_descriptors.RouterZLossDescriptor
    __slots__ = ()


class RouterZLossBackwardPlan(Plan):
    """A kernel for its gradient: `plan.run(dloss=g, logits=x, dlogits=dx)`; dlogits may be the logits."""

    descriptor_type = loss_descriptors.RouterZLossBackwardDescriptor
    __slots__ = ()


def family_guarantee(descriptor: Any) -> PrecisionGuarantee:
    """What every kernel of the family promises: it returns the bits of the reference."""
    integers = descriptor.dtype in INDEX_DTYPES
    return PrecisionGuarantee(
        math_precision="exact integers" if integers else d.work_type(descriptor.dtype),
        accumulator="exact integers in fixed point",
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        order_invariant=True,
        bit_stable_across_hardware=True,
        error_bound=bounds.error_bound(descriptor.operation, descriptor.dtype, getattr(descriptor, "batched", False)),
    )


def family_sku(descriptor: Any, backend: str, arch: str) -> KernelSku:
    """The identity of a kernel of the family."""
    return KernelSku(
        category="router",
        op=descriptor.operation,
        dtype=descriptor.dtype,
        aux_dtype="int64" if descriptor.dtype in INDEX_DTYPES else d.work_type(descriptor.dtype),
        layout="strided",
        epilogue="none",
        arch=arch,
        backend=backend,
        precision_guarantee=family_guarantee(descriptor),
    )


INTEGER_OPERATIONS = ("expert_counts", "expert_permutation")


def dtypes_of(operation: str) -> tuple[str, ...]:
    """The dtypes that an operation of the family is registered for."""
    return INDEX_DTYPES if operation in INTEGER_OPERATIONS else DTYPES


OPERATIONS = tuple(cpu.LAUNCH)


class NumbaRouter(Kernel):
    """The family on the CPU, compiled by Numba."""

    name = "numba"
    backend = "numba"

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return family_sku(descriptor, self.backend, "cpu")

    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads; needs no workspace."""
        cpu.LAUNCH[descriptor.operation](descriptor, arguments)


for _operation in OPERATIONS:
    for _dtype in dtypes_of(_operation):
        register_kernel(_operation, "cpu", _dtype, NumbaRouter())
