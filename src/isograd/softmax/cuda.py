"""The softmax family on NVIDIA and AMD GPUs, compiled by Triton."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from isograd.cuda import TritonKernel, architecture
from isograd.plan import DTYPES, KernelSku
from isograd.registry import register_kernel
from isograd.softmax.plans import KINDS, family_sku


@functools.cache
def _function(operation: str) -> Callable[..., None]:
    from isograd.softmax import triton_kernels

    function: Callable[..., None] = getattr(triton_kernels, operation)
    return function


class TritonSoftmax(TritonKernel):
    """The family on a GPU; needs no workspace."""

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return family_sku(descriptor, self.backend, architecture())

    def compute(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        operands = [arguments[name] for name in descriptor.inputs]
        operands.append(arguments[descriptor.output])
        _function(descriptor.operation)(*operands, descriptor.axis)


for _operation in (*KINDS, *(f"{kind}_backward" for kind in KINDS)):
    for _dtype in DTYPES:
        register_kernel(_operation, "cuda", _dtype, TritonSoftmax())
