"""Cross entropy and linear cross entropy on NVIDIA and AMD GPUs.

torch is imported when a kernel runs; nothing here waits for a GPU.
"""

from collections.abc import Mapping
from typing import Any

from isograd.core.checks import DTYPES
from isograd.core.descriptor import KernelSku
from isograd.core.registry import register_kernel
from isograd.devices.cuda import TritonKernel, architecture, unavailable
from isograd.losses import cross_entropy_plans, linear_bounds, linear_plans
from isograd.numerics.matmul import MAX_TERMS


# --- one number, or one a row ----------------------------------------------------------------------------------------
def total(values: Any) -> Any:
    """The order-free sum of all elements."""
    from isograd.reduction import cuda as reduction

    return reduction.sum(values)


def divided(a: Any, b: Any) -> Any:
    """The quotient of tensors of one device, rounded once, its NaN the canonical one."""
    from isograd.rows import triton_totals

    return triton_totals.divided(a, b)


def target_total(targets: Any, weight: Any, classes: int, ignore_index: int, work: str) -> Any:
    """The number of targets that are not ignored or, given weights of the classes, the order-free sum of theirs.

    The weight of a target that is no class is NaN.
    """
    import torch

    from isograd.rows import triton_totals

    found = triton_totals.target_total(targets, weight, classes, ignore_index, getattr(torch, work))
    return found if weight is None else total(found)


# --- kernels ---------------------------------------------------------------------------------------------------------
class TritonCrossEntropy(TritonKernel):
    """Cross entropy on a GPU; needs no workspace."""

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return cross_entropy_plans.sku(descriptor, self.backend, architecture())

    def compute(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        from isograd.core import faults
        from isograd.losses.triton_cross_entropy_launch import cross_entropy

        cross_entropy(descriptor, arguments)
        faults.after_launch(arguments["logits"].device)


class TritonLinear(TritonKernel):
    """A linear layer's products by torch, and cross entropy in place of a chunk's logits."""

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return linear_plans.sku(descriptor, self.backend, architecture(), linear_bounds.accumulated)

    def compute(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        from isograd.losses.linear_torch import linear_cross_entropy

        linear_cross_entropy(descriptor, arguments)


class OrderFreeLinear(TritonKernel):
    """The same by products of 16-bit integers, whose bits are the CPU's and no chunk's."""

    name = "order_free"

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return linear_plans.sku(descriptor, self.backend, architecture(), linear_bounds.order_free)

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine, or too long."""
        longest = max(descriptor.rows, descriptor.features, descriptor.classes)
        return unavailable() or (f"{longest} terms; supported: up to {MAX_TERMS}" if longest > MAX_TERMS else None)

    def compute(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        from isograd.losses.linear_torch import linear_cross_entropy

        linear_cross_entropy(descriptor, arguments, order_free=True)


for _dtype in DTYPES:
    for _operation in cross_entropy_plans.OPERATIONS:
        register_kernel(_operation, "cuda", _dtype, TritonCrossEntropy())
    for _operation in linear_plans.OPERATIONS:
        register_kernel(_operation, "cuda", _dtype, TritonLinear())
        if _dtype in ("float16", "bfloat16"):  # rule 10's product of the others has no kernel on GPUs
            register_kernel(_operation, "cuda", _dtype, OrderFreeLinear())
