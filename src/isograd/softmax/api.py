"""What a user calls: softmax, log_softmax and their backwards."""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from numpy.typing import NDArray

from isograd import arrays, encoder, registry
from isograd.errors import IsogradError
from isograd.faults import named
from isograd.numerics.storage import dtype_name
from isograd.plan import integer
from isograd.softmax.plans import SoftmaxBackwardDescriptor, SoftmaxBackwardPlan, SoftmaxDescriptor, SoftmaxPlan
from isograd.typing import ArrayT, DataT, ScalarT

if TYPE_CHECKING:
    pass


@functools.lru_cache(maxsize=4096)
def _forward_plan(kind: str, shape: tuple[int, ...], dtype: Any, axis: int, generation: int) -> SoftmaxPlan:
    return SoftmaxPlan.select(SoftmaxDescriptor(kind, shape, dtype_name(dtype, kind, "x"), axis))


@functools.lru_cache(maxsize=4096)
def _backward_plan(kind: str, shape: tuple[int, ...], dtype: Any, axis: int, generation: int) -> SoftmaxBackwardPlan:
    name = dtype_name(dtype, f"{kind}_backward", "dy")
    return SoftmaxBackwardPlan.select(SoftmaxBackwardDescriptor(kind, shape, name, axis))


def _forward(kind: str, x: Any, axis: int, out: Any) -> Any:
    if type(axis) is not int:
        axis = integer(kind, "axis", axis)
    if type(x) is np.ndarray:
        y = np.empty_like(x) if out is None else out
        plan = _forward_plan(kind, x.shape, x.dtype, axis, registry.generation())
        try:
            plan.run(x=x, y=y)
        except IsogradError as error:
            raise named(kind, y="out").renamed(error) from None
        return encoder.result(kind, y) if encoder.recordings and out is None else y
    if arrays.is_tensor(x):
        from isograd.torch import functional

        return functional.forward(kind, x, axis, None, out, ("x", "axis"))
    tape = sys.modules.get("isograd.tape")
    if tape is not None and isinstance(x, tape.Variable):
        encoder.refuse(kind, "x is a tape variable")
        return getattr(tape, kind)(x, axis)
    x = encoder.unwrapped(x)
    view, restore = arrays.to_numpy(x, kind, "x")
    arrays.describe(view, kind, "x")
    if restore is not None:
        encoder.refuse(kind, f"x is a {type(x).__name__}")
    result = _forward(kind, view, axis, out)
    return result if restore is None or out is not None else restore(result)


def _backward(kind: str, dy: Any, y: Any, axis: int, out: Any) -> Any:
    if type(axis) is not int:
        axis = integer(f"{kind}_backward", "axis", axis)
    if type(dy) is np.ndarray and type(y) is np.ndarray:
        dx = np.empty_like(dy) if out is None else out
        plan = _backward_plan(kind, dy.shape, dy.dtype, axis, registry.generation())
        try:
            plan.run(dy=dy, y=y, dx=dx)
        except IsogradError as error:
            raise named(f"{kind}_backward", dx="out").renamed(error) from None
        return encoder.result(f"{kind}_backward", dx) if encoder.recordings and out is None else dx
    name = f"{kind}_backward"
    if arrays.is_tensor(dy) or arrays.is_tensor(y):
        from isograd.torch import functional

        return functional.backward(kind, dy, y, axis, out, "axis")
    dy, y = encoder.unwrapped(dy), encoder.unwrapped(y)
    dy_view, restore = arrays.to_numpy(dy, name, "dy")
    y_view, _ = arrays.to_numpy(y, name, "y")
    arrays.describe(dy_view, name, "dy")
    arrays.describe(y_view, name, "y")
    if restore is not None:
        encoder.refuse(name, f"dy is a {type(dy).__name__}")
    result = _backward(kind, dy_view, y_view, axis, out)
    return result if restore is None or out is not None else restore(result)


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
    return _forward("softmax", x, axis, out)


@overload
def log_softmax(x: NDArray[ScalarT], axis: int = ..., *, out: NDArray[ScalarT] | None = ...) -> NDArray[ScalarT]: ...
@overload
def log_softmax(x: ArrayT, axis: int = ..., *, out: ArrayT | None = ...) -> ArrayT: ...
def log_softmax(x: Any, axis: int = -1, *, out: Any = None) -> Any:
    """Logarithm of the softmax along an axis: `y_j = x_j - m - log Σ_i exp(x_i - m)` with `m = max_i x_i`.

    Arguments, special values and errors as for `softmax`.
    """
    return _forward("log_softmax", x, axis, out)


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
    return _backward("softmax", dy, y, axis, out)


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
    return _backward("log_softmax", dy, y, axis, out)
