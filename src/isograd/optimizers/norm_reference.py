"""The norm of many tensors in NumPy: what every kernel returns bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.reference import narrow, order_free_sum, widen

Floats = NDArray[Any]
WORDS: Final = 4  # int64 words of a tensor's sum; float32 needs the first two
SMALL: Final = 1e-6  # what a norm is divided with on top of itself


def total_norm(tensors: Sequence[Floats], squared: bool = True) -> Any:
    """The square root of the sum of the tensors' sums of squares, or the largest magnitude; of the widest work type."""
    wide = [widen(x).reshape(-1) for x in tensors]
    work = np.result_type(np.float32, *wide)
    with np.errstate(all="ignore"):
        if not squared:
            return largest(np.array([np.max(np.abs(x), initial=0) for x in wide], work))
        sums = np.array([order_free_sum((x * x)[None])[0] for x in wide], work)
    return norm_of_sums(sums)


def norm_of_sums(sums: Floats) -> Any:
    """The norm from the sums of the tensors, all of the widest work type."""
    with np.errstate(all="ignore"):
        return narrow(np.sqrt(order_free_sum(sums[None])), sums.dtype)[0]


def largest(magnitudes: Floats) -> Any:
    """The largest of magnitudes; NaN wins."""
    with np.errstate(all="ignore"):
        return narrow(np.max(magnitudes, initial=0)[None], magnitudes.dtype)[0]


def clip_factor(norm: Any, max_norm: float) -> Any:
    """What gradients are multiplied with; NaN where the norm is one."""
    of = type(norm)
    with np.errstate(all="ignore"):
        factor = of(max_norm) / (norm + of(SMALL))
        return of(1) if factor > 1 else factor


def clipped(g: Floats, factor: Any) -> Floats:
    """A gradient times the factor, which is rounded to its work type."""
    with np.errstate(all="ignore"):
        wide = widen(g)
        return narrow(wide * wide.dtype.type(factor), g.dtype)
