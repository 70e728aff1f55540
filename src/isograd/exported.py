"""The names of operations; written by `python tools/update_names.py`."""

from isograd.ops.distillation_loss.api import (
    distillation_loss,
    distillation_loss_backward,
)
from isograd.ops.distillation_loss.operation import (
    DistillationLossBackwardDescriptor,
    DistillationLossBackwardPlan,
    DistillationLossDescriptor,
    DistillationLossPlan,
)
from isograd.ops.gumbel_softmax.api import (
    gumbel_softmax,
    gumbel_softmax_backward,
)
from isograd.ops.gumbel_softmax.operation import (
    GumbelSoftmaxBackwardDescriptor,
    GumbelSoftmaxBackwardPlan,
    GumbelSoftmaxDescriptor,
    GumbelSoftmaxPlan,
)
from isograd.ops.kl_div.api import (
    kl_div,
    kl_div_backward,
)
from isograd.ops.kl_div.operation import (
    KlDivBackwardDescriptor,
    KlDivBackwardPlan,
    KlDivDescriptor,
    KlDivPlan,
)
from isograd.ops.layernorm.api import (
    layernorm,
    layernorm_backward,
)
from isograd.ops.layernorm.operation import (
    LayernormBackwardDescriptor,
    LayernormBackwardPlan,
    LayernormDescriptor,
    LayernormPlan,
)
from isograd.ops.rmsnorm.api import (
    rmsnorm,
    rmsnorm_backward,
)
from isograd.ops.rmsnorm.operation import (
    RmsnormBackwardDescriptor,
    RmsnormBackwardPlan,
    RmsnormDescriptor,
    RmsnormPlan,
)
from isograd.ops.softmax.api import (
    log_softmax,
    log_softmax_backward,
    softmax,
    softmax_backward,
)
from isograd.ops.softmax.operation import (
    LogSoftmaxBackwardDescriptor,
    LogSoftmaxBackwardPlan,
    LogSoftmaxDescriptor,
    LogSoftmaxPlan,
    SoftmaxBackwardDescriptor,
    SoftmaxBackwardPlan,
    SoftmaxDescriptor,
    SoftmaxPlan,
)
from isograd.ops.sparsemax.api import (
    sparsemax,
    sparsemax_backward,
)
from isograd.ops.sparsemax.operation import (
    SparsemaxBackwardDescriptor,
    SparsemaxBackwardPlan,
    SparsemaxDescriptor,
    SparsemaxPlan,
)

__all__ = [
    "DistillationLossBackwardDescriptor",
    "DistillationLossBackwardPlan",
    "DistillationLossDescriptor",
    "DistillationLossPlan",
    "GumbelSoftmaxBackwardDescriptor",
    "GumbelSoftmaxBackwardPlan",
    "GumbelSoftmaxDescriptor",
    "GumbelSoftmaxPlan",
    "KlDivBackwardDescriptor",
    "KlDivBackwardPlan",
    "KlDivDescriptor",
    "KlDivPlan",
    "LayernormBackwardDescriptor",
    "LayernormBackwardPlan",
    "LayernormDescriptor",
    "LayernormPlan",
    "LogSoftmaxBackwardDescriptor",
    "LogSoftmaxBackwardPlan",
    "LogSoftmaxDescriptor",
    "LogSoftmaxPlan",
    "RmsnormBackwardDescriptor",
    "RmsnormBackwardPlan",
    "RmsnormDescriptor",
    "RmsnormPlan",
    "SoftmaxBackwardDescriptor",
    "SoftmaxBackwardPlan",
    "SoftmaxDescriptor",
    "SoftmaxPlan",
    "SparsemaxBackwardDescriptor",
    "SparsemaxBackwardPlan",
    "SparsemaxDescriptor",
    "SparsemaxPlan",
    "distillation_loss",
    "distillation_loss_backward",
    "gumbel_softmax",
    "gumbel_softmax_backward",
    "kl_div",
    "kl_div_backward",
    "layernorm",
    "layernorm_backward",
    "log_softmax",
    "log_softmax_backward",
    "rmsnorm",
    "rmsnorm_backward",
    "softmax",
    "softmax_backward",
    "sparsemax",
    "sparsemax_backward",
]
