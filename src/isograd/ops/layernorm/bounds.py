"""The error bounds of layernorm and its gradient.

δ is the error of the mean, r the root's reciprocal, c a centered and v a normalized element. The gradient is measured
from the mean and the r that it is given.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.bounds import LARGEST, limits, sum_error, ulp
from isograd.numerics.storage import compute_dtype
from isograd.ops.layernorm import reference
from isograd.rows.matrix import along
from isograd.rows.residual import added, gradient_bound, sum_bound, with_gradient

Floats = NDArray[Any]
_WIDE = np.longdouble


def layernorm(
    dtype: str,
    x: Floats,
    weight: Floats | None = None,
    bias: Floats | None = None,
    axis: int = -1,
    eps: float = 1e-5,
) -> tuple[Floats, Floats, Floats]:
    """Of y, of the mean and of rstd."""
    u, bits, eta, largest = limits(dtype)
    work, n = compute_dtype(dtype), x.shape[axis]
    with np.errstate(all="ignore"):
        wide = x.astype(_WIDE)
        y, center, r = reference.oracle_layernorm(x, weight, bias, axis, eps)
        # Roundings of the sum, its count and the quotient.
        delta = 3 * u * np.abs(center) + sum_error(wide, work, axis) / max(n, 1) + eta
        # The centered elements add up to zero, so the mean's error enters their squares by its own square alone.
        shift = np.where(np.isfinite(r), delta * r, 0)
        # Roundings of a difference, twice, its square, the sum, its count, the quotient, eps: half of them in the root.
        relative = 4.5 * u + n * 2.0 ** -(bits + 2) + eta * np.where(np.isfinite(r), r * r, 0)
        relative = relative + np.minimum(1, shift * shift / 2)
        c = wide - np.expand_dims(center, axis)
        squares = np.square(np.abs(c) + np.expand_dims(delta, axis)).sum(axis=axis)
        sums = np.abs(wide).sum(axis=axis)
        overflows = np.isfinite(sums) & ((sums > largest) | (squares > largest))
        # Squares that underflow may leave nothing of their mean, as may a row whose elements are all but equal.
        past = overflows | (np.isfinite(squares) & ((r > largest) | np.isnan(r) | (eta * r * r > 0.25)))
        of_mean = np.where(np.isfinite(sums) & (sums > largest), np.inf, delta)
        of_rstd = np.where(past, np.inf, (relative + u) * r + eta)
        v, shift, relative = np.abs(c * np.expand_dims(r, axis)), *(np.expand_dims(t, axis) for t in (shift, relative))
        scale = 1 if weight is None else np.abs(along(weight, x.ndim, axis))
        bound = scale * ((v + shift) * (relative + 3.5 * u) + shift) + u * np.abs(y) + 3 * eta * (1 + scale)
        middle = np.abs(y) if bias is None else np.maximum(np.abs(y), (v + shift) * scale)
        past = np.expand_dims(past, axis) | (np.isfinite(y) & ((np.abs(y) > LARGEST[dtype]) | (middle > largest)))
        return np.where(past, np.inf, bound + ulp(y, dtype) / 2), of_mean, of_rstd


def layernorm_backward(
    dtype: str,
    dy: Floats,
    x: Floats,
    mean: Floats,
    rstd: Floats,
    weight: Floats | None = None,
    axis: int = -1,
    dweight: bool = False,
    dbias: bool = False,
) -> Any:
    """Of dx or, with dweight or dbias, of these behind it."""
    u, _, eta, largest = limits(dtype)
    work, n = compute_dtype(dtype), max(x.shape[axis], 1)
    with np.errstate(all="ignore"):
        dx, dw, db = reference.oracle_layernorm_backward(dy, x, mean, rstd, weight, axis, True, True)
        r = np.expand_dims(np.abs(rstd.astype(_WIDE)), axis)
        upstream, c = np.abs(dy.astype(_WIDE)), np.abs(x.astype(_WIDE) - np.expand_dims(mean.astype(_WIDE), axis))
        v = c * r
        w = 1 if weight is None else np.abs(along(weight, x.ndim, axis))
        g = upstream * w
        terms = g * v
        sums, products = (t.sum(axis=axis, keepdims=True) for t in (g, terms))
        steps = [np.expand_dims(sum_error(t, work, axis), axis) / n for t in (g, terms)]
        # What a subnormal g or v is off by is multiplied by the other, in the mean too, and that by v.
        small = 4 * eta * ((1 + v) * (3 + w) + products / n + v * (g + v).mean(axis=axis, keepdims=True))
        error = u * (5 * g + 8 * sums / n + 13 * v * products / n) + steps[0] + v * steps[1] + small
        bound = r * error + 2 * eta + ulp(dx, dtype) / 2
        middle = np.maximum.reduce(np.broadcast_arrays(g, c, v, v * products / n, products, sums))
        past = (middle.max(axis=axis, keepdims=True, initial=0) > largest) | (np.abs(dx) > LARGEST[dtype])
        outputs = [np.where(past, np.inf, bound)]
        others = tuple([d for d in range(x.ndim) if d != axis % x.ndim])
        by_place = [np.moveaxis(t, axis, 0).reshape(x.shape[axis], -1) for t in (upstream * v, upstream)]
        total, edge = (t.sum(axis=1) for t in by_place)
        if dweight:
            error = 4 * u * total + sum_error(by_place[0], work, 1) + 2 * eta * (by_place[0].shape[1] + edge)
            past = (np.maximum(v, c).max(axis=others, initial=0) > largest) | (total > LARGEST[dtype])
            outputs.append(np.where(past, np.inf, error + ulp(dw, dtype) / 2))
        if dbias:
            error = u * np.abs(db) + sum_error(by_place[1], work, 1) + ulp(db, dtype) / 2
            outputs.append(np.where(edge > LARGEST[dtype], np.inf, error))
        return tuple(outputs) if len(outputs) > 1 else outputs[0]


def add_layernorm(
    dtype: str,
    x: Floats,
    residual: Floats,
    weight: Floats | None = None,
    bias: Floats | None = None,
    axis: int = -1,
    eps: float = 1e-5,
) -> tuple[Floats, ...]:
    """Of y, summed, mean, rstd."""
    y, *statistics = layernorm(dtype, added(x, residual), weight, bias, axis, eps)
    return (y, sum_bound(dtype, x, residual), *statistics)


def add_layernorm_backward(
    dtype: str,
    dy: Floats,
    summed: Floats,
    mean: Floats,
    rstd: Floats,
    dsummed: Floats | None = None,
    weight: Floats | None = None,
    axis: int = -1,
    dweight: bool = False,
    dbias: bool = False,
) -> Any:
    """Of dx or of what is asked for behind it."""
    found = layernorm_backward(dtype, dy, summed, mean, rstd, weight, axis, dweight, dbias)

    def with_sum(error: Floats, dsummed: Floats) -> Floats:
        exact = reference.oracle_add_layernorm_backward(dy, summed, mean, rstd, dsummed, weight, axis)
        return gradient_bound(dtype, exact, error)

    return with_gradient(found, dsummed, with_sum)
