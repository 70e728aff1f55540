"""distillation_loss and its gradient, declared."""

from isograd.core.attributes import DtypeOf, Reduction, Scale, SizeOf
from isograd.core.operands import Chosen, Like, Loss
from isograd.core.operation import Operation
from isograd.ops.distillation_loss import bounds, reference

_ATTRIBUTES = {
    "teacher_dtype": DtypeOf("teacher"),
    "temperature": Scale(),
    "classes": SizeOf("indices"),
    "index_dtype": DtypeOf("indices", "int64"),
    "reduction": Reduction("batchmean"),
}
_LOGITS = {
    "student": Like(),
    "teacher": Chosen(count="classes", dtype="teacher_dtype"),
    "indices": Chosen(count="classes", dtype="index_dtype", optional=True),
}

DISTILLATION_LOSS = Operation(
    "distillation_loss",
    attributes=_ATTRIBUTES,
    inputs=_LOGITS,
    outputs={"loss": Loss(rows=True, compute=True)},
    reference=reference.distillation_loss,
    oracle=reference.oracle_distillation_loss,
    bound=bounds.distillation_loss,
    formula="T²·(Σ p·((4.6u + n·q)·|d| + 4n·q + u·(0.7 + 0.2 log n) + 2δ) + n·q/2) + ulp",
    vjp="distillation_loss_backward",
    problem="student",
)
DISTILLATION_LOSS_BACKWARD = Operation(
    "distillation_loss_backward",
    attributes=_ATTRIBUTES,
    inputs={"dloss": Loss(rows=True, compute=True), **_LOGITS},
    outputs={"dstudent": Like(over=("student",))},
    reference=reference.distillation_loss_backward,
    oracle=reference.oracle_distillation_loss_backward,
    bound=bounds.distillation_loss_backward,
    formula="T·|g|·(p + q)·(2.4u + n·q + 2δ) + 6u·|dx| + ulp(dx)/2",
    problem="student",
)
DistillationLossDescriptor, DistillationLossPlan = DISTILLATION_LOSS.descriptor_type, DISTILLATION_LOSS.plan_type
DistillationLossBackwardDescriptor = DISTILLATION_LOSS_BACKWARD.descriptor_type
DistillationLossBackwardPlan = DISTILLATION_LOSS_BACKWARD.plan_type
