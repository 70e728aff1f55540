"""The gather family on NVIDIA and AMD GPUs, compiled by Triton."""

from collections.abc import Mapping
from typing import Any

from isograd.core.checks import DTYPES
from isograd.core.descriptor import KernelSku
from isograd.core.registry import register_kernel
from isograd.devices.cuda import TritonKernel, architecture
from isograd.gather.plans import OPERATIONS, family_sku


class TritonGather(TritonKernel):
    """The family on a GPU; scratch memory comes from torch's allocator."""

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return family_sku(descriptor, self.backend, architecture())

    def compute(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        from isograd.gather import triton_launch as launch

        a, indices = arguments, arguments["indices"]
        match descriptor.operation:
            case "take_along_axis":
                launch.take_along_axis(a["x"], indices, a["v"], descriptor.axis)
            case "take_along_axis_backward":
                operation, unique = descriptor.operation, descriptor.unique_indices
                launch.scatter_sum(indices, a["dv"], a["dx"], descriptor.axis, unique=unique, operation=operation)
            case "scatter_sum":
                launch.scatter_sum(indices, a["values"], a["out"], descriptor.axis, a["x"])
            case "index_select":
                launch.index_select(a["weight"], indices, a["y"], negative=descriptor.negative)
            case "index_sum":
                launch.index_sum(
                    indices, a["values"], a["out"], a.get("x"), descriptor.skipped, negative=descriptor.negative
                )


for _operation in OPERATIONS:
    for _dtype in DTYPES:
        register_kernel(_operation, "cuda", _dtype, TritonGather())
