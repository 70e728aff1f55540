"""What a user calls: gumbel_softmax and its gradient."""

from __future__ import annotations

from typing import Any, overload

from numpy.typing import NDArray

from isograd.core import call
from isograd.ops.gumbel_softmax.operation import GUMBEL_SOFTMAX, GUMBEL_SOFTMAX_BACKWARD
from isograd.typing import ArrayT, DataT, ScalarT

_gumbel_softmax, _backward = call.function(GUMBEL_SOFTMAX), call.function(GUMBEL_SOFTMAX_BACKWARD)


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
    return _gumbel_softmax((logits,), (axis, tau, hard, seed, offset, False))


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
    return _backward((dy, y), (axis, tau))
