"""Plans of the attention family, what its kernels promise, and the kernel on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from isograd.core.checks import DTYPES
from isograd.core.descriptor import Kernel, KernelSku, PrecisionGuarantee
from isograd.core.plan import Plan
from isograd.core.registry import register_kernel
from isograd.flash_attention import bounds, cpu
from isograd.flash_attention import descriptors as d
from isograd.flash_attention.order_free import bounds as order_free_bounds
from isograd.flash_attention.order_free import cpu as order_free_cpu


class AttentionPlan(Plan):
    """A kernel for attention: `plan.run(q=q, k=k, v=v, o=o, lse=lse)` and the optional inputs of the descriptor."""

    descriptor_type = d.AttentionDescriptor
    __slots__ = ()


class AttentionBackwardPlan(Plan):
    """A kernel for its gradients: `plan.run(do=do, q=q, k=k, v=v, o=o, lse=lse, dq=dq, dk=dk, dv=dv)`.

    The optional inputs and outputs of the descriptor are added: dlse, bias, dbias and so on.
    """

    descriptor_type = d.AttentionBackwardDescriptor
    __slots__ = ()


class AttentionWithCachePlan(Plan):
    """A kernel for attention over a cache: `plan.run(q=q, k=k, v=v, cache_seqlens=cache_seqlens, o=o, lse=lse)`.

    The optional inputs of the descriptor are added: block_table and sinks.
    """

    descriptor_type = d.AttentionWithCacheDescriptor
    __slots__ = ()


class AttentionDeltaPlan(Plan):
    """A kernel for the row sums of o · do: `plan.run(o=o, do=do, delta=delta)`."""

    descriptor_type = d.AttentionDeltaDescriptor
    __slots__ = ()


OPERATIONS = ("attention", "attention_backward", "attention_delta")
WITH_CACHE = "attention_with_cache"  # on the CPU, and on GPUs that Triton serves


def dtypes_of(device: str) -> tuple[str, ...]:
    """The dtypes that the family is registered for."""
    return DTYPES if device == "cpu" else ("float16", "bfloat16", "float32")


def order_free_sku(descriptor: Any, backend: str, arch: str) -> KernelSku:
    """The identity of a kernel that returns the bits of `order_free/reference.py`."""
    return KernelSku(
        category="attention",
        op=descriptor.operation,
        dtype=descriptor.dtype,
        aux_dtype="float32",
        layout="strided",
        epilogue="none",
        arch=arch,
        backend=backend,
        precision_guarantee=PrecisionGuarantee(
            math_precision="float32",
            accumulator="exact integers in blocks, which float32 adds in their order",
            deterministic=True,
            bit_stable_on_same_hardware=True,
            batch_invariant=True,
            order_invariant=True,
            bit_stable_across_hardware=True,
            error_bound=order_free_bounds.error_bound(descriptor.operation),
        ),
    )


def order_free_refusal(descriptor: Any) -> str | None:
    """Why no order-free kernel serves a problem, or None; the dtypes are those that they are registered for."""
    if getattr(descriptor, "dbias", False):
        return "it has no gradient of a bias; accepted: bias_gradient=False"
    return None


def family_guarantee(descriptor: Any, narrowed: bool, tile_keys: int | None = None) -> PrecisionGuarantee:
    """What kernels of the family promise; only `attention_delta` returns the bits of the reference.

    narrowed and tile_keys: as in `bounds.error_bound`.
    """
    exact = descriptor.operation == "attention_delta"
    return PrecisionGuarantee(
        math_precision=d.work_type(descriptor.dtype),
        accumulator="exact integers in fixed point" if exact else "matrix products in an order fixed by the tiles",
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        order_invariant=exact,
        bit_stable_across_hardware=exact,
        error_bound=bounds.error_bound(descriptor.operation, narrowed, tile_keys),
    )


def family_sku(
    descriptor: Any, backend: str, arch: str, narrowed: bool = False, tile_keys: int | None = None
) -> KernelSku:
    """The identity of a kernel of the family; narrowed: whether it rounds P and dS to the storage type.

    tile_keys: the keys of a tile if it adds dq up in fixed point.
    """
    return KernelSku(
        category="attention",
        op=descriptor.operation,
        dtype=descriptor.dtype,
        aux_dtype=d.work_type(descriptor.dtype),
        layout="strided",
        epilogue="none",
        arch=arch,
        backend=backend,
        precision_guarantee=family_guarantee(descriptor, narrowed, tile_keys),
    )


class NumbaAttention(Kernel):
    """The family on the CPU, compiled by Numba."""

    name = "numba"
    backend = "numba"

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return family_sku(descriptor, self.backend, "cpu")

    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads; needs no workspace."""
        match descriptor.operation:
            case "attention" | "attention_with_cache":
                cpu.attention(descriptor, arguments)
            case "attention_backward":
                cpu.attention_backward(descriptor, arguments)
            case "attention_delta":
                cpu.attention_delta(descriptor, arguments)


class OrderFreeAttention(Kernel):
    """Attention and its gradients on the CPU with the bits of every machine, compiled by Numba."""

    name = "order_free"
    backend = "numba"

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return order_free_sku(descriptor, self.backend, "cpu")

    def reject(self, descriptor: Any) -> str | None:
        """Why it cannot serve a problem."""
        return order_free_refusal(descriptor)

    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads; needs no workspace."""
        if descriptor.operation == "attention_backward":
            order_free_cpu.attention_backward(descriptor, arguments)
        else:
            order_free_cpu.attention(descriptor, arguments)


ORDER_FREE_OPERATIONS = ("attention", "attention_backward", WITH_CACHE)
ORDER_FREE_DTYPES = ("float16", "bfloat16")
for _operation in (*OPERATIONS, WITH_CACHE):
    for _dtype in dtypes_of("cpu"):
        register_kernel(_operation, "cpu", _dtype, NumbaAttention())
for _operation in ORDER_FREE_OPERATIONS:
    for _dtype in ORDER_FREE_DTYPES:
        # After the other, which a plan takes unless it is asked for this one.
        register_kernel(_operation, "cpu", _dtype, OrderFreeAttention())
