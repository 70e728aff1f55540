"""The attention family on NVIDIA and AMD GPUs, compiled by Triton."""

from collections.abc import Mapping
from typing import Any

from isograd.core.descriptor import KernelSku, Operand
from isograd.core.registry import register_kernel
from isograd.devices.cuda import TritonKernel, architecture
from isograd.flash_attention.plans import (
    OPERATIONS,
    ORDER_FREE_DTYPES,
    ORDER_FREE_OPERATIONS,
    WITH_CACHE,
    dtypes_of,
    family_sku,
    order_free_refusal,
    order_free_sku,
)

_ROWS = frozenset({"q", "k", "v", "o", "do", "dq", "dk", "dv"})


def _rows_in_order(operands: tuple[Operand, ...], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with a contiguous last axis: an input is copied for it, an output replaced by scratch."""
    given = dict(arguments)
    for operand in operands:
        array = given[operand.name]
        if operand.name in _ROWS and array.stride(-1) != 1:
            given[operand.name] = array.new_empty(operand.shape) if operand.output else array.contiguous()
    return given


class TritonAttention(TritonKernel):
    """The family on a GPU; scratch memory comes from torch's allocator."""

    def launchers(self) -> Any:
        """The module that launches the kernels."""
        from isograd.flash_attention import triton_launch

        return triton_launch

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return family_sku(descriptor, self.backend, architecture(), narrowed=True)

    def compute(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        launch = self.launchers()
        operands = descriptor.operands()
        given = _rows_in_order(operands, arguments)
        match descriptor.operation:
            case "attention" | "attention_with_cache":
                launch.forward(descriptor, given)
            case "attention_backward":
                launch.backward(descriptor, given)
            case "attention_delta":
                launch.delta(descriptor, given)
        for operand in operands:
            if given[operand.name] is not arguments[operand.name] and operand.output:
                arguments[operand.name].copy_(given[operand.name])


class HopperAttention(TritonAttention):
    """The forward and the backward pass in Gluon, for compute capability 9.0, where they are tried first."""

    name = "hopper"
    backend = "gluon"

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        tile_keys = self.launchers().TILE_KEYS if descriptor.operation == "attention_backward" else None
        return family_sku(descriptor, self.backend, architecture(), True, tile_keys)

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine, or what of the problem the kernels do not take."""
        reason = super().reject(descriptor)
        if reason is not None:
            return reason
        if architecture() != "sm_90":
            return f"it needs compute capability 9.0; there is {architecture()}"
        reason = self.launchers().supports(descriptor)
        return None if reason is None else str(reason)

    def launchers(self) -> Any:
        """The module that launches the kernels."""
        from isograd.flash_attention import gluon_launch

        return gluon_launch


class OrderFreeAttention(TritonAttention):
    """The forward and the backward pass with the bits of every machine: rule 23 of `docs/arithmetic.md`."""

    name = "order_free"

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return order_free_sku(descriptor, self.backend, architecture())

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine, or why it cannot serve a problem."""
        return super().reject(descriptor) or order_free_refusal(descriptor)

    def launchers(self) -> Any:
        """The module that launches the kernels."""
        from isograd.flash_attention.order_free import triton_launch

        return triton_launch


# Before Triton's, which take what these do not: a choice by the descriptor alone, the same forward and backward.
for _operation in ("attention", "attention_backward", WITH_CACHE):
    for _dtype in ("float16", "bfloat16"):
        register_kernel(_operation, "cuda", _dtype, HopperAttention())

for _operation in (*OPERATIONS, WITH_CACHE):
    for _dtype in dtypes_of("cuda"):
        register_kernel(_operation, "cuda", _dtype, TritonAttention())

# By preference only.
for _operation in ORDER_FREE_OPERATIONS:
    for _dtype in ORDER_FREE_DTYPES:
        register_kernel(_operation, "cuda", _dtype, OrderFreeAttention())
