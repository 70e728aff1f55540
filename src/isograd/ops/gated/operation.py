"""silu_mul, gelu_mul and their gradients, declared, of two arrays and of one that has both."""

from collections.abc import Sequence
from typing import Any

from isograd.core.attributes import Choice
from isograd.core.operands import Like, Settings, Sized
from isograd.core.operation import Operation
from isograd.errors import InvalidProblemError
from isograd.ops.gated import bounds, reference

_FORMULA = "|up|·e + 2u·|y| + 2η + ulp(y)/2 in 16 bits, e the activation's error by rule 8"
_GRADIENTS = (
    "dgate: |dy·up|·e' + 3u·|dgate| + 3η; dup: |dy|·e + 2u·|dup| + 2η; plus ulp/2 in 16 bits; e, e' the errors of the "
    "activation and its slope by rule 8"
)
SILU_MUL = Operation(
    "silu_mul",
    attributes={},
    inputs={"gate": Like(), "up": Like()},
    outputs={"y": Like(over=("gate", "up"))},
    reference=reference.silu_mul,
    oracle=reference.oracle_silu_mul,
    bound=bounds.silu_mul,
    formula=_FORMULA,
    vjp="silu_mul_backward",
    least_rank=0,
)
SILU_MUL_BACKWARD = Operation(
    "silu_mul_backward",
    attributes={},
    inputs={"dy": Like(), "gate": Like(), "up": Like()},
    outputs={"dgate": Like(over=("dy", "gate", "up")), "dup": Like(over=("dy", "gate", "up"))},
    reference=reference.silu_mul_backward,
    oracle=reference.oracle_silu_mul_backward,
    bound=bounds.silu_mul_backward,
    formula=_GRADIENTS,
    least_rank=0,
)
GELU_MUL = Operation(
    "gelu_mul",
    attributes={"approximate": Choice("none", "tanh")},
    inputs={"gate": Like(), "up": Like()},
    outputs={"y": Like(over=("gate", "up"))},
    reference=reference.gelu_mul,
    oracle=reference.oracle_gelu_mul,
    bound=bounds.gelu_mul,
    formula=_FORMULA,
    vjp="gelu_mul_backward",
    least_rank=0,
)
GELU_MUL_BACKWARD = Operation(
    "gelu_mul_backward",
    attributes={"approximate": Choice("none", "tanh")},
    inputs={"dy": Like(), "gate": Like(), "up": Like()},
    outputs={"dgate": Like(over=("dy", "gate", "up")), "dup": Like(over=("dy", "gate", "up"))},
    reference=reference.gelu_mul_backward,
    oracle=reference.oracle_gelu_mul_backward,
    bound=bounds.gelu_mul_backward,
    formula=_GRADIENTS,
    least_rank=0,
)


def _half(shape: Sequence[Any], settings: Settings) -> tuple[Any, ...]:
    return (*shape[:-1], shape[-1] // 2)


def _even(problem: Any) -> None:
    if problem.shape[-1] % 2:
        raise InvalidProblemError(
            f"{problem.operation}: x has shape {problem.shape}; accepted: a last dimension of even size"
        )


SWIGLU = Operation(
    "swiglu",
    attributes={},
    inputs={"x": Like()},
    outputs={"y": Sized(of=_half)},
    reference=reference.swiglu,
    oracle=reference.oracle_swiglu,
    bound=bounds.swiglu,
    formula=_FORMULA,
    vjp="swiglu_backward",
    check=_even,
    ordered=True,
)
SWIGLU_BACKWARD = Operation(
    "swiglu_backward",
    attributes={},
    inputs={"dy": Sized(of=_half), "x": Like()},
    outputs={"dx": Like(over=("x",))},
    reference=reference.swiglu_backward,
    oracle=reference.oracle_swiglu_backward,
    bound=bounds.swiglu_backward,
    formula=_GRADIENTS,
    check=_even,
    ordered=True,
)
GEGLU = Operation(
    "geglu",
    attributes={"approximate": Choice("none", "tanh")},
    inputs={"x": Like()},
    outputs={"y": Sized(of=_half)},
    reference=reference.geglu,
    oracle=reference.oracle_geglu,
    bound=bounds.geglu,
    formula=_FORMULA,
    vjp="geglu_backward",
    check=_even,
    ordered=True,
)
GEGLU_BACKWARD = Operation(
    "geglu_backward",
    attributes={"approximate": Choice("none", "tanh")},
    inputs={"dy": Sized(of=_half), "x": Like()},
    outputs={"dx": Like(over=("x",))},
    reference=reference.geglu_backward,
    oracle=reference.oracle_geglu_backward,
    bound=bounds.geglu_backward,
    formula=_GRADIENTS,
    check=_even,
    ordered=True,
)
SiluMulDescriptor, SiluMulPlan = SILU_MUL.descriptor_type, SILU_MUL.plan_type
SiluMulBackwardDescriptor, SiluMulBackwardPlan = SILU_MUL_BACKWARD.descriptor_type, SILU_MUL_BACKWARD.plan_type
GeluMulDescriptor, GeluMulPlan = GELU_MUL.descriptor_type, GELU_MUL.plan_type
GeluMulBackwardDescriptor, GeluMulBackwardPlan = GELU_MUL_BACKWARD.descriptor_type, GELU_MUL_BACKWARD.plan_type
SwigluDescriptor, SwigluPlan = SWIGLU.descriptor_type, SWIGLU.plan_type
SwigluBackwardDescriptor, SwigluBackwardPlan = SWIGLU_BACKWARD.descriptor_type, SWIGLU_BACKWARD.plan_type
GegluDescriptor, GegluPlan = GEGLU.descriptor_type, GEGLU.plan_type
GegluBackwardDescriptor, GegluBackwardPlan = GEGLU_BACKWARD.descriptor_type, GEGLU_BACKWARD.plan_type
