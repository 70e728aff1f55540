"""The error bounds of silu, gelu and their gradients: those of rule 8 in `docs/arithmetic.md`."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.bounds import stored_error
from isograd.ops.activation import reference
from isograd.ops.gated import bounds as family

Floats = NDArray[Any]


def _value(form: str, dtype: str, x: Floats, y: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return np.asarray(family.errors(form, x, dtype)[0] + stored_error(y, dtype))


def _gradient(form: str, dtype: str, dy: Floats, x: Floats, dx: Floats) -> Floats:
    with np.errstate(all="ignore"):
        return family.product(dtype, dy.astype(np.longdouble), family.errors(form, x, dtype)[1], dx, 1)


def silu(dtype: str, x: Floats) -> Floats:
    """Of y."""
    return _value("silu", dtype, x, reference.oracle_silu(x))


def silu_backward(dtype: str, dy: Floats, x: Floats) -> Floats:
    """Of dx."""
    return _gradient("silu", dtype, dy, x, reference.oracle_silu_backward(dy, x))


def gelu(dtype: str, x: Floats, approximate: str = "none") -> Floats:
    """Of y."""
    return _value(approximate, dtype, x, reference.oracle_gelu(x, approximate))


def gelu_backward(dtype: str, dy: Floats, x: Floats, approximate: str = "none") -> Floats:
    """Of dx."""
    return _gradient(approximate, dtype, dy, x, reference.oracle_gelu_backward(dy, x, approximate))
