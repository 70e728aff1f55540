"""The names of operations; written by `python tools/update_names.py`."""

from isograd.ops.sparsemax.api import (
    sparsemax,
)

__all__ = [
    "sparsemax",
]
