"""sparsemax in NumPy: the definition that every kernel returns bit for bit, and its oracle.

Martins and Astudillo, "From softmax to sparsemax" (2016): the point of the probability simplex nearest to a row. With
the row sorted in descending order and k the largest number with 1 + k x_(k) > sum of the first k,

    sparsemax           y_j = max(x_j - tau, 0),  tau = (sum of the k largest - 1) / k
    sparsemax_backward  dx_j = dy_j - (sum of dy over the support) / size of the support where y_j > 0, else 0

Rule 15 of `docs/arithmetic.md` says what is rounded.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.rows.reference import over_rows

Floats = NDArray[Any]


def _support(units: list[int], one: int) -> list[int]:
    """The k largest of the row's elements, which are integers with 0 the largest."""
    descending = sorted(units, reverse=True)
    total, kept = 0, 0
    for k, unit in enumerate(descending, 1):
        if one + k * unit <= total + unit:
            break
        total, kept = total + unit, k
    return descending[:kept]


def threshold(candidates: Floats, errors: Floats) -> tuple[Any, Any]:
    """The threshold tau less the row's maximum, a pair; from the differences to the maximum that are at least -1."""
    form = ref.FORMATS[candidates.dtype]
    bits = form.quantum_bits
    terms = (ref.integer_terms(v[None], bits)[0] for v in (candidates, errors))
    support = _support([a + b for a, b in zip(*terms, strict=True)], 1 << bits)
    total = sum(support) - (1 << bits)
    head = ref.round_integer(total, -bits, form)
    rest = ref.round_integer(total - int(np.ldexp(np.float64(head), bits)), -bits, form)
    k = form.dtype(len(support))
    high = head / k
    return high, (ref.fma(-high, k, head) + rest) / k


def _sparsemax_rows(rows: Floats) -> Floats:
    x = ref.widen(rows)
    of = x.dtype.type
    y = np.zeros_like(x)
    for row, m in enumerate(ref.row_maximum(x)):
        if not np.isfinite(m):
            y[row] = np.nan
            continue
        d, error = ref.two_sum(x[row], np.full_like(x[row], -m))
        near = d >= of(-1)
        high, low = threshold(d[near], error[near])
        u, v = ref.two_sum(d[near], np.full_like(d[near], -high))
        value = u + (v + (error[near] - low))
        y[row, near] = np.where(value > 0, value, of(0))
    return ref.narrow(y, rows.dtype)


def _sparsemax_backward_rows(dy_rows: Floats, y_rows: Floats) -> Floats:
    dy, y = ref.widen(dy_rows), ref.widen(y_rows)
    of = dy.dtype.type
    terms = np.where(y > 0, dy, np.where(np.isnan(y), y, of(0)))
    mean = ref.order_free_sum(terms) / (y > 0).sum(axis=1).astype(dy.dtype)
    dx = np.where(y > 0, dy - mean[:, None], np.where(np.isnan(y), y, of(0)))
    return ref.narrow(dx, dy_rows.dtype)


def sparsemax(x: Floats, axis: int = -1) -> Floats:
    """The bits of sparsemax."""
    return over_rows(_sparsemax_rows, axis, x)


def sparsemax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """The bits of the gradient of sparsemax; y is its result."""
    return over_rows(_sparsemax_backward_rows, axis, dy, y)


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
_WIDE = np.longdouble


def oracle_sparsemax(x: Floats, axis: int = -1) -> Floats:
    """The exact sparsemax, but for the rounding of the wide type."""
    if x.size == 0:
        return x.astype(_WIDE)
    with np.errstate(all="ignore"):
        wide = np.moveaxis(x.astype(_WIDE), axis, -1)
        m = wide.max(axis=-1, keepdims=True)
        d = np.where(np.isfinite(m), wide - np.where(np.isfinite(m), m, 0), -np.inf)
        descending = -np.sort(-np.maximum(d, -2), axis=-1)
        k = np.arange(1, d.shape[-1] + 1)
        inside = 1 + k * descending > np.cumsum(descending, axis=-1)
        size = np.maximum(inside.sum(axis=-1, keepdims=True), 1)
        tau = (np.where(np.arange(d.shape[-1]) < size, descending, 0).sum(axis=-1, keepdims=True) - 1) / size
        # Once more with what the sum of the result lacks of 1: a sum of many differences has lost some of its own.
        inside = np.maximum(d - tau, 0)
        tau = tau + (inside.sum(axis=-1, keepdims=True) - 1) / np.maximum((inside > 0).sum(axis=-1, keepdims=True), 1)
        y = np.where(np.isfinite(m), np.maximum(d - tau, 0), np.nan)
        return np.moveaxis(y, -1, axis)


def oracle_sparsemax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """The exact gradient of sparsemax, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        g, wide = dy.astype(_WIDE), y.astype(_WIDE)
        inside = wide > 0
        terms = np.where(inside, g, np.where(np.isnan(wide), np.nan, 0))
        mean = terms.sum(axis=axis, keepdims=True) / inside.sum(axis=axis, keepdims=True)
        return np.where(inside, g - mean, np.where(np.isnan(wide), np.nan, 0))
