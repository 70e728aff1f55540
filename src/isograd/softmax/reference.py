"""The softmax family in NumPy: the definition that every kernel returns bit for bit, and its float64 oracle.

Formulas (rule 7 of `docs/arithmetic.md`), over one row of the reduced axis:

    softmax              y_j  = exp(x_j - m) / sum_i exp(x_i - m),          m = max_i x_i
    log_softmax          y_j  = x_j - m - log(sum_i exp(x_i - m))
    softmax_backward     dx_j = y_j * (dy_j - sum_i y_i * dy_i)
    log_softmax_backward dx_j = dy_j - exp(y_j) * sum_i dy_i
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import constants as c
from isograd.numerics import reference as ref

Floats = NDArray[Any]


def _rows(x: Floats, axis: int) -> Floats:
    moved = np.moveaxis(x, axis, -1)
    return np.ascontiguousarray(moved).reshape(-1, x.shape[axis])


def _restore(rows: Floats, like: Floats, axis: int) -> Floats:
    shape = list(like.shape)
    shape.append(shape.pop(axis))
    return np.moveaxis(rows.reshape(shape), -1, axis)


def _over_rows(function: Callable[..., Floats], axis: int, *arrays: Floats) -> Floats:
    if arrays[0].size == 0:
        return np.empty_like(arrays[0])
    rows = function(*(_rows(a, axis) for a in arrays))
    return _restore(rows, arrays[0], axis)


def _exponential_sums(x: Floats, m: Floats, short: bool) -> tuple[Floats, list[int], int]:
    """Scaled exponentials, their exact integer sum per row, and the exponent of the sum's quantum."""
    if short:
        e = ref.exp_short((x - m).astype(np.float32))
        shift = 0 if x.shape[1] <= c.SHORT_ROW else c.QUANTUM_BITS - c.SHORT_QUANTUM_BITS
        return e, [sum(row) for row in ref.integer_terms(e, shift)], -(c.SHORT_QUANTUM_BITS + shift)
    form = ref.FORMATS[x.dtype]
    e, error = ref.exp_of_difference(x, np.broadcast_to(m, x.shape))
    shift = form.quantum_bits - form.exp_scale
    terms, errors = ref.integer_terms(e, shift), ref.integer_terms(error, shift)
    return e, [sum(a) + sum(b) for a, b in zip(terms, errors, strict=True)], -form.quantum_bits


def _softmax_rows(rows: Floats) -> Floats:
    x = ref.widen(rows)
    form = ref.FORMATS[x.dtype]
    short = rows.dtype.itemsize == 2
    m = ref.row_maximum(x)[:, None]
    valid = np.isfinite(m)
    # A row without a finite maximum is NaN throughout; zeros keep the arithmetic below quiet.
    x, m = np.where(valid, x, form.dtype(0)), np.where(valid, m, form.dtype(0))
    with np.errstate(all="ignore"):
        e, sums, quantum = _exponential_sums(x, m, short)
        y = np.empty_like(x)
        for row, total in enumerate(sums):
            if short:
                s = ref.round_integer(total, quantum + c.SHORT_QUANTUM_BITS, form)
                y[row] = e[row] * (form.dtype(1) / s)
            else:
                s = ref.round_integer(total, quantum, form)
                rest = total - int(np.ldexp(np.float64(s), -quantum))
                s_low = ref.round_integer(rest, quantum, form)
                r = form.dtype(1) / s
                residual = ref.fma(-r, s_low, ref.fma(-r, s, form.dtype(1)))
                r_low = residual * r
                if form.bits == 32:
                    down = form.dtype(2.0**-form.exp_scale)
                    y[row] = ref.fma(e[row], r * down, e[row] * (r_low * down))
                else:
                    y[row] = ref.fma(e[row], r, e[row] * r_low) * form.dtype(2.0**-form.exp_scale)
        y = np.where(valid, y, form.dtype(np.nan))
    return ref.narrow(y, rows.dtype)


def _log_softmax_rows(rows: Floats) -> Floats:
    x = ref.widen(rows)
    form = ref.FORMATS[x.dtype]
    short = rows.dtype.itemsize == 2
    m = ref.row_maximum(x)[:, None]
    valid = np.isfinite(m)
    x, m = np.where(valid, x, form.dtype(0)), np.where(valid, m, form.dtype(0))
    with np.errstate(all="ignore"):
        _, sums, quantum = _exponential_sums(x, m, short)
        # The largest term is exactly 1, and leaves as an integer: a small remainder keeps all of its bits.
        t = np.array([ref.round_integer(total - (1 << -quantum), quantum, form) for total in sums], form.dtype)
        high, low = ref.log1p_pair(t)
        if short:
            y = (x - m) - high[:, None]
        else:
            top, middle = ref.two_sum(m[:, 0], high)
            u, v = ref.two_sum(x, np.broadcast_to(-top[:, None], x.shape))
            y = np.where(np.isinf(u), u, u + ((v - middle[:, None]) - low[:, None]))
        y = np.where(valid, y, form.dtype(np.nan))
    return ref.narrow(y, rows.dtype)


def _softmax_backward_rows(dy_rows: Floats, y_rows: Floats) -> Floats:
    dy, y = ref.widen(dy_rows), ref.widen(y_rows)
    with np.errstate(all="ignore"):
        s = ref.order_free_sum(y * dy)[:, None]
        return ref.narrow(y * (dy - s), dy_rows.dtype)


def _log_softmax_backward_rows(dy_rows: Floats, y_rows: Floats) -> Floats:
    dy, y = ref.widen(dy_rows), ref.widen(y_rows)
    with np.errstate(all="ignore"):
        s = np.broadcast_to(ref.order_free_sum(dy)[:, None], dy.shape)
        return ref.narrow(ref.fma(-ref.exp(y), s, dy), dy_rows.dtype)


def softmax(x: Floats, axis: int = -1) -> Floats:
    return _over_rows(_softmax_rows, axis, x)


def log_softmax(x: Floats, axis: int = -1) -> Floats:
    return _over_rows(_log_softmax_rows, axis, x)


def softmax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    return _over_rows(_softmax_backward_rows, axis, dy, y)


def log_softmax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    return _over_rows(_log_softmax_backward_rows, axis, dy, y)


# --- the oracle: the same formulas in the widest float of the machine --------------------------------------------------
# x86 has an 80-bit longdouble, which also serves as the oracle of float64; elsewhere it is binary64.
_WIDE = np.longdouble


def oracle_softmax(x: Floats, axis: int = -1) -> Floats:
    with np.errstate(all="ignore"):
        wide = x.astype(_WIDE)
        e = np.exp(wide - wide.max(axis=axis, keepdims=True))
        return np.asarray(e / e.sum(axis=axis, keepdims=True))


def oracle_log_softmax(x: Floats, axis: int = -1) -> Floats:
    with np.errstate(all="ignore"):
        wide = x.astype(_WIDE)
        d = wide - wide.max(axis=axis, keepdims=True)
        # log1p of the sum without its largest term keeps what a plain log would lose when one term dominates.
        e = np.sort(np.exp(d), axis=axis)
        rest = np.take(e, range(x.shape[axis] - 1), axis=axis).sum(axis=axis, keepdims=True)
        return np.asarray(d - np.log1p(rest))


def oracle_softmax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    with np.errstate(all="ignore"):
        a, b = y.astype(_WIDE), dy.astype(_WIDE)
        return np.asarray(a * (b - (a * b).sum(axis=axis, keepdims=True)))


def oracle_log_softmax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    with np.errstate(all="ignore"):
        a, b = y.astype(_WIDE), dy.astype(_WIDE)
        return np.asarray(b - np.exp(a) * b.sum(axis=axis, keepdims=True))
