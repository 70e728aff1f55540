"""silu_mul, gelu_mul and their gradients, declared."""

from isograd.core.attributes import Choice
from isograd.core.operands import Like
from isograd.core.operation import Operation
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
SiluMulDescriptor, SiluMulPlan = SILU_MUL.descriptor_type, SILU_MUL.plan_type
SiluMulBackwardDescriptor, SiluMulBackwardPlan = SILU_MUL_BACKWARD.descriptor_type, SILU_MUL_BACKWARD.plan_type
GeluMulDescriptor, GeluMulPlan = GELU_MUL.descriptor_type, GELU_MUL.plan_type
GeluMulBackwardDescriptor, GeluMulBackwardPlan = GELU_MUL_BACKWARD.descriptor_type, GELU_MUL_BACKWARD.plan_type
