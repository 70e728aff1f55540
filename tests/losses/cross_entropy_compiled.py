"""Compile the kernels of cross entropy for a GPU that is not there, and read back what they need."""

from typing import Any
from unittest import mock

import torch
import triton_targets

import isograd as ig
from isograd.losses import triton_cross_entropy_launch as triton_launch

KINDS = {
    "cross_entropy": ig.CrossEntropyDescriptor,
    "cross_entropy_backward": ig.CrossEntropyBackwardDescriptor,
    "cross_entropy_gradient": ig.CrossEntropyGradientDescriptor,
}


def kernel_for(target: str, operation: str, shape: tuple[int, ...], dtype: str, axis: int = 1, **options: Any) -> Any:
    """(kernel, tensors, what follows them, compiler's options, numbers) that an operation would launch.

    part: for some classes alone. state: the gradient's with a state.
    """
    part, state = options.pop("part", False), options.pop("state", False)
    descriptor = KINDS[operation](shape, dtype, axis=axis, **options).validated()
    given = {o.name: torch.empty(o.shape, dtype=getattr(torch, o.dtype)) for o in descriptor.operands()}
    if state:
        given["state"] = torch.empty((4, *descriptor.row_shape))
    found: list[Any] = []

    def launch(kernel: Any, tensors: Any, specify: Any, *key: Any, numbers: tuple[int, ...] = ()) -> None:
        specification = specify(*key)
        found.append((kernel, tensors, specification.tail, specification.options, numbers))

    arch = triton_targets.architecture(target)
    with (
        mock.patch.object(triton_launch, "launch", launch),
        mock.patch.object(triton_launch, "numbers", return_value=given["losses" if "losses" in given else "dlosses"]),
        mock.patch.object(triton_launch, "architecture", return_value=arch),
    ):
        if part:
            triton_launch.cross_entropy_backward_in_part(descriptor, 16, given)
        else:
            triton_launch.cross_entropy(descriptor, given)
    return found[-1]


def compile_for(target: str, operation: str, shape: tuple[int, ...], dtype: str, axis: int = 1, **options: Any) -> Any:
    """The compiled kernel that an operation on tensors of a shape would launch."""
    kernel, tensors, tail, compiler, numbers = kernel_for(target, operation, shape, dtype, axis, **options)
    return triton_targets.compiled(target, kernel, tensors, tail, compiler, numbers)
