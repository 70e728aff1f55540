"""The distillation loss in NumPy: the definition that every kernel returns bit for bit, and its oracle.

Formula (rule 15 of `docs/arithmetic.md`), T being the temperature: `T^2 sum_j p_j (log p_j - log q_j)` per row, with
p = softmax(teacher / T) and q = softmax(student / T).

The exponentials and logarithms are those of float32 (float64) rows, for 16-bit logits too: a divergence of
distributions that are close is a small difference, in which the shorter exponential would show.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.numerics.losses import divisor, oracle_reduced, reduced, spread
from isograd.ops.softmax import reference as family
from isograd.rows.reference import rounded_pair, row_exponentials

Floats = NDArray[Any]
Integers = NDArray[Any]

REST_BITS = 12  # a rest below 2**-12 of the row's largest exponential is summed in units of its own largest


# --- distillation ----------------------------------------------------------------------------------------------------
class LogSum(NamedTuple):
    """m + log(sum of exp(x - m)) of every row in three parts, the first NaN where a row has no finite maximum."""

    top: Floats
    middle: Floats
    low: Floats


class Rows(NamedTuple):
    """Rows of work-type logits with their exponentials, whose integer terms are exact, and their logarithmic sum."""

    z: Floats
    valid: NDArray[np.bool_]
    exponentials: Any
    largest: Integers
    log_sum: LogSum


def _log_sum(exponentials: Any, m: Floats, largest: Integers, totals: list[int]) -> LogSum:
    """From integer sums of a row's exponentials, or of some of them: m + log(total / largest term) as three parts."""
    form = ref.FORMATS[m.dtype]
    t, t_low = np.empty_like(m), np.empty_like(m)
    down = form.dtype(2.0**-exponentials.scale)
    for row, total in enumerate(totals):
        j = int(largest[row])
        rest, rest_low = rounded_pair(total - exponentials.terms[row][j], -exponentials.bits, form)
        e, error = exponentials.e[row, j] * down, exponentials.error[row, j] * down
        t[row] = rest / e
        t_low[row] = ((ref.fma(-t[row], e, rest) + rest_low) - t[row] * error) / e
    high, low = ref.log1p_pair(t, t_low)
    return LogSum(*ref.two_sum(m, high), low)


def rows_of(z: Floats) -> Rows:
    """The rows of a 2-D array of the work type, none of them empty."""
    of = z.dtype.type
    m = ref.row_maximum(z)
    valid = np.isfinite(m)
    # A row without a finite maximum is NaN throughout; zeros keep the arithmetic quiet.
    safe, m = np.where(valid[:, None], z, of(0)), np.where(valid, m, of(0))
    exponentials = row_exponentials(safe, m[:, None], short=False)
    largest = np.argmax(safe, axis=1)
    log_sum = _log_sum(exponentials, m, largest, [sum(terms) for terms in exponentials.terms])
    return Rows(z, valid, exponentials, largest, log_sum._replace(top=np.where(valid, log_sum.top, of(np.nan))))


def log_probability(x: Floats, total: LogSum) -> Floats:
    """X less the logarithm of the sum."""
    u, v = ref.two_sum(x, np.broadcast_to(-total.top, x.shape))
    return np.where(np.isinf(u), u, u + ((v - total.middle) - total.low))


def _difference(a: LogSum, b: LogSum) -> tuple[Floats, Floats]:
    """The first logarithmic sum less the second as an unevaluated pair."""
    high, error = ref.two_sum(a.top, -b.top)
    return high, error + ((a.middle - b.middle) + (a.low - b.low))


class Temperature(NamedTuple):
    """What a temperature becomes in the work type: 1 / T, T and T^2."""

    inverse: Any
    itself: Any
    square: Any


def temperature_of(temperature: float, dtype: Any) -> Temperature:
    """The factors of a temperature."""
    of = ref.work_dtype(dtype)
    t = of(temperature)
    return Temperature(of(1) / t, t, t * t)


def scaled(x: Floats, factor: Any) -> Floats:
    """Logits over the temperature; a finite one that overflows is the largest number of its sign."""
    z = x * factor
    return np.asarray(np.where(np.isinf(z) & np.isfinite(x), np.nextafter(z, x.dtype.type(0)), z))


def _as_rows(x: Any) -> Any:
    return np.ascontiguousarray(x).reshape(-1, x.shape[-1])


def _terms(student: Floats, teacher: Floats, factor: Any) -> Floats:
    """The terms p_j (log p_j - log q_j); NaN throughout a row that has no distribution."""
    of = student.dtype.type
    t, s = rows_of(scaled(teacher, factor)), rows_of(scaled(student, factor))
    p = family.softmax(t.z)
    # The difference of the logits is exact as a pair, so nothing is lost where student and teacher are close.
    a, b = ref.two_sum(t.z, -s.z)
    high, rest = _difference(t.log_sum, s.log_sum)
    u, v = ref.two_sum(a, np.broadcast_to(-high[:, None], a.shape))
    d = np.where(np.isinf(u), u, u + (v + (b - rest[:, None])))
    terms = np.where(p == 0, of(0), p * d)
    return np.where((t.valid & s.valid)[:, None], terms, of(np.nan))


class TopRow(NamedTuple):
    """A row whose teacher is known at some classes only: what both distributions are there and in the rest."""

    z: Floats
    q: Floats  # the student's probabilities, all classes
    log_q: Floats  # its log-probabilities at the classes that the teacher names
    log_q_rest: Any
    shares: Floats | None  # what each class has of the rest, None where there is none
    p: Floats
    p_rest: Any
    valid: bool


def _shares(rows: Rows, total: int) -> Floats:
    """The exponentials of a single row over an integer sum of some of them, as softmax divides."""
    form = ref.FORMATS[rows.z.dtype]
    of, down = form.dtype, form.dtype(2.0**-rows.exponentials.scale)
    s, rest = rounded_pair(total, -rows.exponentials.bits, form)
    r = of(1) / s
    r_low = ref.fma(-r, rest, ref.fma(-r, s, of(1))) * r
    if form.bits == 32:
        r, r_low = r * down, r_low * down
    e, error = rows.exponentials.e[0], rows.exponentials.error[0]
    low = np.where(rows.z[0] == rows.z[0, rows.largest[0]], ref.fma(error, r, e * r_low), e * r_low)
    y = ref.fma(e, r, low)
    return y * down if form.bits == 64 else y


def _rest(rows: Rows, indices: Integers) -> tuple[LogSum, Floats | None]:
    """(logarithmic sum, shares) of the classes besides `indices` of a single row.

    No shares where there is no such class, or every one is masked with -inf: then there is no rest, and what rounding
    leaves of the teacher's is dropped.
    """
    of = rows.z.dtype.type
    terms = rows.exponentials.terms[0]
    rest = sum(terms) - sum(terms[j] for j in indices)
    if rest >= 1 << (rows.exponentials.bits - REST_BITS):
        m = rows.z[:, rows.largest[0]]
        return _log_sum(rows.exponentials, m, rows.largest, [rest]), _shares(rows, rest)
    others = rows.z.copy()
    others[0, indices] = -np.inf
    if np.max(others) == -np.inf:
        return LogSum(np.array([-np.inf], of), np.zeros(1, of), np.zeros(1, of)), None
    return rows_of(others).log_sum, family.softmax(others[0])


def _teacher_rest(log_p: Floats) -> Any:
    """1 less the sum of the teacher's probabilities, the sum being exact but for the exponentials themselves."""
    form = ref.FORMATS[log_p.dtype]
    exponentials = row_exponentials(log_p[None], np.zeros((1, 1), log_p.dtype), short=False)
    rest = (1 << exponentials.bits) - sum(exponentials.terms[0])
    if rest <= 0:
        return form.dtype(0)
    return ref.round_integer(rest, -exponentials.bits, form)


def _top_row(z: Floats, log_p: Floats, indices: Integers) -> TopRow:
    of = z.dtype.type
    rows = rows_of(z[None])
    valid = bool(rows.valid[0] and (log_p <= of(0.5)).all())
    if not valid:
        nothing = np.full(1, np.nan, z.dtype)
        return TopRow(z, z, log_p, nothing, None, log_p, nothing, False)
    rest_sum, shares = _rest(rows, indices)
    high, low = _difference(rest_sum, rows.log_sum)
    log_q_rest = np.where(np.isinf(high), high, high + low)
    log_q = log_probability(z[indices], rows.log_sum)
    p_rest = _teacher_rest(log_p) if shares is not None else of(0)
    return TopRow(z, family.softmax(z), log_q, log_q_rest, shares, ref.exp(log_p), p_rest, True)


def _top_terms(row: TopRow, log_p: Floats) -> Floats:
    of = row.z.dtype.type
    if not row.valid:
        return np.array([np.nan], of)
    terms = np.where(row.p == 0, of(0), row.p * (log_p - row.log_q))
    rest = row.p_rest * (ref.log(np.array([row.p_rest])) - row.log_q_rest)
    return np.append(terms, rest if row.p_rest != 0 else of(0))


def distillation_loss(
    student: Floats,
    teacher: Floats,
    indices: Integers | None = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Floats:
    """The bits of the distillation loss, in the work type."""
    of = ref.work_dtype(student.dtype)
    factors = temperature_of(temperature, student.dtype)
    losses = np.zeros(student.shape[:-1], of)
    with np.errstate(all="ignore"):
        if student.size:
            x, t = ref.widen(_as_rows(student)), ref.widen(_as_rows(teacher))
            if indices is None:
                sums = ref.order_free_sum(_terms(x, t, factors.inverse))
            else:
                parts = zip(scaled(x, factors.inverse), t, _as_rows(indices), strict=True)
                terms = [_top_terms(_top_row(z, lp, where), lp) for z, lp, where in parts]
                sums = np.array([ref.order_free_sum(row[None])[0] for row in terms], of)
            losses = (factors.square * sums).reshape(losses.shape)
    return reduced(losses, reduction)


def _top_slopes(row: TopRow, indices: Integers) -> Floats:
    if not row.valid:
        return np.full_like(row.z, np.nan)
    slopes = row.q
    if row.shares is not None and row.p_rest != 0:
        slopes = row.q - row.p_rest * row.shares
    slopes[indices] = row.q[indices] - row.p
    return slopes


def distillation_loss_backward(
    dloss: Floats,
    student: Floats,
    teacher: Floats,
    indices: Integers | None = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Floats:
    """The bits of the gradient of the distillation loss for the student's logits."""
    factors = temperature_of(temperature, student.dtype)
    if student.size == 0:
        return np.empty_like(student)
    with np.errstate(all="ignore"):
        g = spread(dloss, reduction, student.shape[:-1]).reshape(-1, 1) * factors.itself
        x, t = ref.widen(_as_rows(student)), ref.widen(_as_rows(teacher))
        if indices is None:
            z, y = scaled(x, factors.inverse), scaled(t, factors.inverse)
            valid = np.isfinite(ref.row_maximum(z)) & np.isfinite(ref.row_maximum(y))
            slopes = family.softmax(z) - family.softmax(y)
            slopes = np.where(valid[:, None], slopes, x.dtype.type(np.nan))
        else:
            parts = zip(scaled(x, factors.inverse), t, _as_rows(indices), strict=True)
            slopes = np.stack([_top_slopes(_top_row(z, lp, where), where) for z, lp, where in parts])
        return ref.narrow(g * slopes, student.dtype).reshape(student.shape)


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
_WIDE = np.longdouble


def _oracle_log_softmax(z: Floats) -> Floats:
    if z.size == 0:
        return z
    valid = np.isfinite(np.max(z, axis=-1, keepdims=True))
    return np.where(valid, family.oracle_log_softmax(z, -1), _WIDE(np.nan))


def oracle_rest(
    student: Floats, teacher: Floats, indices: Integers, temperature: float
) -> tuple[Floats, Floats, Floats, Floats]:
    """(log p, log q at the indices; p and log q of the rest) for rows of a teacher's best classes."""
    log_p, z = teacher.astype(_WIDE), student.astype(_WIDE) / _WIDE(temperature)
    log_q = _oracle_log_softmax(z)
    others = z.copy()
    np.put_along_axis(others, indices.astype(np.int64), -np.inf, -1)
    m, top = np.max(others, axis=-1, keepdims=True), np.max(z, axis=-1, keepdims=True)
    safe = np.where(np.isfinite(m), m, 0)
    sums = [np.log(np.exp(v - w).sum(-1, keepdims=True)) for v, w in ((others, safe), (z, top))]
    log_q_rest = ((safe - top) + (sums[0] - sums[1]))[..., 0]
    p_rest = np.maximum(1 - np.exp(log_p).sum(-1), 0)
    p_rest = np.where((m[..., 0] == -np.inf) & np.isfinite(top[..., 0]), 0, p_rest)
    return log_p, np.take_along_axis(log_q, indices.astype(np.int64), -1), p_rest, log_q_rest


def oracle_distillation_terms(
    student: Floats, teacher: Floats, indices: Integers | None = None, temperature: float = 1.0
) -> Floats:
    """The exact terms of every row, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        if indices is None:
            log_p = _oracle_log_softmax(teacher.astype(_WIDE) / _WIDE(temperature))
            log_q = _oracle_log_softmax(student.astype(_WIDE) / _WIDE(temperature))
            p = np.exp(log_p)
            return np.where(p == 0, np.where(np.isnan(log_q), np.nan, 0), p * (log_p - log_q))
        log_p, log_q, p_rest, log_q_rest = oracle_rest(student, teacher, indices, temperature)
        p = np.exp(log_p)
        terms = np.where(p == 0, np.where(np.isnan(log_q), np.nan, 0), p * (log_p - log_q))
        rest = np.where(p_rest == 0, 0, p_rest * (np.log(p_rest) - log_q_rest))
        return np.concatenate([terms, rest[..., None]], axis=-1)


def oracle_distillation_loss(
    student: Floats,
    teacher: Floats,
    indices: Integers | None = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Floats:
    """The exact distillation loss, but for the rounding of the wide type."""
    with np.errstate(all="ignore"):
        if student.size == 0:
            return oracle_reduced(np.zeros(student.shape[:-1], _WIDE), reduction)
        terms = oracle_distillation_terms(student, teacher, indices, temperature)
        return oracle_reduced(_WIDE(temperature) ** 2 * terms.sum(-1), reduction)


def oracle_distillation_loss_backward(
    dloss: Floats,
    student: Floats,
    teacher: Floats,
    indices: Integers | None = None,
    temperature: float = 1.0,
    reduction: str = "batchmean",
) -> Floats:
    """The exact gradient of the distillation loss, but for the rounding of the wide type."""
    if student.size == 0:
        return student.astype(_WIDE)
    with np.errstate(all="ignore"):
        g = dloss.astype(_WIDE) * _WIDE(temperature)
        if reduction != "none":
            g = g / _WIDE(divisor(reduction, student.shape[:-1]))
        z = student.astype(_WIDE) / _WIDE(temperature)
        q = np.exp(_oracle_log_softmax(z))
        g = np.broadcast_to(g, student.shape[:-1])[..., None]
        if indices is None:
            return np.asarray(g * (q - np.exp(_oracle_log_softmax(teacher.astype(_WIDE) / _WIDE(temperature)))))
        log_p, _, p_rest, _ = oracle_rest(student, teacher, indices, temperature)
        others, where = z.copy(), indices.astype(np.int64)
        np.put_along_axis(others, where, -np.inf, -1)
        m = np.max(others, axis=-1, keepdims=True)
        share = np.exp(others - np.where(np.isfinite(m), m, 0))
        share = share / share.sum(-1, keepdims=True)
        slopes = q - np.where(p_rest[..., None] == 0, 0, p_rest[..., None] * share)
        np.put_along_axis(slopes, where, np.take_along_axis(q, where, -1) - np.exp(log_p), -1)
        return np.asarray(g * slopes)
