"""How kernels go through many tensors at once: a table with a row a tensor, and chunks of one length, one tensor each.

A row has the addresses of up to five tensors of one layout, the number of their elements, and the address of a count of
steps (on a GPU, for updates).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

COLUMNS = 7  # of the table
COUNT, STEP = 5, 6  # where they stand


def chunks(counts: NDArray[np.int64], length: int) -> NDArray[np.int64]:
    """[chunks, 2]: tensor, and number within it, of the chunks of tensors that have so many elements."""
    pieces = -(-counts // length)
    tensor = np.repeat(np.arange(len(counts)), pieces)
    first = np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.stack([tensor, np.arange(len(tensor)) - first], axis=1).astype(np.int64)
