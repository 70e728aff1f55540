"""The error bounds of rotary and its gradient: two products and their sum are rounded, and the result."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.bounds import LARGEST, limits, stored_error
from isograd.ops.rotary import reference

Floats = NDArray[Any]
_WIDE = np.longdouble


def rotary(dtype: str, x: Floats, cos: Floats, sin: Floats, interleaved: bool = False) -> Floats:
    """Of y."""
    u, _, eta, largest = limits(dtype)
    with np.errstate(all="ignore"):
        y = reference.oracle_rotary(x, cos, sin, interleaved)
        # The sum of both products' magnitudes; of what is not rotated nothing is rounded.
        size = np.zeros(x.shape, _WIDE)
        pairs = cos.shape[-1]
        a, b, _ = reference.halves(np.abs(x.astype(_WIDE)), pairs, interleaved)
        first, second, _ = reference.halves(size, pairs, interleaved)
        c, s = np.abs(cos.astype(_WIDE)), np.abs(sin.astype(_WIDE))
        first[...], second[...] = a * c + b * s, b * c + a * s
        bound = np.where(size > 0, u * (size + np.abs(y)) * (1 + 4 * u) + 3 * eta, 0) + stored_error(y, dtype)
        past = (size * (1 + 2.0**-10) > largest) | (np.isfinite(y) & (np.abs(y) * (1 + 2.0**-10) > LARGEST[dtype]))
        return np.where(past & ~np.isnan(y), np.inf, bound)


def rotary_backward(dtype: str, dy: Floats, cos: Floats, sin: Floats, interleaved: bool = False) -> Floats:
    """Of dx."""
    return rotary(dtype, dy, cos, -sin, interleaved)
