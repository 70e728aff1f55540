"""sparsemax and its gradient, declared."""

from isograd.core.attributes import Axis
from isograd.core.operands import Like
from isograd.core.operation import Operation
from isograd.ops.sparsemax import bounds, reference

SPARSEMAX = Operation(
    "sparsemax",
    attributes={"axis": Axis()},
    inputs={"x": Like()},
    outputs={"y": Like(over=("x",))},
    reference=reference.sparsemax,
    oracle=reference.oracle_sparsemax,
    bound=bounds.sparsemax,
    formula="ulp(y) + 2^-42 (float64: 2^-62)",
    vjp="sparsemax_backward",
    symmetric=True,
    padding=float("-inf"),
)
SPARSEMAX_BACKWARD = Operation(
    "sparsemax_backward",
    attributes={"axis": Axis()},
    inputs={"dy": Like(), "y": Like()},
    outputs={"dx": Like(over=("dy", "y"))},
    reference=reference.sparsemax_backward,
    oracle=reference.oracle_sparsemax_backward,
    bound=bounds.sparsemax_backward,
    formula="4u·(|dy| + Σ|dy|/k) + n·q/(2k) + ulp(dx)/2 on the support, else 0",
    linear="dy",
    padding=0.0,
)
SparsemaxDescriptor, SparsemaxPlan = SPARSEMAX.descriptor_type, SPARSEMAX.plan_type
SparsemaxBackwardDescriptor, SparsemaxBackwardPlan = SPARSEMAX_BACKWARD.descriptor_type, SPARSEMAX_BACKWARD.plan_type
