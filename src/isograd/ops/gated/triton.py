# ruff: noqa: N803
"""silu_mul, gelu_mul and their gradients in Triton, one element at a time in any layout."""

from typing import Any

import torch
import triton
import triton.language as tl

from isograd.core.kernel import launcher
from isograd.devices.triton_launcher import architecture
from isograd.elementwise import triton_activations as activations
from isograd.rows import triton_elements as elements


@triton.jit
def gated(
    gate_ptr, up_ptr, y_ptr, n, shape, gate_strides, up_strides, y_strides, FORM: tl.constexpr,
    NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The result; y may be any of its inputs."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    gate = elements.load(gate_ptr, index, shape, gate_strides, mask)
    up = elements.load(up_ptr, index, shape, up_strides, mask)
    elements.store(y_ptr, index, shape, y_strides, mask, activations.value(gate, FORM) * up, NATIVE)


@triton.jit
def gated_backward(
    dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, shape, dy_strides, gate_strides, up_strides, dgate_strides,
    dup_strides, FORM: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both gradients, each of which may be any of the inputs."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = index < n
    dy = elements.load(dy_ptr, index, shape, dy_strides, mask)
    gate = elements.load(gate_ptr, index, shape, gate_strides, mask)
    up = elements.load(up_ptr, index, shape, up_strides, mask)
    dgate = (dy * up) * activations.slope(gate, FORM)
    dup = dy * activations.value(gate, FORM)
    elements.store(dgate_ptr, index, shape, dgate_strides, mask, dgate, NATIVE)
    elements.store(dup_ptr, index, shape, dup_strides, mask, dup, NATIVE)


# --- launches --------------------------------------------------------------------------------------------------------
def _launch(kernel: Any, form: str, *tensors: torch.Tensor) -> None:
    out = tensors[-1]
    if out.numel():
        strides, arch = tuple([t.stride() for t in tensors]), architecture(out)
        flags = form, arch >= 90
        elements.prepared(kernel, out.numel(), (), tuple(out.shape), strides, flags, (out.dtype, arch))(*tensors)


@launcher("silu_mul")
def silu_mul(problem: Any, gate: torch.Tensor, up: torch.Tensor, y: torch.Tensor) -> None:
    """Compute y."""
    _launch(gated, "silu", gate, up, y)


@launcher("silu_mul_backward")
def silu_mul_backward(
    problem: Any, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dgate: torch.Tensor, dup: torch.Tensor
) -> None:
    """Compute dgate and dup."""
    _launch(gated_backward, "silu", dy, gate, up, dgate, dup)


@launcher("gelu_mul")
def gelu_mul(problem: Any, gate: torch.Tensor, up: torch.Tensor, y: torch.Tensor) -> None:
    """Compute y."""
    _launch(gated, problem.approximate, gate, up, y)


@launcher("gelu_mul_backward")
def gelu_mul_backward(
    problem: Any, dy: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, dgate: torch.Tensor, dup: torch.Tensor
) -> None:
    """Compute dgate and dup."""
    _launch(gated_backward, problem.approximate, dy, gate, up, dgate, dup)


def _halves(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


@launcher("swiglu")
def swiglu(problem: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Compute y."""
    _launch(gated, "silu", *_halves(x), y)


@launcher("swiglu_backward")
def swiglu_backward(problem: Any, dy: torch.Tensor, x: torch.Tensor, dx: torch.Tensor) -> None:
    """Compute both halves of dx, which may be x."""
    _launch(gated_backward, "silu", dy, *_halves(x), *_halves(dx))


@launcher("geglu")
def geglu(problem: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Compute y."""
    _launch(gated, problem.approximate, *_halves(x), y)


@launcher("geglu_backward")
def geglu_backward(problem: Any, dy: torch.Tensor, x: torch.Tensor, dx: torch.Tensor) -> None:
    """Compute both halves of dx, which may be x."""
    _launch(gated_backward, problem.approximate, dy, *_halves(x), *_halves(dx))
