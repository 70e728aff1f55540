"""silu, gelu and their gradients, declared."""

from isograd.core.attributes import Choice
from isograd.core.operands import Like
from isograd.core.operation import Operation
from isograd.ops.activation import bounds, reference

_FORMULA = "e + ulp(y)/2 in 16 bits, e the activation's error by rule 8"
_GRADIENT = "|dy|·e' + 2u·|dx| + 2η + ulp(dx)/2 in 16 bits, e' the error of the slope by rule 8"
SILU = Operation(
    "silu",
    attributes={},
    inputs={"x": Like()},
    outputs={"y": Like(over=("x",))},
    reference=reference.silu,
    oracle=reference.oracle_silu,
    bound=bounds.silu,
    formula=_FORMULA,
    vjp="silu_backward",
    symmetric=True,
    least_rank=0,
)
SILU_BACKWARD = Operation(
    "silu_backward",
    attributes={},
    inputs={"dy": Like(), "x": Like()},
    outputs={"dx": Like(over=("dy", "x"))},
    reference=reference.silu_backward,
    oracle=reference.oracle_silu_backward,
    bound=bounds.silu_backward,
    formula=_GRADIENT,
    least_rank=0,
)
GELU = Operation(
    "gelu",
    attributes={"approximate": Choice("none", "tanh")},
    inputs={"x": Like()},
    outputs={"y": Like(over=("x",))},
    reference=reference.gelu,
    oracle=reference.oracle_gelu,
    bound=bounds.gelu,
    formula=_FORMULA,
    vjp="gelu_backward",
    symmetric=True,
    least_rank=0,
)
GELU_BACKWARD = Operation(
    "gelu_backward",
    attributes={"approximate": Choice("none", "tanh")},
    inputs={"dy": Like(), "x": Like()},
    outputs={"dx": Like(over=("dy", "x"))},
    reference=reference.gelu_backward,
    oracle=reference.oracle_gelu_backward,
    bound=bounds.gelu_backward,
    formula=_GRADIENT,
    least_rank=0,
)
SiluDescriptor, SiluPlan = SILU.descriptor_type, SILU.plan_type
SiluBackwardDescriptor, SiluBackwardPlan = SILU_BACKWARD.descriptor_type, SILU_BACKWARD.plan_type
GeluDescriptor, GeluPlan = GELU.descriptor_type, GELU.plan_type
GeluBackwardDescriptor, GeluBackwardPlan = GELU_BACKWARD.descriptor_type, GELU_BACKWARD.plan_type
