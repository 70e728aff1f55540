"""sum and mean in NumPy: the definition that the kernels return bit for bit.

A sum is the order-free sum of rule 4 over the widened terms, rounded to the storage type once. A mean is
RN(sum / count) in the work type, with count rounded to it, rounded to the storage type once.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref

Floats = NDArray[Any]
Axes = int | tuple[int, ...] | None


def _axes(axis: Axes, rank: int) -> tuple[int, ...]:
    if axis is None:
        return tuple(range(rank))
    return tuple(a % rank for a in (axis if isinstance(axis, tuple) else (axis,)))


def _rows(x: Floats, axis: Axes) -> Floats:
    axes = _axes(axis, x.ndim)
    kept = [d for d in range(x.ndim) if d not in axes]
    moved = x.transpose(*kept, *axes)
    return moved.reshape(int(np.prod([x.shape[d] for d in kept])), int(np.prod([x.shape[d] for d in axes])))


def _shape(x: Floats, axis: Axes, keepdims: bool) -> tuple[int, ...]:
    axes = _axes(axis, x.ndim)
    return tuple(1 if d in axes else n for d, n in enumerate(x.shape) if keepdims or d not in axes)


def sum(x: Floats, axis: Axes = None, keepdims: bool = False) -> Floats:  # noqa: A001 - NumPy's name
    """The order-free sum over some axes."""
    totals = ref.order_free_sum(ref.widen(_rows(x, axis)))
    return ref.narrow(totals, x.dtype).reshape(_shape(x, axis, keepdims))


def mean(x: Floats, axis: Axes = None, keepdims: bool = False) -> Floats:
    """The order-free sum over some axes divided by the number of terms; NaN without terms."""
    rows = ref.widen(_rows(x, axis))
    with np.errstate(all="ignore"):
        totals = ref.order_free_sum(rows) / rows.dtype.type(rows.shape[1])
    return ref.narrow(totals, x.dtype).reshape(_shape(x, axis, keepdims))
