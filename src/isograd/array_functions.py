"""Functions of arrays and of tape variables alike, with the same bits on every machine.

Arrays are NumPy's (float16, bfloat16, float32, float64; any shape and strides) or any with DLPack on the CPU; the
result is a new array of the first one's kind. With a variable among the operands it is a variable, and its tape
records the operation (`isograd.tape`). Operands have one dtype, Python numbers take it, and shapes broadcast as in
NumPy.

They raise InvalidProblemError for operands or shapes that do not match, and UnsupportedError for another dtype, for a
torch tensor and inside an `Encoder`.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from isograd.core import arrays, encoder
from isograd.errors import UnsupportedError
from isograd.reduction.axes import Axes
from isograd.tape import choice_rules, rules, variable
from isograd.tape.functions import checked_mask
from isograd.tape.variable import Variable
from isograd.typing import Array, SupportsDLPack

Precision = Literal["int16", "wide"]
Constant = SupportsDLPack | np.generic | float
T = TypeVar("T", bound=Array)


def _taken(operation: str, operands: tuple[Any, ...]) -> tuple[list[Any], Callable[[Any], Any] | None]:
    """The operands as what the tape takes, and the function that turns a result into the first one's kind."""
    if any(isinstance(x, Variable) for x in operands):
        return list(operands), None
    encoder.refuse(operation, "it is computed at once")
    taken, restore = [], None
    for position, given in enumerate(operands):
        x = encoder.unwrapped(given)
        if arrays.is_tensor(x):
            raise UnsupportedError(
                f"{operation}: an operand is a torch tensor; accepted: NumPy arrays, arrays with DLPack, tape variables"
            )
        if hasattr(x, "__dlpack__") and not isinstance(x, (np.ndarray, np.generic)):
            x, back = arrays.to_numpy(x, operation, "an operand")
            restore = back if position == 0 else restore
        taken.append(x)
    return taken, restore


def _call(rule: Any, *operands: Any, **options: Any) -> Any:
    taken, restore = _taken(rule.__name__, operands)
    if any(isinstance(x, Variable) for x in taken):
        return variable.apply(rule, *taken, **options)
    result = variable.evaluate(rule, *taken, **options)
    return result if restore is None else restore(result)


def _compare(operation: str, a: Any, b: Any) -> NDArray[np.bool_]:
    return variable.compare(operation, *_taken(operation, (a, b))[0])


# --- elementwise -----------------------------------------------------------------------------------------------------
def exp(x: T) -> T:
    """The exponential, at most 1.05 ulp off before the rounding to a 16-bit type."""
    result: T = _call(rules.exp, x)
    return result


def log(x: T) -> T:
    """The natural logarithm, at most 1.05 ulp off before the rounding to a 16-bit type."""
    result: T = _call(rules.log, x)
    return result


def sqrt(x: T) -> T:
    """The square root, rounded once."""
    result: T = _call(rules.sqrt, x)
    return result


def tanh(x: T) -> T:
    """The hyperbolic tangent; its bound is that of `isograd.elementwise.api.tanh`."""
    result: T = _call(rules.tanh, x)
    return result


def sigmoid(x: T) -> T:
    """The logistic function 1 / (1 + exp(-x)); its bound is that of `isograd.elementwise.api.sigmoid`."""
    result: T = _call(rules.sigmoid, x)
    return result


def relu(x: T) -> T:
    """max(x, 0), NaN for NaN; the slope at 0 is 0."""
    result: T = _call(rules.relu, x)
    return result


@overload
def power(x: Variable, y: Variable | Constant) -> Variable: ...
@overload
def power(x: Constant, y: Variable) -> Variable: ...
@overload
def power(x: Constant, y: Constant) -> NDArray[Any]: ...
def power(x: Any, y: Any) -> Any:
    """X to the power y; a Python number as the exponent is not rounded to the dtype.

    Computed in binary64 and rounded to the dtype once; `isograd.elementwise.api.power` has the bounds.
    """
    return variable.power(x, y, _call)


@overload
def maximum(a: Variable, b: Variable | Constant) -> Variable: ...
@overload
def maximum(a: Constant, b: Variable) -> Variable: ...
@overload
def maximum(a: Constant, b: Constant) -> NDArray[Any]: ...
def maximum(a: Any, b: Any) -> Any:
    """The larger one of two operands, element by element; where they are equal both get half of the gradient.

    NaN where one is NaN; +0 is above -0.
    """
    return _call(choice_rules.maximum, a, b)


@overload
def minimum(a: Variable, b: Variable | Constant) -> Variable: ...
@overload
def minimum(a: Constant, b: Variable) -> Variable: ...
@overload
def minimum(a: Constant, b: Constant) -> NDArray[Any]: ...
def minimum(a: Any, b: Any) -> Any:
    """The smaller one of two operands, element by element; where they are equal both get half of the gradient.

    NaN where one is NaN; -0 is below +0.
    """
    return _call(choice_rules.minimum, a, b)


@overload
def where(mask: Any, a: Variable, b: Variable | Constant) -> Variable: ...
@overload
def where(mask: Any, a: Constant, b: Variable) -> Variable: ...
@overload
def where(mask: Any, a: Constant, b: Constant) -> NDArray[Any]: ...
def where(mask: Any, a: Any, b: Any) -> Any:
    """The elements of a where a mask, an array of booleans, is true, and those of b elsewhere."""
    return _call(choice_rules.where, a, b, mask=checked_mask("where", mask))


# --- matrix products -------------------------------------------------------------------------------------------------
@overload
def matmul(a: Variable, b: Variable | Constant, *, precision: Precision | None = None) -> Variable: ...
@overload
def matmul(a: Constant, b: Variable, *, precision: Precision | None = None) -> Variable: ...
@overload
def matmul(a: Constant, b: Constant, *, precision: Precision | None = None) -> NDArray[Any]: ...
def matmul(a: Any, b: Any, *, precision: Precision | None = None) -> Any:
    """The matrix product with the shape rules of `numpy.matmul`, `[..., M, K] @ [..., K, N]`, in no order.

    precision: "int16" rounds every row of a and every column of b to 16-bit integers with a power of two as scale;
    their product is exact, and its error that of a bfloat16 product on ordinary data. It is the default of the 16-bit
    types; float32 may have it. "wide" keeps some 50 bits of a row (float64: 67) at many times the cost; it is the
    default of float32 and float64.

    Neither the order of K, padding with zeros, nor any split of M, N and the batch changes a bit: rule 10 of
    `docs/arithmetic.md`. K is up to 2^26. The bound on the error is `isograd.numerics.matmul.matmul_error_bound`.

    Raises UnsupportedError also for int16 with float64; `isograd.torch.matmul` takes tensors.
    """
    return _call(rules.matmul, a, b, precision=precision)


# --- comparisons -----------------------------------------------------------------------------------------------------
def equal(a: Variable | Constant, b: Variable | Constant) -> NDArray[np.bool_]:
    """A mask: where a == b."""
    return _compare("equal", a, b)


def not_equal(a: Variable | Constant, b: Variable | Constant) -> NDArray[np.bool_]:
    """A mask: where a != b."""
    return _compare("not_equal", a, b)


def less(a: Variable | Constant, b: Variable | Constant) -> NDArray[np.bool_]:
    """A mask: where a < b."""
    return _compare("less", a, b)


def less_equal(a: Variable | Constant, b: Variable | Constant) -> NDArray[np.bool_]:
    """A mask: where a <= b."""
    return _compare("less_equal", a, b)


def greater(a: Variable | Constant, b: Variable | Constant) -> NDArray[np.bool_]:
    """A mask: where a > b."""
    return _compare("greater", a, b)


def greater_equal(a: Variable | Constant, b: Variable | Constant) -> NDArray[np.bool_]:
    """A mask: where a >= b."""
    return _compare("greater_equal", a, b)


# --- reductions ------------------------------------------------------------------------------------------------------
def sum(x: T, axis: Axes = None, keepdims: bool = False) -> T:  # noqa: A001 - NumPy's name
    """The order-free sum over an axis, a tuple of axes, or all; its bound is that of `isograd.reduction.api.sum`."""
    result: T = _call(rules.sum, x, axis=axis, keepdims=keepdims)
    return result


def mean(x: T, axis: Axes = None, keepdims: bool = False) -> T:
    """The order-free sum divided by the number of terms; NaN without terms."""
    result: T = _call(rules.mean, x, axis=axis, keepdims=keepdims)
    return result


def max(x: T, axis: Axes = None, keepdims: bool = False) -> T:  # noqa: A001 - NumPy's name
    """The largest element over an axis, a tuple of axes, or all; n equal ones get 1 / n of the gradient each.

    NaN if there is one; +0 is above -0.
    """
    result: T = _call(choice_rules.max, x, axis=axis, keepdims=keepdims)
    return result


def min(x: T, axis: Axes = None, keepdims: bool = False) -> T:  # noqa: A001 - NumPy's name
    """The smallest element over an axis, a tuple of axes, or all; n equal ones get 1 / n of the gradient each.

    NaN if there is one; -0 is below +0.
    """
    result: T = _call(choice_rules.min, x, axis=axis, keepdims=keepdims)
    return result
