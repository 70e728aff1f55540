"""layernorm and its gradient, declared, of rows and of sums with a residual."""

from isograd.core.attributes import Axis, Real
from isograd.core.operands import AlongAxis, Like, PerRow
from isograd.core.operation import Operation
from isograd.ops.layernorm import bounds, reference

LAYERNORM = Operation(
    "layernorm",
    attributes={"axis": Axis(), "eps": Real(1e-5, least=0.0, most=1e30)},
    inputs={"x": Like(), "weight": AlongAxis(optional=True), "bias": AlongAxis(optional=True)},
    outputs={"y": Like(over=("x",)), "mean": PerRow(compute=True), "rstd": PerRow(compute=True)},
    reference=reference.layernorm,
    oracle=reference.oracle_layernorm,
    bound=bounds.layernorm,
    formula="|w|·((|v| + r·δ)·(8u + n·q' + η·r² + min(1, δ²·r²/2)) + r·δ) + u·|y| + 3η·(1 + |w|) + ulp(y)/2, "
    "q' = 2^-46 (float64: 2^-90), δ = 3u·|mean| + q/2 + η",
    vjp="layernorm_backward",
)
LAYERNORM_BACKWARD = Operation(
    "layernorm_backward",
    attributes={"axis": Axis()},
    inputs={
        "dy": Like(),
        "x": Like(),
        "mean": PerRow(compute=True),
        "rstd": PerRow(compute=True),
        "weight": AlongAxis(optional=True),
    },
    outputs={
        "dx": Like(over=("dy", "x")),
        "dweight": AlongAxis(optional=True),
        "dbias": AlongAxis(optional=True),
    },
    reference=reference.layernorm_backward,
    oracle=reference.oracle_layernorm_backward,
    bound=bounds.layernorm_backward,
    formula="dx: r·(5u·|g| + 8u·Σ|g|/n + 13u·|v|·Σ|g·v|/n + (1 + |v|)·q/2 + 4η·(1 + |v|)·(3 + |w|)) + 2η + ulp(dx)/2; "
    "dweight: 4u·Σ|dy·v| + rows·q/2 + 2η·Σ(1 + |dy|) + ulp(dweight)/2; dbias: u·|dbias| + rows·q/2 + ulp(dbias)/2; "
    "v = (x - mean)·r, g = dy·w",
)
ADD_LAYERNORM = Operation(
    "add_layernorm",
    attributes=LAYERNORM.attributes,
    inputs={"x": Like(), "residual": Like(), "weight": AlongAxis(optional=True), "bias": AlongAxis(optional=True)},
    outputs={
        "y": Like(over=("x", "residual")),
        "summed": Like(over=("x", "residual")),
        "mean": PerRow(compute=True),
        "rstd": PerRow(compute=True),
    },
    reference=reference.add_layernorm,
    oracle=reference.oracle_add_layernorm,
    bound=bounds.add_layernorm,
    formula=f"summed: ulp(summed)/2; y, measured from it: {LAYERNORM.formula}",
    vjp="add_layernorm_backward",
    same={"residual": "x"},
)
ADD_LAYERNORM_BACKWARD = Operation(
    "add_layernorm_backward",
    attributes={"axis": Axis()},
    inputs={
        "dy": Like(),
        "summed": Like(),
        "mean": PerRow(compute=True),
        "rstd": PerRow(compute=True),
        "dsummed": Like(optional=True),
        "weight": AlongAxis(optional=True),
    },
    outputs={**LAYERNORM_BACKWARD.outputs, "dx": Like(over=("dy", "dsummed", "summed"))},
    reference=reference.add_layernorm_backward,
    oracle=reference.oracle_add_layernorm_backward,
    bound=bounds.add_layernorm_backward,
    formula=f"dx: ulp(dx)/2 more than in {LAYERNORM_BACKWARD.formula}",
)
LayernormDescriptor, LayernormPlan = LAYERNORM.descriptor_type, LAYERNORM.plan_type
LayernormBackwardDescriptor, LayernormBackwardPlan = LAYERNORM_BACKWARD.descriptor_type, LAYERNORM_BACKWARD.plan_type
AddLayernormDescriptor, AddLayernormPlan = ADD_LAYERNORM.descriptor_type, ADD_LAYERNORM.plan_type
AddLayernormBackwardDescriptor, AddLayernormBackwardPlan = (
    ADD_LAYERNORM_BACKWARD.descriptor_type,
    ADD_LAYERNORM_BACKWARD.plan_type,
)
