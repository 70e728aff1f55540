"""Rows of an axis for references and oracles in NumPy."""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref

Floats = NDArray[Any]


def matrix(x: Floats, axis: int) -> Floats:
    """A row of the axis in each row of a matrix, widened."""
    moved = np.moveaxis(x, axis, -1)
    return ref.widen(moved.reshape(math.prod(moved.shape[:-1]), moved.shape[-1]))


def put_back(rows: Floats, like: Floats, axis: int) -> Floats:
    """The rows of a matrix where they lie in an array, rounded to its dtype."""
    moved = np.moveaxis(like, axis, -1).shape
    return np.ascontiguousarray(np.moveaxis(ref.narrow(rows, like.dtype).reshape(moved), -1, axis))


def row_mean(terms: Floats) -> Floats:
    """RN(sum / RN(n)) of every row of a matrix, the sum by rule 4."""
    return np.asarray(ref.order_free_sum(terms) / terms.dtype.type(terms.shape[1]))


def along(values: Floats, rank: int, axis: int) -> Floats:
    """One value for each place of the axis as a wide array that broadcasts against rows."""
    shape = [1] * rank
    shape[axis] = -1
    return values.astype(np.longdouble).reshape(shape)
