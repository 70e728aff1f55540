"""The error bounds of rmsnorm and its gradient.

m is the mean of the squares, r the root's reciprocal, v a normalized element. The gradient is measured from the r that
it is given.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.bounds import LARGEST, limits, sum_error, ulp
from isograd.numerics.storage import compute_dtype
from isograd.ops.rmsnorm import reference
from isograd.rows.matrix import along
from isograd.rows.residual import added, gradient_bound, sum_bound, with_gradient

Floats = NDArray[Any]
_WIDE = np.longdouble


def rmsnorm(
    dtype: str, x: Floats, weight: Floats | None = None, axis: int = -1, eps: float = 1e-6
) -> tuple[Floats, Floats]:
    """Of y and of rstd."""
    u, bits, eta, largest = limits(dtype)
    n = x.shape[axis]
    with np.errstate(all="ignore"):
        y, r = reference.oracle_rmsnorm(x, weight, axis, eps)
        # Roundings of a square, the sum, its count, the quotient and eps count half in the root.
        relative = 3.5 * u + n * 2.0 ** -(bits + 2) + eta * np.where(np.isfinite(r), r * r, 0)
        squares = np.square(x.astype(_WIDE)).sum(axis=axis)
        # Squares that underflow may leave nothing of their mean.
        past = np.isfinite(squares) & ((squares > largest) | (r > largest) | (eta * r * r > 0.25))
        of_rstd = np.where(past, np.inf, (relative + u) * r + eta)
        scale = 1 if weight is None else np.abs(along(weight, x.ndim, axis))
        bound = np.abs(y) * (np.expand_dims(relative, axis) + 3.5 * u) + 3 * eta * (1 + scale)
        past = np.expand_dims(past, axis) | (np.isfinite(y) & (np.abs(y) > LARGEST[dtype]))
        return np.where(past, np.inf, bound + ulp(y, dtype) / 2), of_rstd


def rmsnorm_backward(
    dtype: str,
    dy: Floats,
    x: Floats,
    rstd: Floats,
    weight: Floats | None = None,
    axis: int = -1,
    dweight: bool = False,
) -> Any:
    """Of dx or, with dweight, of dx and dweight."""
    u, _, eta, largest = limits(dtype)
    work, n = compute_dtype(dtype), max(x.shape[axis], 1)
    with np.errstate(all="ignore"):
        found = reference.oracle_rmsnorm_backward(dy, x, rstd, weight, axis, dweight)
        dx, dw = found if dweight else (found, None)
        r = np.expand_dims(np.abs(rstd.astype(_WIDE)), axis)
        upstream, scaled = np.abs(dy.astype(_WIDE)), np.abs(x.astype(_WIDE)) * r
        w = 1 if weight is None else np.abs(along(weight, x.ndim, axis))
        g = upstream * w
        terms = g * scaled
        total = terms.sum(axis=axis, keepdims=True) / n
        quantum = np.expand_dims(sum_error(terms, work, axis), axis) / n
        # What a subnormal g or v = x r is off by is multiplied by the other, in the mean too, and that by v.
        small = 4 * eta * ((1 + scaled) * (2 + w) + total + scaled * (g + scaled).mean(axis=axis, keepdims=True))
        bound = r * (6 * u * (g + scaled * total) + scaled * quantum + small) + 2 * eta + ulp(dx, dtype) / 2
        middle = np.maximum(np.maximum(g, scaled), np.maximum(scaled * total, terms.sum(axis=axis, keepdims=True)))
        bound = np.where(
            (middle.max(axis=axis, keepdims=True, initial=0) > largest) | (np.abs(dx) > LARGEST[dtype]), np.inf, bound
        )
        if dw is None:
            return bound
        others = tuple([d for d in range(x.ndim) if d != axis % x.ndim])
        products = np.moveaxis(upstream * scaled, axis, 0).reshape(x.shape[axis], -1)
        count, edge = products.shape[1], np.moveaxis(upstream, axis, 0).reshape(x.shape[axis], -1).sum(axis=1)
        error = 3 * u * products.sum(axis=1) + sum_error(products, work, 1) + 2 * eta * (count + edge)
        past = (scaled.max(axis=others, initial=0) > largest) | (products.sum(axis=1) > LARGEST[dtype])
        return bound, np.where(past, np.inf, error + ulp(dw, dtype) / 2)


def add_rmsnorm(
    dtype: str, x: Floats, residual: Floats, weight: Floats | None = None, axis: int = -1, eps: float = 1e-6
) -> tuple[Floats, ...]:
    """Of y, summed, rstd."""
    y, *statistics = rmsnorm(dtype, added(x, residual), weight, axis, eps)
    return (y, sum_bound(dtype, x, residual), *statistics)


def add_rmsnorm_backward(
    dtype: str,
    dy: Floats,
    summed: Floats,
    rstd: Floats,
    dsummed: Floats | None = None,
    weight: Floats | None = None,
    axis: int = -1,
    dweight: bool = False,
) -> Any:
    """Of dx or of what is asked for behind it."""
    found = rmsnorm_backward(dtype, dy, summed, rstd, weight, axis, dweight)

    def with_sum(error: Floats, dsummed: Floats) -> Floats:
        exact = reference.oracle_add_rmsnorm_backward(dy, summed, rstd, dsummed, weight, axis)
        return gradient_bound(dtype, exact, error)

    return with_gradient(found, dsummed, with_sum)
