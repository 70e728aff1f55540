"""layernorm in NumPy: the definition that every kernel returns bit for bit, and its oracle.

    layernorm           u = mean(x),  c_j = x_j - u,  r = 1 / sqrt(mean(c^2) + eps),  y_j = c_j r w_j + b_j
    layernorm_backward  dx_j = r (g_j - mean(g) - v_j mean(g v)),  v = c r,  g = dy w;
                        dw_j = sum over rows of dy_j v_j,  db_j = sum over rows of dy_j

`docs/arithmetic.md` says under norms what is rounded.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.rows.matrix import along, matrix, put_back, row_mean
from isograd.rows.residual import added, exact_sum, with_gradient

Floats = NDArray[Any]


def layernorm(
    x: Floats, weight: Floats | None = None, bias: Floats | None = None, axis: int = -1, eps: float = 1e-5
) -> tuple[Floats, Floats, Floats]:
    """The bits of (y, mean, rstd)."""
    shape = np.moveaxis(x, axis, -1).shape[:-1]
    rows = matrix(x, axis)
    of = rows.dtype.type
    with np.errstate(all="ignore"):
        center = row_mean(rows)
        y = rows - center[:, None]
        r = of(1) / np.sqrt(row_mean(y * y) + of(eps))
        y = y * r[:, None]
        if weight is not None:
            y = y * ref.widen(weight)
        if bias is not None:
            y = y + ref.widen(bias)
    return put_back(y, x, axis), ref.narrow(center, of).reshape(shape), ref.narrow(r, of).reshape(shape)


def layernorm_backward(
    dy: Floats,
    x: Floats,
    mean: Floats,
    rstd: Floats,
    weight: Floats | None = None,
    axis: int = -1,
    dweight: bool = False,
    dbias: bool = False,
) -> Any:
    """The bits of dx or, with dweight or dbias, of these behind it."""
    upstream, rows = matrix(dy, axis), matrix(x, axis)
    with np.errstate(all="ignore"):
        r = rstd.reshape(-1, 1)
        v = (rows - mean.reshape(-1, 1)) * r
        g = upstream if weight is None else upstream * ref.widen(weight)
        a, b = row_mean(g * v), row_mean(g)
        outputs = [put_back(r * ((g - b[:, None]) - v * a[:, None]), x, axis)]
        for terms, asked in ((upstream * v, dweight), (upstream, dbias)):
            if asked:
                outputs.append(ref.narrow(ref.order_free_sum(np.ascontiguousarray(terms.T)), x.dtype))
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def add_layernorm(
    x: Floats,
    residual: Floats,
    weight: Floats | None = None,
    bias: Floats | None = None,
    axis: int = -1,
    eps: float = 1e-5,
) -> tuple[Floats, ...]:
    """The bits of (y, summed, mean, rstd): the norm of the sum as it is stored."""
    summed = added(x, residual)
    y, *statistics = layernorm(summed, weight, bias, axis, eps)
    return (y, summed, *statistics)


def add_layernorm_backward(
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
    """The bits of dx, which is the residual's gradient as well, or of what is asked for behind it."""
    return with_gradient(layernorm_backward(dy, summed, mean, rstd, weight, axis, dweight, dbias), dsummed, added)


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
_WIDE = np.longdouble


def oracle_layernorm(
    x: Floats, weight: Floats | None = None, bias: Floats | None = None, axis: int = -1, eps: float = 1e-5
) -> tuple[Floats, Floats, Floats]:
    """The exact results, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        n, wide = _WIDE(x.shape[axis]), x.astype(_WIDE)
        center = wide.sum(axis=axis, keepdims=True) / n
        wide = wide - center
        r = 1 / np.sqrt((wide * wide).sum(axis=axis, keepdims=True) / n + _WIDE(eps))
        y = wide * r
        if weight is not None:
            y = y * along(weight, x.ndim, axis)
        if bias is not None:
            y = y + along(bias, x.ndim, axis)
        return y, center.squeeze(axis), r.squeeze(axis)


def oracle_layernorm_backward(
    dy: Floats,
    x: Floats,
    mean: Floats,
    rstd: Floats,
    weight: Floats | None = None,
    axis: int = -1,
    dweight: bool = False,
    dbias: bool = False,
) -> Any:
    """The exact gradients, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        n, r = _WIDE(x.shape[axis]), np.expand_dims(rstd.astype(_WIDE), axis)
        upstream, v = dy.astype(_WIDE), (x.astype(_WIDE) - np.expand_dims(mean.astype(_WIDE), axis)) * r
        g = upstream if weight is None else upstream * along(weight, x.ndim, axis)
        a, b = (t.sum(axis=axis, keepdims=True) / n for t in (g * v, g))
        outputs = [r * (g - b - v * a)]
        others = tuple([d for d in range(x.ndim) if d != axis % x.ndim])
        outputs += [t.sum(axis=others) for t, asked in ((upstream * v, dweight), (upstream, dbias)) if asked]
        return tuple(outputs) if len(outputs) > 1 else outputs[0]


def oracle_add_layernorm(
    x: Floats,
    residual: Floats,
    weight: Floats | None = None,
    bias: Floats | None = None,
    axis: int = -1,
    eps: float = 1e-5,
) -> tuple[Floats, ...]:
    """The exact sum; the exact norm of what is stored of it."""
    y, *statistics = oracle_layernorm(added(x, residual), weight, bias, axis, eps)
    return (y, exact_sum(x, residual), *statistics)


def oracle_add_layernorm_backward(
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
    """The exact gradients, but for the rounding of the wide type."""
    found = oracle_layernorm_backward(dy, summed, mean, rstd, weight, axis, dweight, dbias)
    return with_gradient(found, dsummed, exact_sum)
