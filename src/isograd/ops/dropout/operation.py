"""dropout, declared: it is linear, and its own gradient."""

from typing import Any

from isograd.core import call
from isograd.core.attributes import Flag, Real, Word
from isograd.core.operands import Like
from isograd.core.operation import Operation
from isograd.ops.dropout import bounds, reference


def _dropped_alike(dy: Any, inputs: Any, outputs: Any, settings: Any) -> dict[str, Any]:
    """The gradient: the same mask and factor."""
    return {"x": call.function(DROPOUT)((dy,), tuple(settings.values()))}


DROPOUT = Operation(
    "dropout",
    # batched: whether the elements are counted anew at every place in the first dimension.
    attributes={
        "p": Real(0.5, least=0.0, most=1.0),
        "seed": Word(),
        "offset": Word(counts=True),
        "batched": Flag(),
    },
    inputs={"x": Like()},
    outputs={"y": Like(over=("x",))},
    reference=reference.dropout,
    oracle=reference.oracle_dropout,
    bound=bounds.dropout,
    formula="4u·|y| + η + ulp(y)/2 in 16 bits",
    pullback=_dropped_alike,
    linear="x",
    ordered=True,
)
DropoutDescriptor, DropoutPlan = DROPOUT.descriptor_type, DROPOUT.plan_type
