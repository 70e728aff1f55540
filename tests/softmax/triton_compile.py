"""Compile a softmax kernel for a GPU that is not there."""

from typing import Any

import torch
import triton_targets

from isograd.softmax import triton_kernels
from isograd.softmax.triton_launch import Configuration, specify


def compile_for(
    target: str, op: str, tensors: list[torch.Tensor], axis: int, config: Configuration | None = None
) -> Any:
    """The compiled kernel that `op` would launch for these tensors, which only lend shape, strides and dtype."""
    arch = triton_targets.architecture(target)
    kernel, tail, _, options, _ = specify(triton_kernels.KERNELS, op, tensors, axis, config, arch)
    return triton_targets.compiled(target, kernel, tensors, tail, options)
