"""The error bounds of kl_div and its gradient.

u is half an ulp of 1 in the work type, q the quantum of a sum. eta, half of the smallest subnormal, is added for every
product. Where a result or an intermediate term overflows, the bound is infinite.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.bounds import LARGEST, limits, ulp
from isograd.numerics.losses import divisor, reduced_error
from isograd.ops.kl_div import reference as ref

Floats = NDArray[Any]
_WIDE = np.longdouble


def _parts(input: Floats, target: Floats, log_target: bool) -> tuple[Floats, Floats, Floats]:  # noqa: A002
    """(p, |log p|, |log p - x|), zeros where p is 0."""
    x, t = input.astype(_WIDE), target.astype(_WIDE)
    p, log_p = (np.exp(t), t) if log_target else (t, np.log(t))
    d = np.abs(log_p - x)
    return p, np.where(p == 0, 0, np.abs(log_p)), np.where(p == 0, 0, d)


def kl_div(dtype: str, input: Floats, target: Floats, reduction: str = "mean", log_target: bool = False) -> Floats:  # noqa: A002
    """Of the loss."""
    u, _, eta, _ = limits(dtype)
    with np.errstate(all="ignore"):
        terms = ref.oracle_kl_terms(input, target, log_target)
        p, log_p, d = _parts(input, target, log_target)
        errors = (4.3 * u * p * d + 4 * eta * d if log_target else 2.2 * u * p * (log_p + d)) + 2 * eta
        return reduced_error(terms, np.where(np.isfinite(terms), errors, 0), reduction, dtype)


def kl_div_backward(
    dtype: str,
    dloss: Floats,
    input: Floats,  # noqa: A002
    target: Floats,
    reduction: str = "mean",
    log_target: bool = False,
    wrt: str = "input",
) -> Floats:
    """Of dx."""
    u, _, eta, largest = limits(dtype)
    with np.errstate(all="ignore"):
        dx = ref.oracle_kl_div_backward(dloss, input, target, reduction, log_target, wrt)
        g = np.abs(dloss.astype(_WIDE)) / (1 if reduction == "none" else _WIDE(divisor(reduction, input.shape)))
        p, log_p, d = _parts(input, target, log_target)
        if wrt == "input":
            error = 5 * u * np.abs(dx) + (4 * eta * g if log_target else 0)
        else:
            error = 5 * u * g * (log_p + 2 * d + 2) * (p if log_target else 1) + (4 * eta * g * (d + 1))
            error = error + 2 * eta * d
        error = error + 2 * eta * (1 + p) + ulp(dx, dtype) / 2
        slope = p if wrt == "input" else (d + 1) * (np.maximum(p, 1) if log_target else 1)
        large = (slope * (1 + 2.0**-10) > largest) | (np.abs(dx) > LARGEST[dtype])
        return np.where(np.isfinite(dx) & large, np.inf, error)
