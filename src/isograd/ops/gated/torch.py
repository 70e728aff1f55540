"""silu_mul and gelu_mul in torch's spelling, and their derivatives beyond the first."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from isograd.core.operation import Operation
from isograd.errors import InvalidProblemError
from isograd.ops.gated.operation import GELU_MUL, GELU_MUL_BACKWARD, SILU_MUL, SILU_MUL_BACKWARD
from isograd.torch import bind
from isograd.torch.activations import derivatives
from isograd.torch.tensors import require_tensor, wide
from isograd.typing import Approximate

Named = Mapping[str, Any]


def _form(settings: Any) -> str:
    return settings[0] if settings else "silu"


def _tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    gate, up = wide(saved["gate"], saved["up"])
    value, slope, _ = derivatives(gate, _form(settings))
    t = torch.zeros_like(up)
    if tangents["gate"] is not None:
        t = t + up * slope * tangents["gate"]
    if tangents["up"] is not None:
        t = t + value * tangents["up"]
    return t.to(saved["up"].dtype)


def _second(saved: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradients of the gradients."""
    dy, gate, up = wide(saved["dy"], saved["gate"], saved["up"])
    value, slope, second = derivatives(gate, _form(settings))
    by_dy, by_gate, by_up = (torch.zeros_like(dy) for _ in range(3))
    if grads["dgate"] is not None:
        (h,) = wide(grads["dgate"])
        by_dy, by_gate, by_up = h * up * slope, h * dy * up * second, h * dy * slope
    if grads["dup"] is not None:
        (h,) = wide(grads["dup"])
        by_dy, by_gate = by_dy + h * value, by_gate + h * dy * slope
    dtype = saved["up"].dtype
    return {"dy": by_dy.to(dtype), "gate": by_gate.to(dtype), "up": by_up.to(dtype)}


def _second_tangent(saved: Named, settings: Any, tangents: Named) -> tuple[Tensor, Tensor]:
    dy, gate, up = wide(saved["dy"], saved["gate"], saved["up"])
    value, slope, second = derivatives(gate, _form(settings))
    of_dgate, of_dup = torch.zeros_like(dy), torch.zeros_like(dy)
    if (t := tangents["dy"]) is not None:
        of_dgate, of_dup = t * up * slope, t * value
    if (t := tangents["gate"]) is not None:
        of_dgate, of_dup = of_dgate + t * dy * up * second, of_dup + t * dy * slope
    if (t := tangents["up"]) is not None:
        of_dgate = of_dgate + t * dy * slope
    dtype = saved["up"].dtype
    return of_dgate.to(dtype), of_dup.to(dtype)


def _bound(op: Operation, backward: Operation) -> Callable[..., Any]:
    bind.operator(backward, derivative=_second, tangent=_second_tangent)
    return bind.function(bind.operator(op, tangent=_tangent))


_silu_mul, _gelu_mul = _bound(SILU_MUL, SILU_MUL_BACKWARD), _bound(GELU_MUL, GELU_MUL_BACKWARD)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`torch.nn.functional.silu(gate) * up`, rounded once; bits and errors as `isograd.silu_mul`.

    gate, up: float16, bfloat16, float32 or float64, of one shape and dtype, any strides. Differentiable twice; both
    gradients come from one pass.

    Raises InvalidProblemError for shapes or dtypes that differ, UnsupportedError for another dtype.
    """
    result: Tensor = _silu_mul((gate, up), ())
    return result


def gelu_mul(gate: Tensor, up: Tensor, approximate: Approximate = "none") -> Tensor:
    """`torch.nn.functional.gelu(gate, approximate=approximate) * up`, rounded once; bits as `isograd.gelu_mul`.

    gate, up: as for `silu_mul`. approximate: "none" or "tanh". Differentiable twice.

    Raises InvalidProblemError for shapes or dtypes that differ and another `approximate`, UnsupportedError for another
    dtype.
    """
    result: Tensor = _gelu_mul((gate, up), (approximate,))
    return result


def _halves(name: str, input: Tensor) -> tuple[Tensor, Tensor]:  # noqa: A002
    require_tensor(name, input, "input")
    if input.dim() == 0 or input.shape[-1] % 2:
        raise InvalidProblemError(
            f"{name}: input has shape {tuple(input.shape)}; accepted: a last dimension of even size"
        )
    gate, up = input.tensor_split(2, -1)
    return gate, up


def swiglu(input: Tensor) -> Tensor:  # noqa: A002
    """`silu_mul(*input.chunk(2, -1))`: the first half of the last dimension is the gate, read in place.

    Raises InvalidProblemError for a last dimension of odd size, UnsupportedError for another dtype.
    """
    return silu_mul(*_halves("swiglu", input))


def geglu(input: Tensor, approximate: Approximate = "none") -> Tensor:  # noqa: A002
    """`gelu_mul(*input.chunk(2, -1), approximate)`: the first half of the last dimension is the gate, read in place.

    Raises InvalidProblemError for a last dimension of odd size and another `approximate`, UnsupportedError for another
    dtype.
    """
    return gelu_mul(*_halves("geglu", input), approximate)
