"""Sums with a residual in the definitions of norms: what is rounded, the exact sum, and the bounds of both."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.numerics.bounds import LARGEST, ulp

Floats = NDArray[Any]
_WIDE = np.longdouble


def added(a: Floats, b: Floats) -> Floats:
    """The sum, rounded to a's dtype."""
    with np.errstate(all="ignore"):
        return ref.narrow(ref.widen(a) + ref.widen(b), a.dtype)


def exact_sum(a: Floats, b: Floats) -> Floats:
    """The sum in the widest float."""
    with np.errstate(all="ignore"):
        total: Floats = a.astype(_WIDE) + b.astype(_WIDE)
        return total


def sum_bound(dtype: str, a: Floats, b: Floats) -> Floats:
    """Of `added`."""
    exact = exact_sum(a, b)
    return np.where(np.abs(exact) > LARGEST[dtype], np.inf, ulp(exact, dtype) / 2)


def gradient_bound(dtype: str, exact: Floats, error: Floats) -> Floats:
    """Of a gradient with this error that is added to another and rounded."""
    with np.errstate(all="ignore"):
        reach = np.abs(exact) + error
        return np.where(reach > LARGEST[dtype], np.inf, error + ulp(reach, dtype) / 2)


def with_gradient(found: Any, dsummed: Floats | None, combined: Callable[[Floats, Floats], Floats]) -> Any:
    """Results of a norm's gradient, the first combined with the gradient of the sum where there is one."""
    if dsummed is None:
        return found
    dx, *others = found if isinstance(found, tuple) else (found,)
    dx = combined(dx, dsummed)
    return (dx, *others) if others else dx
