"""The router family in NumPy: the definition that every kernel returns bit for bit, and whose oracle is `oracle.py`.

Everything is computed in the work type (rule 1) and rounded to the storage type once; Σ is the order-free sum of rule
4. s are the scores of a token's experts, w the weights of the k chosen ones.

    top_k                 descending, a NaN first, -0 = +0, of equal elements the lower index first
    moe_router            s = softmax or sigmoid of the widened logits, c = s or RN(s + bias); the k largest c, as top_k
                          orders them, among the group_k groups with the largest RN(sum of their two largest c);
                          w = s there, renormalized if asked for, times scale if that is not 1
    moe_router_backward   the softmax's or sigmoid's gradient of the weights' gradient, scattered among zeros
    renormalize           t_i = RN(w_i / S), S = Σ w_i; 0 where S is 0
    renormalize_backward  dw_i = RN(RN(dt_i - Σ RN(dt_j t_j)) / S); 0 where S is 0
    moe_combine           y_d = Σ_i RN(w_i o_id) over the k rows o of a token
    moe_combine_backward  do_id = RN(w_i dy_d), dw_i = Σ_d RN(dy_d o_id)
    load_balancing_loss   RN(E Σ_e RN(f_e P_e)), f_e = RN(count_e / (T k)), P_e = RN(Σ_t p_te / T)
    router_z_loss         RN(Σ_t RN(lse_t lse_t) / T), lse_t = log Σ_e exp(x_te)
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.elementwise import reference as elementwise
from isograd.numerics import reference as ref
from isograd.ops.softmax import reference as softmax_family
from isograd.rows.reference import log_sum

Array = NDArray[Any]


def of_members(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function for a batch too: with `batched` the arrays' first dimension counts problems."""

    @functools.wraps(function)
    def computed(*first: Any, batched: bool = False, **inputs: Any) -> Any:
        if not batched:
            return function(*first, **inputs)
        if "shape" in inputs:
            inputs |= {"shape": inputs["shape"][1:]}
        arrays = {key: value for key, value in inputs.items() if isinstance(value, np.ndarray)}
        size = len(next(iter(arrays.values())))
        if size == 0:  # as many of what one problem has
            one = function(*first, **inputs | {key: np.zeros(a.shape[1:], a.dtype) for key, a in arrays.items()})
            return np.asarray(one)[None][:0]
        return np.stack([function(*first, **inputs | {key: a[i] for key, a in arrays.items()}) for i in range(size)])

    return computed


# --- top_k -----------------------------------------------------------------------------------------------------------
def selection_key(x: Array) -> Array:
    """Integers in the order of top_k: those of rule 3, but equal for the two zeros."""
    v = ref.widen(x) + ref.work_dtype(x.dtype)(0)
    bits = v.view(ref.FORMATS[v.dtype].integer).astype(np.int64)
    mask = np.int64(0x7FFFFFFF if v.dtype == np.float32 else 0x7FFFFFFFFFFFFFFF)
    return np.where(np.isnan(v), mask, bits ^ ((bits >> 63) & mask))


def _first(key: Array, k: int) -> Array:
    """Indices of the k largest keys of the last axis, of equal ones the lower first."""
    return np.argsort(~key, axis=-1, kind="stable")[..., :k].astype(np.int64)


def top_k(x: Array, k: int, axis: int = -1) -> tuple[Array, Array]:
    """The k first elements of an axis in descending order, with their stored bits, and their indices."""
    indices = np.moveaxis(_first(selection_key(np.moveaxis(x, axis, -1)), k), -1, axis)
    return np.take_along_axis(x, indices, axis), indices


def top_k_backward(dv: Array, indices: Array, shape: tuple[int, ...], axis: int = -1) -> Array:
    """The gradient of the values of top_k among zeros; a -0 becomes +0, as in a sum."""
    dx = np.zeros(shape, dv.dtype)
    np.put_along_axis(dx, indices, ref.narrow(dv + dv.dtype.type(0), dv.dtype), axis)
    return dx


# --- the router ------------------------------------------------------------------------------------------------------
def scores(logits: Array, scoring: str = "softmax") -> Array:
    """The scores of all experts in the work type."""
    x = ref.widen(logits)
    return softmax_family.softmax(x) if scoring == "softmax" else elementwise.sigmoid(x)


def choose(s: Array, k: int, bias: Array | None = None, groups: int = 1, group_k: int = 1) -> Array:
    """The experts with the k largest selection scores."""
    with np.errstate(all="ignore"):
        c = s if bias is None else s + bias
        key = selection_key(c)
        if groups > 1:
            members = c.reshape(*c.shape[:-1], groups, c.shape[-1] // groups)
            best = top_k(members, min(members.shape[-1], 2))[0]
            total = best[..., 0] + best[..., 1] if best.shape[-1] > 1 else best[..., 0]
            kept = np.zeros(total.shape, bool)
            np.put_along_axis(kept, top_k(total, group_k)[1], True, -1)
            key = np.where(np.repeat(kept, members.shape[-1], axis=-1), key, np.iinfo(np.int64).min)
        return _first(key, k)


def moe_router(
    logits: Array,
    k: int,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    bias: Array | None = None,
    groups: int = 1,
    group_k: int = 1,
    scale: float = 1.0,
) -> tuple[Array, Array]:
    """The weights of a token's experts, in the work type, and their indices."""
    s = scores(logits, scoring)
    experts = choose(s, k, bias, groups, group_k)
    weights = np.take_along_axis(s, experts, -1)
    if renormalize:
        weights = _renormalize(weights)
    if scale != 1:
        weights = ref.narrow(weights * s.dtype.type(scale + 0.0), s.dtype)
    return weights, experts


def moe_router_backward(
    dweights: Array,
    logits: Array,
    experts: Array,
    *,
    scoring: str = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
) -> Array:
    """The gradient of the logits. Should an expert occur twice in a token, its last occurrence counts."""
    s = scores(logits, scoring)
    with np.errstate(all="ignore"):
        g = dweights * s.dtype.type(scale + 0.0) if scale != 1 else dweights
        if renormalize:
            g = _renormalize_backward(g, np.take_along_axis(s, experts, -1))
        chosen, dy = np.zeros(s.shape, bool), np.zeros_like(s)
        for i in range(experts.shape[-1]):
            where = experts[..., i, None]
            np.put_along_axis(chosen, where, True, -1)
            np.put_along_axis(dy, where, g[..., i, None], -1)
        if scoring == "softmax":
            return ref.narrow(softmax_family.softmax_backward(dy, s), logits.dtype)
        one, zero = s.dtype.type(1), s.dtype.type(0)
        return ref.narrow(np.where(chosen, (dy * s) * (one - s), zero), logits.dtype)


# --- renormalize -----------------------------------------------------------------------------------------------------
def _sums(p: Array) -> Array:
    """Order-free sums over the last axis, which stays with size 1."""
    rows = p.reshape(math.prod(p.shape[:-1]), p.shape[-1])
    return ref.order_free_sum(rows).reshape(*p.shape[:-1], 1)


def _renormalize(w: Array) -> Array:
    """Over the last axis, in the work type."""
    with np.errstate(all="ignore"):
        total = _sums(w)
        return ref.narrow(np.where(total == 0, total.dtype.type(0), w / total), w.dtype)


def _renormalize_backward(dt: Array, w: Array) -> Array:
    with np.errstate(all="ignore"):
        total = _sums(w)
        mean = _sums(dt * _renormalize(w))
        return ref.narrow(np.where(total == 0, total.dtype.type(0), (dt - mean) / total), w.dtype)


def renormalize(w: Array, axis: int = -1) -> Array:
    """The elements of an axis divided by their sum."""
    return np.moveaxis(ref.narrow(_renormalize(np.moveaxis(ref.widen(w), axis, -1)), w.dtype), -1, axis)


def renormalize_backward(dt: Array, w: Array, axis: int = -1) -> Array:
    """The gradient of w for the gradient of renormalize(w)."""
    moved = (np.moveaxis(ref.widen(a), axis, -1) for a in (dt, w))
    return np.moveaxis(ref.narrow(_renormalize_backward(*moved), w.dtype), -1, axis)


# --- permutation to contiguous experts -------------------------------------------------------------------------------
def expert_counts(experts: Array, num_experts: int) -> Array:
    """How many entries each expert has."""
    return np.bincount(experts.reshape(-1).astype(np.int64), minlength=num_experts).astype(np.int64)


def expert_permutation(experts: Array, num_experts: int) -> tuple[Array, Array]:
    """The entries' positions sorted by expert, in their own order for each, and where each expert's begin."""
    order = np.argsort(experts.reshape(-1), kind="stable").astype(np.int64)
    ends = np.cumsum(expert_counts(experts, num_experts), dtype=np.int64)
    return order, np.concatenate([np.zeros(1, np.int64), ends])


def positions(order: Array, k: int) -> Array:
    """Where each of a token's k entries went: the inverse of `order`."""
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    return inverse.reshape(-1, k)


def moe_permute(x: Array, order: Array, k: int) -> Array:
    """The row of every entry's token, in the order of the experts."""
    return np.asarray(x[order // k])


def moe_permute_backward(dy: Array, order: Array, k: int) -> Array:
    """The sum of a token's k rows."""
    terms = np.moveaxis(ref.widen(dy)[positions(order, k)], 1, -1)
    return ref.narrow(_sums(terms)[..., 0], dy.dtype)


def moe_combine(expert_out: Array, weights: Array, order: Array) -> Array:
    """The weighted sum of a token's k rows."""
    with np.errstate(all="ignore"):
        rows = ref.widen(expert_out)[positions(order, weights.shape[1])]
        terms = np.moveaxis(weights[..., None] * rows, 1, -1)
        return ref.narrow(_sums(terms)[..., 0], expert_out.dtype)


def moe_combine_backward(dy: Array, expert_out: Array, weights: Array, order: Array) -> tuple[Array, Array]:
    """The gradients of the experts' rows and of the weights."""
    where = positions(order, weights.shape[1])
    with np.errstate(all="ignore"):
        g = ref.widen(dy)[:, None, :]
        d_expert_out = np.empty_like(expert_out)
        d_expert_out[where] = ref.narrow(weights[..., None] * g, expert_out.dtype)
        dweights = _sums(g * ref.widen(expert_out)[where])[..., 0]
    return d_expert_out, ref.narrow(dweights, weights.dtype)


# --- auxiliary losses ------------------------------------------------------------------------------------------------
def _shares(experts: Array, num_experts: int, of: Any) -> Array:
    """f: the share of the entries that each expert has."""
    with np.errstate(all="ignore"):
        return np.asarray(expert_counts(experts, num_experts).astype(of) / of(experts.size))


@of_members
def load_balancing_loss(probabilities: Array, experts: Array) -> Array:
    """The loss of Switch Transformers, whose least value 1 stands for an even load; rank 0, in the work type."""
    p = ref.widen(probabilities).reshape(-1, probabilities.shape[-1])
    of = p.dtype.type
    with np.errstate(all="ignore"):
        mean = ref.order_free_sum(np.ascontiguousarray(p.T)) / of(len(p))
        total = ref.order_free_sum((_shares(experts, p.shape[1], of) * mean)[None])
        return ref.narrow(of(p.shape[1]) * total, p.dtype).reshape(())


@of_members
def load_balancing_loss_backward(dloss: Array, experts: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """RN(RN(RN(dloss E) f_e) / T), the same for every token; the choice of the experts has no gradient."""
    of = ref.work_dtype(dtype)
    with np.errstate(all="ignore"):
        row = ((dloss * of(shape[-1])) * _shares(experts, shape[-1], of)) / of(np.prod(shape[:-1], dtype=np.int64))
        return np.broadcast_to(ref.narrow(row, dtype), shape).copy()


def logsumexp(x: Array) -> Array:
    """The logarithm of Σ exp(x) over the last axis of a 2-D work-type array, from the parts that log_softmax subtracts.

    NaN for a row with one, else +inf for a row with one, -inf for a row of these alone.
    """
    m = ref.row_maximum(x)
    valid = np.isfinite(m)
    with np.errstate(all="ignore"):
        finite, top = np.where(valid[:, None], x, x.dtype.type(0)), np.where(valid, m, x.dtype.type(0))
        high, low = log_sum(finite, top[:, None], False)
        top, middle = ref.two_sum(top, high)
        return ref.narrow(np.where(valid, top + (middle + low), m), x.dtype)


@of_members
def router_z_loss(logits: Array) -> Array:
    """The mean over tokens of the squared logsumexp of the widened logits; rank 0, in the work type."""
    x = ref.widen(logits).reshape(-1, logits.shape[-1])
    of = x.dtype.type
    with np.errstate(all="ignore"):
        z = logsumexp(x)
        return ref.narrow(ref.order_free_sum((z * z)[None]) / of(len(x)), x.dtype).reshape(())


@of_members
def router_z_loss_backward(dloss: Array, logits: Array) -> Array:
    """dx_te = RN(RN(RN(2 lse_t dloss) / T) p_te), p the softmax of the widened logits."""
    x = ref.widen(logits).reshape(-1, logits.shape[-1])
    of = x.dtype.type
    with np.errstate(all="ignore"):
        factor = ((of(2) * logsumexp(x)) * dloss) / of(len(x))
        return ref.narrow(factor[:, None] * softmax_family.softmax(x), logits.dtype).reshape(logits.shape)
