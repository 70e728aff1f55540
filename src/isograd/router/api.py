"""What a user calls to route tokens to experts. NumPy arrays, tensors and arrays with DLPack in, the same kind out.

All operations take float16, bfloat16, float32 and float64 in any strides and return the same bits everywhere; where a
plan for what is asked exists, its `precision_guarantee.error_bound` evaluates the bound. They raise InvalidProblemError
for arguments that do not fit together, UnsupportedError for other dtypes, DeviceMismatchError for arrays on different
devices, and on the CPU IndexOutOfRangeError for an index out of range, before anything is written.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from isograd.core import arrays, functional
from isograd.core.checks import checked_shape
from isograd.errors import InvalidProblemError
from isograd.router import descriptors as d
from isograd.router import loss_descriptors, plans
from isograd.router.results import CombineGradients, Permutation, Routing, TopK
from isograd.typing import ArrayT, DataT, DType, RouterOptions, ScalarT, Scoring, SupportsDLPack

if TYPE_CHECKING:
    from isograd.tape.variable import Variable


def _restored(restore: Any, results: Any) -> Any:
    return tuple(restore(result) for result in results)


def _rank(operation: str, argument: str, array: Any, rank: int) -> tuple[int, ...]:
    shape = tuple(array.shape)
    if len(shape) != rank:
        raise InvalidProblemError(f"{operation}: {argument} has shape {shape}; expected {rank} dimensions")
    return shape


def _last(operation: str, argument: str, array: Any) -> int:
    """The size of the last axis."""
    if not array.shape:
        raise InvalidProblemError(f"{operation}: {argument} has rank 0; expected at least one dimension")
    return int(array.shape[-1])


# --- top_k and renormalize -------------------------------------------------------------------------------------------
@overload
def top_k(x: NDArray[ScalarT], k: int, axis: int = ...) -> TopK[NDArray[ScalarT], NDArray[np.int64]]: ...
@overload
def top_k(x: Variable, k: int, axis: int = ...) -> TopK[Variable, NDArray[np.int64]]: ...
@overload
def top_k(x: DataT, k: int, axis: int = ...) -> TopK[DataT, DataT]: ...
def top_k(x: Any, k: int, axis: int = -1) -> TopK[Any, Any]:
    """The k largest elements along an axis in descending order: (values, indices).

    x: rank 1 to 8, or a tape variable. k: 1 to the size of the axis. values have x's dtype and exactly its bits,
    indices are int64; both have k for the size of the axis. A NaN counts as larger than everything, -0 as equal to +0,
    and of equal elements the one with the lower index comes first. The gradient of the values is
    `take_along_axis_backward(dvalues, indices, shape, axis, unique_indices=True)`.

    Raises InvalidProblemError for arguments that do not fit together, UnsupportedError for another dtype,
    DeviceMismatchError for arrays on different devices.
    """
    tape = functional.tape_of(x)
    if tape is not None:
        return TopK(*tape.top_k(x, k, axis))
    (x,), restore = functional.inputs("top_k", x=x)
    device, dtype = arrays.describe(x, "top_k", "x")
    k, axis = (functional.integer("top_k", name, value) for name, value in (("k", k), ("axis", axis)))
    plan = functional.plan(plans.TopKPlan, d.TopKDescriptor(tuple(x.shape), k, dtype, axis), device)
    shape = plan.descriptor.operands()[-1].shape
    values, indices = functional.empty(shape, dtype, x), functional.empty(shape, "int64", x)
    return TopK(*_restored(restore, functional.run(plan, x=x, values=values, indices=indices)))


@overload
def renormalize(w: NDArray[ScalarT], axis: int = ...) -> NDArray[ScalarT]: ...
@overload
def renormalize(w: ArrayT, axis: int = ...) -> ArrayT: ...
def renormalize(w: Any, axis: int = -1) -> Any:
    """The elements along an axis divided by their sum: `t_i = w_i / Σ_j w_j`, 0 where the sum is 0.

    w: rank 1 to 8, or a tape variable; t has its shape and dtype. The sum is order-free.

    Errors as for `top_k`.
    """
    tape = functional.tape_of(w)
    if tape is not None:
        return tape.renormalize(w, axis)
    (w,), restore = functional.inputs("renormalize", w=w)
    device, dtype = arrays.describe(w, "renormalize", "w")
    axis = functional.integer("renormalize", "axis", axis)
    plan = functional.plan(plans.RenormalizePlan, d.RenormalizeDescriptor(tuple(w.shape), dtype, axis), device)
    return restore(functional.run(plan, w=w, t=functional.empty(tuple(w.shape), dtype, w)))


@overload
def renormalize_backward(dt: NDArray[ScalarT], w: NDArray[ScalarT], axis: int = ...) -> NDArray[ScalarT]: ...
@overload
def renormalize_backward(dt: DataT, w: DataT, axis: int = ...) -> DataT: ...
def renormalize_backward(dt: Any, w: Any, axis: int = -1) -> Any:
    """The gradient of `renormalize`: `dw_i = (dt_i - Σ_j dt_j t_j) / Σ_j w_j`, 0 where the sum is 0.

    dt: gradient of the result; w: what was renormalized. Both of one shape and dtype, which dw has too.

    Errors as for `top_k`.
    """
    (dt, w), restore = functional.inputs("renormalize_backward", dt=dt, w=w)
    device, dtype = arrays.describe(w, "renormalize_backward", "w")
    axis = functional.integer("renormalize_backward", "axis", axis)
    descriptor = d.RenormalizeBackwardDescriptor(tuple(w.shape), dtype, axis)
    plan = functional.plan(plans.RenormalizeBackwardPlan, descriptor, device)
    return restore(functional.run(plan, dt=dt, w=w, dw=functional.empty(tuple(w.shape), dtype, w)))


# --- the router ------------------------------------------------------------------------------------------------------
@overload
def moe_router(
    logits: NDArray[Any], k: int, **options: Unpack[RouterOptions]
) -> Routing[NDArray[Any], NDArray[np.int64]]: ...
@overload
def moe_router(logits: Variable, k: int, **options: Unpack[RouterOptions]) -> Routing[Variable, NDArray[np.int64]]: ...
@overload
def moe_router(logits: DataT, k: int, **options: Unpack[RouterOptions]) -> Routing[DataT, DataT]: ...
def moe_router(
    logits: Any,
    k: int,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    bias: Any = None,
    groups: int = 1,
    group_k: int = 1,
    scale: float = 1.0,
) -> Routing[Any, Any]:
    """Choose the k experts of every token: (weights, experts).

    logits: [..., E], or a tape variable. The scores s are the softmax or the sigmoid of the logits, computed in the
    work type (float32 for 16 bits). The experts are those with the largest `s + bias`, ordered as in `top_k`; their
    weights are s, divided by their sum if `renormalize`, times `scale`.

    bias: [E] in the work type, for the choice alone; it gets no gradient. groups, group_k: the experts form `groups`
    neighbouring groups of one size, and a token chooses among the `group_k` groups whose two best experts have the
    largest sum. weights: [..., k] in the work type; experts: [..., k], int64.

    The same bits as softmax or sigmoid, top_k, take_along_axis and renormalize one after the other.

    Errors as for `top_k`.
    """
    tape = functional.tape_of(logits)
    options: dict[str, Any] = {
        "scoring": scoring,
        "renormalize": renormalize,
        "groups": groups,
        "group_k": group_k,
        "scale": scale,
    }
    if tape is not None:
        return Routing(*tape.moe_router(logits, k, bias=bias, **options))
    given = {"logits": logits} if bias is None else {"logits": logits, "bias": bias}
    taken, restore = functional.inputs("moe_router", **given)
    logits = taken[0]
    device, dtype = arrays.describe(logits, "moe_router", "logits")
    for name in ("groups", "group_k"):
        options[name] = functional.integer("moe_router", name, options[name])
    k = functional.integer("moe_router", "k", k)
    d.checked_options("moe_router", scoring, renormalize, scale)
    descriptor = d.MoeRouterDescriptor(tuple(logits.shape), k, dtype, bias=bias is not None, **options)
    plan = functional.plan(plans.MoeRouterPlan, descriptor, device)
    shape = (*logits.shape[:-1], k)
    results = functional.run(
        plan,
        **dict(zip(given, taken, strict=True)),
        weights=functional.empty(shape, d.work_type(dtype), logits),
        experts=functional.empty(shape, "int64", logits),
    )
    return Routing(*_restored(restore, results))


@overload
def moe_router_backward(
    dweights: NDArray[Any],
    logits: NDArray[ScalarT],
    experts: SupportsDLPack,
    *,
    scoring: Scoring = ...,
    renormalize: bool = ...,
    scale: float = ...,
) -> NDArray[ScalarT]: ...
@overload
def moe_router_backward(
    dweights: DataT,
    logits: DataT,
    experts: SupportsDLPack,
    *,
    scoring: Scoring = ...,
    renormalize: bool = ...,
    scale: float = ...,
) -> DataT: ...
def moe_router_backward(
    dweights: Any,
    logits: Any,
    experts: Any,
    *,
    scoring: Scoring = "softmax",
    renormalize: bool = False,
    scale: float = 1.0,
) -> Any:
    """The gradient of the logits from that of the weights of `moe_router`, whose scores are computed again.

    dweights: [..., k] in the work type; logits: [..., E]; experts: [..., k] as chosen, int32, int64 or uint32; the
    other arguments as given to `moe_router`. The result has the shape and dtype of the logits.
    A token's experts are distinct, as `moe_router` returns them; what one that occurs twice gets is not specified.

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    name = "moe_router_backward"
    (dweights, logits, experts), restore = functional.inputs(name, dweights=dweights, logits=logits, experts=experts)
    device, dtype = arrays.describe(logits, name, "logits")
    index_dtype = arrays.describe(experts, name, "experts", index=True)[1]
    d.checked_options(name, scoring, renormalize, scale)
    k, shape = _last(name, "experts", experts), tuple(logits.shape)
    descriptor = d.MoeRouterBackwardDescriptor(shape, k, dtype, scoring, renormalize, scale, index_dtype)
    plan = functional.plan(plans.MoeRouterBackwardPlan, descriptor, device)
    dlogits = functional.empty(shape, dtype, logits)
    return restore(functional.run(plan, dweights=dweights, logits=logits, experts=experts, dlogits=dlogits))


# --- permutation -----------------------------------------------------------------------------------------------------
@overload
def expert_counts(experts: NDArray[Any], num_experts: int) -> NDArray[np.int64]: ...
@overload
def expert_counts(experts: DataT, num_experts: int) -> DataT: ...
def expert_counts(experts: Any, num_experts: int) -> Any:
    """How many entries every expert has: [num_experts], int64.

    experts: int32, int64 or uint32 of any shape, each from 0 to num_experts - 1.

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    (experts,), restore = functional.inputs("expert_counts", experts=experts)
    device, dtype = arrays.describe(experts, "expert_counts", "experts", index=True)
    num_experts = functional.integer("expert_counts", "num_experts", num_experts)
    descriptor = d.ExpertCountsDescriptor(tuple(experts.shape), num_experts, dtype)
    plan = functional.plan(plans.ExpertCountsPlan, descriptor, device)
    return restore(functional.run(plan, experts=experts, counts=functional.empty((num_experts,), "int64", experts)))


@overload
def expert_permutation(experts: NDArray[Any], num_experts: int) -> Permutation[NDArray[np.int64]]: ...
@overload
def expert_permutation(experts: DataT, num_experts: int) -> Permutation[DataT]: ...
def expert_permutation(experts: Any, num_experts: int) -> Permutation[Any]:
    """Sort entries by expert: (order, offsets).

    experts: as for `expert_counts`; an entry is a position in it, counted flat. order: the entries in ascending order
    of their experts, those of one expert in their own order, int64. offsets: [num_experts + 1], int64: expert e has
    order[offsets[e]:offsets[e + 1]].

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    (experts,), restore = functional.inputs("expert_permutation", experts=experts)
    device, dtype = arrays.describe(experts, "expert_permutation", "experts", index=True)
    num_experts = functional.integer("expert_permutation", "num_experts", num_experts)
    shape = tuple(experts.shape)
    descriptor = d.ExpertPermutationDescriptor(shape, num_experts, dtype)
    plan = functional.plan(plans.ExpertPermutationPlan, descriptor, device)
    order = functional.empty((math.prod(shape),), "int64", experts)
    offsets = functional.empty((num_experts + 1,), "int64", experts)
    return Permutation(*_restored(restore, functional.run(plan, experts=experts, order=order, offsets=offsets)))


def _entries(operation: str, order: Any, k: int) -> int:
    """How many tokens an order stands for."""
    (count,) = _rank(operation, "order", order, 1)
    if k < 1 or count % k:
        raise InvalidProblemError(f"{operation}: k is {k}; expected a divisor of {count}, the size of order")
    return count // k


@overload
def moe_permute(x: NDArray[ScalarT], order: SupportsDLPack, k: int) -> NDArray[ScalarT]: ...
@overload
def moe_permute(x: ArrayT, order: SupportsDLPack, k: int) -> ArrayT: ...
def moe_permute(x: Any, order: Any, k: int) -> Any:
    """The tokens' rows in the order of the experts: `y[i] = x[order[i] // k]`, exactly their bits.

    x: [T, D], or a tape variable. order: [T k], int64, from `expert_permutation`. The result is [T k, D].

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    tape = functional.tape_of(x)
    if tape is not None:
        return tape.moe_permute(x, order, k)
    (x, order), restore = functional.inputs("moe_permute", x=x, order=order)
    device, dtype = arrays.describe(x, "moe_permute", "x")
    tokens, width = _rank("moe_permute", "x", x, 2)
    k = functional.integer("moe_permute", "k", k)
    plan = functional.plan(plans.MoePermutePlan, d.MoePermuteDescriptor(tokens, k, width, dtype), device)
    return restore(functional.run(plan, x=x, order=order, y=functional.empty((tokens * k, width), dtype, x)))


@overload
def moe_permute_backward(dy: NDArray[ScalarT], order: SupportsDLPack, k: int) -> NDArray[ScalarT]: ...
@overload
def moe_permute_backward(dy: DataT, order: SupportsDLPack, k: int) -> DataT: ...
def moe_permute_backward(dy: Any, order: Any, k: int) -> Any:
    """The gradient of `moe_permute`: the order-free sum of every token's k rows.

    dy: [T k, D]. order: [T k], int64, a permutation. The result is [T, D].

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    name = "moe_permute_backward"
    (dy, order), restore = functional.inputs(name, dy=dy, order=order)
    device, dtype = arrays.describe(dy, name, "dy")
    width = _rank(name, "dy", dy, 2)[1]
    k = functional.integer(name, "k", k)
    tokens = _entries(name, order, k)
    plan = functional.plan(
        plans.MoePermuteBackwardPlan, d.MoePermuteBackwardDescriptor(tokens, k, width, dtype), device
    )
    return restore(functional.run(plan, dy=dy, order=order, dx=functional.empty((tokens, width), dtype, dy)))


@overload
def moe_combine(expert_out: NDArray[ScalarT], weights: NDArray[Any], order: SupportsDLPack) -> NDArray[ScalarT]: ...
@overload
def moe_combine(expert_out: Variable, weights: Variable | NDArray[Any], order: SupportsDLPack) -> Variable: ...
@overload
def moe_combine(expert_out: NDArray[Any], weights: Variable, order: SupportsDLPack) -> Variable: ...
@overload
def moe_combine(expert_out: DataT, weights: DataT, order: SupportsDLPack) -> DataT: ...
def moe_combine(expert_out: Any, weights: Any, order: Any) -> Any:
    """The weighted sum of every token's k rows: `y[t] = Σ_i weights[t, i] · row of entry t k + i`, order-free.

    expert_out: [T k, D] in the order of the experts, as `moe_permute` returns it. weights: [T, k] in the work type
    (float32 for 16 bits). Either or both may be tape variables. order: [T k], int64, a permutation. The result is [T,
    D].

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    name = "moe_combine"
    tape = functional.tape_of(expert_out, weights)
    if tape is not None:
        return tape.moe_combine(expert_out, weights, order)
    (expert_out, weights, order), restore = functional.inputs(name, expert_out=expert_out, weights=weights, order=order)
    device, dtype = arrays.describe(expert_out, name, "expert_out")
    width = _rank(name, "expert_out", expert_out, 2)[1]
    tokens, k = _rank(name, "weights", weights, 2)
    plan = functional.plan(plans.MoeCombinePlan, d.MoeCombineDescriptor(tokens, k, width, dtype), device)
    y = functional.empty((tokens, width), dtype, expert_out)
    return restore(functional.run(plan, expert_out=expert_out, weights=weights, order=order, y=y))


@overload
def moe_combine_backward(
    dy: NDArray[Any], expert_out: NDArray[Any], weights: NDArray[Any], order: SupportsDLPack
) -> CombineGradients[NDArray[Any]]: ...
@overload
def moe_combine_backward(
    dy: DataT, expert_out: DataT, weights: DataT, order: SupportsDLPack
) -> CombineGradients[DataT]: ...
def moe_combine_backward(dy: Any, expert_out: Any, weights: Any, order: Any) -> CombineGradients[Any]:
    """The gradients of `moe_combine`: (d_expert_out [T k, D], dweights [T, k]).

    dy: [T, D], gradient of the result; the other arguments as given to `moe_combine`.

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    name = "moe_combine_backward"
    taken, restore = functional.inputs(name, dy=dy, expert_out=expert_out, weights=weights, order=order)
    dy, expert_out, weights, order = taken
    device, dtype = arrays.describe(expert_out, name, "expert_out")
    width = _rank(name, "expert_out", expert_out, 2)[1]
    tokens, k = _rank(name, "weights", weights, 2)
    descriptor = d.MoeCombineBackwardDescriptor(tokens, k, width, dtype)
    results = functional.run(
        functional.plan(plans.MoeCombineBackwardPlan, descriptor, device),
        dy=dy,
        expert_out=expert_out,
        weights=weights,
        order=order,
        d_expert_out=functional.empty((tokens * k, width), dtype, expert_out),
        dweights=functional.empty((tokens, k), d.work_type(dtype), expert_out),
    )
    return CombineGradients(*_restored(restore, results))


# --- auxiliary losses ------------------------------------------------------------------------------------------------
@overload
def load_balancing_loss(
    probabilities: Variable, experts: SupportsDLPack, num_experts: int | None = ...
) -> Variable: ...
@overload
def load_balancing_loss(probabilities: DataT, experts: SupportsDLPack, num_experts: int | None = ...) -> DataT: ...
def load_balancing_loss(probabilities: Any, experts: Any, num_experts: int | None = None) -> Any:
    """The load-balancing loss `E Σ_e f_e P_e`, 1 for an even load (Fedus, Zoph and Shazeer 2022).

    probabilities: [..., E], or a tape variable: the router's scores of all experts. experts: [..., k], int32, int64 or
    uint32: the chosen ones. num_experts: E, if it is to be checked. f_e is the share of the entries that chose e, P_e
    the mean of its probability over the tokens; all sums are order-free. The loss is a scalar in the work type.

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    name = "load_balancing_loss"
    tape = functional.tape_of(probabilities)
    if tape is not None:
        return tape.load_balancing_loss(probabilities, experts, num_experts)
    (probabilities, experts), restore = functional.inputs(name, probabilities=probabilities, experts=experts)
    device, dtype = arrays.describe(probabilities, name, "probabilities")
    index_dtype = arrays.describe(experts, name, "experts", index=True)[1]
    last = _last(name, "probabilities", probabilities)
    if num_experts is not None and functional.integer(name, "num_experts", num_experts) != last:
        raise InvalidProblemError(f"{name}: num_experts is {num_experts}; probabilities have {last} columns")
    k = _last(name, "experts", experts)
    descriptor = loss_descriptors.LoadBalancingLossDescriptor(tuple(probabilities.shape), k, dtype, index_dtype)
    plan = functional.plan(plans.LoadBalancingLossPlan, descriptor, device)
    loss = functional.empty((), d.work_type(dtype), probabilities)
    return restore(functional.run(plan, probabilities=probabilities, experts=experts, loss=loss))


@overload
def load_balancing_loss_backward(
    dloss: NDArray[Any] | np.number[Any], experts: NDArray[Any], shape: tuple[int, ...], dtype: DType | None = ...
) -> NDArray[Any]: ...
@overload
def load_balancing_loss_backward(
    dloss: DataT, experts: SupportsDLPack, shape: tuple[int, ...], dtype: DType | None = ...
) -> DataT: ...
def load_balancing_loss_backward(dloss: Any, experts: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """The gradient of `load_balancing_loss` with respect to the probabilities: `dloss E f_e / T` for every token.

    dloss: a scalar in the work type. experts: as given to the loss. shape: of the probabilities. dtype: the name of
    their type, by default dloss's.

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    name = "load_balancing_loss_backward"
    (dloss, experts), restore = functional.inputs(name, dloss=dloss, experts=experts)
    device, work = arrays.describe(dloss, name, "dloss")
    index_dtype = arrays.describe(experts, name, "experts", index=True)[1]
    dtype = work if dtype is None else dtype
    sizes = checked_shape(name, "shape", shape)
    k = _last(name, "experts", experts)
    descriptor = loss_descriptors.LoadBalancingLossBackwardDescriptor(sizes, k, dtype, index_dtype)
    plan = functional.plan(plans.LoadBalancingLossBackwardPlan, descriptor, device)
    dprobabilities = functional.empty(sizes, dtype, dloss)
    return restore(functional.run(plan, dloss=dloss, experts=experts, dprobabilities=dprobabilities))


@overload
def router_z_loss(logits: Variable) -> Variable: ...
@overload
def router_z_loss(logits: DataT) -> DataT: ...
def router_z_loss(logits: Any) -> Any:
    """The mean over tokens of the squared logarithm of Σ_e exp(logits_e) (Zoph et al. 2022).

    logits: [..., E], or a tape variable; computed in the work type. The mean is order-free and a scalar in the work
    type.

    Errors as for `top_k`.
    """
    tape = functional.tape_of(logits)
    if tape is not None:
        return tape.router_z_loss(logits)
    (logits,), restore = functional.inputs("router_z_loss", logits=logits)
    device, dtype = arrays.describe(logits, "router_z_loss", "logits")
    descriptor = loss_descriptors.RouterZLossDescriptor(tuple(logits.shape), dtype)
    plan = functional.plan(plans.RouterZLossPlan, descriptor, device)
    return restore(functional.run(plan, logits=logits, loss=functional.empty((), d.work_type(dtype), logits)))


@overload
def router_z_loss_backward(dloss: NDArray[Any] | np.number[Any], logits: NDArray[ScalarT]) -> NDArray[ScalarT]: ...
@overload
def router_z_loss_backward(dloss: SupportsDLPack, logits: DataT) -> DataT: ...
def router_z_loss_backward(dloss: Any, logits: Any) -> Any:
    """The gradient of `router_z_loss`: `2 lse dloss / T` times the softmax of the logits.

    dloss: a scalar in the work type. The result has the shape and dtype of the logits.

    Errors as for `top_k`.
    """
    (dloss, logits), restore = functional.inputs("router_z_loss_backward", dloss=dloss, logits=logits)
    device, dtype = arrays.describe(logits, "router_z_loss_backward", "logits")
    descriptor = loss_descriptors.RouterZLossBackwardDescriptor(tuple(logits.shape), dtype)
    plan = functional.plan(plans.RouterZLossBackwardPlan, descriptor, device)
    dlogits = functional.empty(tuple(logits.shape), dtype, logits)
    return restore(functional.run(plan, dloss=dloss, logits=logits, dlogits=dlogits))
