"""Everything that `isograd` gives by name; loaded when the first name is asked for."""

from isograd.runtime.fenv import default_environment

# Literals are rounded when a module is compiled and constants when it is loaded: this happens under the default
# environment, whatever the caller's is.
with default_environment():
    from isograd import exported, optim
    from isograd.array_functions import (
        equal,
        exp,
        greater,
        greater_equal,
        less,
        less_equal,
        log,
        matmul,
        max,  # noqa: A004 - NumPy's name
        maximum,
        mean,
        min,  # noqa: A004 - NumPy's name
        minimum,
        not_equal,
        power,
        relu,
        sigmoid,
        sqrt,
        sum,  # noqa: A004 - NumPy's name
        tanh,
        where,
    )
    from isograd.core.descriptor import ErrorBound, Kernel, KernelSku, PrecisionGuarantee
    from isograd.core.encoder import Encoder
    from isograd.core.faults import check, debug
    from isograd.core.registry import kernels, prefer, register_kernel, unregister_kernel
    from isograd.errors import (
        BufferTooSmallError,
        DeviceMismatchError,
        IndexOutOfRangeError,
        InvalidProblemError,
        IsogradError,
        MisalignedOperandError,
        MissingGradientError,
        NonFiniteGradientError,
        RecordingError,
        StepError,
        TraceFileError,
        UnsupportedError,
        WorkspaceTooSmallError,
    )
    from isograd.exported import *  # noqa: F403
    from isograd.flash_attention.api import (
        attention,
        attention_backward,
        attention_delta,
    )
    from isograd.flash_attention.cached import attention_with_cache
    from isograd.flash_attention.descriptors import (
        AttentionBackwardDescriptor,
        AttentionDeltaDescriptor,
        AttentionDescriptor,
        AttentionWithCacheDescriptor,
    )
    from isograd.flash_attention.options import AttentionOptions
    from isograd.flash_attention.plans import (
        AttentionBackwardPlan,
        AttentionDeltaPlan,
        AttentionPlan,
        AttentionWithCachePlan,
    )
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
    from isograd.losses.accumulator import LossAccumulator
    from isograd.losses.api import (
        cross_entropy,
        cross_entropy_backward,
        linear_cross_entropy,
    )
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
    from isograd.products.plans import MatmulDescriptor, MatmulPlan
    from isograd.rotary import rotary_table
    from isograd.runtime.parallel import get_num_threads, set_num_threads
    from isograd.tape import (
        Tape,
        Variable,
    )

__all__ = [
    "AttentionBackwardDescriptor",
    "AttentionBackwardPlan",
    "AttentionDeltaDescriptor",
    "AttentionDeltaPlan",
    "AttentionDescriptor",
    "AttentionOptions",
    "AttentionPlan",
    "AttentionWithCacheDescriptor",
    "AttentionWithCachePlan",
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
    "IndexSelectDescriptor",
    "IndexSelectPlan",
    "IndexSumDescriptor",
    "IndexSumPlan",
    "InvalidProblemError",
    "IsogradError",
    "Kernel",
    "KernelSku",
    "LinearCrossEntropyDescriptor",
    "LinearCrossEntropyGradientDescriptor",
    "LinearCrossEntropyGradientPlan",
    "LinearCrossEntropyPlan",
    "LossAccumulator",
    "MatmulDescriptor",
    "MatmulPlan",
    "MisalignedOperandError",
    "MissingGradientError",
    "NonFiniteGradientError",
    "PrecisionGuarantee",
    "RecordingError",
    "ScatterSumDescriptor",
    "ScatterSumPlan",
    "StepError",
    "TakeAlongAxisBackwardDescriptor",
    "TakeAlongAxisBackwardPlan",
    "TakeAlongAxisDescriptor",
    "TakeAlongAxisPlan",
    "Tape",
    "TraceFileError",
    "UnsupportedError",
    "Variable",
    "WorkspaceTooSmallError",
    "attention",
    "attention_backward",
    "attention_delta",
    "attention_with_cache",
    "check",
    "cross_entropy",
    "cross_entropy_backward",
    "debug",
    "embedding",
    "embedding_backward",
    "equal",
    "exp",
    "get_num_threads",
    "greater",
    "greater_equal",
    "kernels",
    "less",
    "less_equal",
    "linear_cross_entropy",
    "log",
    "matmul",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "not_equal",
    "optim",
    "power",
    "prefer",
    "register_kernel",
    "relu",
    "rotary_table",
    "scatter_sum",
    "segment_sum",
    "set_num_threads",
    "sigmoid",
    "sqrt",
    "sum",
    "take_along_axis",
    "take_along_axis_backward",
    "tanh",
    "unregister_kernel",
    "where",
]
__all__ += exported.__all__
