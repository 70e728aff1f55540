"""Cross entropy in NumPy: the definition that every kernel returns bit for bit, and its oracle.

A row is the logits of one position over the class axis. With lp_j its log-probabilities and p_j its probabilities, the
softmax family's before they are rounded to the storage type, lse = log Σ exp(x_i), and everything in the work type:

    index targets          loss = w_t · (0 - lp_t)                                    t the target, w its weight
    with label smoothing   loss = keep · (that) + spread · (0 - Σ_j w_j lp_j)         keep = 1 - ε, spread = ε / classes
    probabilities          loss = 0 - Σ_j q_j lp_j,   q_j = (keep · y_j + spread) w_j
    with a z-loss          loss + z · lse²

    gradient               dx_j = fma(RN(g · a), p_j, -RN(g · q_j)),   a = Σ_j q_j + 2z · lse

q is the target distribution that the loss is linear in: w_t at the target, smoothed where asked. g is the gradient of
the row's loss. Every product and sum is rounded once, sums over classes are order-free (rule 4), and dx is rounded to
the storage type once. A row whose target is the ignored index has loss and gradient 0.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import reference as ref
from isograd.ops.softmax.reference import oracle_log_softmax
from isograd.rows import reference as family

Floats = NDArray[Any]

IGNORE_INDEX = -100
STATE = 4  # what a row keeps for its gradient: maximum, reciprocal of the sum as a pair, and the factor a


class Constants(NamedTuple):
    """The options in the work type: 1 - ε, ε / classes, z and 2z."""

    keep: Any
    spread: Any
    z: Any
    z_twice: Any


def constants(work: Any, classes: int, label_smoothing: float, z_loss: float) -> Constants:
    """Each option is computed in binary64 and rounded to the work type once."""
    values = (1.0 - label_smoothing, label_smoothing / max(classes, 1), z_loss, 2.0 * z_loss)
    return Constants(*(work(v) for v in values))


class _Targets(NamedTuple):
    """What the targets of a set of rows say; `index` and `own` (the target's weight) or `q`, a row of classes each."""

    kept: Floats
    index: Any
    own: Any
    q: Any
    total: Floats  # Σ_j q_j


def _class_rows(x: Floats, axis: int) -> Floats:
    moved = np.moveaxis(x, axis, -1)
    return np.ascontiguousarray(moved).reshape(-1, x.shape[axis])


def _class_targets(
    targets: Floats, like: Floats, weight: Floats | None, axis: int, ignore_index: int, options: Constants
) -> _Targets:
    """`like` has the rows' shape and work type."""
    of = like.dtype.type
    count = len(like)
    if targets.ndim and targets.dtype.kind not in "iu":
        y = ref.widen(_class_rows(targets, axis))
        q = y * options.keep + options.spread
        q = q if weight is None else q * weight
        return _Targets(np.ones(count, bool), None, None, q, ref.order_free_sum(q))
    flat = np.ascontiguousarray(targets).reshape(-1).astype(np.int64)
    kept = flat != ignore_index
    index = np.where(kept, flat, 0)
    own = np.ones(count, of) if weight is None else weight[index]
    if not options.spread:
        return _Targets(kept, index, own, None, own)
    q = np.full_like(like, options.spread) if weight is None else np.broadcast_to(options.spread * weight, like.shape)
    q = q.copy()
    q[np.arange(count), index] = options.keep * own + options.spread * own
    if weight is None:
        total = np.ones(count, of)
    else:
        total = options.keep * own + options.spread * ref.order_free_sum(weight[None])
    return _Targets(kept, index, own, q, total)


def _losses(lp: Floats, lse: Floats, targets: _Targets, weight: Floats | None, options: Constants) -> Floats:
    zero = lp.dtype.type(0)
    if targets.index is None:
        loss = zero - ref.order_free_sum(targets.q * lp)
    else:
        own = zero - lp[np.arange(len(lp)), targets.index]
        loss = own if weight is None else targets.own * own
        if options.spread:
            everything = ref.order_free_sum(lp if weight is None else weight * lp)
            loss = options.keep * loss + options.spread * (zero - everything)
    if options.z:
        loss = loss + options.z * (lse * lse)
    return np.asarray(np.where(targets.kept, loss, zero))


def _forward(
    logits: Floats, targets: Floats, weight: Floats | None, axis: int, ignore_index: int, options: Constants
) -> tuple[Floats, Floats]:
    """(losses, state) of the rows, flat."""
    rows = _class_rows(logits, axis)
    state = family.row_state(rows)
    of = state.x.dtype.type
    with np.errstate(all="ignore"):
        r, r_low = family.reciprocals(state)
        top, middle, low = family.log_sums(state)
        lp = family.log_probabilities(state, top, middle, low)
        lse = (state.m + top if state.short else top + (middle + low))[:, 0]
        lse = np.where(state.valid[:, 0], lse, of(np.nan))
        about = _class_targets(targets, state.x, weight, axis, ignore_index, options)
        a = about.total + options.z_twice * lse if options.z else about.total
        kept = np.stack([state.m[:, 0], r, r_low, a])
        kept = np.where(state.valid[:, 0], kept, of(np.nan))
        losses = _losses(lp, lse, about, weight, options)
        return ref.narrow(losses, of), ref.narrow(np.where(about.kept, kept, of(0)), of)


def _gradient(
    dlosses: Floats,
    logits: Floats,
    targets: Floats,
    weight: Floats | None,
    state: Floats,
    axis: int,
    ignore_index: int,
    options: Constants,
) -> Floats:
    """The gradient of the rows from their state, in the shape of the logits."""
    rows = _class_rows(logits, axis)
    x, short = ref.widen(rows), rows.dtype.itemsize == 2
    of = x.dtype.type
    m, r, r_low, a = state
    valid = np.isfinite(m)[:, None]
    with np.errstate(all="ignore"):
        x, m = np.where(valid, x, of(0)), np.where(valid, m[:, None], of(0))
        e, error = family.scaled_exponentials(x, m, short)
        p = np.where(valid, family.quotients(x, m, e, error, r, r_low, short), of(np.nan))
        about = _class_targets(targets, x, weight, axis, ignore_index, options)
        g = np.ascontiguousarray(dlosses).reshape(-1)
        factor = (g * a)[:, None]
        if about.q is None:
            at = (np.arange(len(x)), about.index)
            dx = factor * p
            dx[at] = ref.fma(factor[:, 0], p[at], -(g * about.own))
        else:
            dx = ref.fma(factor, p, -(g[:, None] * about.q))
        dx = ref.narrow(np.where(about.kept[:, None], dx, of(0)), rows.dtype)
    shape = list(logits.shape)
    shape.append(shape.pop(axis))
    return np.moveaxis(dx.reshape(shape), -1, axis)


def _row_shape(logits: Floats, axis: int) -> tuple[int, ...]:
    return tuple(np.delete(logits.shape, axis).tolist())


def cross_entropy(
    logits: Floats,
    targets: Floats,
    weight: Floats | None = None,
    axis: int = 1,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Floats, Floats]:
    """The bits of the losses and of the state that a gradient starts from."""
    options = constants(ref.work_dtype(logits.dtype), logits.shape[axis], label_smoothing, z_loss)
    losses, state = _forward(logits, targets, weight, axis, ignore_index, options)
    shape = _row_shape(logits, axis)
    return losses.reshape(shape), state.reshape(STATE, *shape)


def cross_entropy_backward(
    dlosses: Floats,
    logits: Floats,
    targets: Floats,
    state: Floats,
    weight: Floats | None = None,
    axis: int = 1,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Floats:
    """The bits of the gradient of the logits for the gradient of every row's loss."""
    options = constants(ref.work_dtype(logits.dtype), logits.shape[axis], label_smoothing, z_loss)
    flat = state.reshape(STATE, -1)
    return _gradient(dlosses, logits, targets, weight, flat, axis, ignore_index, options)


def cross_entropy_gradient(
    dlosses: Floats,
    logits: Floats,
    targets: Floats,
    weight: Floats | None = None,
    axis: int = 1,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Floats, Floats]:
    """The bits of the losses and of the gradient, as the two functions above give them."""
    rest = (axis, ignore_index, label_smoothing, z_loss)
    losses, state = cross_entropy(logits, targets, weight, *rest)
    return losses, cross_entropy_backward(dlosses, logits, targets, state, weight, *rest)


def denominator(
    targets: Floats, rows: int, work: Any, weight: Floats | None = None, ignore_index: int = IGNORE_INDEX
) -> Any:
    """What a mean divides by: the weights of the targets that are not ignored, or their number; rows of probabilities.

    The weights are added order-free; a number is rounded to the work type.
    """
    if targets.dtype.kind not in "iu":
        return work(rows)
    kept = targets.reshape(-1)[targets.reshape(-1) != ignore_index].astype(np.int64)
    return work(kept.size) if weight is None else ref.order_free_sum(weight[kept][None])[0]


def reduced(losses: Floats, reduction: str, divisor: Any = None) -> Floats:
    """The losses as they are ("none"), their order-free sum, or that over the divisor ("mean")."""
    if reduction == "none":
        return losses
    total = ref.order_free_sum(losses.reshape(1, -1))[0]
    with np.errstate(all="ignore"):
        return np.asarray(total if reduction == "sum" else ref.narrow(np.asarray(total / divisor), losses.dtype))


# --- the oracle: the same formulas in the widest float of the machine ------------------------------------------------
_WIDE = np.longdouble


class Exact(NamedTuple):
    """The quantities of the formulas for every row, flat, in the wide type."""

    lp: Floats
    lse: Floats
    q: Floats
    total: Floats
    kept: Floats


def exact(
    logits: Floats,
    targets: Floats,
    weight: Floats | None,
    axis: int,
    ignore_index: int,
    label_smoothing: float,
) -> Exact:
    """What the oracle and the error bounds are made of."""
    with np.errstate(all="ignore"):
        x = _class_rows(logits, axis).astype(_WIDE)
        lp = np.asarray(oracle_log_softmax(x, -1))
        m = x.max(axis=-1)
        lse = m + np.log(np.exp(x - m[:, None]).sum(axis=-1))
        # A row without a finite maximum is NaN throughout.
        lp, lse = np.where(np.isfinite(m)[:, None], lp, np.nan), np.where(np.isfinite(m), lse, np.nan)
        w = np.ones(x.shape[1], _WIDE) if weight is None else weight.astype(_WIDE)
        keep, spread = _WIDE(1) - _WIDE(label_smoothing), _WIDE(label_smoothing) / x.shape[1]
        if targets.dtype.kind in "iu":
            flat = np.ascontiguousarray(targets).reshape(-1).astype(np.int64)
            kept = flat != ignore_index
            y = np.zeros(x.shape, _WIDE)
            y[np.arange(len(x)), np.where(kept, flat, 0)] = 1
        else:
            kept, y = np.ones(len(x), bool), _class_rows(targets, axis).astype(_WIDE)
        q = (keep * y + spread) * w
        return Exact(lp, lse, q, q.sum(axis=-1), kept)


def oracle_cross_entropy(
    logits: Floats,
    targets: Floats,
    weight: Floats | None = None,
    axis: int = 1,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> tuple[Floats, None]:
    """The exact losses, but for the rounding of the wide type; nothing for the state."""
    parts = exact(logits, targets, weight, axis, ignore_index, label_smoothing)
    with np.errstate(all="ignore"):
        # Index targets without smoothing leave no trace of other classes, whatever their logits are.
        quiet = targets.dtype.kind in "iu" and not label_smoothing
        products = np.where((parts.q == 0) & quiet, 0, parts.q * parts.lp)
        loss = z_loss * parts.lse**2 - products.sum(axis=-1) if z_loss else -products.sum(axis=-1)
        return np.where(parts.kept, loss, 0).reshape(_row_shape(logits, axis)), None


def oracle_cross_entropy_backward(
    dlosses: Floats,
    logits: Floats,
    targets: Floats,
    state: Floats | None = None,
    weight: Floats | None = None,
    axis: int = 1,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Floats:
    """The exact gradient, but for the rounding of the wide type; the state is not looked at."""
    parts = exact(logits, targets, weight, axis, ignore_index, label_smoothing)
    with np.errstate(all="ignore"):
        g = np.ascontiguousarray(dlosses).reshape(-1).astype(_WIDE)
        a = parts.total + 2 * _WIDE(z_loss) * parts.lse if z_loss else parts.total
        dx = g[:, None] * (np.exp(parts.lp) * a[:, None] - parts.q)
        dx = np.where(parts.kept[:, None], dx, 0)
    shape = list(logits.shape)
    shape.append(shape.pop(axis))
    return np.moveaxis(dx.reshape(shape), -1, axis)


def oracle_cross_entropy_gradient(
    dlosses: Floats, logits: Floats, targets: Floats, weight: Floats | None = None, **options: Any
) -> tuple[Floats, Floats]:
    """Both of the above."""
    losses, _ = oracle_cross_entropy(logits, targets, weight, **options)
    return losses, oracle_cross_entropy_backward(dlosses, logits, targets, None, weight, **options)
