"""The error bound of dropout: roundings of 1 - p, of the factor twice and of the product."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.bounds import LARGEST, limits, stored_error
from isograd.ops.dropout import reference

Floats = NDArray[Any]


def dropout(dtype: str, x: Floats, p: float = 0.5, seed: int = 0, offset: int = 0, batched: bool = False) -> Floats:
    """Of y."""
    u, _, eta, _ = limits(dtype)
    with np.errstate(all="ignore"):
        y = np.abs(reference.oracle_dropout(x, p, seed, offset, batched))
        bound = 4 * u * y + eta + stored_error(y, dtype)
        return np.where(np.isfinite(y) & (y * (1 + 2.0**-10) > LARGEST[dtype]), np.inf, bound)
