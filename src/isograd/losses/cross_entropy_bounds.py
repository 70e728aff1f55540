"""The error bounds that plans of cross entropy promise, as formulas that can be evaluated.

Notation as in `numerics/bounds.py`: u half an ulp of 1 in the work type, q the quantum of a sum of exponentials, n the
number of classes, η half of the smallest subnormal. A log-probability is off by at most δ |lp| + n q, δ being 2^-15 in
16 bits and 4u else, and log Σ exp by at most λ = δ |lse - m| + 4u (|lse| + |m|) + n q. With d the target distribution,
D = Σ_j |d_j| and T = Σ_j |d_j lp_j|:

    loss       (δ + 8u) T + n q D + n 2^-44 (T + D) + z (2 |lse| λ + λ² + 4u lse²) + E
    gradient   |g a| (δ p + n q p + 8u p) + |g| (p A + 8u |d|) + ulp(dx)/2 + 4η (1 + |g| (1 + |a|)) + |g| F,
               A = 4u (D + 2z |lse|) + n 2^-44 D + 2z λ

E and F are what subnormal products and options lose. With w_j the weight of a class, 1 without weights:

    E = η (4 + 2 lse² + z) and, unless the targets are indices without smoothing, η Σ_j (2 + (1 + 3 |w_j|) |lp_j|)
    F = η (4 + 2 |lse|)    and, under the same condition, η (Σ_j (1 + 2 |w_j|) + 2 |w_j|)

Where a result or one of these overflows, the bound is infinite: lse², z lse² and 2z lse (but where z is rounded to 0),
the log-probability of a class that has a part in the loss, Σ |w_j lp_j| and Σ |w_j| with smoothing, T, D, g a and g d.
"""

import functools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.core.descriptor import ErrorBound
from isograd.losses import cross_entropy_reference as reference
from isograd.losses.cross_entropy_reference import IGNORE_INDEX, Exact
from isograd.numerics import constants as c
from isograd.numerics.bounds import LARGEST, ulp

Floats = NDArray[Any]

_WIDE = np.longdouble


class _Work:
    """u, η, δ and the quanta of a storage type for n classes."""

    def __init__(self, dtype: str, n: int) -> None:
        wide, short = dtype == "float64", dtype in ("float16", "bfloat16")
        self.u = _WIDE(2.0) ** (-53 if wide else -24)
        self.eta = np.ldexp(_WIDE(1), -1075 if wide else -150)
        self.delta = _WIDE(2.0**-15) if short else 4 * self.u
        bits = c.QUANTUM_BITS + (c.LIMB_SHIFT_64 if wide else 0)
        self.sum = n * _WIDE(2.0) ** -bits
        short_bits = c.SHORT_QUANTUM_BITS if n <= c.SHORT_ROW else c.QUANTUM_BITS
        self.exponentials = n * _WIDE(2.0) ** -(short_bits + 1 if short else bits)
        self.largest = _WIDE(LARGEST["float64" if wide else "float32"])

    def overflows(self, *sizes: Floats) -> Any:
        """Where one of several magnitudes may be rounded to infinity, or is none."""
        return ~np.logical_and.reduce([size * (1 + 2.0**-10) < self.largest for size in sizes])

    def vanishes(self, option: float) -> bool:
        """Whether an option is rounded to 0."""
        return bool(abs(_WIDE(option)) <= self.eta)


class _Spread:
    """What a target distribution that is no single class costs besides: sums over the classes, of weights."""

    def __init__(self, work: _Work, parts: Exact, weight: Floats | None, targets: Floats, smoothing: float) -> None:
        self.losses = self.distribution = self.total = self.weights = work.eta * 0
        self.sizes: tuple[Floats, ...] = ()
        w = np.ones(parts.lp.shape[-1], _WIDE) if weight is None else np.abs(weight.astype(_WIDE))
        indices, lp = targets.dtype.kind in "iu", np.abs(parts.lp)
        if indices and not smoothing:
            target = np.where(parts.kept, targets.reshape(-1), 0).astype(np.int64)
            self.sizes = (lp[np.arange(len(lp)), target],)
            return
        self.losses = work.eta * (2 + (1 + 3 * w) * lp).sum(axis=-1)
        self.distribution = 2 * work.eta * w
        self.total = work.eta * (1 + 2 * w).sum()
        self.sizes = (lp.max(axis=-1),)
        if indices and not work.vanishes(smoothing / len(w)):
            self.sizes += (np.where(w == 0, 0, w * lp).sum(axis=-1),)
            self.weights = w.sum()


def _row_parts(
    logits: Floats,
    targets: Floats,
    weight: Floats | None,
    axis: int,
    ignore_index: int,
    label_smoothing: float,
    dtype: str,
) -> tuple[Exact, Floats, _Work]:
    """(the exact quantities, the bound λ of every row's logsumexp, constants)."""
    exact = reference.exact(logits, targets, weight, axis, ignore_index, label_smoothing)
    work = _Work(dtype, logits.shape[axis])
    m = np.moveaxis(logits, axis, -1).reshape(-1, logits.shape[axis]).astype(_WIDE).max(axis=-1)
    lse = np.abs(exact.lse)
    bound = work.delta * np.abs(exact.lse - m) + 4 * work.u * (lse + np.abs(m)) + work.exponentials
    return exact, bound, work


def losses_bound(
    logits: Floats,
    targets: Floats,
    weight: Floats | None = None,
    axis: int = 1,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dtype: str | None = None,
) -> tuple[Floats, None]:
    """The bound of the losses; `dtype` is the storage type where the logits are given in a wider one."""
    with np.errstate(all="ignore"):
        name = dtype or logits.dtype.name
        parts, of_lse, work = _row_parts(logits, targets, weight, axis, ignore_index, label_smoothing, name)
        q = np.abs(parts.q)
        products = np.where(q == 0, 0, q * np.abs(parts.lp))
        all_q, all_products = q.sum(axis=-1), products.sum(axis=-1)
        spread = _Spread(work, parts, weight, targets, label_smoothing)
        bound = (work.delta + 8 * work.u) * all_products + work.exponentials * all_q
        bound = bound + work.sum * (all_products + all_q) + spread.losses + 4 * work.eta
        sizes = [all_products, *spread.sizes]
        if z_loss:
            z, lse = _WIDE(z_loss), np.abs(parts.lse)
            bound = bound + z * (2 * lse * of_lse + of_lse**2 + 4 * work.u * lse**2) + work.eta * (2 * lse**2 + z)
            sizes[0] = all_products + z * lse**2
            sizes += [] if work.vanishes(z_loss) else [lse**2]
        bound = np.where(work.overflows(*sizes), np.inf, bound)
        shape = tuple(np.delete(logits.shape, axis).tolist())
        return np.where(parts.kept, bound, 0).reshape(shape), None


def gradient_bound(
    dlosses: Floats,
    logits: Floats,
    targets: Floats,
    state: Floats | None = None,
    weight: Floats | None = None,
    axis: int = 1,
    ignore_index: int = IGNORE_INDEX,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    dtype: str | None = None,
) -> Floats:
    """The bound of the gradient; `dtype` as above."""
    name = dtype or logits.dtype.name
    with np.errstate(all="ignore"):
        parts, of_lse, work = _row_parts(logits, targets, weight, axis, ignore_index, label_smoothing, name)
        g = np.abs(np.ascontiguousarray(dlosses).reshape(-1, 1).astype(_WIDE))
        p, q = np.exp(parts.lp), np.abs(parts.q)
        spread = _Spread(work, parts, weight, targets, label_smoothing)
        all_q = size = q.sum(axis=-1)
        of_a, a = (4 * work.u + work.sum) * all_q + spread.total + 4 * work.eta, np.abs(parts.total)
        if z_loss:
            # Without a z-loss logsumexp plays no part, whatever it is.
            twice, lse = 2 * _WIDE(z_loss), np.abs(parts.lse)
            of_a = of_a + twice * (of_lse + 4 * work.u * lse) + 2 * work.eta * lse
            a, size = np.abs(parts.total + twice * parts.lse), all_q + twice * lse
        of_p = (work.delta + work.exponentials + 8 * work.u) * p
        bound = g * (a[:, None] * of_p + p * of_a[:, None] + 8 * work.u * q + spread.distribution)
        bound = bound + 4 * work.eta * (1 + g * (1 + a[:, None]))
        rest = (axis, ignore_index, label_smoothing, z_loss)
        dx = reference.oracle_cross_entropy_backward(dlosses, logits, targets, None, weight, *rest)
        kept = np.where(parts.kept[:, None], bound, 0).reshape(np.moveaxis(dx, axis, -1).shape)
        bound = np.moveaxis(kept, -1, axis) + ulp(dx, name) / 2
        large = work.overflows(size + spread.weights, g[:, 0] * size)[:, None] | work.overflows(g * q)
        large = np.moveaxis((large & parts.kept[:, None]).reshape(np.moveaxis(dx, axis, -1).shape), -1, axis)
        return np.where(large | (np.abs(dx) > LARGEST[name]), np.inf, bound)


def _both(
    dlosses: Floats, logits: Floats, targets: Floats, weight: Floats | None = None, **options: Any
) -> tuple[Floats, Floats]:
    losses, _ = losses_bound(logits, targets, weight, **options)
    return losses, gradient_bound(dlosses, logits, targets, None, weight, **options)


_LOSS = "(δ + 8u)·T + n·q·D + n·2^-44·(T + D) + z·(2|lse|·λ + λ² + 4u·lse²) + E"
_GRADIENT = "|g·a|·(δ + n·q + 8u)·p + |g|·(p·A + 8u·|d| + F) + ulp(dx)/2 + 4η·(1 + |g|·(1 + |a|))"
_BOUNDS: dict[str, tuple[str, Any]] = {
    "cross_entropy": (_LOSS, losses_bound),
    "cross_entropy_backward": (_GRADIENT, gradient_bound),
    "cross_entropy_gradient": (f"losses: {_LOSS}; gradient: {_GRADIENT}", _both),
}


def error_bound(operation: str) -> ErrorBound:
    """The bound of an operation; call it with the operation's inputs and options."""
    formula, evaluate = _BOUNDS[operation]
    return ErrorBound(formula, functools.partial(evaluate))
