"""The router family, declared: choices, weights, the way to the experts and back, auxiliary losses."""

import math
from typing import Any

from isograd.core.attributes import Axis, Batched, Choice, DtypeOf, Factor, Flag, HasRows, Integer, SizeOf
from isograd.core.checks import INDEX_DTYPES, integer_within
from isograd.core.operands import AlongOrLike, Chosen, Like, Sized, Total
from isograd.core.operation import Operation
from isograd.errors import InvalidProblemError
from isograd.ops.router import bounds, oracle, reference


# --- top_k and renormalize -------------------------------------------------------------------------------------------
def _check_top_k(d: Any) -> None:
    integer_within(d.operation, "k", d.k, 1, d.shape[d.axis])


def _scattered(dvalues: Any, inputs: Any, outputs: Any, settings: Any) -> dict[str, Any]:
    shape, axis = inputs["x"].shape, settings["axis"]
    return {"x": reference.top_k_backward(dvalues, outputs["indices"], shape, axis)}


TOP_K = Operation(
    "top_k",
    attributes={"k": Integer(), "axis": Axis()},
    inputs={"x": Like()},
    outputs={"values": Chosen(count="k"), "indices": Chosen(count="k", dtype="int64")},
    reference=reference.top_k,
    oracle=oracle.top_k,
    bound=bounds.top_k,
    formula="0",
    check=_check_top_k,
    pullback=_scattered,
)
RENORMALIZE = Operation(
    "renormalize",
    attributes={"axis": Axis()},
    inputs={"w": Like()},
    outputs={"t": Like(over=("w",))},
    reference=reference.renormalize,
    oracle=oracle.renormalize,
    bound=bounds.renormalize,
    formula="|t|·(k·q/2/|S| + 2u) + η + ulp(t)/2",
    vjp="renormalize_backward",
    padding=0.0,
)
RENORMALIZE_BACKWARD = Operation(
    "renormalize_backward",
    attributes={"axis": Axis()},
    inputs={"dt": Like(), "w": Like()},
    outputs={"dw": Like(over=("dt", "w"))},
    reference=reference.renormalize_backward,
    oracle=oracle.renormalize_backward,
    bound=bounds.renormalize_backward,
    formula="(4u·(|dt| + Σ|dt·t|) + k·q/2)/|S| + |dw|·(k·q/2/|S| + 2u) + η + ulp(dw)/2",
)


# --- the router ------------------------------------------------------------------------------------------------------
def _check_router(d: Any) -> None:
    name, experts = d.operation, d.shape[-1]
    if experts % d.groups:
        raise InvalidProblemError(f"{name}: groups is {d.groups}; expected a divisor of {experts} experts")
    integer_within(name, "group_k", d.group_k, 1, d.groups)
    integer_within(name, "k", d.k, 1, experts // d.groups * d.group_k)


MOE_ROUTER = Operation(
    "moe_router",
    attributes={
        "k": Integer(),
        "scoring": Choice("softmax", "sigmoid"),
        "renormalize": Flag(),
        "groups": Integer(1, least=1),
        "group_k": Integer(1),
        "scale": Factor(),
        "bias_rows": HasRows("bias"),
    },
    inputs={"logits": Like(), "bias": AlongOrLike(optional=True, compute=True, rows="bias_rows")},
    outputs={"weights": Chosen(compute=True, count="k"), "experts": Chosen(dtype="int64", count="k")},
    reference=reference.moe_router,
    oracle=oracle.moe_router,
    bound=bounds.moe_router,
    formula="that of s: 2 ulp(s) + n·q·s or 4.2u·s + 2η; renormalized (error(w) + t·error(S))/S",
    vjp="moe_router_backward",
    check=_check_router,
)
MOE_ROUTER_BACKWARD = Operation(
    "moe_router_backward",
    attributes={
        "k": SizeOf("experts", required=True),
        "scoring": Choice("softmax", "sigmoid"),
        "renormalize": Flag(),
        "scale": Factor(),
        "index_dtype": DtypeOf("experts", "int64"),
    },
    inputs={
        "dweights": Chosen(compute=True, count="k"),
        "logits": Like(),
        "experts": Chosen(dtype="index_dtype", count="k"),
    },
    outputs={"dlogits": Like(over=("logits",))},
    reference=reference.moe_router_backward,
    oracle=oracle.moe_router_backward,
    bound=bounds.moe_router_backward,
    formula="4u·s·(|g| + Σ|s·g|) + error(s)·|g - Σs·g| + s·Σ(error(s)·|g| + s·error(g)) + ulp(dx)/2",
)


# --- the way to the experts and back ---------------------------------------------------------------------------------
def _each_expert(shape: Any, settings: Any) -> tuple[Any, ...]:
    return (settings["num_experts"],)


def _ends(shape: Any, settings: Any) -> tuple[Any, ...]:
    return (settings["num_experts"] + 1,)


def _entries(shape: Any, settings: Any) -> tuple[Any, ...]:
    return (math.prod(shape),)


EXPERT_COUNTS = Operation(
    "expert_counts",
    attributes={"num_experts": Integer(least=1)},
    inputs={"experts": Like()},
    outputs={"counts": Sized(dtype="int64", of=_each_expert)},
    reference=reference.expert_counts,
    oracle=oracle.expert_counts,
    bound=bounds.expert_counts,
    formula="0",
    dtypes=INDEX_DTYPES,
)
EXPERT_PERMUTATION = Operation(
    "expert_permutation",
    attributes={"num_experts": Integer(least=1)},
    inputs={"experts": Like()},
    outputs={"order": Sized(dtype="int64", of=_entries), "offsets": Sized(dtype="int64", of=_ends)},
    reference=reference.expert_permutation,
    oracle=oracle.expert_permutation,
    bound=bounds.expert_permutation,
    formula="0",
    dtypes=INDEX_DTYPES,
)


def _rows(shape: Any, settings: Any) -> tuple[Any, ...]:
    return shape[0] * settings["k"], shape[1]


def _order(shape: Any, settings: Any) -> tuple[Any, ...]:
    return (shape[0] * settings["k"],)


def _weights(shape: Any, settings: Any) -> tuple[Any, ...]:
    return shape[0], settings["k"]


def _rank(operation: str, argument: str, array: Any, rank: int) -> tuple[int, ...]:
    shape = tuple(array.shape)
    if len(shape) != rank:
        raise InvalidProblemError(f"{operation}: {argument} has shape {shape}; expected {rank} dimensions")
    return shape


def _of_tokens(operation: str, arrays: Any, settings: Any) -> tuple[Any, ...]:
    if (k := settings["k"]) < 1:
        raise InvalidProblemError(f"{operation}: k is {k}; accepted: at least 1, up to 2^56")
    return _rank(operation, "x", arrays["x"], 2)


def _of_entries(operation: str, arrays: Any, settings: Any) -> tuple[Any, ...]:
    (_, width), (count,) = _rank(operation, "dy", arrays["dy"], 2), _rank(operation, "order", arrays["order"], 1)
    if (k := settings["k"]) < 1 or count % k:
        raise InvalidProblemError(f"{operation}: k is {k}; expected a divisor of {count}, the size of order")
    return count // k, width


def _of_weights(operation: str, arrays: Any, settings: Any) -> tuple[Any, ...]:
    _, width = _rank(operation, "expert_out", arrays["expert_out"], 2)
    return _rank(operation, "weights", arrays["weights"], 2)[0], width


MOE_PERMUTE = Operation(
    "moe_permute",
    attributes={"k": Integer(least=1)},
    inputs={"x": Like(), "order": Sized(dtype="int64", of=_order)},
    outputs={"y": Sized(of=_rows)},
    reference=reference.moe_permute,
    oracle=oracle.moe_permute,
    bound=bounds.moe_permute,
    formula="0",
    vjp="moe_permute_backward",
    shape_of=_of_tokens,
    sizes=("tokens", "width"),
)
MOE_PERMUTE_BACKWARD = Operation(
    "moe_permute_backward",
    attributes={"k": Integer(least=1)},
    inputs={"dy": Sized(of=_rows), "order": Sized(dtype="int64", of=_order)},
    outputs={"dx": Like()},
    reference=reference.moe_permute_backward,
    oracle=oracle.moe_permute_backward,
    bound=bounds.moe_permute_backward,
    formula="k·q/2 + u·|dx| + ulp(dx)/2",
    problem="dy",
    shape_of=_of_entries,
    sizes=("tokens", "width"),
)
MOE_COMBINE = Operation(
    "moe_combine",
    attributes={"k": SizeOf("weights", repeated=True, required=True)},
    inputs={
        "expert_out": Sized(of=_rows),
        "weights": Sized(compute=True, of=_weights),
        "order": Sized(dtype="int64", of=_order),
    },
    outputs={"y": Like()},
    reference=reference.moe_combine,
    oracle=oracle.moe_combine,
    bound=bounds.moe_combine,
    formula="u·Σ|w·o| + k·(q/2 + η) + u·|y| + ulp(y)/2",
    vjp="moe_combine_backward",
    problem="expert_out",
    shape_of=_of_weights,
    sizes=("tokens", "width"),
)
MOE_COMBINE_BACKWARD = Operation(
    "moe_combine_backward",
    attributes={"k": SizeOf("weights", repeated=True, required=True)},
    inputs={
        "dy": Like(),
        "expert_out": Sized(of=_rows),
        "weights": Sized(compute=True, of=_weights),
        "order": Sized(dtype="int64", of=_order),
    },
    outputs={"d_expert_out": Sized(over=("expert_out",), of=_rows), "dweights": Sized(compute=True, of=_weights)},
    reference=reference.moe_combine_backward,
    oracle=oracle.moe_combine_backward,
    bound=bounds.moe_combine_backward,
    formula="u·|w·dy| + η + ulp/2; u·Σ|dy·o| + D·(q/2 + η) + u·|dw|",
    problem="expert_out",
    shape_of=_of_weights,
    sizes=("tokens", "width"),
)

# --- auxiliary losses ------------------------------------------------------------------------------------------------
_CHOICE = {
    "k": SizeOf("experts", repeated=True, required=True),
    "index_dtype": DtypeOf("experts", "int64"),
    "batched": Batched(),
}
LOAD_BALANCING_LOSS = Operation(
    "load_balancing_loss",
    attributes=_CHOICE,
    inputs={"probabilities": Like(), "experts": Chosen(dtype="index_dtype", count="k")},
    outputs={"loss": Total(compute=True)},
    reference=reference.load_balancing_loss,
    oracle=oracle.load_balancing_loss,
    bound=bounds.load_balancing_loss,
    formula="E·Σf·(T·q/2/T + 6u·P) + E·q/2 + 3u·loss",
    vjp="load_balancing_loss_backward",
    least_size=1,
)
LOAD_BALANCING_LOSS_BACKWARD = Operation(
    "load_balancing_loss_backward",
    attributes=_CHOICE,
    inputs={"dloss": Total(compute=True), "experts": Chosen(dtype="index_dtype", count="k")},
    outputs={"dprobabilities": Like()},
    reference=reference.load_balancing_loss_backward,
    oracle=oracle.load_balancing_loss_backward,
    bound=bounds.load_balancing_loss_backward,
    formula="6u·|dp| + 3η + ulp(dp)/2",
    problem="dprobabilities",
    least_size=1,
)
ROUTER_Z_LOSS = Operation(
    "router_z_loss",
    attributes={"batched": Batched()},
    inputs={"logits": Like()},
    outputs={"loss": Total(compute=True)},
    reference=reference.router_z_loss,
    oracle=oracle.router_z_loss,
    bound=bounds.router_z_loss,
    formula="mean(2·|lse|·error(lse) + u·lse²) + q/2 + 3u·loss, error(lse) = 3 ulp + n·q",
    vjp="router_z_loss_backward",
    least_size=1,
)
ROUTER_Z_LOSS_BACKWARD = Operation(
    "router_z_loss_backward",
    attributes={"batched": Batched()},
    inputs={"dloss": Total(compute=True), "logits": Like()},
    outputs={"dlogits": Like(over=("logits",))},
    reference=reference.router_z_loss_backward,
    oracle=oracle.router_z_loss_backward,
    bound=bounds.router_z_loss_backward,
    formula="|dx|·(error(lse)/|lse| + error(p)/p + 5u) + ulp(dx)/2",
    least_size=1,
)

TopKDescriptor, TopKPlan = TOP_K.descriptor_type, TOP_K.plan_type
RenormalizeDescriptor, RenormalizePlan = RENORMALIZE.descriptor_type, RENORMALIZE.plan_type
RenormalizeBackwardDescriptor = RENORMALIZE_BACKWARD.descriptor_type
RenormalizeBackwardPlan = RENORMALIZE_BACKWARD.plan_type
MoeRouterDescriptor, MoeRouterPlan = MOE_ROUTER.descriptor_type, MOE_ROUTER.plan_type
MoeRouterBackwardDescriptor, MoeRouterBackwardPlan = MOE_ROUTER_BACKWARD.descriptor_type, MOE_ROUTER_BACKWARD.plan_type
ExpertCountsDescriptor, ExpertCountsPlan = EXPERT_COUNTS.descriptor_type, EXPERT_COUNTS.plan_type
ExpertPermutationDescriptor, ExpertPermutationPlan = EXPERT_PERMUTATION.descriptor_type, EXPERT_PERMUTATION.plan_type
MoePermuteDescriptor, MoePermutePlan = MOE_PERMUTE.descriptor_type, MOE_PERMUTE.plan_type
MoePermuteBackwardDescriptor = MOE_PERMUTE_BACKWARD.descriptor_type
MoePermuteBackwardPlan = MOE_PERMUTE_BACKWARD.plan_type
MoeCombineDescriptor, MoeCombinePlan = MOE_COMBINE.descriptor_type, MOE_COMBINE.plan_type
MoeCombineBackwardDescriptor = MOE_COMBINE_BACKWARD.descriptor_type
MoeCombineBackwardPlan = MOE_COMBINE_BACKWARD.plan_type
LoadBalancingLossDescriptor, LoadBalancingLossPlan = LOAD_BALANCING_LOSS.descriptor_type, LOAD_BALANCING_LOSS.plan_type
LoadBalancingLossBackwardDescriptor = LOAD_BALANCING_LOSS_BACKWARD.descriptor_type
LoadBalancingLossBackwardPlan = LOAD_BALANCING_LOSS_BACKWARD.plan_type
RouterZLossDescriptor, RouterZLossPlan = ROUTER_Z_LOSS.descriptor_type, ROUTER_Z_LOSS.plan_type
RouterZLossBackwardDescriptor = ROUTER_Z_LOSS_BACKWARD.descriptor_type
RouterZLossBackwardPlan = ROUTER_Z_LOSS_BACKWARD.plan_type
