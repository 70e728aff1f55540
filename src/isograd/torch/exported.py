"""The names of operations; written by `python tools/update_names.py`."""

from isograd.ops.rmsnorm.torch import (
    rms_norm,
)
from isograd.ops.sparsemax.torch import (
    sparsemax,
)

__all__ = [
    "rms_norm",
    "sparsemax",
]
