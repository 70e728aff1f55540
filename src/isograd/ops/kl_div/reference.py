"""kl_div in NumPy: the definition that every kernel returns bit for bit, and its oracle.

`p (log p - x)` for every element, x being the logarithm of a probability; 0 where p is 0 (rule 15 of
`docs/arithmetic.md`). The exponential and the logarithm are those of float32 (float64), for 16 bits too: a divergence
of distributions that are close is a small difference, in which the shorter exponential would show.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.numerics.losses import divisor, oracle_reduced, reduced, spread

Floats = NDArray[Any]


def _flat(x: Floats) -> Floats:
    return ref.widen(np.ascontiguousarray(x)).reshape(-1)


def _probabilities(t: Floats, log_target: bool) -> tuple[Floats, Floats]:
    """(p, log p) of the target."""
    return (ref.exp(t), t) if log_target else (t, ref.log(t))


def _where_positive(p: Floats, x: Floats, value: Floats) -> Floats:
    """The value where there is a probability; 0 where it is 0, whatever the input is, unless that is no number."""
    of = p.dtype.type
    return np.where(p == 0, np.where(np.isnan(x), of(np.nan), of(0)), value)


def kl_div(input: Floats, target: Floats, reduction: str = "mean", log_target: bool = False) -> Floats:  # noqa: A002
    """The bits of kl_div, in the work type."""
    x, t = _flat(input), _flat(target)
    with np.errstate(all="ignore"):
        p, log_p = _probabilities(t, log_target)
        terms = _where_positive(p, x, p * (log_p - x))
    return reduced(terms.reshape(input.shape), reduction)


def kl_div_backward(
    dloss: Floats,
    input: Floats,  # noqa: A002
    target: Floats,
    reduction: str = "mean",
    log_target: bool = False,
    wrt: str = "input",
) -> Floats:
    """The bits of the gradient of kl_div for its input or its target."""
    x, t = _flat(input), _flat(target)
    g = spread(dloss, reduction, input.shape).reshape(-1)
    of = x.dtype.type
    with np.errstate(all="ignore"):
        p, log_p = _probabilities(t, log_target)
        if wrt == "input":
            slope = -p
        else:
            slope = (log_p - x) + of(1)
            slope = _where_positive(p, x, p * slope if log_target else slope)
        return ref.narrow(g * slope, input.dtype).reshape(input.shape)


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
_WIDE = np.longdouble


def oracle_kl_terms(input: Floats, target: Floats, log_target: bool = False) -> Floats:  # noqa: A002
    """The exact terms of kl_div, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        x, t = input.astype(_WIDE), target.astype(_WIDE)
        p, log_p = (np.exp(t), t) if log_target else (t, np.log(t))
        if log_target:
            # What the work type calls 0 is 0.
            p = np.where(ref.exp(_flat(target)).reshape(target.shape) == 0, 0, p)
        return np.where(p == 0, np.where(np.isnan(x), np.nan, 0), p * (log_p - x))


def oracle_kl_div(input: Floats, target: Floats, reduction: str = "mean", log_target: bool = False) -> Floats:  # noqa: A002
    """The exact kl_div, but for the rounding of the wide type."""
    return oracle_reduced(oracle_kl_terms(input, target, log_target), reduction)


def oracle_kl_div_backward(
    dloss: Floats,
    input: Floats,  # noqa: A002
    target: Floats,
    reduction: str = "mean",
    log_target: bool = False,
    wrt: str = "input",
) -> Floats:
    """The exact gradient of kl_div, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        x, t = input.astype(_WIDE), target.astype(_WIDE)
        g = dloss.astype(_WIDE)
        if reduction != "none":
            g = g / _WIDE(divisor(reduction, input.shape))
        p, log_p = (np.exp(t), t) if log_target else (t, np.log(t))
        if wrt == "input":
            return np.asarray(-g * p)
        if log_target:
            p = np.where(ref.exp(_flat(target)).reshape(target.shape) == 0, 0, p)
        slope = (log_p - x) + 1
        slope = np.where(p == 0, np.where(np.isnan(x), np.nan, 0), p * slope if log_target else slope)
        return np.asarray(g * slope)
