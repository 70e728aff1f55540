"""softmax, log_softmax and their gradients, declared."""

from isograd.core.attributes import Axis
from isograd.core.operands import Like
from isograd.core.operation import Operation
from isograd.ops.softmax import bounds, reference

SOFTMAX = Operation(
    "softmax",
    attributes={"axis": Axis()},
    inputs={"x": Like()},
    outputs={"y": Like(over=("x",))},
    reference=reference.softmax,
    oracle=reference.oracle_softmax,
    bound=bounds.softmax,
    formula="2 ulp(y) + n·q·y; 16 bits: ulp(y)/2 + (2^-15 + n·q/2)·y",
    vjp="softmax_backward",
    symmetric=True,
    padding=float("-inf"),
)
SOFTMAX_BACKWARD = Operation(
    "softmax_backward",
    attributes={"axis": Axis()},
    inputs={"dy": Like(), "y": Like()},
    outputs={"dx": Like(over=("dy", "y"))},
    reference=reference.softmax_backward,
    oracle=reference.oracle_softmax_backward,
    bound=bounds.softmax_backward,
    formula="4u·|y|·(|dy| + Σ|y·dy|) + |y|·n·(q/2 + η) + ulp(dx)/2",
    padding=0.0,
)
LOG_SOFTMAX = Operation(
    "log_softmax",
    attributes={"axis": Axis()},
    inputs={"x": Like()},
    outputs={"y": Like(over=("x",))},
    reference=reference.log_softmax,
    oracle=reference.oracle_log_softmax,
    bound=bounds.log_softmax,
    formula="2 ulp(y) + n·q; 16 bits: ulp(y)/2 + 2^-15·|y| + n·q/2",
    vjp="log_softmax_backward",
    padding=float("-inf"),
)
LOG_SOFTMAX_BACKWARD = Operation(
    "log_softmax_backward",
    attributes={"axis": Axis()},
    inputs={"dy": Like(), "y": Like()},
    outputs={"dx": Like(over=("dy", "y"))},
    reference=reference.log_softmax_backward,
    oracle=reference.oracle_log_softmax_backward,
    bound=bounds.log_softmax_backward,
    formula="4u·(|dy| + e^y·Σ|dy|) + e^y·n·q/2 + 2η·Σ|dy| + ulp(dx)/2; 16 bits: 2^-15·e^y + 2^-126 for 2η",
    padding=0.0,
)
SoftmaxDescriptor, SoftmaxPlan = SOFTMAX.descriptor_type, SOFTMAX.plan_type
SoftmaxBackwardDescriptor, SoftmaxBackwardPlan = SOFTMAX_BACKWARD.descriptor_type, SOFTMAX_BACKWARD.plan_type
LogSoftmaxDescriptor, LogSoftmaxPlan = LOG_SOFTMAX.descriptor_type, LOG_SOFTMAX.plan_type
LogSoftmaxBackwardDescriptor, LogSoftmaxBackwardPlan = (
    LOG_SOFTMAX_BACKWARD.descriptor_type,
    LOG_SOFTMAX_BACKWARD.plan_type,
)
