"""gumbel_softmax and its gradient, declared."""

from isograd.core.attributes import Axis, Flag, Scale, Word
from isograd.core.operands import Like
from isograd.core.operation import Operation
from isograd.ops.gumbel_softmax import bounds, reference

GUMBEL_SOFTMAX = Operation(
    "gumbel_softmax",
    # batched: whether the elements are counted anew at every place in the first dimension.
    attributes={
        "axis": Axis(),
        "tau": Scale(),
        "hard": Flag(),
        "seed": Word(),
        "offset": Word(counts=True),
        "batched": Flag(),
    },
    inputs={"logits": Like()},
    outputs={"y": Like(over=("logits",))},
    reference=reference.gumbel_softmax,
    oracle=reference.oracle_gumbel_softmax,
    bound=bounds.gumbel_softmax,
    formula="2 ulp(y) + y·(n·q + δ + Σ y·δ), δ = (3u·(1 + |g|) + 4u·|x + g|) / tau",
    vjp="gumbel_softmax_backward",
    symmetric=True,
    straight_through={"hard": False},
    ordered=True,
)
GUMBEL_SOFTMAX_BACKWARD = Operation(
    "gumbel_softmax_backward",
    attributes={"axis": Axis(), "tau": Scale()},
    inputs={"dy": Like(), "y": Like()},
    outputs={"dx": Like(over=("dy", "y"))},
    reference=reference.gumbel_softmax_backward,
    oracle=reference.oracle_gumbel_softmax_backward,
    bound=bounds.gumbel_softmax_backward,
    formula="(4u·|y|·(|dy| + Σ|y·dy|) + |y|·n·q/2) / tau + 4u·|dx| + ulp(dx)/2",
    padding=0.0,
)
GumbelSoftmaxDescriptor, GumbelSoftmaxPlan = GUMBEL_SOFTMAX.descriptor_type, GUMBEL_SOFTMAX.plan_type
GumbelSoftmaxBackwardDescriptor = GUMBEL_SOFTMAX_BACKWARD.descriptor_type
GumbelSoftmaxBackwardPlan = GUMBEL_SOFTMAX_BACKWARD.plan_type
