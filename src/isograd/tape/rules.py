"""The operations of the tape on plain arrays: each returns its value and, for every operand, the gradient function.

Families, choices between values and indexing have rules in files of their own.

A gradient function takes the upstream gradient, of the shape and dtype of the value, and returns the operand's. The
arithmetic is done in the work type and rounded to the storage type once; an operand that was broadcast gets the
order-free sum over the axes that it was repeated along. The caller provides the default floating-point environment
and silences NumPy's warnings. With g for the upstream gradient:

    add, sub   da = g, db = g or -g
    mul        da = RN(g * b), db = RN(g * a)
    div        da = RN(g / b), db = RN(-RN(g * RN(a / b)) / b)
    exp        RN(g * y), y as stored            log    RN(g / x)
    sqrt       RN(RN(g / 2) / y), y as stored    relu   g where x > 0 or x is NaN, else 0
    mean       RN(g / count)                     matmul da = g @ b^T, db = a^T @ g, broadcast batches inside the product
    power, tanh, sigmoid                         as in `elementwise/reference.py`
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.elementwise import api as elementwise
from isograd.errors import InvalidProblemError
from isograd.numerics import matmul as product
from isograd.numerics.reference import narrow, work_dtype
from isograd.reduction import api as reduction

Array = NDArray[Any]
Gradient = Callable[[Array], Array]
Result = tuple[Array, tuple[Gradient, ...]]
Axes = int | tuple[int, ...] | None


# --- helpers ---------------------------------------------------------------------------------------------------------
def wide(x: Array) -> Array:
    """The array in its work type."""
    widened: Array = x.astype(work_dtype(x.dtype), copy=False)
    return widened


def stored(y: Any, dtype: Any) -> Array:
    """Round a result of the work type to the storage type, every NaN to the canonical one."""
    result: Array = np.asarray(y)
    if result.dtype != dtype:
        return narrow(result, dtype)
    invalid = np.isnan(result)
    if np.count_nonzero(invalid):
        result = np.where(invalid, result.dtype.type(np.nan), result)
    return result


def accumulated(old: Array, new: Array) -> Array:
    """The sum of two gradients of one value."""
    return stored(wide(old) + wide(new), old.dtype)


def _check_broadcast(operation: str, a: Array, b: Array) -> None:
    if a.shape == b.shape:
        return
    try:
        np.broadcast(a, b)
    except ValueError:
        raise InvalidProblemError(f"{operation}: the shapes {a.shape} and {b.shape} do not broadcast") from None


def _unbroadcast(p: Array, shape: tuple[int, ...], dtype: Any) -> Array:
    """Sum work-type terms over the axes that an operand of `shape` was repeated along, and round them to its type."""
    if p.shape != shape:
        extra = p.ndim - len(shape)
        repeated = (d + extra for d, n in enumerate(shape) if n == 1 and p.shape[d + extra] != 1)
        p = reduction.sum(p, (*range(extra), *repeated), keepdims=True).reshape(shape)
    return stored(p, dtype)


# --- arithmetic ------------------------------------------------------------------------------------------------------
def add(a: Array, b: Array) -> Result:
    """The sum of two operands."""
    _check_broadcast("add", a, b)
    # Here and below a gradient function holds on to no array that it does not need.
    shape_a, shape_b, dtype = a.shape, b.shape, a.dtype
    return stored(wide(a) + wide(b), dtype), (
        lambda g: _unbroadcast(wide(g), shape_a, dtype),
        lambda g: _unbroadcast(wide(g), shape_b, dtype),
    )


def sub(a: Array, b: Array) -> Result:
    """The difference of two operands."""
    _check_broadcast("sub", a, b)
    shape_a, shape_b, dtype = a.shape, b.shape, a.dtype
    return stored(wide(a) - wide(b), dtype), (
        lambda g: _unbroadcast(wide(g), shape_a, dtype),
        lambda g: _unbroadcast(-wide(g), shape_b, dtype),
    )


def mul(a: Array, b: Array) -> Result:
    """The product of two operands, element by element."""
    _check_broadcast("mul", a, b)
    shape_a, shape_b, dtype = a.shape, b.shape, a.dtype
    return stored(wide(a) * wide(b), dtype), (
        lambda g: _unbroadcast(wide(g) * wide(b), shape_a, dtype),
        lambda g: _unbroadcast(wide(g) * wide(a), shape_b, dtype),
    )


def div(a: Array, b: Array) -> Result:
    """The quotient of two operands."""
    _check_broadcast("div", a, b)
    shape_a, shape_b, dtype = a.shape, b.shape, a.dtype
    return stored(wide(a) / wide(b), dtype), (
        lambda g: _unbroadcast(wide(g) / wide(b), shape_a, dtype),
        lambda g: _unbroadcast(-(wide(g) * (wide(a) / wide(b))) / wide(b), shape_b, dtype),
    )


def neg(x: Array) -> Result:
    """The operand with its sign changed."""
    return stored(-x, x.dtype), (lambda g: stored(-g, g.dtype),)


def power(a: Array, *exponents: Array, exponent: float = 0.0) -> Result:
    """One operand to the power of the other, or of a number, which is not rounded."""
    b = exponents[0] if exponents else np.asarray(exponent, np.float64)
    _check_broadcast("power", a, b)
    shape_a, shape_b, dtype = a.shape, b.shape, a.dtype
    gradients = (
        lambda g: _unbroadcast(elementwise.power_backward(g, a, b), shape_a, dtype),
        lambda g: _unbroadcast(elementwise.power_backward_exponent(g, a, b), shape_b, dtype),
    )
    return elementwise.power(a, b), gradients[: 1 + len(exponents)]


# --- matrix products -------------------------------------------------------------------------------------------------
def _contract(left: Array, right: Array, batch: tuple[int, ...], kept: tuple[int, ...], precision: str | None) -> Array:
    """Contract [*batch, R, P] and [*batch, R, Q] to [*kept, P, Q].

    Summed over R and over the batch axes that `kept` lacks or has at size 1, in one order-free product per kept matrix,
    so it is rounded once.
    """
    kept = (1,) * (len(batch) - len(kept)) + kept
    folded = [d for d in range(len(batch)) if kept[d] != batch[d]]
    if not folded:
        return product.matmul(left.swapaxes(-1, -2), right, precision)
    others = [d for d in range(len(batch)) if kept[d] == batch[d]]

    def stacked(x: Array) -> Array:
        full = np.broadcast_to(x, batch + x.shape[-2:])
        order = (*others, *folded, len(batch), len(batch) + 1)
        rows = math.prod(batch[d] for d in folded) * x.shape[-2]
        return full.transpose(order).reshape(*(batch[d] for d in others), rows, x.shape[-1])

    return product.matmul(stacked(left).swapaxes(-1, -2), stacked(right), precision)


def matmul(a: Array, b: Array, precision: str | None = None) -> Result:
    """The matrix product, order-free."""
    y = product.matmul(a, b, precision)
    left = a[None, :] if a.ndim == 1 else a
    right = b[:, None] if b.ndim == 1 else b
    batch = product.batch_shape(left, right)
    full = (*batch, left.shape[-2], right.shape[-1])

    def gradient_a(g: Array) -> Array:
        g = g.reshape(full).swapaxes(-1, -2)
        return _contract(g, right.swapaxes(-1, -2), batch, left.shape[:-2], precision).reshape(a.shape)

    def gradient_b(g: Array) -> Array:
        return _contract(left, g.reshape(full), batch, right.shape[:-2], precision).reshape(b.shape)

    return y, (gradient_a, gradient_b)


# --- functions -------------------------------------------------------------------------------------------------------
def exp(x: Array) -> Result:
    """The exponential."""
    y = elementwise.exp(x)
    return y, (lambda g: stored(wide(g) * wide(y), y.dtype),)


def log(x: Array) -> Result:
    """The natural logarithm."""
    return elementwise.log(x), (lambda g: stored(wide(g) / wide(x), x.dtype),)


def sqrt(x: Array) -> Result:
    """The square root."""
    y = stored(np.sqrt(wide(x)), x.dtype)
    half = work_dtype(x.dtype)(0.5)
    return y, (lambda g: stored((wide(g) * half) / wide(y), y.dtype),)


def relu(x: Array) -> Result:
    """max(x, 0), NaN for NaN; the slope at 0 is 0."""
    zero, bits = x.dtype.type(0), np.dtype(f"i{x.itemsize}")
    # np.where branches on every element: on signs without a pattern it takes ten times as long.
    keep = (x <= zero).astype(bits) - bits.type(1)
    return np.maximum(x, zero) + zero, (lambda g: (g.view(bits) & keep).view(g.dtype),)


def tanh(x: Array) -> Result:
    """The hyperbolic tangent."""
    y = elementwise.tanh(x)
    return y, (lambda g: elementwise.tanh_backward(g, y),)


def sigmoid(x: Array) -> Result:
    """The logistic function."""
    y = elementwise.sigmoid(x)
    return y, (lambda g: elementwise.sigmoid_backward(g, y),)


def sum(x: Array, axis: Axes, keepdims: bool) -> Result:  # noqa: A001 - NumPy's name
    """The order-free sum over some axes."""
    kept = reduction.sum(x, axis, keepdims=True)
    y = kept if keepdims else kept.squeeze(axis)
    inner, shape = kept.shape, x.shape
    return y, (lambda g: np.broadcast_to(g.reshape(inner), shape),)


def mean(x: Array, axis: Axes, keepdims: bool) -> Result:
    """The mean over some axes."""
    kept = reduction.mean(x, axis, keepdims=True)
    y = kept if keepdims else kept.squeeze(axis)
    count = work_dtype(x.dtype)(x.size // max(kept.size, 1))
    inner, shape = kept.shape, x.shape

    def gradient(g: Array) -> Array:
        return np.broadcast_to(stored(wide(g) / count, g.dtype).reshape(inner), shape)

    return y, (gradient,)


# --- shapes ----------------------------------------------------------------------------------------------------------
def reshape(x: Array, shape: tuple[int, ...]) -> Result:
    """The same elements in another shape; one size may be -1."""
    before = x.shape
    try:
        y = x.reshape(shape)
    except (ValueError, TypeError):
        raise InvalidProblemError(f"reshape: shape {before} cannot become {shape}; sizes must agree") from None
    return y, (lambda g: g.reshape(before),)


def transpose(x: Array, axes: tuple[int, ...] | None) -> Result:
    """Permute the axes, or reverse them."""
    order = tuple(range(x.ndim))[::-1] if axes is None else tuple(a + x.ndim if a < 0 else a for a in axes)
    if sorted(order) != list(range(x.ndim)):
        raise InvalidProblemError(f"transpose: axes are {axes}; expected a permutation of the {x.ndim} axes")
    inverse = tuple(int(d) for d in np.argsort(order))
    return x.transpose(order), (lambda g: g.transpose(inverse),)


def concatenate(*arrays: Array, axis: int) -> Result:
    """Join arrays along an axis."""
    rank = arrays[0].ndim
    if not -rank <= axis < rank:
        raise InvalidProblemError(f"concatenate: axis {axis} is out of range for arrays of rank {rank}")
    axis %= rank
    rest = {(*x.shape[:axis], *x.shape[axis + 1 :]) for x in arrays}
    if any(x.ndim != rank for x in arrays) or len(rest) > 1:
        shapes = [x.shape for x in arrays]
        raise InvalidProblemError(f"concatenate: the shapes {shapes} differ in more than axis {axis}")

    ends = np.cumsum([x.shape[axis] for x in arrays])

    def part(end: int, size: int) -> Gradient:
        index = (slice(None),) * axis + (slice(end - size, end),)
        return lambda g: g[index]

    gradients = tuple(part(int(end), x.shape[axis]) for end, x in zip(ends, arrays, strict=True))
    return np.concatenate(arrays, axis), gradients
