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


def scaled_exponentials(x: Floats, m: Floats, short: bool) -> tuple[Floats, Floats]:
    """exp(x - m) and its rounding error (none in 16 bits), scaled, for rows with the finite maximum m, a column."""
    if short:
        e = ref.exp_short((x - m).astype(np.float32))
        return e, np.zeros_like(e)
    return ref.exp_shifted(x, *ref.exp_shift(m))


def _exponentials(x: Floats, m: Floats, short: bool) -> _Exponentials:
    e, error = scaled_exponentials(x, m, short)
    if short:
        bits = c.SHORT_QUANTUM_BITS if x.shape[1] <= c.SHORT_ROW else c.QUANTUM_BITS
        terms = ref.integer_terms(e, bits - c.SHORT_QUANTUM_BITS)
        return _Exponentials(e, error, terms, c.SHORT_QUANTUM_BITS, bits)
    form = ref.FORMATS[x.dtype]
    shift = form.quantum_bits - form.exp_scale
    pairs = zip(ref.integer_terms(e, shift), ref.integer_terms(error, shift), strict=True)
    terms = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
    return _Exponentials(e, error, terms, form.exp_scale, form.quantum_bits)


def _pair(total: int, exponent: int, form: ref.Format) -> tuple[Any, Any]:
    """Total * 2**exponent rounded once, and what that left, rounded once."""
    head = ref.round_integer(total, exponent, form)
    rest = total - int(np.ldexp(np.float64(head), -exponent))
    return head, ref.round_integer(rest, exponent, form)


class Rows(NamedTuple):
    """Rows widened to the work type, their maxima as a column, and their exponentials.

    A row without a finite maximum is not valid; zeros stand in for it and keep the arithmetic quiet.
    """

    x: Floats
    m: Floats
    valid: Floats
    exponentials: _Exponentials
    short: bool


def row_state(rows: Floats) -> Rows:
    """What all of the family's forward operations need to know of a set of rows."""
    x = ref.widen(rows)
    form = ref.FORMATS[x.dtype]
    short = rows.dtype.itemsize == 2
    m = ref.row_maximum(x)[:, None]
    valid = np.isfinite(m)
    x, m = np.where(valid, x, form.dtype(0)), np.where(valid, m, form.dtype(0))
    with np.errstate(all="ignore"):
        return Rows(x, m, valid, _exponentials(x, m, short), short)


def reciprocals(state: Rows) -> tuple[Floats, Floats]:
    """1 / sum of every row as a pair; the scale of the exponentials is taken out where that is exact."""
    form = ref.FORMATS[state.x.dtype]
    r, r_low = np.zeros(len(state.x), form.dtype), np.zeros(len(state.x), form.dtype)
    down = form.dtype(2.0**-state.exponentials.scale)
    with np.errstate(all="ignore"):
        for row, terms in enumerate(state.exponentials.terms):
            s, rest = _pair(sum(terms), -state.exponentials.bits, form)
            if state.short:
                r[row] = form.dtype(1) / (s / down)
                continue
            r[row] = form.dtype(1) / s
            r_low[row] = ref.fma(-r[row], rest, ref.fma(-r[row], s, form.dtype(1))) * r[row]
            if form.bits == 32:
                r[row], r_low[row] = r[row] * down, r_low[row] * down
    return r, r_low


def quotients(x: Floats, m: Floats, e: Floats, error: Floats, r: Floats, r_low: Floats, short: bool) -> Floats:
    """Scaled exponentials times the `reciprocals` of their rows."""
    form = ref.FORMATS[x.dtype]
    y = np.empty_like(x)
    with np.errstate(all="ignore"):
        for row in range(len(y)):
            if short:
                y[row] = e[row] * r[row]
                continue
            y[row] = ref.fma(e[row], r[row], e[row] * r_low[row])
            # The largest elements carry their rounding error as well: equal elements give 1 / n, one alone gives 1.
            largest = x[row] == m[row]
            low = ref.fma(error[row], r[row], e[row] * r_low[row])
            y[row, largest] = ref.fma(e[row], r[row], low)[largest]
            if form.bits == 64:
                # Two roundings for a subnormal result, but no scaled reciprocal that could underflow.
                y[row] *= form.dtype(2.0**-form.exp_scale)
    return y


def probabilities(state: Rows, r: Floats, r_low: Floats) -> Floats:
    """The softmax of every row in the work type, from its `reciprocals`."""
    e, error, *_ = state.exponentials
    y = quotients(state.x, state.m, e, error, r, r_low, state.short)
    return np.where(state.valid, y, y.dtype.type(np.nan))


def log_sums(state: Rows) -> tuple[Floats, Floats, Floats]:
    """M + log(sum / largest term) of every row as three columns; for 16 bits that logarithm alone in the first."""
    x, form = state.x, ref.FORMATS[state.x.dtype]
    t, t_low = np.empty(len(x), x.dtype), np.empty(len(x), x.dtype)
    with np.errstate(all="ignore"):
        for row, terms in enumerate(state.exponentials.terms):
            # The largest term leaves the sum as an integer: a float logarithm of the rounded sum would lose every
            # small term when one dominates.
            largest = int(np.argmax(x[row]))
            rest, rest_low = _pair(sum(terms) - terms[largest], -state.exponentials.bits, form)
            down = form.dtype(2.0**-state.exponentials.scale)
            e, error = state.exponentials.e[row, largest] * down, state.exponentials.error[row, largest] * down
            t[row] = rest / e
            t_low[row] = ((ref.fma(-t[row], e, rest) + rest_low) - t[row] * error) / e
        high, low = ref.log1p_pair(t, t_low)
        if state.short:
            return high[:, None], np.zeros_like(high)[:, None], np.zeros_like(high)[:, None]
        top, middle = ref.two_sum(state.m[:, 0], high)
        return top[:, None], middle[:, None], low[:, None]


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


def log_probabilities(state: Rows, top: Floats, middle: Floats, low: Floats) -> Floats:
    """The log_softmax of every row in the work type, from its `log_sums`."""
    x = state.x
    with np.errstate(all="ignore"):
        if state.short:
            y = (x - state.m) - top
        else:
            u, v = ref.two_sum(x, np.broadcast_to(-top, x.shape))
            y = np.where(np.isinf(u), u, u + ((v - middle) - low))
    return np.where(state.valid, y, x.dtype.type(np.nan))


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
