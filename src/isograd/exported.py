"""The names of operations; written by `python tools/update_names.py`."""

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
    "SparsemaxBackwardDescriptor",
    "SparsemaxBackwardPlan",
    "SparsemaxDescriptor",
    "SparsemaxPlan",
    "sparsemax",
    "sparsemax_backward",
]
