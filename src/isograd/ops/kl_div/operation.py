"""kl_div and its gradient, declared."""

from isograd.core.attributes import Choice, Flag, Reduction
from isograd.core.operands import Like, Loss
from isograd.core.operation import Operation
from isograd.ops.kl_div import bounds, reference

KL_DIV = Operation(
    "kl_div",
    attributes={"reduction": Reduction(), "log_target": Flag()},
    inputs={"input": Like(), "target": Like()},
    outputs={"loss": Loss(compute=True)},
    reference=reference.kl_div,
    oracle=reference.oracle_kl_div,
    bound=bounds.kl_div,
    formula="(Σ u·p·(2.2·|log p| + 4.3·|log p - x|) + n·q/2) / count + ulp",
    vjp="kl_div_backward",
    problem="input",
    least_rank=0,
)
KL_DIV_BACKWARD = Operation(
    "kl_div_backward",
    attributes={"reduction": Reduction(), "log_target": Flag(), "wrt": Choice("input", "target")},
    inputs={"dloss": Loss(compute=True), "input": Like(), "target": Like()},
    outputs={"dx": Like(over=("input", "target"))},
    reference=reference.kl_div_backward,
    oracle=reference.oracle_kl_div_backward,
    bound=bounds.kl_div_backward,
    formula="5u·|g|·(|log p| + 2·|log p - x| + 2) + ulp(dx)/2 (input: 5u·|dx| + ulp(dx)/2)",
    problem="input",
    least_rank=0,
)
KlDivDescriptor, KlDivPlan = KL_DIV.descriptor_type, KL_DIV.plan_type
KlDivBackwardDescriptor, KlDivBackwardPlan = KL_DIV_BACKWARD.descriptor_type, KL_DIV_BACKWARD.plan_type
