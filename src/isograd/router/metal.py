"""The fused router and its gradient on Apple GPUs."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from isograd.core import arrays, faults
from isograd.core.descriptor import Kernel, KernelSku
from isograd.core.registry import register_kernel
from isograd.devices import metal
from isograd.router.plans import family_guarantee, family_sku

OPERATIONS = ("moe_router", "moe_router_backward")
_MOST_EXPERTS = 4096  # whose keys fit into threadgroup memory
_MOST_GROUPS = 1024  # of experts


def too_large(descriptor: Any) -> str | None:
    """Say what does not fit into threadgroup memory, or has no kernel."""
    if descriptor.shape[-1] > _MOST_EXPERTS:
        return f"more than {_MOST_EXPERTS} experts"
    if getattr(descriptor, "groups", 1) > _MOST_GROUPS:
        return f"more than {_MOST_GROUPS} groups of experts"
    if getattr(descriptor, "bias_rows", False):
        return "a bias for every token"
    return None


def scale_bits(scale: float) -> int:
    """The bits of a float32, as kernels take numbers beside their layout."""
    return int(np.float32(scale).view(np.int32))


class RouterInMetal(Kernel):
    """What the family's kernels in Metal have in common, whoever launches them."""

    family = "router"

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        promised = metal.guarantee(family_guarantee(descriptor), integers=False)
        return replace(family_sku(descriptor, self.backend, "apple"), precision_guarantee=promised)

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine, or what is too much for it."""
        return too_large(descriptor) or super().reject(descriptor)


class MetalRouter(RouterInMetal, metal.MetalKernel):
    """The family in Metal, one threadgroup a token; needs no workspace."""

    def launches(self, descriptor: Any, arguments: Mapping[str, Any]) -> Iterator[metal.Launch]:
        """One launch, unless there are no tokens."""
        outer, experts = descriptor.shape[:-1], descriptor.shape[-1]
        tokens = arrays.size_of(outer)
        if tokens == 0:
            return
        d, softmax = descriptor, int(descriptor.scoring == "softmax")
        layout = [tokens, experts, d.k]
        names = ["dweights", "logits", "experts", "dlogits"]
        if d.operation == "moe_router":
            names = ["logits", "weights", "experts"]
            bias = arguments.get("bias")
            layout += [d.groups, d.group_k, softmax, int(d.renormalize), int(d.bias), scale_bits(d.scale)]
            layout.append(0 if bias is None else bias.stride(0))
        else:
            code = faults.code(d.operation, "experts", False)
            layout += [softmax, int(d.renormalize), scale_bits(d.scale), code]
        layout += [len(outer), *outer]
        for name in names:
            *steps, step = arguments[name].stride()
            layout += [step, *steps]
        operands = [arguments[name] for name in names]
        size = metal.threads_for(experts)
        groups = min(tokens, metal.MOST_GROUPS)
        if d.operation == "moe_router":
            logits, weights, chosen = operands
            buffers = (logits, weights if bias is None else bias, weights, chosen, layout)
            yield metal.Launch(f"route_{d.dtype}", buffers, groups, size)
        else:
            flag = faults.flag(operands[0].device)
            name = f"route_backward_{d.dtype}_{d.index_dtype}"
            yield metal.Launch(name, (*operands, layout, flag), groups, size)


for _operation in OPERATIONS:
    for _dtype in metal.DTYPES:
        register_kernel(_operation, "mps", _dtype, MetalRouter())
