"""silu_mul and gelu_mul in torch's spelling, and their derivatives beyond the first."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from isograd.core.operation import Operation
from isograd.errors import InvalidProblemError
from isograd.ops.gated.operation import (
    GEGLU,
    GEGLU_BACKWARD,
    GELU_MUL,
    GELU_MUL_BACKWARD,
    SILU_MUL,
    SILU_MUL_BACKWARD,
    SWIGLU,
    SWIGLU_BACKWARD,
)
from isograd.torch import bind, define, sharding
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


def _split(named: Named) -> dict[str, Any]:
    """The halves of packed tensors by the names that they have alone."""
    halves = {key: (None, None) if t is None else t.chunk(2, -1) for key, t in named.items() if key in ("x", "dx")}
    found = {key: t for key, t in named.items() if key not in halves}
    for key, names in (("x", ("gate", "up")), ("dx", ("dgate", "dup"))):
        found |= zip(names, halves.get(key, ()), strict=False)
    return found


def _packed_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    return _tangent(_split(saved), settings, _split(tangents))


def _packed_second(saved: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    found = _second(_split(saved), settings, needs, _split(grads))
    return {"dy": found["dy"], "x": torch.cat([found["gate"], found["up"]], -1)}


def _packed_second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    return torch.cat(_second_tangent(_split(saved), settings, _split(tangents)), -1)


def _batch(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    """A batch is a dimension like the others but for the last one."""
    pairs = zip(args, (*in_dims, *[None] * len(args)), strict=False)
    return op(*[define.batched(t, d, size) if isinstance(t, Tensor) else t for t, d in pairs]), 0


def _cuts(*args: Any) -> Iterator[tuple[list[int | None], list[int | None]]]:
    tensors = [t for t in args if isinstance(t, Tensor)]
    for d in range(tensors[-1].dim() - 1):
        yield [d], [d] * len(tensors)


def _bound_packed(op: Operation, backward: Operation) -> Callable[..., Any]:
    for packed in (backward, op):
        sharding.add(packed.name, _cuts)
    bind.operator(backward, derivative=_packed_second, tangent=_packed_second_tangent, batch=_batch)
    return bind.function(bind.operator(op, tangent=_packed_tangent, batch=_batch))


_silu_mul, _gelu_mul = _bound(SILU_MUL, SILU_MUL_BACKWARD), _bound(GELU_MUL, GELU_MUL_BACKWARD)
_swiglu, _geglu = _bound_packed(SWIGLU, SWIGLU_BACKWARD), _bound_packed(GEGLU, GEGLU_BACKWARD)


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


def _require_even(name: str, input: Tensor) -> None:  # noqa: A002
    require_tensor(name, input, "input")
    if input.dim() == 0 or input.shape[-1] % 2:
        raise InvalidProblemError(
            f"{name}: input has shape {tuple(input.shape)}; accepted: a last dimension of even size"
        )


def swiglu(input: Tensor) -> Tensor:  # noqa: A002
    """`silu_mul(*input.chunk(2, -1))`: the first half of the last dimension is the gate, read in place.

    The gradient is one tensor that one kernel writes. Differentiable twice.

    Raises InvalidProblemError for a last dimension of odd size, UnsupportedError for another dtype.
    """
    _require_even("swiglu", input)
    result: Tensor = _swiglu((input,), ())
    return result


def geglu(input: Tensor, approximate: Approximate = "none") -> Tensor:  # noqa: A002
    """`gelu_mul(*input.chunk(2, -1), approximate)`: the first half of the last dimension is the gate, read in place.

    The gradient is one tensor that one kernel writes. Differentiable twice.

    Raises InvalidProblemError for a last dimension of odd size and another `approximate`, UnsupportedError for another
    dtype.
    """
    _require_even("geglu", input)
    result: Tensor = _geglu((input,), (approximate,))
    return result
