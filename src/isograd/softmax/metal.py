"""The softmax family on Apple GPUs."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from isograd import arrays, metal
from isograd.layout import merge_dimensions
from isograd.plan import Kernel, KernelSku
from isograd.registry import register_kernel
from isograd.softmax.plans import KINDS, family_guarantee, family_sku


class SoftmaxInMetal(Kernel):
    """What the family's kernels in Metal have in common, whoever launches them."""

    family = "softmax"

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        promised = metal.guarantee(family_guarantee(descriptor), integers=False)
        return replace(family_sku(descriptor, self.backend, "apple"), precision_guarantee=promised)


class MetalSoftmax(SoftmaxInMetal, metal.MetalKernel):
    """The family in Metal, one threadgroup a row; needs no workspace."""

    def launches(self, descriptor: Any, arguments: Mapping[str, Any]) -> Iterator[metal.Launch]:
        """One launch, unless there is nothing to compute."""
        operands = [arguments[name] for name in descriptor.inputs]
        operands.append(arguments[descriptor.output])
        if arrays.size_of(descriptor.shape) == 0:
            return
        axis, columns = descriptor.axis, descriptor.shape[descriptor.axis]
        strides = [tuple(tensor.stride()) for tensor in operands]
        outer = [d for d in range(len(descriptor.shape)) if d != axis]
        shape, steps = merge_dimensions(
            tuple([descriptor.shape[d] for d in outer]), tuple([tuple([s[d] for d in outer]) for s in strides])
        )
        rows = arrays.size_of(shape)
        layout = [rows, columns, len(shape), *shape]
        for stride, step in zip(strides, steps, strict=True):
            layout += [stride[axis], *step]
        name = f"{descriptor.operation}_{descriptor.dtype}"
        groups, size = min(rows, metal.MOST_GROUPS), metal.threads_for(columns)
        yield metal.Launch(name, (*operands, layout), groups, size)


for _operation in (*KINDS, *(f"{kind}_backward" for kind in KINDS)):
    for _dtype in metal.DTYPES:
        register_kernel(_operation, "mps", _dtype, MetalSoftmax())
