"""Compile a softmax kernel for a GPU that is not there."""

from typing import Any

import torch
import triton_targets

from isograd.ops.softmax import triton
from isograd.rows.triton_configuration import Configuration


def compile_for(
    target: str, op: str, tensors: list[torch.Tensor], axis: int, config: Configuration | None = None
) -> Any:
    """The compiled kernel that `op` would launch for these tensors, which only lend shape, strides and dtype."""
    found = triton_targets.kernels_of(target, lambda: triton.launch(op, tensors, axis, config), triton)
    (kernel,) = found.values()
    return kernel
