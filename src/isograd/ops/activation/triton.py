# ruff: noqa: N803
"""silu, gelu and their gradients in Triton, one element at a time in any layout."""

from typing import Any

import torch
import triton
import triton.language as tl

from isograd.core.kernel import launcher
from isograd.devices.triton_launcher import architecture
from isograd.elementwise import triton_activations as activations
from isograd.rows import triton_elements as elements


@triton.jit
def activation(x_ptr, y_ptr, n, shape, x_strides, y_strides, FORM: tl.constexpr, BLOCK: tl.constexpr):
    """The result; y may be x."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    x = elements.load(x_ptr, index, shape, x_strides, mask)
    elements.store(y_ptr, index, shape, y_strides, mask, activations.value(x, FORM))


@triton.jit
def activation_backward(
    dy_ptr, x_ptr, dx_ptr, n, shape, dy_strides, x_strides, dx_strides, FORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient, which may be any of the inputs."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    dy = elements.load(dy_ptr, index, shape, dy_strides, mask)
    x = elements.load(x_ptr, index, shape, x_strides, mask)
    elements.store(dx_ptr, index, shape, dx_strides, mask, dy * activations.slope(x, FORM))


# --- launches --------------------------------------------------------------------------------------------------------
def _launch(kernel: Any, form: str, *tensors: torch.Tensor) -> None:
    out = tensors[-1]
    if out.numel():
        strides, like = tuple([t.stride() for t in tensors]), (out.dtype, architecture(out))
        elements.prepared(kernel, out.numel(), (), tuple(out.shape), strides, (form,), like)(*tensors)


@launcher("silu")
def silu(problem: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Compute y."""
    _launch(activation, "silu", x, y)


@launcher("silu_backward")
def silu_backward(problem: Any, dy: torch.Tensor, x: torch.Tensor, dx: torch.Tensor) -> None:
    """Compute dx."""
    _launch(activation_backward, "silu", dy, x, dx)


@launcher("gelu")
def gelu(problem: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Compute y."""
    _launch(activation, problem.approximate, x, y)


@launcher("gelu_backward")
def gelu_backward(problem: Any, dy: torch.Tensor, x: torch.Tensor, dx: torch.Tensor) -> None:
    """Compute dx."""
    _launch(activation_backward, problem.approximate, dy, x, dx)
