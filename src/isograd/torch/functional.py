"""softmax, log_softmax and their backwards in torch's spelling."""

from typing import Any

import torch
from torch import Tensor

from isograd import encoder, registry
from isograd.errors import IsogradError, UnsupportedError
from isograd.faults import named
from isograd.torch import ops, tensors


def _checked_dim(operation: str, dim: Any, tensor: Tensor, name: str) -> int:
    return tensors.normalized_dim(operation, tensors.integer(operation, name, dim), tensor.shape, name)


def _refuse_gradient(operation: str, where: str, *given: Tensor) -> None:
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        raise UnsupportedError(f"{operation}: gradients are not recorded {where}; use torch.no_grad() or detach()")


def forward(
    kind: str, x: Any, dim: Any, dtype: torch.dtype | None, out: Tensor | None, names: tuple[str, str]
) -> Tensor:
    """Either forward operation on a tensor; `names` is what the caller knows the tensor and the dimension as."""
    tensors.require_dense(kind, x, names[0], dtype)
    dim = _checked_dim(kind, dim, x, names[1])
    if torch.compiler.is_compiling():
        y = ops.FORWARD[kind](x, dim, dtype)
        return y if out is None else out.copy_(y)
    recording = encoder.current() if encoder.recordings else None
    if out is None and recording is None:
        return ops.FORWARD[kind](x, dim, dtype)
    if recording is None:
        tensors.require_tensor(kind, out, "out")
        _refuse_gradient(kind, "where out is given", x)
        return _forward_into(kind, x if dtype is None else x.to(dtype), dim, out, names[0])
    with recording.unguarded():
        if dtype not in (None, x.dtype):
            raise UnsupportedError(f"{kind}: dtype is {dtype} for {x.dtype}; a recording cannot contain a conversion")
        _refuse_gradient(kind, "by an encoder", x)
        return _forward_into(kind, x, dim, torch.empty_like(x) if out is None else out, names[0])


def _forward_into(kind: str, x: Tensor, dim: int, out: Any, name: str) -> Tensor:
    x = _at_least_1d(x)
    plan = ops.forward_plan(kind, x.shape, x.dtype, dim, x.device.type, registry.generation())
    try:
        plan.run(x=x, y=_at_least_1d(out))
    except IsogradError as error:
        raise named(kind, x=name, y="out").renamed(error) from None
    result: Tensor = out
    return result


def _at_least_1d(tensor: Tensor) -> Tensor:
    return tensor if tensor.dim() else tensor.view(1)


def backward(kind: str, dy: Any, y: Any, dim: Any, out: Tensor | None, name: str) -> Tensor:
    """The gradient of either; `name` is what the caller knows the dimension as."""
    operation = f"{kind}_backward"
    tensors.require_dense(operation, dy, "dy")
    tensors.require_dense(operation, y, "y")
    dim = _checked_dim(operation, dim, y, name)
    if torch.compiler.is_compiling():
        dx = ops.BACKWARD[kind](dy, y, dim)
        return dx if out is None else out.copy_(dx)
    tensors.require_same(operation, dy, y)
    recording = encoder.current() if encoder.recordings else None
    if out is None and recording is None:
        return ops.BACKWARD[kind](dy, y, dim)
    if recording is None:
        tensors.require_tensor(operation, out, "out")
        _refuse_gradient(operation, "where out is given", dy, y)
        return _backward_into(kind, dy, y, dim, out)
    with recording.unguarded():
        _refuse_gradient(operation, "by an encoder", dy, y)
        return _backward_into(kind, dy, y, dim, torch.empty_like(y) if out is None else out)


def _backward_into(kind: str, dy: Tensor, y: Tensor, dim: int, out: Any) -> Tensor:
    y = _at_least_1d(y)
    plan = ops.backward_plan(kind, y.shape, y.dtype, dim, y.device.type, registry.generation())
    try:
        plan.run(dy=_at_least_1d(dy), y=y, dx=_at_least_1d(out))
    except IsogradError as error:
        raise named(f"{kind}_backward", dx="out").renamed(error) from None
    result: Tensor = out
    return result


def softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:  # noqa: A002
    """`torch.softmax`: `y_j = exp(x_j - m) / Σ_i exp(x_i - m)` along `dim`, `m = max_i x_i`.

    input: a dense tensor on the CPU or a GPU, any strides, rank 0 to 8; float16, bfloat16, float32 or float64, or
    anything that converts to one of them with `dtype`. dtype: what the input is converted to first. out: a tensor for
    the result (no gradient then); input itself is accepted.

    Differentiable twice, in reverse and in forward mode; saves its result alone. Bits and bounds as for
    `isograd.softmax`; second derivatives are sums of torch's, whose bits may differ between machines. Under CUDA
    autocast narrow inputs give float32, as with torch's own.

    Raises UnsupportedError for another dtype (float8, complex, integers without `dtype`), a sparse, nested or
    quantized tensor or a device without a kernel, InvalidProblemError for a `dim` out of range or None, and for an
    `out` that does not fit.
    """
    return forward("softmax", input, dim, dtype, out, ("input", "dim"))


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:  # noqa: A002
    """`torch.log_softmax`: `y_j = x_j - m - log Σ_i exp(x_i - m)` along `dim`, `m = max_i x_i`.

    Arguments, dtypes and errors as for `softmax`.
    """
    return forward("log_softmax", input, dim, dtype, out, ("input", "dim"))


def softmax_backward(dy: Tensor, y: Tensor, dim: int, *, out: Tensor | None = None) -> Tensor:
    """The gradient of softmax: `dx_j = y_j * (dy_j - Σ_i y_i * dy_i)` along `dim`.

    dy: gradient of the result, y: the result; one shape, dtype and device, any strides (an expanded dy included). out:
    a tensor for dx; dy or y themselves are accepted. Differentiable with respect to both.

    Raises DeviceMismatchError for tensors on different devices, otherwise as `softmax`.
    """
    return backward("softmax", dy, y, dim, out, "dim")


def log_softmax_backward(dy: Tensor, y: Tensor, dim: int, *, out: Tensor | None = None) -> Tensor:
    """The gradient of log_softmax: `dx_j = dy_j - exp(y_j) * Σ_i dy_i` along `dim`, y being `log_softmax(x)`.

    Arguments and errors as for `softmax_backward`.
    """
    return backward("log_softmax", dy, y, dim, out, "dim")
