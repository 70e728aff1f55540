"""Rows in NumPy, as kernels have to compute them: exponentials with their exact sums, and what follows from these.

Rule 7 of `docs/arithmetic.md`. A set of rows is an array of two dimensions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import constants as c
from isograd.numerics import reference as ref

Floats = NDArray[Any]


def over_rows(function: Callable[..., Floats], axis: int, *arrays: Floats) -> Floats:
    """What a function of sets of rows makes of the rows of an axis."""
    if arrays[0].size == 0:
        return np.empty_like(arrays[0])
    moved = [np.ascontiguousarray(np.moveaxis(a, axis, -1)) for a in arrays]
    with np.errstate(all="ignore"):
        rows = function(*(a.reshape(-1, a.shape[-1]) for a in moved))
    return np.moveaxis(rows.reshape(moved[0].shape), -1, axis)


class Exponentials(NamedTuple):
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


def row_exponentials(x: Floats, m: Floats, short: bool) -> Exponentials:
    """The exponentials of rows with the finite maximum m, a column, and their integer terms."""
    e, error = scaled_exponentials(x, m, short)
    if short:
        bits = c.SHORT_QUANTUM_BITS if x.shape[1] <= c.SHORT_ROW else c.QUANTUM_BITS
        terms = ref.integer_terms(e, bits - c.SHORT_QUANTUM_BITS)
        return Exponentials(e, error, terms, c.SHORT_QUANTUM_BITS, bits)
    form = ref.FORMATS[x.dtype]
    shift = form.quantum_bits - form.exp_scale
    pairs = zip(ref.integer_terms(e, shift), ref.integer_terms(error, shift), strict=True)
    terms = [[a + b for a, b in zip(*pair, strict=True)] for pair in pairs]
    return Exponentials(e, error, terms, form.exp_scale, form.quantum_bits)


def rounded_pair(total: int, exponent: int, form: ref.Format) -> tuple[Any, Any]:
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
    exponentials: Exponentials
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
        return Rows(x, m, valid, row_exponentials(x, m, short), short)


def reciprocals(state: Rows) -> tuple[Floats, Floats]:
    """1 / sum of every row as a pair; the scale of the exponentials is taken out where that is exact."""
    form = ref.FORMATS[state.x.dtype]
    r, r_low = np.zeros(len(state.x), form.dtype), np.zeros(len(state.x), form.dtype)
    down = form.dtype(2.0**-state.exponentials.scale)
    with np.errstate(all="ignore"):
        for row, terms in enumerate(state.exponentials.terms):
            s, rest = rounded_pair(sum(terms), -state.exponentials.bits, form)
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
            rest, rest_low = rounded_pair(sum(terms) - terms[largest], -state.exponentials.bits, form)
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
        exponentials = row_exponentials(x, m, short)
        t, t_low = np.empty(len(x), x.dtype), np.empty(len(x), x.dtype)
        for row, terms in enumerate(exponentials.terms):
            largest = int(np.argmax(x[row]))
            rest, rest_low = rounded_pair(sum(terms) - terms[largest], -exponentials.bits, form)
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
