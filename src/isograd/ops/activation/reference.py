"""silu, gelu and their gradients in NumPy: the definition that every kernel returns bit for bit, and its oracle.

The formulas are those of `elementwise/reference.py`, which rounds to the storage type once.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.ops.gated import reference as family

Floats = NDArray[Any]
_WIDE = np.longdouble


def _computed(form: str, slope: bool, *arrays: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return np.asarray(family.ACTIVATIONS[form][slope](*arrays))


def silu(x: Floats) -> Floats:
    """The bits of y."""
    return _computed("silu", False, x)


def silu_backward(dy: Floats, x: Floats) -> Floats:
    """The bits of dx."""
    return _computed("silu", True, dy, x)


def gelu(x: Floats, approximate: str = "none") -> Floats:
    """The bits of y."""
    return _computed(approximate, False, x)


def gelu_backward(dy: Floats, x: Floats, approximate: str = "none") -> Floats:
    """The bits of dx."""
    return _computed(approximate, True, dy, x)


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
def _oracle(form: str, x: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return family.activation(form, x)[0]


def _oracle_backward(form: str, dy: Floats, x: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return np.asarray(dy.astype(_WIDE) * family.activation(form, x)[1])


def oracle_silu(x: Floats) -> Floats:
    """The exact y, but for the rounding of the wide type."""
    return _oracle("silu", x)


def oracle_silu_backward(dy: Floats, x: Floats) -> Floats:
    """The exact dx, but for the rounding of the wide type."""
    return _oracle_backward("silu", dy, x)


def oracle_gelu(x: Floats, approximate: str = "none") -> Floats:
    """The exact y, but for the rounding of the wide type."""
    return _oracle(approximate, x)


def oracle_gelu_backward(dy: Floats, x: Floats, approximate: str = "none") -> Floats:
    """The exact dx, but for the rounding of the wide type."""
    return _oracle_backward(approximate, dy, x)
