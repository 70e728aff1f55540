"""The softmax family in NumPy: the definition that every kernel returns bit for bit, and its float64 oracle.

Formulas (rule 7 of `docs/arithmetic.md`), over one row of the reduced axis:

    softmax              y_j  = exp(x_j - m) / sum_i exp(x_i - m),          m = max_i x_i
    log_softmax          y_j  = x_j - m - log(sum_i exp(x_i - m))
    softmax_backward     dx_j = y_j * (dy_j - sum_i y_i * dy_i)
    log_softmax_backward dx_j = dy_j - exp(y_j) * sum_i dy_i
"""

from collections.abc import Callable
from typing import Any, NamedTuple

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


class _Exponentials(NamedTuple):
    """Scaled exponentials of a set of rows with their exact integer sums; `bits` is minus the quantum's exponent."""

    e: Floats
    error: Floats
    terms: list[list[int]]
    scale: int
    bits: int


def _exponentials(x: Floats, m: Floats, short: bool) -> _Exponentials:
    if short:
        e = ref.exp_short((x - m).astype(np.float32))
        bits = c.SHORT_QUANTUM_BITS if x.shape[1] <= c.SHORT_ROW else c.QUANTUM_BITS
        terms = ref.integer_terms(e, bits - c.SHORT_QUANTUM_BITS)
        return _Exponentials(e, np.zeros_like(e), terms, c.SHORT_QUANTUM_BITS, bits)
    form = ref.FORMATS[x.dtype]
    e, error = ref.exp_shifted(x, *ref.exp_shift(m))
    shift = form.quantum_bits - form.exp_scale
    pairs = zip(ref.integer_terms(e, shift), ref.integer_terms(error, shift), strict=True)
    terms = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
    return _Exponentials(e, error, terms, form.exp_scale, form.quantum_bits)


def _pair(total: int, exponent: int, form: ref.Format) -> tuple[Any, Any]:
    """Total * 2**exponent rounded once, and what that left, rounded once."""
    head = ref.round_integer(total, exponent, form)
    rest = total - int(np.ldexp(np.float64(head), -exponent))
    return head, ref.round_integer(rest, exponent, form)


def _softmax_rows(rows: Floats) -> Floats:
    x = ref.widen(rows)
    form = ref.FORMATS[x.dtype]
    short = rows.dtype.itemsize == 2
    m = ref.row_maximum(x)[:, None]
    valid = np.isfinite(m)
    # A row without a finite maximum is NaN throughout; zeros keep the arithmetic below quiet.
    x, m = np.where(valid, x, form.dtype(0)), np.where(valid, m, form.dtype(0))
    with np.errstate(all="ignore"):
        exponentials = _exponentials(x, m, short)
        y = np.empty_like(x)
        for row, (e, terms) in enumerate(zip(exponentials.e, exponentials.terms, strict=True)):
            s, rest = _pair(sum(terms), -exponentials.bits, form)
            r = form.dtype(1) / s
            down = form.dtype(2.0**-exponentials.scale)
            if short:
                y[row] = e * (form.dtype(1) / (s / down))
                continue
            r_low = ref.fma(-r, rest, ref.fma(-r, s, form.dtype(1))) * r
            if form.bits == 32:
                r, r_low = r * down, r_low * down
            y[row] = ref.fma(e, r, e * r_low)
            # The largest elements carry their rounding error as well: equal elements give 1 / n, one alone gives 1.
            largest = x[row] == m[row]
            low = ref.fma(exponentials.error[row], r, e * r_low)
            y[row, largest] = ref.fma(e, r, low)[largest]
            if form.bits == 64:
                # Two roundings for a subnormal result, but no scaled reciprocal that could underflow.
                y[row] *= down
        y = np.where(valid, y, form.dtype(np.nan))
    return ref.narrow(y, rows.dtype)


def log_sum(x: Floats, m: Floats, short: bool) -> tuple[Floats, Floats]:
    """log(Σ exp(x_i - m)) of rows of the work type with the finite maximum m, a column, as an unevaluated pair.

    The largest term leaves the sum as an integer: a float logarithm of the rounded sum would lose every small term when
    one dominates.
    """
    form = ref.FORMATS[x.dtype]
    with np.errstate(all="ignore"):
        exponentials = _exponentials(x, m, short)
        t, t_low = np.empty(len(x), x.dtype), np.empty(len(x), x.dtype)
        for row, terms in enumerate(exponentials.terms):
            largest = int(np.argmax(x[row]))
            rest, rest_low = _pair(sum(terms) - terms[largest], -exponentials.bits, form)
            down = form.dtype(2.0**-exponentials.scale)
            e, error = exponentials.e[row, largest] * down, exponentials.error[row, largest] * down
            t[row] = rest / e
            t_low[row] = ((ref.fma(-t[row], e, rest) + rest_low) - t[row] * error) / e
        return ref.log1p_pair(t, t_low)


def _log_softmax_rows(rows: Floats) -> Floats:
    x = ref.widen(rows)
    form = ref.FORMATS[x.dtype]
    short = rows.dtype.itemsize == 2
    m = ref.row_maximum(x)[:, None]
    valid = np.isfinite(m)
    x, m = np.where(valid, x, form.dtype(0)), np.where(valid, m, form.dtype(0))
    with np.errstate(all="ignore"):
        high, low = log_sum(x, m, short)
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
        exp = ref.exp_short_any if dy_rows.dtype.itemsize == 2 else ref.exp
        return ref.narrow(ref.fma(-exp(y), s, dy), dy_rows.dtype)


def softmax(x: Floats, axis: int = -1) -> Floats:
    """The bits of softmax."""
    return _over_rows(_softmax_rows, axis, x)


def log_softmax(x: Floats, axis: int = -1) -> Floats:
    """The bits of log_softmax."""
    return _over_rows(_log_softmax_rows, axis, x)


def softmax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """The bits of the gradient of softmax."""
    return _over_rows(_softmax_backward_rows, axis, dy, y)


def log_softmax_backward(dy: Floats, y: Floats, axis: int = -1) -> Floats:
    """The bits of the gradient of log_softmax."""
    return _over_rows(_log_softmax_backward_rows, axis, dy, y)


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
