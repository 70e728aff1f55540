"""silu and gelu in torch's spelling, and their derivatives beyond the first."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from isograd.core.operation import Operation
from isograd.ops.activation.operation import GELU, GELU_BACKWARD, SILU, SILU_BACKWARD
from isograd.torch import bind
from isograd.torch.activations import derivatives
from isograd.torch.tensors import wide
from isograd.typing import Approximate

Named = Mapping[str, Any]


def _parts(saved: Named, settings: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dy, and the first two derivatives of the activation."""
    dy, x = wide(saved["dy"], saved["x"])
    return dy, *derivatives(x, settings[0] if settings else "silu")[1:]


def _second(saved: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradients of the gradient."""
    dy, slope, second = _parts(saved, settings)
    (h,) = wide(grads["dx"])
    dtype = saved["x"].dtype
    return {"dy": (h * slope).to(dtype), "x": (h * dy * second).to(dtype)}


def _second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    dy, slope, second = _parts(saved, settings)
    found = torch.zeros_like(dy)
    if (t := tangents["dy"]) is not None:
        found = found + t * slope
    if (t := tangents["x"]) is not None:
        found = found + t * dy * second
    return found.to(saved["x"].dtype)


def _bound(op: Operation, backward: Operation) -> Callable[..., Any]:
    bind.operator(backward, derivative=_second, tangent=_second_tangent)
    return bind.function(bind.operator(op))


_silu, _gelu = _bound(SILU, SILU_BACKWARD), _bound(GELU, GELU_BACKWARD)


def silu(input: Tensor) -> Tensor:  # noqa: A002
    """`torch.nn.functional.silu`: `input * sigmoid(input)`; bits and errors as `isograd.silu`.

    input: float16, bfloat16, float32 or float64, any strides. Differentiable twice.

    Raises UnsupportedError for another dtype.
    """
    result: Tensor = _silu((input,), ())
    return result


def gelu(input: Tensor, approximate: Approximate = "none") -> Tensor:  # noqa: A002
    """`torch.nn.functional.gelu`; bits and errors as `isograd.gelu`.

    input: as for `silu`. approximate: "none" or "tanh". Differentiable twice.

    Raises InvalidProblemError for another `approximate`, UnsupportedError for another dtype.
    """
    result: Tensor = _gelu((input,), (approximate,))
    return result
