"""What a user calls: gumbel_softmax and its gradient."""

from __future__ import annotations

from typing import Any, overload

from numpy.typing import NDArray

from isograd import arrays, functional
from isograd.losses.promises import checked_flag, checked_integer, checked_scale
from isograd.losses.simplex_plans import (
    GumbelSoftmaxBackwardDescriptor,
    GumbelSoftmaxBackwardPlan,
    GumbelSoftmaxDescriptor,
    GumbelSoftmaxPlan,
)
from isograd.typing import ArrayT, DataT, ScalarT


@overload
def gumbel_softmax(
    logits: NDArray[ScalarT], tau: float = ..., hard: bool = ..., axis: int = ..., *, seed: int, offset: int = ...
) -> NDArray[ScalarT]: ...
@overload
def gumbel_softmax(
    logits: ArrayT, tau: float = ..., hard: bool = ..., axis: int = ..., *, seed: int, offset: int = ...
) -> ArrayT: ...
def gumbel_softmax(
    logits: Any, tau: float = 1.0, hard: bool = False, axis: int = -1, *, seed: int, offset: int = 0
) -> Any:
    """A sample of the Gumbel-softmax distribution: `softmax((logits + g) / tau)` along an axis, g = -log(-log u).

    logits: float16, bfloat16, float32 or float64, rank 1 to 8, any strides: a NumPy array, a torch tensor, an array
    with DLPack or a tape variable; the result is of the same kind. tau: positive. hard: return the one-hot of the first
    largest perturbed logit instead; a gradient is that of the soft result. seed, offset: from 0 to 2^64 - 1; element i
    of the logits, in C order, takes number `offset + i` of the noise of `seed`, on every device. A call that goes on
    adds the size of the logits to the offset. There is no default seed, which would draw the same at every call.

    Bits and bound in `docs/arithmetic.md`, rule 15. A row with NaN or +inf, or of -inf alone, gives NaN.

    Raises InvalidProblemError for a wrong axis, rank, tau, seed or offset, UnsupportedError for another dtype.
    """
    operation = "gumbel_softmax"
    axis = functional.integer(operation, "axis", axis)
    hard = checked_flag(operation, "hard", hard)
    seed, offset = (checked_integer(operation, k, v, 64) for k, v in (("seed", seed), ("offset", offset)))
    if (tape := functional.tape_of(logits)) is not None:
        return tape.gumbel_softmax(logits, tau, hard, axis, seed=seed, offset=offset)
    (x,), restore = functional.inputs(operation, logits=logits)
    device, dtype = arrays.describe(x, operation, "logits")
    tau = checked_scale(operation, "tau", tau, dtype)
    descriptor = GumbelSoftmaxDescriptor(tuple(x.shape), dtype, axis, tau, hard, seed, offset)
    # Not through the cache of plans: a seed that changes with every call would fill it.
    plan = GumbelSoftmaxPlan.select(descriptor, device)
    return restore(functional.run(plan, logits=x, y=functional.empty(tuple(x.shape), dtype, x)))


@overload
def gumbel_softmax_backward(
    dy: NDArray[ScalarT], y: NDArray[ScalarT], tau: float = ..., axis: int = ...
) -> NDArray[ScalarT]: ...
@overload
def gumbel_softmax_backward(dy: DataT, y: DataT, tau: float = ..., axis: int = ...) -> DataT: ...
def gumbel_softmax_backward(dy: Any, y: Any, tau: float = 1.0, axis: int = -1) -> Any:
    """The gradient of gumbel_softmax: `dx_j = y_j * (dy_j - sum_i y_i * dy_i) / tau`.

    dy: the gradient of the result. y: the soft result, for a hard one `gumbel_softmax` with the same seed and offset
    and without `hard`. Both of one shape and dtype, any strides (an expanded dy included).

    Raises InvalidProblemError for mismatched shapes or dtypes, a wrong axis or tau.
    """
    operation = "gumbel_softmax_backward"
    axis = functional.integer(operation, "axis", axis)
    (g, p), restore = functional.inputs(operation, dy=dy, y=y)
    device, dtype = arrays.describe(p, operation, "y")
    tau = checked_scale(operation, "tau", tau, dtype)
    descriptor = GumbelSoftmaxBackwardDescriptor(tuple(p.shape), dtype, axis, tau)
    plan = functional.plan(GumbelSoftmaxBackwardPlan, descriptor, device)
    return restore(functional.run(plan, dy=g, y=p, dx=functional.empty(tuple(p.shape), dtype, p)))
