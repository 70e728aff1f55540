"""What FSDP2 (`fully_shard`) needs: its reduce-scatter of float gradients becomes one of integers."""

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Reduced = Callable[[Tensor], None]


def fsdp_modules(model: nn.Module) -> list[Any]:
    """The modules that `fully_shard` was applied to."""
    # A model with such modules has loaded this.
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def groups_of(modules: Sequence[Any]) -> Iterator[tuple[Any, list[nn.Parameter]]]:
    """Modules that reduce their parameters together, the first of each group, and those parameters."""
    owners: dict[int, Any] = {}
    parameters: dict[int, list[nn.Parameter]] = {}
    own = {id(module) for module in modules}

    def collect(module: nn.Module, state: int) -> None:
        parameters[state] += module.parameters(recurse=False)
        for child in module.children():
            if id(child) not in own:
                collect(child, state)

    for module in modules:
        state = id(module._get_fsdp_state())
        owners.setdefault(state, module)
        parameters.setdefault(state, [])
        collect(module, state)
    for state, module in owners.items():
        yield module, parameters[state]


class IntegerReduceScatter:
    """FSDP2's reduce-scatter for a group of parameters: rounds the gradients of a unit and adds integers.

    The sums go to `reduced`. FSDP2's own output stays as it was allocated: the hook of each parameter, which FSDP2
    calls next, drops what it makes of that.
    """

    def __init__(self, quantize: Callable[[Tensor], Tensor], reduced: Reduced) -> None:
        self._quantize, self._reduced = quantize, reduced

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False) -> Any:
        """Add the integers over the group; each rank keeps its part."""
        units = self._quantize(input_tensor)
        part = torch.empty(output_tensor.shape, dtype=torch.int64, device=units.device)
        # The name until torch 2.12, of which later versions warn.
        scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        scatter(part, units, op=dist.ReduceOp.SUM, group=group)
        self._reduced(part)


def reduce_by(module: Any, quantize: Callable[[Tensor], Tensor], reduced: Reduced) -> None:
    """Let a module that shares its gradients with other ranks reduce integers, and divide by nothing."""
    module.set_custom_reduce_scatter(IntegerReduceScatter(quantize, reduced))
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
