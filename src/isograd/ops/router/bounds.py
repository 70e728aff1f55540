"""The error bounds that plans of the router family promise.

A bound follows the definition step by step in longdouble: every quantity is a value with a bound on its error, and
every operation adds its own rounding to what its operands bring (running error analysis). u is half an ulp of 1 in the
work type, η half of its smallest subnormal, q the quantum of a sum. Where something may overflow, the bound is
infinite. Choices are those of the definition: the bound of the router's weights is that of the experts it chose.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from isograd.numerics import constants as c
from isograd.numerics import reference as ref
from isograd.numerics.bounds import LARGEST, ulp
from isograd.ops.router import oracle
from isograd.ops.router import reference as definition
from isograd.ops.softmax import bounds as softmax_bounds

Floats = NDArray[Any]


class Rough(NamedTuple):
    """A value and a bound on the error of what is computed for it."""

    value: Any
    error: Any


class _Work:
    """Operations of a work type on rough values."""

    def __init__(self, dtype: str) -> None:
        self.dtype = "float64" if dtype == "float64" else "float32"
        wide = self.dtype == "float64"
        self.u = np.longdouble(2.0**-53 if wide else 2.0**-24)
        self.eta = np.ldexp(np.longdouble(1), -1075 if wide else -150)
        self.bits = c.QUANTUM_BITS + (c.LIMB_SHIFT_64 if wide else 0)
        self.least = -1022 if wide else -126
        self.largest = LARGEST[self.dtype]

    def exact(self, value: Any) -> Rough:
        value = np.asarray(value, np.longdouble)
        return Rough(value, np.zeros_like(value))

    def rounded(self, value: Any, error: Any, tiny: bool = True) -> Rough:
        size = np.abs(value) + error
        error = error + self.u * size + (self.eta if tiny else 0)
        # An infinite error times an exact zero is not known either.
        return Rough(value, np.where((size > self.largest) | (np.isnan(error) & np.isfinite(value)), np.inf, error))

    def mul(self, a: Rough, b: Rough) -> Rough:
        error = np.abs(a.value) * b.error + np.abs(b.value) * a.error + a.error * b.error
        return self.rounded(a.value * b.value, error)

    def sub(self, a: Rough, b: Rough) -> Rough:
        return self.rounded(a.value - b.value, a.error + b.error, tiny=False)

    def add(self, a: Rough, b: Rough) -> Rough:
        return self.rounded(a.value + b.value, a.error + b.error, tiny=False)

    def div(self, a: Rough, b: Rough) -> Rough:
        value = a.value / b.value
        room = np.abs(b.value) - b.error
        error = (a.error + np.abs(value) * b.error) / np.where(room > 0, room, np.nan)
        return self.rounded(value, np.where(room > 0, error, np.inf))

    def sum(self, terms: Rough) -> Rough:
        """The order-free sum over the last axis, which stays with size 1."""
        size = np.abs(terms.value) + terms.error
        top = np.max(size, axis=-1, keepdims=True, initial=0)
        _, exponent = np.frexp(np.where(np.isfinite(top), top, 1))
        q = np.ldexp(np.ones_like(top), np.maximum(exponent - 1, self.least) - self.bits)
        error = terms.error.sum(axis=-1, keepdims=True) + terms.value.shape[-1] * q / 2
        total = self.rounded(terms.value.sum(axis=-1, keepdims=True), np.where(np.isfinite(top), error, np.inf))
        return Rough(total.value, np.where(top == 0, 0, total.error))  # zeros are added exactly

    def stored(self, y: Rough, dtype: str) -> Floats:
        """The error after rounding to a storage type."""
        if dtype == self.dtype:
            return np.asarray(y.error)
        size = np.abs(y.value) + np.where(np.isfinite(y.error), y.error, 0)
        return np.where(size > LARGEST[dtype], np.inf, y.error + ulp(size, dtype) / 2)


def _scores(work: _Work, logits: Floats, scoring: str) -> Rough:
    value = oracle.scores(logits, scoring)
    if scoring == "softmax":
        return Rough(value, softmax_bounds.softmax(work.dtype, logits.astype(work.dtype)))
    # exp is at most 1.05 ulp off; 1 + z and the quotient are rounded once each.
    return Rough(value, np.longdouble(4.2) * work.u * value + 2 * work.eta)


def _renormalized(work: _Work, w: Rough) -> tuple[Rough, Rough]:
    """The renormalized weights and their sum; weights that are all 0 stay so."""
    total = work.sum(w)
    t, nothing = work.div(w, total), (total.value == 0) & (total.error == 0)
    return Rough(np.where(nothing, 0, t.value), np.where(nothing, 0, t.error)), total


def _renormalized_gradient(work: _Work, dt: Rough, w: Rough) -> Rough:
    t, total = _renormalized(work, w)
    dw, nothing = work.div(work.sub(dt, work.sum(work.mul(dt, t))), total), (total.value == 0) & (total.error == 0)
    return Rough(np.where(nothing, 0, dw.value), np.where(nothing, 0, dw.error))


def _take(s: Rough, experts: Floats) -> Rough:
    return Rough(np.take_along_axis(s.value, experts, -1), np.take_along_axis(s.error, experts, -1))


def _quiet(bound: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which divides by zero where nothing is promised."""

    @functools.wraps(bound)
    def evaluated(*arguments: Any, **inputs: Any) -> Any:
        with np.errstate(all="ignore"):
            return bound(*arguments, **inputs)

    return evaluated


# --- one function an operation; each returns a bound for every result, None for integers ------------------------------
@_quiet
def top_k(storage: str, /, x: Floats, k: int, axis: int = -1) -> Any:
    """Values are exact."""
    values, _ = definition.top_k(x, k, axis)
    return np.zeros(values.shape), None


@_quiet
def renormalize(storage: str, /, w: Floats, axis: int = -1) -> Any:
    """Of t."""
    work = _Work(storage)
    t, _ = _renormalized(work, work.exact(np.moveaxis(w, axis, -1)))
    return np.moveaxis(work.stored(t, storage), -1, axis)


@_quiet
def renormalize_backward(storage: str, /, dt: Floats, w: Floats, axis: int = -1) -> Any:
    """Of dw."""
    work = _Work(storage)
    moved = (work.exact(np.moveaxis(a, axis, -1)) for a in (dt, w))
    return np.moveaxis(work.stored(_renormalized_gradient(work, *moved), storage), -1, axis)


@_quiet
def moe_router(storage: str, /, logits: Floats, k: int, bias: Any = None, scale: float = 1.0, **options: Any) -> Any:
    """Of the weights of the experts that the definition chooses."""
    work = _Work(storage)
    experts = definition.moe_router(logits, k, bias=bias, **options)[1]
    w = _take(_scores(work, logits, options.get("scoring", "softmax")), experts)
    if options.get("renormalize"):
        t, _ = _renormalized(work, w)
        # Both the exact and the computed quotients lie between 0 and 1, however little is known about the sum.
        w = Rough(t.value, np.minimum(np.where(np.isnan(t.error), np.inf, t.error), 1 + 4 * work.u))
    if scale != 1:
        w = work.mul(w, work.exact(ref.FORMATS[np.dtype(work.dtype)].dtype(scale)))
    return w.error, None


@_quiet
def moe_router_backward(
    storage: str,
    /,
    dweights: Floats,
    logits: Floats,
    experts: Floats,
    scoring: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    **options: Any,
) -> Any:
    """Of dlogits."""
    work = _Work(storage)
    experts = experts.astype(np.int64)
    s = _scores(work, logits, scoring)
    g = work.exact(dweights)
    if scale != 1:
        g = work.mul(g, work.exact(ref.FORMATS[np.dtype(work.dtype)].dtype(scale)))
    if renormalize:
        g = _renormalized_gradient(work, g, _take(s, experts))
    dy = work.exact(np.zeros(s.value.shape))
    for part, values in zip(dy, g, strict=True):
        np.put_along_axis(part, experts, values, -1)
    if scoring == "softmax":
        dx = work.mul(s, work.sub(dy, work.sum(work.mul(s, dy))))
    else:
        dx = work.mul(work.mul(dy, s), work.sub(work.exact(1), s))
        dx = Rough(dx.value, np.where(oracle.chosen(experts, s.value.shape), dx.error, 0))
    return work.stored(dx, storage)


def expert_counts(storage: str, /, **inputs: Any) -> Any:
    """Integers are exact."""
    return None


def expert_permutation(storage: str, /, **inputs: Any) -> Any:
    """Integers are exact."""
    return None, None


@_quiet
def moe_permute(storage: str, /, x: Floats, order: Floats, k: int) -> Any:
    """Rows are exact."""
    return np.zeros((order.size, x.shape[1]))


def _combined(work: _Work, rows: Floats, weights: Floats | None, order: Floats, k: int) -> Rough:
    terms = work.exact(np.moveaxis(rows[definition.positions(order, k)], 1, -1))
    if weights is not None:
        terms = work.mul(terms, work.exact(weights[:, None, :]))
    return work.sum(terms)


@_quiet
def moe_permute_backward(storage: str, /, dy: Floats, order: Floats, k: int) -> Any:
    """Of dx."""
    work = _Work(storage)
    return work.stored(_combined(work, dy, None, order, k), storage)[..., 0]


@_quiet
def moe_combine(storage: str, /, expert_out: Floats, weights: Floats, order: Floats) -> Any:
    """Of y."""
    work = _Work(storage)
    return work.stored(_combined(work, expert_out, weights, order, weights.shape[1]), storage)[..., 0]


@_quiet
def moe_combine_backward(storage: str, /, dy: Floats, expert_out: Floats, weights: Floats, order: Floats) -> Any:
    """Of d_expert_out and dweights."""
    work = _Work(storage)
    positions = definition.positions(order, weights.shape[1])
    g = work.exact(dy[:, None, :])
    product = work.stored(work.mul(work.exact(weights[..., None]), g), storage)
    first = np.empty(expert_out.shape, np.longdouble)
    first[positions] = product
    return first, work.sum(work.mul(g, work.exact(expert_out[positions]))).error[..., 0]


def _shares(work: _Work, experts: Floats, num_experts: int) -> Rough:
    counts = work.rounded(definition.expert_counts(experts, num_experts).astype(np.longdouble), 0, tiny=False)
    return work.div(counts, work.rounded(np.longdouble(experts.size), 0, tiny=False))


@_quiet
@definition.of_members
def load_balancing_loss(storage: str, /, probabilities: Floats, experts: Floats) -> Any:
    """Of the loss."""
    work = _Work(storage)
    n = probabilities.shape[-1]
    columns = work.sum(work.exact(probabilities.reshape(-1, n).T))
    mean = work.div(columns, work.rounded(np.longdouble(probabilities.size // n), 0, tiny=False))
    mean = Rough(mean.value[:, 0], mean.error[:, 0])
    total = work.sum(work.mul(_shares(work, experts, n), mean))
    return work.mul(work.rounded(np.longdouble(n), 0, tiny=False), total).error.reshape(())


@_quiet
@definition.of_members
def load_balancing_loss_backward(
    storage: str, /, dloss: Floats, experts: Floats, shape: tuple[int, ...], dtype: str
) -> Any:
    """Of dprobabilities."""
    work = _Work(storage)
    n, tokens = np.longdouble(shape[-1]), np.prod(shape[:-1], dtype=np.longdouble)
    product = work.mul(work.mul(work.exact(dloss), work.rounded(n, 0)), _shares(work, experts, shape[-1]))
    row = work.stored(work.div(product, work.rounded(tokens, 0)), storage)
    return np.broadcast_to(row, shape)


def _logsumexp(work: _Work, x: Floats) -> Rough:
    value, log = oracle.logsumexp(x)
    quanta = x.shape[-1] * 2.0**-work.bits
    return Rough(value, 2 * ulp(value, work.dtype) + ulp(log, work.dtype) + quanta)


@_quiet
@definition.of_members
def router_z_loss(storage: str, /, logits: Floats) -> Any:
    """Of the loss."""
    work = _Work(storage)
    z = _logsumexp(work, logits.reshape(-1, logits.shape[-1]))
    tokens = work.rounded(np.longdouble(z.value.size), 0, tiny=False)
    return work.div(work.sum(work.mul(z, z)), tokens).error.reshape(())


@_quiet
@definition.of_members
def router_z_loss_backward(storage: str, /, dloss: Floats, logits: Floats) -> Any:
    """Of dlogits."""
    work = _Work(storage)
    x = logits.reshape(-1, logits.shape[-1])
    z = _logsumexp(work, x)
    tokens = work.rounded(np.longdouble(len(x)), 0, tiny=False)
    factor = work.div(work.mul(work.add(z, z), work.exact(dloss)), tokens)
    dx = work.mul(Rough(factor.value[:, None], factor.error[:, None]), _scores(work, x, "softmax"))
    return work.stored(dx, storage).reshape(logits.shape)
