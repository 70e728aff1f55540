"""rmsnorm and its gradient, declared, of rows and of sums with a residual."""

from isograd.core.attributes import Axis, Real
from isograd.core.operands import AlongAxis, Like, PerRow
from isograd.core.operation import Operation
from isograd.ops.rmsnorm import bounds, reference

RMSNORM = Operation(
    "rmsnorm",
    attributes={"axis": Axis(), "eps": Real(1e-6, least=0.0, most=1e30)},
    inputs={"x": Like(), "weight": AlongAxis(optional=True)},
    outputs={"y": Like(over=("x",)), "rstd": PerRow(compute=True)},
    reference=reference.rmsnorm,
    oracle=reference.oracle_rmsnorm,
    bound=bounds.rmsnorm,
    formula="|y|·(7u + n·q' + η/(m + eps)) + 3η·(1 + |w|) + ulp(y)/2, q' = 2^-46 (float64: 2^-90)",
    vjp="rmsnorm_backward",
)
RMSNORM_BACKWARD = Operation(
    "rmsnorm_backward",
    attributes={"axis": Axis()},
    inputs={"dy": Like(), "x": Like(), "rstd": PerRow(compute=True), "weight": AlongAxis(optional=True)},
    outputs={"dx": Like(over=("dy", "x")), "dweight": AlongAxis(optional=True)},
    reference=reference.rmsnorm_backward,
    oracle=reference.oracle_rmsnorm_backward,
    bound=bounds.rmsnorm_backward,
    formula="dx: r·(4u·|g| + |v|·(10u·Σ|g·v|/n + q/2) + 4η·(1 + |v|)·(2 + |w|)) + 2η + ulp(dx)/2; "
    "dweight: 3u·Σ|dy·v| + rows·q/2 + 2η·Σ(1 + |dy|) + ulp(dweight)/2; v = x·r, g = dy·w",
)
ADD_RMSNORM = Operation(
    "add_rmsnorm",
    attributes=RMSNORM.attributes,
    inputs={"x": Like(), "residual": Like(), "weight": AlongAxis(optional=True)},
    outputs={
        "y": Like(over=("x", "residual")),
        "summed": Like(over=("x", "residual")),
        "rstd": PerRow(compute=True),
    },
    reference=reference.add_rmsnorm,
    oracle=reference.oracle_add_rmsnorm,
    bound=bounds.add_rmsnorm,
    formula=f"summed: ulp(summed)/2; y, measured from it: {RMSNORM.formula}",
    vjp="add_rmsnorm_backward",
    same={"residual": "x"},
)
ADD_RMSNORM_BACKWARD = Operation(
    "add_rmsnorm_backward",
    attributes={"axis": Axis()},
    inputs={
        "dy": Like(),
        "summed": Like(),
        "rstd": PerRow(compute=True),
        "dsummed": Like(optional=True),
        "weight": AlongAxis(optional=True),
    },
    outputs={**RMSNORM_BACKWARD.outputs, "dx": Like(over=("dy", "dsummed", "summed"))},
    reference=reference.add_rmsnorm_backward,
    oracle=reference.oracle_add_rmsnorm_backward,
    bound=bounds.add_rmsnorm_backward,
    formula=f"dx: ulp(dx)/2 more than in {RMSNORM_BACKWARD.formula}",
)
RmsnormDescriptor, RmsnormPlan = RMSNORM.descriptor_type, RMSNORM.plan_type
RmsnormBackwardDescriptor, RmsnormBackwardPlan = RMSNORM_BACKWARD.descriptor_type, RMSNORM_BACKWARD.plan_type
AddRmsnormDescriptor, AddRmsnormPlan = ADD_RMSNORM.descriptor_type, ADD_RMSNORM.plan_type
AddRmsnormBackwardDescriptor, AddRmsnormBackwardPlan = (
    ADD_RMSNORM_BACKWARD.descriptor_type,
    ADD_RMSNORM_BACKWARD.plan_type,
)
