"""From losses to a loss: an order-free sum divided once, its gradient, its oracle and its error."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.numerics.bounds import LARGEST, sum_error, ulp
from isograd.numerics.storage import compute_dtype

Floats = NDArray[Any]
_WIDE = np.longdouble


def divisor(reduction: str, shape: tuple[int, ...]) -> int:
    """What the sum over losses of a shape is divided by."""
    if reduction == "mean":
        return int(np.prod(shape, dtype=np.int64))
    return shape[0] if reduction == "batchmean" and shape else 1


def reduced(terms: Floats, reduction: str) -> Floats:
    """The losses as they are, or their order-free sum divided once."""
    if reduction == "none":
        return ref.narrow(terms, terms.dtype)
    total = ref.order_free_sum(terms.reshape(1, -1))
    with np.errstate(all="ignore"):
        quotient = total / terms.dtype.type(divisor(reduction, terms.shape))
    return ref.narrow(quotient, terms.dtype).reshape(())


def spread(dloss: Floats, reduction: str, shape: tuple[int, ...]) -> Floats:
    """The gradient of every single loss from that of the reduced one."""
    g = ref.widen(dloss)
    with np.errstate(all="ignore"):
        if reduction != "none":
            g = g / g.dtype.type(divisor(reduction, shape))
    return np.broadcast_to(g, shape)


def oracle_reduced(losses: Floats, reduction: str) -> Floats:
    """The exact reduced losses, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        return losses if reduction == "none" else np.asarray(losses.sum() / _WIDE(divisor(reduction, losses.shape)))


def reduced_error(losses: Floats, errors: Floats, reduction: str, dtype: str) -> Floats:
    """The bound of the reduced losses from those of single ones, their own rounding included."""
    work = compute_dtype(dtype)
    count = divisor(reduction, losses.shape)
    with np.errstate(all="ignore"):
        if reduction == "none":
            return np.asarray(np.where(np.isfinite(losses) & (np.abs(losses) > LARGEST[work]), np.inf, errors))
        value = np.asarray(losses.sum() / _WIDE(count))
        error = np.asarray((errors.sum() + sum_error(losses, work)) / _WIDE(max(count, 1)))
        overflow = np.isfinite(value) & (np.abs(value) * max(count, 1) > LARGEST[work])
        return np.asarray(np.where(overflow, np.inf, error + ulp(value, work)))
