"""Rotary embeddings in NumPy: the definition that every kernel returns bit for bit, and its oracle.

Of each row the first 2 r elements are r pairs (a, b): neighbours if they are interleaved, else i and i + r. With cos
and sin of a row's pairs, in the work type,

    rotary           (RN(RN(a cos) - RN(b sin)), RN(RN(b cos) + RN(a sin)))
    rotary_backward  (RN(RN(a cos) + RN(b sin)), RN(RN(b cos) - RN(a sin)))

each rounded to the storage type once. Elements behind the pairs stay as they are, NaN as the canonical one.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref

Floats = NDArray[Any]
_WIDE = np.longdouble


def halves(x: Any, pairs: int, interleaved: bool) -> tuple[Any, Any, Any]:
    """Views of the first and the second of each pair, and of the rest; of an array or a tensor."""
    rest = x[..., 2 * pairs :]
    if interleaved:
        return x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2], rest
    return x[..., :pairs], x[..., pairs : 2 * pairs], rest


def _rotated(x: Floats, cos: Floats, sin: Floats, interleaved: bool) -> Floats:
    y = x.copy()
    a, b, _ = halves(x, cos.shape[-1], interleaved)
    first, second, _ = halves(y, cos.shape[-1], interleaved)
    first[...], second[...] = a * cos - b * sin, b * cos + a * sin
    return y


def rotary(x: Floats, cos: Floats, sin: Floats, interleaved: bool = False) -> Floats:
    """The bits of y."""
    with np.errstate(all="ignore"):
        return ref.narrow(_rotated(ref.widen(x), cos, sin, interleaved), x.dtype)


def rotary_backward(dy: Floats, cos: Floats, sin: Floats, interleaved: bool = False) -> Floats:
    """The bits of dx: the rotation back."""
    return rotary(dy, cos, -sin, interleaved)


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
def oracle_rotary(x: Floats, cos: Floats, sin: Floats, interleaved: bool = False) -> Floats:
    """The exact y, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        return _rotated(x.astype(_WIDE), cos.astype(_WIDE), sin.astype(_WIDE), interleaved)


def oracle_rotary_backward(dy: Floats, cos: Floats, sin: Floats, interleaved: bool = False) -> Floats:
    """The exact dx, but for the rounding of the wide type."""
    return oracle_rotary(dy, cos, -sin, interleaved)
