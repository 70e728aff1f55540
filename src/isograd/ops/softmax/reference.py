"""The softmax family in NumPy: the definition that every kernel returns bit for bit, and its float64 oracle.

Formulas (rule 7 of `docs/arithmetic.md`), over one row of the reduced axis:

    softmax              y_j  = exp(x_j - m) / sum_i exp(x_i - m),          m = max_i x_i
    log_softmax          y_j  = x_j - m - log(sum_i exp(x_i - m))
    softmax_backward     dx_j = y_j * (dy_j - sum_i y_i * dy_i)
    log_softmax_backward dx_j = dy_j - exp(y_j) * sum_i dy_i
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.rows.reference import log_probabilities, log_sums, over_rows, probabilities, reciprocals, row_state

Floats = NDArray[Any]


def _softmax_rows(rows: Floats) -> Floats:
    state = row_state(rows)
    return ref.narrow(probabilities(state, *reciprocals(state)), rows.dtype)


def _log_softmax_rows(rows: Floats) -> Floats:
    state = row_state(rows)
    return ref.narrow(log_probabilities(state, *log_sums(state)), rows.dtype)


def _softmax_backward_rows(dy_rows: Floats, y_rows: Floats) -> Floats:
    dy, y = ref.widen(dy_rows), ref.widen(y_rows)
    with np.errstate(all="ignore"):
        s = ref.order_free_sum(y * dy)[:, None]
        return ref.narrow(y * (dy - s), dy_rows.dtype)


def _log_softmax_backward_rows(dy_rows: Floats, y_rows: Floats) -> Floats:
    dy, y = ref.widen(dy_rows), ref.widen(y_rows)
    with np.errstate(all="ignore"):
        s = np.broadcast_to(ref.order_free_sum(dy)[:, None], dy.shape)
        exp = ref.exp_short_any if dy_rows.dtype.itemsize == 2 else ref.exp
        return ref.narrow(ref.fma(-exp(y), s, dy), dy_rows.dtype)


def softmax(x: Floats, axis: int = -1) -> Floats:
    """The bits of softmax."""
    return over_rows(_softmax_rows, axis, x)


def log_softmax(x: Floats, axis: int = -1) -> Floats:
    """The bits of log_softmax."""
    return over_rows(_log_softmax_rows, axis, x)


def softmax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """The bits of the gradient of softmax."""
    return over_rows(_softmax_backward_rows, axis, dy, y)


def log_softmax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """The bits of the gradient of log_softmax."""
    return over_rows(_log_softmax_backward_rows, axis, dy, y)


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
# x86 has an 80-bit longdouble, which also serves as the oracle of float64; elsewhere it is binary64.
_WIDE = np.longdouble


def oracle_softmax(x: Floats, axis: int = -1) -> Floats:
    """The exact softmax, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        wide = x.astype(_WIDE)
        e = np.exp(wide - wide.max(axis=axis, keepdims=True))
        return np.asarray(e / e.sum(axis=axis, keepdims=True))


def oracle_log_softmax(x: Floats, axis: int = -1) -> Floats:
    """The exact log_softmax, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        wide = x.astype(_WIDE)
        d = wide - wide.max(axis=axis, keepdims=True)
        # log1p of the sum without its largest term keeps what a plain log would lose when one term dominates.
        e = np.sort(np.exp(d), axis=axis)
        rest = np.take(e, range(x.shape[axis] - 1), axis=axis).sum(axis=axis, keepdims=True)
        return np.asarray(d - np.log1p(rest))


def oracle_softmax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """The exact gradient of softmax, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        a, b = y.astype(_WIDE), dy.astype(_WIDE)
        return np.asarray(a * (b - (a * b).sum(axis=axis, keepdims=True)))


def oracle_log_softmax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """The exact gradient of log_softmax, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        a, b = y.astype(_WIDE), dy.astype(_WIDE)
        return np.asarray(b - np.exp(a) * b.sum(axis=axis, keepdims=True))
