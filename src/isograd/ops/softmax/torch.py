"""softmax, log_softmax and their gradients in torch's spelling, and the derivatives beyond the first."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from isograd.ops.softmax.operation import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD
from isograd.torch import bind
from isograd.torch.tensors import wide

Named = Mapping[str, Any]


def _second(inputs: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradients of softmax's gradient, which has softmax's own Jacobian for dy."""
    (dim,), y = settings, inputs["y"]
    found = {"dy": BACKWARD["softmax"](grads["dx"], y, dim)} if needs["dy"] else {}
    if needs["y"]:
        g, dy, y_wide = wide(grads["dx"], inputs["dy"], y)
        s = (y_wide * dy).sum(dim, keepdim=True)
        found["y"] = (g * (dy - s) - dy * (g * y_wide).sum(dim, keepdim=True)).to(y.dtype)
    return found


def _second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    (dim,), y = settings, saved["y"]
    t = tangents["dy"]
    t = torch.zeros_like(y) if t is None else BACKWARD["softmax"](t, y, dim)
    if tangents["y"] is None:
        return t
    dy, y_wide, t_y = wide(saved["dy"], y, tangents["y"])
    s = (y_wide * dy).sum(dim, keepdim=True)
    result: Tensor = t + (t_y * (dy - s) - y_wide * (t_y * dy).sum(dim, keepdim=True)).to(y.dtype)
    return result


def _log_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    t, y = wide(tangents["x"], saved["y"])
    return (t - (y.exp() * t).sum(settings[0], keepdim=True)).to(saved["y"].dtype)


def _log_second(inputs: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradients of log_softmax's gradient."""
    (dim,), y = settings, inputs["y"]
    g, dy, y_wide = wide(grads["dx"], inputs["dy"], y)
    weighted = g * y_wide.exp()
    found = {"dy": (g - weighted.sum(dim, keepdim=True)).to(y.dtype)} if needs["dy"] else {}
    if needs["y"]:
        found["y"] = (-weighted * dy.sum(dim, keepdim=True)).to(y.dtype)
    return found


def _log_second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    (dim,), y = settings, saved["y"]
    t = tangents["dy"]
    t = torch.zeros_like(y) if t is None else BACKWARD["log_softmax"](t, y, dim)
    if tangents["y"] is None:
        return t
    dy, y_wide, t_y = wide(saved["dy"], y, tangents["y"])
    result: Tensor = t + (-y_wide.exp() * t_y * dy.sum(dim, keepdim=True)).to(y.dtype)
    return result


_backward = bind.operator(SOFTMAX_BACKWARD, derivative=_second, tangent=_second_tangent)
_log_backward = bind.operator(LOG_SOFTMAX_BACKWARD, derivative=_log_second, tangent=_log_second_tangent)
_forward = bind.operator(SOFTMAX, autocast=("CUDA",))
_log_forward = bind.operator(LOG_SOFTMAX, tangent=_log_tangent, autocast=("CUDA",))
FORWARD: dict[str, Callable[..., Tensor]] = {"softmax": _forward.call, "log_softmax": _log_forward.call}
BACKWARD: dict[str, Callable[..., Tensor]] = {"softmax": _backward.call, "log_softmax": _log_backward.call}


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
    result: Tensor = _forward.function((input,), (dim,), out=out, dtype=dtype)
    return result


def log_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:  # noqa: A002
    """`torch.log_softmax`: `y_j = x_j - m - log Σ_i exp(x_i - m)` along `dim`, `m = max_i x_i`.

    Arguments, dtypes and errors as for `softmax`.
    """
    result: Tensor = _log_forward.function((input,), (dim,), out=out, dtype=dtype)
    return result


def softmax_backward(dy: Tensor, y: Tensor, dim: int, *, out: Tensor | None = None) -> Tensor:
    """The gradient of softmax: `dx_j = y_j * (dy_j - Σ_i y_i * dy_i)` along `dim`.

    dy: gradient of the result, y: the result; one shape, dtype and device, any strides (an expanded dy included). out:
    a tensor for dx; dy or y themselves are accepted. Differentiable with respect to both.

    Raises DeviceMismatchError for tensors on different devices, otherwise as `softmax`.
    """
    result: Tensor = _backward.function((dy, y), (dim,), out=out)
    return result


def log_softmax_backward(dy: Tensor, y: Tensor, dim: int, *, out: Tensor | None = None) -> Tensor:
    """The gradient of log_softmax: `dx_j = dy_j - exp(y_j) * Σ_i dy_i` along `dim`, y being `log_softmax(x)`.

    Arguments and errors as for `softmax_backward`.
    """
    result: Tensor = _log_backward.function((dy, y), (dim,), out=out)
    return result
