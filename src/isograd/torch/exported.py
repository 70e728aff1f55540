"""The names of operations; written by `python tools/update_names.py`."""

from isograd.ops.gumbel_softmax.torch import (
    gumbel_softmax,
)
from isograd.ops.rmsnorm.torch import (
    rms_norm,
)
from isograd.ops.sparsemax.torch import (
    sparsemax,
)

__all__ = [
    "gumbel_softmax",
    "rms_norm",
    "sparsemax",
]
