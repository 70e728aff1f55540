"""What a user calls: rmsnorm and its gradient, of rows and of sums with a residual."""

from __future__ import annotations

from typing import Any, Literal, overload

from numpy.typing import NDArray

from isograd.core import call
from isograd.ops.rmsnorm.operation import ADD_RMSNORM, ADD_RMSNORM_BACKWARD, RMSNORM, RMSNORM_BACKWARD
from isograd.typing import Array, ArrayT, DataT, ScalarT

_rmsnorm, _backward = call.function(RMSNORM), call.function(RMSNORM_BACKWARD)
_add, _add_backward = call.function(ADD_RMSNORM), call.function(ADD_RMSNORM_BACKWARD)


@overload
def rmsnorm(
    x: NDArray[ScalarT],
    weight: NDArray[Any] | None = ...,
    *,
    axis: int = ...,
    eps: float = ...,
    return_rstd: Literal[False] = ...,
) -> NDArray[ScalarT]: ...
@overload
def rmsnorm(
    x: ArrayT, weight: Array | None = ..., *, axis: int = ..., eps: float = ..., return_rstd: Literal[False] = ...
) -> ArrayT: ...
@overload
def rmsnorm(
    x: ArrayT, weight: Array | None = ..., *, axis: int = ..., eps: float = ..., return_rstd: Literal[True]
) -> tuple[ArrayT, Any]: ...
def rmsnorm(x: Any, weight: Any = None, *, axis: int = -1, eps: float = 1e-6, return_rstd: bool = False) -> Any:
    """Each row of an axis divided by the root of the mean of its squares: `y_j = x_j * rstd * weight_j`.

    x: float16, bfloat16, float32 or float64, rank 1 to 8, any strides: a NumPy array, a torch tensor, an array with
    DLPack or a tape variable; the result is of the same kind. weight: of x's dtype, one for each place of the axis;
    ones by default. eps: from 0 to 1e30; `rstd = 1 / sqrt(mean(x^2) + eps)`. return_rstd: whether rstd comes as well,
    one for each row, in float32 (float64 for float64); `rmsnorm_backward` wants it.

    The mean comes from an exact sum, so a row has the same bits in any order and in any batch: rule 16 of
    `docs/arithmetic.md`.

    Raises InvalidProblemError for a wrong axis, rank or eps and a weight that does not fit, UnsupportedError for
    another dtype.
    """
    y, rstd = _rmsnorm((x, weight), (axis, eps))
    return (y, rstd) if return_rstd else y


@overload
def rmsnorm_backward(
    dy: NDArray[ScalarT], x: NDArray[ScalarT], rstd: NDArray[Any], weight: NDArray[Any] | None = ..., *, axis: int = ...
) -> tuple[NDArray[ScalarT], NDArray[ScalarT]]: ...
@overload
def rmsnorm_backward(
    dy: DataT, x: DataT, rstd: DataT, weight: DataT | None = ..., *, axis: int = ...
) -> tuple[DataT, DataT]: ...
def rmsnorm_backward(dy: Any, x: Any, rstd: Any, weight: Any = None, *, axis: int = -1) -> Any:
    """The gradients of rmsnorm for x and for its weight: `(dx, dweight)`.

    dy: the gradient of y. x, weight: as rmsnorm got them. rstd: as it returned it. With `g = dy * weight` and
    `v = x * rstd`: `dx_j = rstd * (g_j - v_j * mean(g * v))`. dweight is the sum of `dy * v` over all rows, which is
    exact but for the rounding of its terms and of the result: the order of the rows leaves no trace.

    Raises InvalidProblemError for shapes or dtypes that do not match and a wrong axis.
    """
    return _backward((dy, x, rstd, weight), (axis,), ("dweight",))


@overload
def add_rmsnorm(
    x: NDArray[ScalarT],
    residual: NDArray[ScalarT],
    weight: NDArray[Any] | None = ...,
    *,
    axis: int = ...,
    eps: float = ...,
    return_rstd: Literal[False] = ...,
) -> tuple[NDArray[ScalarT], NDArray[ScalarT]]: ...
@overload
def add_rmsnorm(
    x: ArrayT,
    residual: ArrayT,
    weight: Array | None = ...,
    *,
    axis: int = ...,
    eps: float = ...,
    return_rstd: Literal[False] = ...,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def add_rmsnorm(
    x: ArrayT,
    residual: ArrayT,
    weight: Array | None = ...,
    *,
    axis: int = ...,
    eps: float = ...,
    return_rstd: Literal[True],
) -> tuple[ArrayT, ArrayT, Any]: ...
def add_rmsnorm(
    x: Any,
    residual: Any,
    weight: Any = None,
    *,
    axis: int = -1,
    eps: float = 1e-6,
    return_rstd: bool = False,
) -> Any:
    """`(y, summed)`: the sum of x and a residual, and the rmsnorm of it, in one pass.

    x, residual: of one shape and dtype, as x of `rmsnorm`; the results are of x's kind. weight, axis, eps: as for
    `rmsnorm`. return_rstd: whether rstd comes behind them.

    The sum is rounded to its dtype and the norm taken of what is stored: the bits are those of `x + residual` and
    `rmsnorm`, and so are those of the gradients.

    Raises InvalidProblemError for shapes that differ, a wrong axis, rank or eps and a weight that does not fit,
    UnsupportedError for another dtype.
    """
    if (summed := call.added("add_rmsnorm", x, residual)) is not None:
        y, *statistics = _rmsnorm((summed, weight), (axis, eps))
    else:
        y, summed, *statistics = _add((x, residual, weight), (axis, eps))
    return (y, summed, *statistics) if return_rstd else (y, summed)


def add_rmsnorm_backward(
    dy: DataT,
    summed: DataT,
    rstd: DataT,
    dsummed: DataT | None = None,
    weight: DataT | None = None,
    *,
    axis: int = -1,
) -> tuple[DataT, DataT]:
    """The gradients of add_rmsnorm: `(dx, dweight)`; dx is the residual's as well.

    dy, dsummed: the gradients of y and of the sum, None where the sum was not used. summed, rstd: as
    add_rmsnorm returned them. dx is that of `rmsnorm_backward`, rounded, plus dsummed.

    Raises InvalidProblemError for shapes or dtypes that do not match and a wrong axis.
    """
    result: tuple[DataT, DataT] = _add_backward((dy, summed, rstd, dsummed, weight), (axis,), ("dweight",))
    return result
