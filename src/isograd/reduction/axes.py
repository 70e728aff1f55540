"""The axes of a reduction."""

from typing import Any

import numpy as np

from isograd.errors import InvalidProblemError

Axes = int | tuple[int, ...] | None


def normalized(operation: str, axis: Any, rank: int) -> tuple[int, ...]:
    """The reduced axes, none of them negative, in ascending order; InvalidProblemError says what is wrong with them."""
    if axis is None:
        return tuple(range(rank))
    axes = []
    for a in axis if isinstance(axis, tuple) else (axis,):
        if isinstance(a, bool) or not isinstance(a, (int, np.integer)):
            raise InvalidProblemError(f"{operation}: axis is {axis!r}; expected None, an int or a tuple of ints")
        if not -rank <= a < rank:
            raise InvalidProblemError(f"{operation}: axis {a} is out of range for an array of rank {rank}")
        axes.append(int(a) % rank)
    if len(set(axes)) != len(axes):
        raise InvalidProblemError(f"{operation}: axis {axis!r} names an axis twice")
    return tuple(sorted(axes))
