"""The router family in the widest float of the machine, with the choices of the definition.

Which experts are chosen, and their order, is a matter of the rounded scores; everything else is exact but for the
rounding of the wide type. None stands for a result that is compared by its bits alone.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.numerics.reference import work_dtype
from isograd.ops.router import reference as definition
from isograd.ops.softmax import reference as softmax_family

Array = NDArray[Any]
_WIDE = np.longdouble


def scores(logits: Array, scoring: str = "softmax") -> Array:
    """The scores of all experts."""
    if scoring == "softmax":
        return softmax_family.oracle_softmax(logits)
    with np.errstate(all="ignore"):
        x = logits.astype(_WIDE)
        z = np.exp(-np.abs(x))
        return np.asarray(np.where(x >= 0, 1, z) / (1 + z))


def chosen(experts: Array, shape: tuple[int, ...]) -> Array:
    """Which of all experts are among the chosen ones."""
    mask = np.zeros(shape, bool)
    np.put_along_axis(mask, experts.astype(np.int64), True, -1)
    return mask


def _quotients(w: Array) -> Array:
    """Over the last axis, where a sum of zero gives zero."""
    total = w.sum(axis=-1, keepdims=True)
    return np.where(total == 0, 0, w / total)


def _quotient_gradients(dt: Array, w: Array) -> Array:
    total = w.sum(axis=-1, keepdims=True)
    mean = (dt * _quotients(w)).sum(axis=-1, keepdims=True)
    return np.where(total == 0, 0, (dt - mean) / total)


def top_k(x: Array, k: int, axis: int = -1) -> tuple[Array, None]:
    """The values, which are exact."""
    return definition.top_k(x, k, axis)[0].astype(_WIDE), None


def renormalize(w: Array, axis: int = -1) -> Array:
    """The elements of an axis divided by their sum."""
    with np.errstate(all="ignore"):
        return np.moveaxis(_quotients(np.moveaxis(w.astype(_WIDE), axis, -1)), -1, axis)


def renormalize_backward(dt: Array, w: Array, axis: int = -1) -> Array:
    """The gradient of renormalize."""
    with np.errstate(all="ignore"):
        moved = (np.moveaxis(a.astype(_WIDE), axis, -1) for a in (dt, w))
        return np.moveaxis(_quotient_gradients(*moved), -1, axis)


def _factor(scale: float, dtype: Any) -> Any:
    return _WIDE(work_dtype(dtype)(scale))


def moe_router(logits: Array, k: int, bias: Any = None, scale: float = 1.0, **options: Any) -> tuple[Array, None]:
    """The weights of the experts that the definition chooses."""
    experts = definition.moe_router(logits, k, bias=bias, **options)[1]
    with np.errstate(all="ignore"):
        w = np.take_along_axis(scores(logits, options.get("scoring", "softmax")), experts, -1)
        w = _quotients(w) if options.get("renormalize") else w
        return w * _factor(scale, logits.dtype), None


def moe_router_backward(
    dweights: Array,
    logits: Array,
    experts: Array,
    scoring: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
    **options: Any,
) -> Array:
    """The gradient of the logits."""
    experts = experts.astype(np.int64)
    with np.errstate(all="ignore"):
        s = scores(logits, scoring)
        g = dweights.astype(_WIDE) * _factor(scale, logits.dtype)
        if renormalize:
            g = _quotient_gradients(g, np.take_along_axis(s, experts, -1))
        dy = np.zeros(s.shape, _WIDE)
        np.put_along_axis(dy, experts, g, -1)
        if scoring == "softmax":
            return np.asarray(s * (dy - (s * dy).sum(axis=-1, keepdims=True)))
        return np.where(chosen(experts, s.shape), dy * s * (1 - s), 0)


def expert_counts(experts: Array, num_experts: int) -> None:
    """Integers."""


def expert_permutation(experts: Array, num_experts: int) -> tuple[None, None]:
    """Integers."""
    return None, None


def moe_permute(x: Array, order: Array, k: int) -> Array:
    """Rows as they are."""
    return np.asarray(x[order // k], _WIDE)


def moe_permute_backward(dy: Array, order: Array, k: int) -> Array:
    """The sum of a token's k rows."""
    with np.errstate(all="ignore"):
        return np.asarray(dy.astype(_WIDE)[definition.positions(order, k)].sum(axis=1))


def moe_combine(expert_out: Array, weights: Array, order: Array) -> Array:
    """The weighted sum of a token's k rows."""
    with np.errstate(all="ignore"):
        rows = expert_out.astype(_WIDE)[definition.positions(order, weights.shape[1])]
        return np.asarray((weights.astype(_WIDE)[..., None] * rows).sum(axis=1))


def moe_combine_backward(dy: Array, expert_out: Array, weights: Array, order: Array) -> tuple[Array, Array]:
    """The gradients of the experts' rows and of the weights."""
    positions = definition.positions(order, weights.shape[1])
    with np.errstate(all="ignore"):
        g = dy.astype(_WIDE)[:, None, :]
        first = np.empty(expert_out.shape, _WIDE)
        first[positions] = weights.astype(_WIDE)[..., None] * g
        return first, (g * expert_out.astype(_WIDE)[positions]).sum(axis=-1)


@definition.of_members
def load_balancing_loss(probabilities: Array, experts: Array) -> Array:
    """E Σ f P."""
    n = probabilities.shape[-1]
    with np.errstate(all="ignore"):
        shares = definition.expert_counts(experts, n).astype(_WIDE) / _WIDE(experts.size)
        return np.asarray(n * (shares * probabilities.astype(_WIDE).reshape(-1, n).mean(axis=0)).sum())


@definition.of_members
def load_balancing_loss_backward(dloss: Array, experts: Array, shape: tuple[int, ...], dtype: str) -> Array:
    """The same row for every token."""
    with np.errstate(all="ignore"):
        shares = definition.expert_counts(experts, shape[-1]).astype(_WIDE) / _WIDE(experts.size)
        return np.broadcast_to(dloss.astype(_WIDE) * shape[-1] * shares / np.prod(shape[:-1], dtype=_WIDE), shape)


def logsumexp(x: Array) -> tuple[Array, Array]:
    """The logarithm of Σ exp over the last axis, and the same less the maximum."""
    with np.errstate(all="ignore"):
        wide = x.astype(_WIDE)
        m = wide.max(axis=-1)
        # Without the largest term, whose 1 would cover the others.
        rest = np.sort(np.exp(wide - m[..., None]), axis=-1)[..., :-1].sum(axis=-1)
        log = np.log1p(rest)
        return np.where(np.isfinite(m), m + log, m), np.where(np.isfinite(m), log, 0)


@definition.of_members
def router_z_loss(logits: Array) -> Array:
    """The mean of the squared logsumexp."""
    with np.errstate(all="ignore"):
        return np.asarray((logsumexp(logits)[0] ** 2).mean())


@definition.of_members
def router_z_loss_backward(dloss: Array, logits: Array) -> Array:
    """Its gradient."""
    with np.errstate(all="ignore"):
        z = logsumexp(logits)[0]
        return (2 * z * dloss.astype(_WIDE) / z.size)[..., None] * softmax_family.oracle_softmax(logits)
