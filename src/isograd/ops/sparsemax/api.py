"""What a user calls: sparsemax and its gradient."""

from __future__ import annotations

from typing import Any, overload

from numpy.typing import NDArray

from isograd.core import call
from isograd.ops.sparsemax.operation import SPARSEMAX, SPARSEMAX_BACKWARD
from isograd.typing import ArrayT, DataT, ScalarT

_sparsemax, _backward = call.function(SPARSEMAX), call.function(SPARSEMAX_BACKWARD)


@overload
def sparsemax(x: NDArray[ScalarT], axis: int = ...) -> NDArray[ScalarT]: ...
@overload
def sparsemax(x: ArrayT, axis: int = ...) -> ArrayT: ...
def sparsemax(x: Any, axis: int = -1) -> Any:
    """The point of the probability simplex nearest to each row of an axis: `y_j = max(x_j - tau, 0)`, sum 1.

    x: float16, bfloat16, float32 or float64, rank 1 to 8, any strides: a NumPy array, a torch tensor, an array with
    DLPack or a tape variable; the result is of the same kind. (Martins and Astudillo, 2016.)

    Which elements are above the threshold is decided exactly, in integers (`docs/arithmetic.md`, rule 15). A row with
    NaN or +inf, or of -inf alone, gives NaN.

    Raises InvalidProblemError for a wrong axis or rank, UnsupportedError for another dtype.
    """
    return _sparsemax((x,), (axis,))


@overload
def sparsemax_backward(dy: NDArray[ScalarT], y: NDArray[ScalarT], axis: int = ...) -> NDArray[ScalarT]: ...
@overload
def sparsemax_backward(dy: DataT, y: DataT, axis: int = ...) -> DataT: ...
def sparsemax_backward(dy: Any, y: Any, axis: int = -1) -> Any:
    """The gradient of sparsemax: dy less its mean over the support of y there, 0 elsewhere.

    dy: the gradient of the result. y: the result, `sparsemax(x)`. Both of one shape and dtype, any strides.

    Raises InvalidProblemError for mismatched shapes or dtypes and a wrong axis.
    """
    return _backward((dy, y), (axis,))
