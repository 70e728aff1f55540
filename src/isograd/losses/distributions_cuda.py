"""Distillation on NVIDIA and AMD GPUs, compiled by Triton.

torch and triton are imported when a kernel runs.
"""

from collections.abc import Mapping
from typing import Any

from isograd.cuda import TritonKernel, architecture
from isograd.losses import divergence_bounds
from isograd.losses.promises import family_sku
from isograd.plan import DTYPES, KernelSku
from isograd.registry import register_kernel


class TritonDivergence(TritonKernel):
    """Distillation and its gradient on a GPU; needs no workspace."""

    def sku(self, descriptor: Any) -> KernelSku:
        """The kernel's identity."""
        bound = divergence_bounds.error_bound(descriptor.operation, descriptor.dtype)
        return family_sku(descriptor, "losses", bound, self.backend, architecture())

    def compute(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any) -> None:
        """Launch on the current stream of the tensors' device."""
        from isograd import faults
        from isograd.losses import triton_distributions_launch

        triton_distributions_launch.distillation(descriptor, arguments)
        if descriptor.classes is not None:
            faults.after_launch(arguments["student"].device)


for _dtype in DTYPES:
    for _operation in ("distillation_loss", "distillation_loss_backward"):
        register_kernel(_operation, "cuda", _dtype, TritonDivergence())
