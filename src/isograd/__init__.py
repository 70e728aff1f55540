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
    from isograd.losses.accumulator import LossAccumulator
    from isograd.losses.api import cross_entropy, cross_entropy_backward, linear_cross_entropy
    from isograd.losses.cross_entropy_plans import (
        CrossEntropyBackwardDescriptor,
        CrossEntropyBackwardPlan,
        CrossEntropyDescriptor,
        CrossEntropyGradientDescriptor,
        CrossEntropyGradientPlan,
        CrossEntropyPlan,
    )
    from isograd.losses.linear_plans import (
        LinearCrossEntropyDescriptor,
        LinearCrossEntropyGradientDescriptor,
        LinearCrossEntropyGradientPlan,
        LinearCrossEntropyPlan,
    )
    from isograd.faults import check, debug
    from isograd.parallel import get_num_threads, set_num_threads
    from isograd.plan import ErrorBound, Kernel, KernelSku, PrecisionGuarantee
    from isograd.registry import kernels, register_kernel, unregister_kernel
    from isograd.softmax.api import log_softmax, log_softmax_backward, softmax, softmax_backward
    from isograd.softmax.plans import SoftmaxBackwardDescriptor, SoftmaxBackwardPlan, SoftmaxDescriptor, SoftmaxPlan
    from isograd.tape import Tape, Variable

__version__ = "0.1.0"

__all__ = [
    "BufferTooSmallError",
    "CrossEntropyBackwardDescriptor",
    "CrossEntropyBackwardPlan",
    "CrossEntropyDescriptor",
    "CrossEntropyGradientDescriptor",
    "CrossEntropyGradientPlan",
    "CrossEntropyPlan",
    "DeviceMismatchError",
    "Encoder",
    "ErrorBound",
    "IndexOutOfRangeError",
    "InvalidProblemError",
    "IsogradError",
    "Kernel",
    "KernelSku",
    "LinearCrossEntropyDescriptor",
    "LinearCrossEntropyGradientDescriptor",
    "LinearCrossEntropyGradientPlan",
    "LinearCrossEntropyPlan",
    "LossAccumulator",
    "MisalignedOperandError",
    "PrecisionGuarantee",
    "RecordingError",
    "SoftmaxBackwardDescriptor",
    "SoftmaxBackwardPlan",
    "SoftmaxDescriptor",
    "SoftmaxPlan",
    "Tape",
    "UnsupportedError",
    "Variable",
    "WorkspaceTooSmallError",
    "cross_entropy",
    "cross_entropy_backward",
    "check",
    "debug",
    "get_num_threads",
    "kernels",
    "linear_cross_entropy",
    "log_softmax",
    "log_softmax_backward",
    "register_kernel",
    "set_num_threads",
    "softmax",
    "softmax_backward",
    "unregister_kernel",
]
