"""What a user calls to route tokens to experts. NumPy arrays, tensors and arrays with DLPack in, the same kind out.

All operations take float16, bfloat16, float32 and float64 in any strides and return the same bits everywhere; where a
plan for what is asked exists, its `precision_guarantee.error_bound` evaluates the bound. They raise InvalidProblemError
for arguments that do not fit together, UnsupportedError for other dtypes, DeviceMismatchError for arrays on different
devices, and on the CPU IndexOutOfRangeError for an index out of range, before anything is written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Unpack, overload

import numpy as np
from numpy.typing import NDArray

from isograd.core import call, functional
from isograd.errors import InvalidProblemError
from isograd.ops.router.operation import (
    EXPERT_COUNTS,
    EXPERT_PERMUTATION,
    LOAD_BALANCING_LOSS,
    LOAD_BALANCING_LOSS_BACKWARD,
    MOE_COMBINE,
    MOE_COMBINE_BACKWARD,
    MOE_PERMUTE,
    MOE_PERMUTE_BACKWARD,
    MOE_ROUTER,
    MOE_ROUTER_BACKWARD,
    RENORMALIZE,
    RENORMALIZE_BACKWARD,
    ROUTER_Z_LOSS,
    ROUTER_Z_LOSS_BACKWARD,
    TOP_K,
)
from isograd.ops.router.results import CombineGradients, Permutation, Routing, TopK
from isograd.typing import ArrayT, DataT, DType, RouterOptions, ScalarT, Scoring, SupportsDLPack

if TYPE_CHECKING:
    from isograd.tape.variable import Variable

_top_k = call.function(TOP_K)
_renormalize, _renormalize_backward = call.function(RENORMALIZE), call.function(RENORMALIZE_BACKWARD)
_router, _router_backward = call.function(MOE_ROUTER), call.function(MOE_ROUTER_BACKWARD)
_counts, _permutation = call.function(EXPERT_COUNTS), call.function(EXPERT_PERMUTATION)
_permute, _permute_backward = call.function(MOE_PERMUTE), call.function(MOE_PERMUTE_BACKWARD)
_combine, _combine_backward = call.function(MOE_COMBINE), call.function(MOE_COMBINE_BACKWARD)
_balance, _balance_backward = call.function(LOAD_BALANCING_LOSS), call.function(LOAD_BALANCING_LOSS_BACKWARD)
_z_loss, _z_loss_backward = call.function(ROUTER_Z_LOSS), call.function(ROUTER_Z_LOSS_BACKWARD)


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
    return TopK(*_top_k((x,), (k, axis)))


@overload
def renormalize(w: NDArray[ScalarT], axis: int = ...) -> NDArray[ScalarT]: ...
@overload
def renormalize(w: ArrayT, axis: int = ...) -> ArrayT: ...
def renormalize(w: Any, axis: int = -1) -> Any:
    """The elements along an axis divided by their sum: `t_i = w_i / Σ_j w_j`, 0 where the sum is 0.

    w: rank 1 to 8, or a tape variable; t has its shape and dtype. The sum is order-free.

    Errors as for `top_k`.
    """
    return _renormalize((w,), (axis,))


@overload
def renormalize_backward(dt: NDArray[ScalarT], w: NDArray[ScalarT], axis: int = ...) -> NDArray[ScalarT]: ...
@overload
def renormalize_backward(dt: DataT, w: DataT, axis: int = ...) -> DataT: ...
def renormalize_backward(dt: Any, w: Any, axis: int = -1) -> Any:
    """The gradient of `renormalize`: `dw_i = (dt_i - Σ_j dt_j t_j) / Σ_j w_j`, 0 where the sum is 0.

    dt: gradient of the result; w: what was renormalized. Both of one shape and dtype, which dw has too.

    Errors as for `top_k`.
    """
    return _renormalize_backward((dt, w), (axis,))


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
    if bias is not None and len(shape := getattr(bias, "shape", (1,))) != 1:
        raise InvalidProblemError(f"moe_router: bias has shape {tuple(shape)}; expected one number for each expert")
    return Routing(*_router((logits, bias), (k, scoring, renormalize, groups, group_k, scale)))


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
    return _router_backward((dweights, logits, experts), (scoring, renormalize, scale))


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
    return _counts((experts,), (num_experts,))


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
    return Permutation(*_permutation((experts,), (num_experts,)))


@overload
def moe_permute(x: NDArray[ScalarT], order: SupportsDLPack, k: int) -> NDArray[ScalarT]: ...
@overload
def moe_permute(x: ArrayT, order: SupportsDLPack, k: int) -> ArrayT: ...
def moe_permute(x: Any, order: Any, k: int) -> Any:
    """The tokens' rows in the order of the experts: `y[i] = x[order[i] // k]`, exactly their bits.

    x: [T, D], or a tape variable. order: [T k], int64, from `expert_permutation`. The result is [T k, D].

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    return _permute((x, order), (k,))


@overload
def moe_permute_backward(dy: NDArray[ScalarT], order: SupportsDLPack, k: int) -> NDArray[ScalarT]: ...
@overload
def moe_permute_backward(dy: DataT, order: SupportsDLPack, k: int) -> DataT: ...
def moe_permute_backward(dy: Any, order: Any, k: int) -> Any:
    """The gradient of `moe_permute`: the order-free sum of every token's k rows.

    dy: [T k, D]. order: [T k], int64, a permutation. The result is [T, D].

    Errors as for `top_k`, and IndexOutOfRangeError.
    """
    return _permute_backward((dy, order), (k,))


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
    return _combine((expert_out, weights, order), ())


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
    return CombineGradients(*_combine_backward((dy, expert_out, weights, order), ()))


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
    name: str = "load_balancing_loss"
    shape: Any = getattr(probabilities, "shape", None) or (0,)
    if num_experts is not None and functional.integer(name, "num_experts", num_experts) != shape[-1]:
        raise InvalidProblemError(f"{name}: num_experts is {num_experts}; probabilities have {shape[-1]} columns")
    return _balance((probabilities, experts), (False,))


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
    of = str(getattr(dloss, "dtype", "float32")).rpartition(".")[2] if dtype is None else dtype
    return _balance_backward((dloss, experts), (shape, of, False))


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
    return _z_loss((logits,), (False,))


@overload
def router_z_loss_backward(dloss: NDArray[Any] | np.number[Any], logits: NDArray[ScalarT]) -> NDArray[ScalarT]: ...
@overload
def router_z_loss_backward(dloss: SupportsDLPack, logits: DataT) -> DataT: ...
def router_z_loss_backward(dloss: Any, logits: Any) -> Any:
    """The gradient of `router_z_loss`: `2 lse dloss / T` times the softmax of the logits.

    dloss: a scalar in the work type. The result has the shape and dtype of the logits.

    Errors as for `top_k`.
    """
    return _z_loss_backward((dloss, logits), (False,))
