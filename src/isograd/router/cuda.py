"""The router family on NVIDIA and AMD GPUs, compiled by Triton."""

from collections.abc import Mapping
from typing import Any

from isograd.core.descriptor import KernelSku
from isograd.core.registry import register_kernel
from isograd.devices.cuda import TritonKernel, architecture
from isograd.router.plans import OPERATIONS, dtypes_of, family_sku

MOST_EXPERTS = 4096  # experts that one program holds
_LONGEST = 16384  # elements of a row that renormalize holds


class TritonRouter(TritonKernel):
    """The family on a GPU; scratch memory comes from torch's allocator."""

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        return family_sku(descriptor, self.backend, architecture())

    def reject(self, descriptor: Any) -> str | None:
        """Say what is missing on this machine, or which rows are too long for it."""
        operation = descriptor.operation
        if operation.startswith("renormalize") and descriptor.shape[descriptor.axis] > _LONGEST:
            return f"more than {_LONGEST} elements along the axis"
        fused = operation.startswith(("moe_router", "router_z_loss", "load_balancing_loss"))
        if fused and descriptor.shape[-1] > MOST_EXPERTS:
            return f"more than {MOST_EXPERTS} experts"
        return super().reject(descriptor)

    def compute(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        from isograd.router import triton_launch as launch
        from isograd.router import triton_losses_launch as losses

        d, a = descriptor, arguments
        match d.operation:
            case "top_k":
                launch.top_k(a["x"], a["values"], a["indices"], d.axis)
            case "renormalize":
                launch.renormalize(a["w"], a["t"], d.axis)
            case "renormalize_backward":
                launch.renormalize(a["w"], a["dw"], d.axis, a["dt"])
            case "moe_router":
                launch.moe_router(
                    a["logits"],
                    a.get("bias"),
                    a["weights"],
                    a["experts"],
                    softmax=d.scoring == "softmax",
                    renormalize=d.renormalize,
                    groups=d.groups,
                    group_k=d.group_k,
                    scale=d.scale,
                )
            case "moe_router_backward":
                launch.moe_router_backward(
                    a["dweights"],
                    a["logits"],
                    a["experts"],
                    a["dlogits"],
                    softmax=d.scoring == "softmax",
                    renormalize=d.renormalize,
                    scale=d.scale,
                )
            case "expert_counts":
                launch.expert_counts(a["experts"], a["counts"])
            case "expert_permutation":
                launch.expert_permutation(a["experts"], a["order"], a["offsets"])
            case "moe_permute":
                launch.moe_permute(a["x"], a["order"], a["y"], d.k)
            case "moe_permute_backward":
                launch.moe_combine(d.operation, a["dy"], None, a["order"], a["dx"])
            case "moe_combine":
                launch.moe_combine(d.operation, a["expert_out"], a["weights"], a["order"], a["y"])
            case "moe_combine_backward":
                launch.moe_combine_backward(*(a[operand.name] for operand in d.operands()))
            case "load_balancing_loss":
                losses.load_balancing_loss(a["probabilities"], a["experts"], a["loss"], d.batched)
            case "load_balancing_loss_backward":
                losses.load_balancing_loss_backward(a["dloss"], a["experts"], a["dprobabilities"], d.batched)
            case "router_z_loss":
                losses.router_z_loss(a["logits"], a["loss"], d.batched)
            case "router_z_loss_backward":
                losses.router_z_loss_backward(a["dloss"], a["logits"], a["dlogits"], d.batched)


for _operation in OPERATIONS:
    for _dtype in dtypes_of(_operation):
        register_kernel(_operation, "cuda", _dtype, TritonRouter())
