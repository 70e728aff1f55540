"""A flag of the CPU's kernels for indices out of range.

Indices are checked before anything is written. A kernel looks at each once more when it uses it, since another thread
may have changed it: out of range, it is left out and the flag is set (`numba_memory.raise_flag`).
"""

import numpy as np

from isograd.errors import IndexOutOfRangeError
from isograd.numerics.storage import address


class IndexFlag:
    """A byte that kernels set through its address."""

    def __init__(self) -> None:
        self._byte = np.zeros(1, np.uint8)

    def __bool__(self) -> bool:
        return bool(self._byte[0])

    @property
    def address(self) -> int:
        """Where the byte is."""
        return address(self._byte)

    def require_unset(self, operation: str, argument: str) -> None:
        """Raise for an index that was in range when it was checked, but not when it was used."""
        if self:
            raise IndexOutOfRangeError(f"{operation}: {argument} changed during the call, and an index is out of range")
