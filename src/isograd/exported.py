"""The names of operations; written by `python tools/update_names.py`."""

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
    "RmsnormBackwardDescriptor",
    "RmsnormBackwardPlan",
    "RmsnormDescriptor",
    "RmsnormPlan",
    "SparsemaxBackwardDescriptor",
    "SparsemaxBackwardPlan",
    "SparsemaxDescriptor",
    "SparsemaxPlan",
    "rmsnorm",
    "rmsnorm_backward",
    "sparsemax",
    "sparsemax_backward",
]
