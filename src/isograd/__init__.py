"""Training kernels whose results have the same bits on every run, batch split, thread count and machine."""

from isograd.fenv import default_environment

# Literals are rounded when a module is compiled and constants when it is loaded: this happens under the default
# environment, whatever the caller's is.
with default_environment():
    from isograd.encoder import Encoder
    from isograd.errors import (
        BufferTooSmallError,
        DeviceMismatchError,
        IndexOutOfRangeError,
        InvalidProblemError,
        IsogradError,
        MisalignedOperandError,
        RecordingError,
        UnsupportedError,
        WorkspaceTooSmallError,
    )
    from isograd.faults import check, debug
    from isograd.gather.api import (
        embedding,
        embedding_backward,
        scatter_sum,
        segment_sum,
        take_along_axis,
        take_along_axis_backward,
    )
    from isograd.gather.plans import (
        IndexSelectDescriptor,
        IndexSelectPlan,
        IndexSumDescriptor,
        IndexSumPlan,
        ScatterSumDescriptor,
        ScatterSumPlan,
        TakeAlongAxisBackwardDescriptor,
        TakeAlongAxisBackwardPlan,
        TakeAlongAxisDescriptor,
        TakeAlongAxisPlan,
    )
    from isograd.losses.divergence_api import (
        distillation_loss,
        distillation_loss_backward,
        kl_div,
        kl_div_backward,
    )
    from isograd.losses.divergence_plans import (
        DistillationLossBackwardDescriptor,
        DistillationLossBackwardPlan,
        DistillationLossDescriptor,
        DistillationLossPlan,
        KlDivBackwardDescriptor,
        KlDivBackwardPlan,
        KlDivDescriptor,
        KlDivPlan,
    )
    from isograd.losses.simplex_api import (
        gumbel_softmax,
        gumbel_softmax_backward,
        sparsemax,
        sparsemax_backward,
    )
    from isograd.losses.simplex_plans import (
        GumbelSoftmaxBackwardDescriptor,
        GumbelSoftmaxBackwardPlan,
        GumbelSoftmaxDescriptor,
        GumbelSoftmaxPlan,
        SparsemaxBackwardDescriptor,
        SparsemaxBackwardPlan,
        SparsemaxDescriptor,
        SparsemaxPlan,
    )
    from isograd.parallel import get_num_threads, set_num_threads
    from isograd.plan import ErrorBound, Kernel, KernelSku, PrecisionGuarantee
    from isograd.registry import kernels, register_kernel, unregister_kernel
    from isograd.softmax.api import log_softmax, log_softmax_backward, softmax, softmax_backward
    from isograd.softmax.plans import SoftmaxBackwardDescriptor, SoftmaxBackwardPlan, SoftmaxDescriptor, SoftmaxPlan
    from isograd.tape import Tape, Variable

__version__ = "0.1.0"

__all__ = [
    "BufferTooSmallError",
    "DeviceMismatchError",
    "DistillationLossBackwardDescriptor",
    "DistillationLossBackwardPlan",
    "DistillationLossDescriptor",
    "DistillationLossPlan",
    "Encoder",
    "ErrorBound",
    "GumbelSoftmaxBackwardDescriptor",
    "GumbelSoftmaxBackwardPlan",
    "GumbelSoftmaxDescriptor",
    "GumbelSoftmaxPlan",
    "IndexOutOfRangeError",
    "IndexSelectDescriptor",
    "IndexSelectPlan",
    "IndexSumDescriptor",
    "IndexSumPlan",
    "InvalidProblemError",
    "IsogradError",
    "Kernel",
    "KernelSku",
    "KlDivBackwardDescriptor",
    "KlDivBackwardPlan",
    "KlDivDescriptor",
    "KlDivPlan",
    "MisalignedOperandError",
    "PrecisionGuarantee",
    "RecordingError",
    "ScatterSumDescriptor",
    "ScatterSumPlan",
    "SoftmaxBackwardDescriptor",
    "SoftmaxBackwardPlan",
    "SoftmaxDescriptor",
    "SoftmaxPlan",
    "SparsemaxBackwardDescriptor",
    "SparsemaxBackwardPlan",
    "SparsemaxDescriptor",
    "SparsemaxPlan",
    "TakeAlongAxisBackwardDescriptor",
    "TakeAlongAxisBackwardPlan",
    "TakeAlongAxisDescriptor",
    "TakeAlongAxisPlan",
    "Tape",
    "UnsupportedError",
    "Variable",
    "WorkspaceTooSmallError",
    "check",
    "debug",
    "distillation_loss",
    "distillation_loss_backward",
    "embedding",
    "embedding_backward",
    "get_num_threads",
    "gumbel_softmax",
    "gumbel_softmax_backward",
    "kernels",
    "kl_div",
    "kl_div_backward",
    "log_softmax",
    "log_softmax_backward",
    "register_kernel",
    "scatter_sum",
    "segment_sum",
    "set_num_threads",
    "softmax",
    "softmax_backward",
    "sparsemax",
    "sparsemax_backward",
    "take_along_axis",
    "take_along_axis_backward",
    "unregister_kernel",
]
