"""What FSDP2 (`fully_shard`) needs: its reduce-scatter of float gradients becomes an exchange of them."""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from isograd.torch.distributed.buckets import in_bytes


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was applied to."""
    # A model with such modules has loaded this.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def reducing(modules: Sequence[Any]) -> list[Any]:
    """Of the modules that reduce their parameters together the first, where any of these is trained."""
    own = {id(module) for module in modules}

    def trained(module: nn.Module) -> bool:
        return any(p.requires_grad for p in module.parameters(recurse=False)) or any(
            trained(child) for child in module.children() if id(child) not in own
        )

    found: dict[int, Any] = {}
    for module in modules:
        if trained(module):
            found.setdefault(id(module._get_fsdp_state()), module)
    return list(found.values())


class Exchange:
    """FSDP2's reduce-scatter for a group of parameters: a rank gets every rank's gradients of its part, [ranks, n].

    They go to `exchanged`. FSDP2's own output stays as it was allocated: the hook of each parameter, which FSDP2
    calls next, drops what it makes of that.
    """

    def __init__(self, exchanged: Callable[[Tensor], None]) -> None:
        self._exchanged = exchanged

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Send every rank its part."""
        gradients = torch.empty_like(input_tensor)
        dist.all_to_all_single(in_bytes(gradients), in_bytes(input_tensor), group=group)
        self._exchanged(gradients.view(dist.get_world_size(group), -1))


def exchange_by(module: Any, exchanged: Callable[[Tensor], None]) -> None:
    """Let a module that shares its gradients with other ranks exchange them, and divide by nothing."""
    module.set_custom_reduce_scatter(Exchange(exchanged))
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(True, recurse=False)
    else:
        group = module._get_fsdp_state()._fsdp_param_group
        group.post_backward = partial(_with_unused, group)


def reduce_always(module: Any) -> None:
    """Let a module reduce every unit: what accumulates over units are integers, so that gradients wait for nothing."""
    module.__dict__.pop("set_requires_gradient_sync", None)
    module.set_requires_gradient_sync(True, recurse=False)
    module.set_requires_gradient_sync = _stays


def restore(module: Any) -> None:
    """Let a module reduce as FSDP2 does by default."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

    del module.set_requires_gradient_sync
    module.set_custom_reduce_scatter(DefaultReduceScatter())
    module.set_gradient_divide_factor(None)
    module.set_force_sum_reduction_for_comms(False)
    if hasattr(module, "set_reduce_scatter_unused_params"):
        module.set_reduce_scatter_unused_params(False, recurse=False)
    elif (group := module._get_fsdp_state()._fsdp_param_group) is not None:  # None without parameters of its own
        vars(group).pop("post_backward", None)  # one rank has not changed it


def _with_unused(group: Any, *arguments: Any) -> None:
    """FSDP2's `post_backward` before torch had `set_reduce_scatter_unused_params`: it sends what has gradients alone.

    Ranks that used other parameters would then send other sizes, so parameters without a gradient get zeros.
    """
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None and whole.requires_grad and whole.grad is None:
            whole.grad = torch.zeros_like(whole)
    type(group).post_backward(group, *arguments)


def _stays(requires_gradient_sync: bool, *, recurse: bool = True) -> None:
    """Stands for FSDP2's method, which would add up float gradients of several units."""


def padded_size(parameter: Any, ranks: int) -> int:
    """Elements that a rank's part of a parameter has in what is reduced, padding included."""
    shape, dim = parameter.shape, parameter.placements[0].dim
    if dim:
        return int(parameter.numel()) // ranks
    rows = -(-shape[0] // ranks)
    return int(rows * (parameter.numel() // max(shape[0], 1)))
