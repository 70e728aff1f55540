"""rmsnorm in NumPy: the definition that every kernel returns bit for bit, and its oracle.

    rmsnorm           r = 1 / sqrt(mean(x^2) + eps),  y_j = x_j r w_j
    rmsnorm_backward  dx_j = r (g_j - x_j r a),  g = dy w,  a = row_mean(g x r);  dw_j = sum over rows of dy_j x_j r

`docs/arithmetic.md` says under norms what is rounded.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.rows.matrix import along, matrix, put_back, row_mean
from isograd.rows.residual import added, exact_sum, with_gradient

Floats = NDArray[Any]


def rmsnorm(x: Floats, weight: Floats | None = None, axis: int = -1, eps: float = 1e-6) -> tuple[Floats, Floats]:
    """The bits of (y, rstd)."""
    shape = np.moveaxis(x, axis, -1).shape[:-1]
    rows = matrix(x, axis)
    of = rows.dtype.type
    with np.errstate(all="ignore"):
        r = of(1) / np.sqrt(row_mean(rows * rows) + of(eps))
        y = rows * r[:, None]
        if weight is not None:
            y = y * ref.widen(weight)
    return put_back(y, x, axis), ref.narrow(r, r.dtype).reshape(shape)


def rmsnorm_backward(
    dy: Floats, x: Floats, rstd: Floats, weight: Floats | None = None, axis: int = -1, dweight: bool = False
) -> Any:
    """The bits of dx or, with dweight, of (dx, dweight)."""
    upstream, rows = matrix(dy, axis), matrix(x, axis)
    with np.errstate(all="ignore"):
        r = rstd.reshape(-1, 1)
        scaled = rows * r
        g = upstream if weight is None else upstream * ref.widen(weight)
        a = row_mean(g * scaled)
        dx = put_back(r * (g - scaled * a[:, None]), x, axis)
        if not dweight:
            return dx
        return dx, ref.narrow(ref.order_free_sum(np.ascontiguousarray((upstream * scaled).T)), x.dtype)


def add_rmsnorm(
    x: Floats, residual: Floats, weight: Floats | None = None, axis: int = -1, eps: float = 1e-6
) -> tuple[Floats, ...]:
    """The bits of (y, summed, rstd): the norm of the sum as it is stored."""
    summed = added(x, residual)
    y, *statistics = rmsnorm(summed, weight, axis, eps)
    return (y, summed, *statistics)


def add_rmsnorm_backward(
    dy: Floats,
    summed: Floats,
    rstd: Floats,
    dsummed: Floats | None = None,
    weight: Floats | None = None,
    axis: int = -1,
    dweight: bool = False,
) -> Any:
    """The bits of dx, which is the residual's gradient as well, or of what is asked for behind it."""
    return with_gradient(rmsnorm_backward(dy, summed, rstd, weight, axis, dweight), dsummed, added)


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
_WIDE = np.longdouble


def oracle_rmsnorm(x: Floats, weight: Floats | None = None, axis: int = -1, eps: float = 1e-6) -> tuple[Floats, Floats]:
    """The exact results, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        wide = x.astype(_WIDE)
        r = 1 / np.sqrt((wide * wide).sum(axis=axis, keepdims=True) / _WIDE(x.shape[axis]) + _WIDE(eps))
        y = wide * r
        if weight is not None:
            y = y * along(weight, x.ndim, axis)
        return y, r.squeeze(axis)


def oracle_rmsnorm_backward(
    dy: Floats, x: Floats, rstd: Floats, weight: Floats | None = None, axis: int = -1, dweight: bool = False
) -> Any:
    """The exact gradients, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        r = np.expand_dims(rstd.astype(_WIDE), axis)
        upstream, scaled = dy.astype(_WIDE), x.astype(_WIDE) * r
        g = upstream if weight is None else upstream * along(weight, x.ndim, axis)
        a = (g * scaled).sum(axis=axis, keepdims=True) / _WIDE(x.shape[axis])
        dx = r * (g - scaled * a)
        others = tuple([d for d in range(x.ndim) if d != axis % x.ndim])
        return (dx, (upstream * scaled).sum(axis=others)) if dweight else dx


def oracle_add_rmsnorm(
    x: Floats, residual: Floats, weight: Floats | None = None, axis: int = -1, eps: float = 1e-6
) -> tuple[Floats, ...]:
    """The exact sum; the exact norm of what is stored of it."""
    y, *statistics = oracle_rmsnorm(added(x, residual), weight, axis, eps)
    return (y, exact_sum(x, residual), *statistics)


def oracle_add_rmsnorm_backward(
    dy: Floats,
    summed: Floats,
    rstd: Floats,
    dsummed: Floats | None = None,
    weight: Floats | None = None,
    axis: int = -1,
    dweight: bool = False,
) -> Any:
    """The exact gradients, but for the rounding of the wide type."""
    found = oracle_rmsnorm_backward(dy, summed, rstd, weight, axis, dweight)
    return with_gradient(found, dsummed, exact_sum)
