"""rotary and its gradient, declared."""

from typing import Any

from isograd.core.attributes import Flag, SizeOf
from isograd.core.operands import Chosen, Like
from isograd.core.operation import Operation
from isograd.errors import InvalidProblemError
from isograd.ops.rotary import bounds, reference


def _check(problem: Any) -> None:
    if 2 * problem.pairs > problem.shape[-1]:
        raise InvalidProblemError(
            f"{problem.operation}: cos has {problem.pairs} elements a row for shape {problem.shape}; accepted: up to "
            "half of the last size"
        )


def _declared(name: str, given: str, made: str, vjp: str | None) -> Operation:
    backward = vjp is None
    return Operation(
        name,
        attributes={"interleaved": Flag(), "pairs": SizeOf("cos", required=True)},
        inputs={given: Like(), "cos": Chosen(count="pairs", compute=True), "sin": Chosen(count="pairs", compute=True)},
        outputs={made: Like(over=(given,))},
        reference=reference.rotary_backward if backward else reference.rotary,
        oracle=reference.oracle_rotary_backward if backward else reference.oracle_rotary,
        bound=bounds.rotary_backward if backward else bounds.rotary,
        formula="u·(|x1·cos| + |x2·sin| + |y|) + 3η + ulp(y)/2 in 16 bits",
        vjp=vjp,
        ordered=True,
        least_size=2,
        check=_check,
    )


ROTARY_BACKWARD = _declared("rotary_backward", "dy", "dx", None)
ROTARY = _declared("rotary", "x", "y", "rotary_backward")
RotaryDescriptor, RotaryPlan = ROTARY.descriptor_type, ROTARY.plan_type
RotaryBackwardDescriptor, RotaryBackwardPlan = ROTARY_BACKWARD.descriptor_type, ROTARY_BACKWARD.plan_type
