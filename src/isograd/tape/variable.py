"""A value on a tape, with the operators and methods of an array."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from isograd.core.checks import real_number
from isograd.errors import InvalidProblemError
from isograd.numerics.reference import narrow, work_dtype
from isograd.numerics.storage import dtype_name, plain_array
from isograd.ops.activation import api as activation
from isograd.ops.softmax import api as softmax
from isograd.runtime.fenv import default_environment
from isograd.tape import choice_rules, index_rules, rules
from isograd.typing import Approximate

if TYPE_CHECKING:
    from isograd.tape.recording import Frame, Tape

Operand = Any  # a Variable, a NumPy array or scalar of the same dtype, or a Python number


class Variable:
    """A value whose history a tape records.

    Made by `Tape.leaf` and by operations, never directly. Other operands may be variables of the same tape, NumPy
    arrays and scalars of the same dtype (constants; they are copied), and Python numbers, which take the variable's
    dtype. `value` is read-only, because gradients are computed from it later.

    Comparisons, `==` and `!=` too, give arrays of booleans, which are constants. As a key of dicts and sets a variable
    is itself: no other one has its hash. `in` and `list.index` compare with `==`, as for NumPy's arrays.
    """

    __slots__ = ("__weakref__", "_frame", "_index", "_tape", "_value")

    # NumPy then leaves `array @ variable` and the like to the methods below instead of broadcasting over objects.
    __array_ufunc__ = None

    def __init__(self, tape: Tape, frame: Frame, index: int, value: NDArray[Any]):
        value.setflags(write=False)
        self._tape, self._frame, self._index, self._value = tape, frame, index, value

    @property
    def tape(self) -> Tape:
        """The tape that records this value."""
        return self._tape

    @property
    def value(self) -> NDArray[Any]:
        """The value, a read-only array."""
        return self._value

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self._value.shape

    @property
    def ndim(self) -> int:
        """The rank of the value."""
        return self._value.ndim

    @property
    def size(self) -> int:
        """The number of elements of the value."""
        return self._value.size

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the value."""
        return self._value.dtype

    def item(self) -> float:
        """The only element as a Python float."""
        with default_environment():
            return float(self._value.item())

    def __repr__(self) -> str:
        return f"Variable({self._value!r})"

    def __bool__(self) -> NoReturn:
        raise InvalidProblemError("a tape variable has no truth value; use its `value`")

    if not TYPE_CHECKING:  # a type checker would take a Variable for an operand of NumPy's own `array @ variable`

        def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
            raise TypeError("a Variable does not turn into an array, which would lose its gradient; use variable.value")

    def __eq__(self, other: object) -> NDArray[np.bool_]:  # type: ignore[override]
        return compare("equal", self, other) if isinstance(other, _COMPARABLE) else NotImplemented

    def __ne__(self, other: object) -> NDArray[np.bool_]:  # type: ignore[override]
        return compare("not_equal", self, other) if isinstance(other, _COMPARABLE) else NotImplemented

    def __lt__(self, other: Operand) -> NDArray[np.bool_]:
        return compare("less", self, other)

    def __le__(self, other: Operand) -> NDArray[np.bool_]:
        return compare("less_equal", self, other)

    def __gt__(self, other: Operand) -> NDArray[np.bool_]:
        return compare("greater", self, other)

    def __ge__(self, other: Operand) -> NDArray[np.bool_]:
        return compare("greater_equal", self, other)

    __hash__ = object.__hash__

    def __add__(self, other: Operand) -> Variable:
        return apply(rules.add, self, other)

    def __radd__(self, other: Operand) -> Variable:
        return apply(rules.add, other, self)

    def __sub__(self, other: Operand) -> Variable:
        return apply(rules.sub, self, other)

    def __rsub__(self, other: Operand) -> Variable:
        return apply(rules.sub, other, self)

    def __mul__(self, other: Operand) -> Variable:
        return apply(rules.mul, self, other)

    def __rmul__(self, other: Operand) -> Variable:
        return apply(rules.mul, other, self)

    def __truediv__(self, other: Operand) -> Variable:
        return apply(rules.div, self, other)

    def __rtruediv__(self, other: Operand) -> Variable:
        return apply(rules.div, other, self)

    def __matmul__(self, other: Operand) -> Variable:
        return apply(rules.matmul, self, other)

    def __rmatmul__(self, other: Operand) -> Variable:
        return apply(rules.matmul, other, self)

    def __neg__(self) -> Variable:
        return apply(rules.neg, self)

    def __pow__(self, other: Operand) -> Variable:
        result: Variable = power(self, other)
        return result

    def __rpow__(self, other: Operand) -> Variable:
        result: Variable = power(other, self)
        return result

    def __getitem__(self, index: Any) -> Variable:
        return apply(index_rules.getitem, self, index=index)

    def exp(self) -> Variable:
        """The exponential."""
        return apply(rules.exp, self)

    def log(self) -> Variable:
        """The natural logarithm."""
        return apply(rules.log, self)

    def sqrt(self) -> Variable:
        """The square root."""
        return apply(rules.sqrt, self)

    def relu(self) -> Variable:
        """max(x, 0)."""
        return apply(rules.relu, self)

    def silu(self) -> Variable:
        """The product x * sigmoid(x)."""
        return activation.silu(self)

    def tanh(self) -> Variable:
        """The hyperbolic tangent."""
        return apply(rules.tanh, self)

    def sigmoid(self) -> Variable:
        """The logistic function 1 / (1 + exp(-x))."""
        return apply(rules.sigmoid, self)

    def gelu(self, approximate: Approximate = "none") -> Variable:
        """The product x * Phi(x), or its tanh form."""
        return activation.gelu(self, approximate)

    def softmax(self, axis: int = -1) -> Variable:
        """Softmax over an axis."""
        return softmax.softmax(self, axis)

    def log_softmax(self, axis: int = -1) -> Variable:
        """The logarithm of softmax over an axis."""
        return softmax.log_softmax(self, axis)

    def sum(self, axis: rules.Axes = None, keepdims: bool = False) -> Variable:
        """The order-free sum over an axis, a tuple of axes, or all."""
        return apply(rules.sum, self, axis=axis, keepdims=keepdims)

    def mean(self, axis: rules.Axes = None, keepdims: bool = False) -> Variable:
        """The mean over an axis, a tuple of axes, or all."""
        return apply(rules.mean, self, axis=axis, keepdims=keepdims)

    def max(self, axis: rules.Axes = None, keepdims: bool = False) -> Variable:
        """The largest element over an axis, a tuple of axes, or all; equal ones share the gradient."""
        return apply(choice_rules.max, self, axis=axis, keepdims=keepdims)

    def min(self, axis: rules.Axes = None, keepdims: bool = False) -> Variable:
        """The smallest element over an axis, a tuple of axes, or all; equal ones share the gradient."""
        return apply(choice_rules.min, self, axis=axis, keepdims=keepdims)

    def reshape(self, *shape: Any) -> Variable:
        """The same elements in another shape, given as a tuple or as several sizes."""
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        return apply(rules.reshape, self, shape=sizes)

    def transpose(self, *axes: Any) -> Variable:
        """Permute the axes, given as a tuple or as several; without any, reverse them."""
        order = tuple(axes[0]) if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        return apply(rules.transpose, self, axes=order or None)

    @property
    def T(self) -> Variable:  # noqa: N802 - NumPy's name
        """The value with its axes reversed."""
        return self.transpose()


_COMPARABLE = (Variable, np.ndarray, np.generic, int, float)


def _constant(operation: str, operand: Operand, dtype: np.dtype[Any]) -> NDArray[Any]:
    if isinstance(operand, (np.ndarray, np.generic)):
        if operand.dtype != dtype:
            hint = "; convert it, or pass a Python number" if operand.ndim == 0 else "; convert one of them"
            raise InvalidProblemError(f"{operation}: a variable is {dtype} and the other operand {operand.dtype}{hint}")
        # A copy, with canonical NaNs: the caller may overwrite the original before the gradients are computed.
        return narrow(plain_array(operation, "an operand", np.asanyarray(operand)), dtype)
    if isinstance(operand, (int, float)) and not isinstance(operand, bool):
        return narrow(np.asarray(real_number(operation, "an operand", operand), work_dtype(dtype)), dtype)
    raise InvalidProblemError(
        f"{operation}: an operand is a {type(operand).__name__}; expected a variable, a NumPy array of dtype {dtype} "
        "or a Python number"
    )


def apply(rule: Any, *operands: Operand, one_dtype: bool = True, **options: Any) -> Variable:
    """Compute an operation of `rules` and record it on the tape of its operands.

    one_dtype: whether they have to share their dtype; without it other operands are arrays of any.
    """
    name = rule.__name__
    variables = [x for x in operands if isinstance(x, Variable)]
    if not variables:
        kinds = ", ".join(type(x).__name__ for x in operands) or "nothing"
        raise InvalidProblemError(f"{name}: got {kinds}; expected at least one variable of a tape")
    tape, dtype = variables[0].tape, variables[0].dtype
    for x in variables:
        if x.tape is not tape:
            raise InvalidProblemError(f"{name}: the operands belong to different tapes; expected one")
        if one_dtype and x.dtype != dtype:
            raise InvalidProblemError(f"{name}: the operands are {dtype} and {x.dtype}; expected one dtype")
    parents = tuple([tape._index_of(name, x) if isinstance(x, Variable) else None for x in operands])
    with default_environment(), np.errstate(all="ignore"):
        values = [
            x.value
            if isinstance(x, Variable)
            else _constant(name, x, dtype if one_dtype else getattr(x, "dtype", dtype))
            for x in operands
        ]
        value, gradients = rule(*values, **options)
    return tape._record(value, parents, gradients)


def power(base: Operand, exponent: Operand, run: Callable[..., Any] = apply) -> Any:
    """One operand to the power of the other, by `run`; a Python number as the exponent stays in binary64."""
    if isinstance(exponent, (int, float)) and not isinstance(exponent, (bool, np.generic)):
        return run(rules.power, base, exponent=real_number("power", "an operand", exponent))
    return run(rules.power, base, exponent)


def values(operation: str, *operands: Operand) -> list[NDArray[Any]]:
    """The values of variables and of arrays and numbers, at least one of them no number, in their common dtype."""
    for x in operands:
        if isinstance(x, (Variable, np.ndarray, np.generic)):
            dtype = x.dtype
            break
    else:
        kinds = ", ".join(type(x).__name__ for x in operands)
        raise InvalidProblemError(f"{operation}: got {kinds}; expected at least one variable or array")
    dtype_name(dtype, operation, "an operand")
    given = (x.value if isinstance(x, Variable) else x for x in operands)
    return [_constant(operation, x, dtype) for x in given]


def compare(operation: str, a: Operand, b: Operand) -> NDArray[np.bool_]:
    """The mask of one of NumPy's comparisons; no gradient passes through it."""
    with default_environment(), np.errstate(all="ignore"):
        left, right = values(operation, a, b)
        try:
            return np.asarray(getattr(np, operation)(left, right))
        except ValueError:
            raise InvalidProblemError(
                f"{operation}: the shapes {left.shape} and {right.shape} do not broadcast"
            ) from None


def evaluate(rule: Any, *operands: Operand, **options: Any) -> NDArray[Any]:
    """The value of an operation of `rules` where none of the operands is a variable."""
    with default_environment(), np.errstate(all="ignore"):
        value, _ = rule(*values(rule.__name__, *operands), **options)
    return np.asarray(value)
