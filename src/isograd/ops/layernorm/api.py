"""What a user calls: layernorm and its gradient, of rows and of sums with a residual."""

from __future__ import annotations

from typing import Any, Literal, overload

from numpy.typing import NDArray

from isograd.core import call
from isograd.ops.layernorm.operation import ADD_LAYERNORM, ADD_LAYERNORM_BACKWARD, LAYERNORM, LAYERNORM_BACKWARD
from isograd.typing import Array, ArrayT, DataT, ScalarT

_layernorm, _backward = call.function(LAYERNORM), call.function(LAYERNORM_BACKWARD)
_add, _add_backward = call.function(ADD_LAYERNORM), call.function(ADD_LAYERNORM_BACKWARD)


@overload
def layernorm(
    x: NDArray[ScalarT],
    weight: NDArray[Any] | None = ...,
    bias: NDArray[Any] | None = ...,
    *,
    axis: int = ...,
    eps: float = ...,
    return_statistics: Literal[False] = ...,
) -> NDArray[ScalarT]: ...
@overload
def layernorm(
    x: ArrayT,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    axis: int = ...,
    eps: float = ...,
    return_statistics: Literal[False] = ...,
) -> ArrayT: ...
@overload
def layernorm(
    x: ArrayT,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    axis: int = ...,
    eps: float = ...,
    return_statistics: Literal[True],
) -> tuple[ArrayT, Any, Any]: ...
def layernorm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    return_statistics: bool = False,
) -> Any:
    """Each row of an axis less its mean, over its deviation: `y_j = (x_j - mean) * rstd * weight_j + bias_j`.

    x: float16, bfloat16, float32 or float64, rank 1 to 8, any strides: a NumPy array, a torch tensor, an array with
    DLPack or a tape variable; the result is of the same kind. weight, bias: of x's dtype, one for each place of the
    axis; ones and zeros by default. eps: from 0 to 1e30; `rstd = 1 / sqrt(mean((x - mean)^2) + eps)`.
    return_statistics: whether `(y, mean, rstd)` comes, the last two one for each row, in float32 (float64 for float64);
    `layernorm_backward` wants them.

    Both means come from exact sums, so a row has the same bits in any order and in any batch: rule 16 of
    `docs/arithmetic.md`.

    Raises InvalidProblemError for a wrong axis, rank or eps and a weight or bias that does not fit, UnsupportedError
    for another dtype.
    """
    y, mean, rstd = _layernorm((x, weight, bias), (axis, eps))
    return (y, mean, rstd) if return_statistics else y


@overload
def layernorm_backward(
    dy: NDArray[ScalarT],
    x: NDArray[ScalarT],
    mean: NDArray[Any],
    rstd: NDArray[Any],
    weight: NDArray[Any] | None = ...,
    *,
    axis: int = ...,
) -> tuple[NDArray[ScalarT], NDArray[ScalarT], NDArray[ScalarT]]: ...
@overload
def layernorm_backward(
    dy: DataT, x: DataT, mean: DataT, rstd: DataT, weight: DataT | None = ..., *, axis: int = ...
) -> tuple[DataT, DataT, DataT]: ...
def layernorm_backward(dy: Any, x: Any, mean: Any, rstd: Any, weight: Any = None, *, axis: int = -1) -> Any:
    """The gradients of layernorm for x, for its weight and for its bias: `(dx, dweight, dbias)`.

    dy: the gradient of y. x, weight: as layernorm got them. mean, rstd: as it returned them. With `g = dy * weight` and
    `v = (x - mean) * rstd`: `dx_j = rstd * (g_j - mean(g) - v_j * mean(g * v))`. dweight is the sum of `dy * v` over
    all rows and dbias that of dy, exact but for the rounding of their terms and of the result: the order of the rows
    leaves no trace.

    Raises InvalidProblemError for shapes or dtypes that do not match and a wrong axis.
    """
    return _backward((dy, x, mean, rstd, weight), (axis,), ("dweight", "dbias"))


@overload
def add_layernorm(
    x: NDArray[ScalarT],
    residual: NDArray[ScalarT],
    weight: NDArray[Any] | None = ...,
    bias: NDArray[Any] | None = ...,
    *,
    axis: int = ...,
    eps: float = ...,
    return_statistics: Literal[False] = ...,
) -> tuple[NDArray[ScalarT], NDArray[ScalarT]]: ...
@overload
def add_layernorm(
    x: ArrayT,
    residual: ArrayT,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    axis: int = ...,
    eps: float = ...,
    return_statistics: Literal[False] = ...,
) -> tuple[ArrayT, ArrayT]: ...
@overload
def add_layernorm(
    x: ArrayT,
    residual: ArrayT,
    weight: Array | None = ...,
    bias: Array | None = ...,
    *,
    axis: int = ...,
    eps: float = ...,
    return_statistics: Literal[True],
) -> tuple[ArrayT, ArrayT, Any, Any]: ...
def add_layernorm(
    x: Any,
    residual: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    axis: int = -1,
    eps: float = 1e-5,
    return_statistics: bool = False,
) -> Any:
    """`(y, summed)`: the sum of x and a residual, and the layernorm of it, in one pass.

    x, residual: of one shape and dtype, as x of `layernorm`; the results are of x's kind. weight, bias, axis, eps: as
    for `layernorm`. return_statistics: whether mean and rstd come behind them.

    The sum is rounded to its dtype and the norm taken of what is stored: the bits are those of `x + residual` and
    `layernorm`, and so are those of the gradients.

    Raises InvalidProblemError for shapes that differ, a wrong axis, rank or eps and a weight or bias that does not fit,
    UnsupportedError for another dtype.
    """
    if (summed := call.added("add_layernorm", x, residual)) is not None:
        y, *statistics = _layernorm((summed, weight, bias), (axis, eps))
    else:
        y, summed, *statistics = _add((x, residual, weight, bias), (axis, eps))
    return (y, summed, *statistics) if return_statistics else (y, summed)


def add_layernorm_backward(
    dy: DataT,
    summed: DataT,
    mean: DataT,
    rstd: DataT,
    dsummed: DataT | None = None,
    weight: DataT | None = None,
    *,
    axis: int = -1,
) -> tuple[DataT, DataT, DataT]:
    """The gradients of add_layernorm: `(dx, dweight, dbias)`; dx is the residual's as well.

    dy, dsummed: the gradients of y and of the sum, None where the sum was not used. summed, mean, rstd: as
    add_layernorm returned them. dx is that of `layernorm_backward`, rounded, plus dsummed.

    Raises InvalidProblemError for shapes or dtypes that do not match and a wrong axis.
    """
    result: tuple[DataT, DataT, DataT] = _add_backward(
        (dy, summed, mean, rstd, dsummed, weight), (axis,), ("dweight", "dbias")
    )
    return result
