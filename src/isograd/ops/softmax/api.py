"""What a user calls: softmax, log_softmax and their gradients."""

from __future__ import annotations

from typing import Any, overload

from numpy.typing import NDArray

from isograd.core import call
from isograd.ops.softmax.operation import LOG_SOFTMAX, LOG_SOFTMAX_BACKWARD, SOFTMAX, SOFTMAX_BACKWARD
from isograd.typing import ArrayT, DataT, ScalarT

_softmax, _softmax_backward = call.function(SOFTMAX), call.function(SOFTMAX_BACKWARD)
_log_softmax, _log_softmax_backward = call.function(LOG_SOFTMAX), call.function(LOG_SOFTMAX_BACKWARD)


@overload
def softmax(x: NDArray[ScalarT], axis: int = ..., *, out: NDArray[ScalarT] | None = ...) -> NDArray[ScalarT]: ...
@overload
def softmax(x: ArrayT, axis: int = ..., *, out: ArrayT | None = ...) -> ArrayT: ...
def softmax(x: Any, axis: int = -1, *, out: Any = None) -> Any:
    """Softmax along an axis: `y_j = exp(x_j - m) / Σ_i exp(x_i - m)` with `m = max_i x_i`.

    x: float16, bfloat16, float32 or float64, rank 1 to 8, any strides: a NumPy array, a torch tensor on the CPU or a
    GPU (differentiable, see `isograd.torch`), an array with DLPack, or a tape variable; the result is of the same kind.
    out: an array of x's shape and dtype for the result, any strides; x itself is accepted.

    Within 2 ulp in float32 and float64, in 16 bits correctly rounded but for 2**-15 of the value, and the same bits
    everywhere (`docs/arithmetic.md`, rule 7). A row with NaN or +inf, or of -inf alone, gives NaN.

    Raises InvalidProblemError for a wrong axis or rank, or an output that does not fit or overlaps x in part, and
    UnsupportedError for another dtype.
    """
    return _softmax((x,), (axis,), (), out)


@overload
def log_softmax(x: NDArray[ScalarT], axis: int = ..., *, out: NDArray[ScalarT] | None = ...) -> NDArray[ScalarT]: ...
@overload
def log_softmax(x: ArrayT, axis: int = ..., *, out: ArrayT | None = ...) -> ArrayT: ...
def log_softmax(x: Any, axis: int = -1, *, out: Any = None) -> Any:
    """Logarithm of the softmax along an axis: `y_j = x_j - m - log Σ_i exp(x_i - m)` with `m = max_i x_i`.

    Arguments, special values and errors as for `softmax`.
    """
    return _log_softmax((x,), (axis,), (), out)


@overload
def softmax_backward(
    dy: NDArray[ScalarT], y: NDArray[ScalarT], axis: int = ..., *, out: NDArray[ScalarT] | None = ...
) -> NDArray[ScalarT]: ...
@overload
def softmax_backward(dy: DataT, y: DataT, axis: int = ..., *, out: DataT | None = ...) -> DataT: ...
def softmax_backward(dy: Any, y: Any, axis: int = -1, *, out: Any = None) -> Any:
    """Gradient of softmax: `dx_j = y_j * (dy_j - Σ_i y_i * dy_i)`.

    dy: gradient of the result. y: the result, `softmax(x)`. Both of one shape and dtype, any strides (an expanded dy
    with stride 0 included). out: where dx goes; dy or y themselves are accepted.

    The error is at most `4 · 2^-24 · |y| · (|dy| + Σ|y_i dy_i|)` plus the sum's bound and half an ulp of the output
    (float32; `SoftmaxBackwardPlan.precision_guarantee.error_bound` evaluates it).

    Raises InvalidProblemError for mismatched shapes or dtypes, a wrong axis, or an output that does not fit.
    """
    return _softmax_backward((dy, y), (axis,), (), out)


@overload
def log_softmax_backward(
    dy: NDArray[ScalarT], y: NDArray[ScalarT], axis: int = ..., *, out: NDArray[ScalarT] | None = ...
) -> NDArray[ScalarT]: ...
@overload
def log_softmax_backward(dy: DataT, y: DataT, axis: int = ..., *, out: DataT | None = ...) -> DataT: ...
def log_softmax_backward(dy: Any, y: Any, axis: int = -1, *, out: Any = None) -> Any:
    """Gradient of log_softmax: `dx_j = dy_j - exp(y_j) * Σ_i dy_i`, y being `log_softmax(x)`.

    Arguments and errors as for `softmax_backward`.
    """
    return _log_softmax_backward((dy, y), (axis,), (), out)
