"""The operations of the tape as functions: at least one operand is a Variable, the result is one.

The other operand of a binary operation may be a NumPy array of the same dtype or a Python number. Shapes broadcast as
in NumPy. All raise InvalidProblemError for operands or shapes that do not match.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from isograd.core.arrays import copied, describe_mask
from isograd.errors import InvalidProblemError
from isograd.flash_attention import api as attention_family
from isograd.flash_attention.options import AttentionOptions
from isograd.flash_attention.problem import Given
from isograd.losses.cross_entropy import Options
from isograd.losses.linear_cross_entropy import LinearOptions
from isograd.tape import (
    attention_rules,
    choice_rules,
    gather_rules,
    index_rules,
    loss_rules,
    rules,
    variable,
)
from isograd.tape.variable import Operand, Variable, apply


def add(a: Operand, b: Operand) -> Variable:
    """The sum of two operands."""
    return apply(rules.add, a, b)


def sub(a: Operand, b: Operand) -> Variable:
    """The difference of two operands."""
    return apply(rules.sub, a, b)


def mul(a: Operand, b: Operand) -> Variable:
    """The product of two operands, element by element."""
    return apply(rules.mul, a, b)


def div(a: Operand, b: Operand) -> Variable:
    """The quotient of two operands."""
    return apply(rules.div, a, b)


def power(a: Operand, b: Operand) -> Variable:
    """One operand to the power of the other; a Python number as the exponent is not rounded to the dtype."""
    result: Variable = variable.power(a, b)
    return result


def neg(x: Variable) -> Variable:
    """The operand with its sign changed."""
    return apply(rules.neg, x)


def matmul(a: Operand, b: Operand, *, precision: str | None = None) -> Variable:
    """The matrix product with the shape rules of `numpy.matmul`, order-free.

    precision: that of `isograd.matmul`, of the gradients too.
    """
    return apply(rules.matmul, a, b, precision=precision)


def exp(x: Variable) -> Variable:
    """The exponential."""
    return apply(rules.exp, x)


def log(x: Variable) -> Variable:
    """The natural logarithm."""
    return apply(rules.log, x)


def sqrt(x: Variable) -> Variable:
    """The square root."""
    return apply(rules.sqrt, x)


def relu(x: Variable) -> Variable:
    """max(x, 0); the slope at 0 is 0."""
    return apply(rules.relu, x)


def tanh(x: Variable) -> Variable:
    """The hyperbolic tangent."""
    return apply(rules.tanh, x)


def sigmoid(x: Variable) -> Variable:
    """The logistic function 1 / (1 + exp(-x))."""
    return apply(rules.sigmoid, x)


def maximum(a: Operand, b: Operand) -> Variable:
    """The larger one of two operands, element by element; where they are equal both get half of the gradient."""
    return apply(choice_rules.maximum, a, b)


def minimum(a: Operand, b: Operand) -> Variable:
    """The smaller one of two operands, element by element; where they are equal both get half of the gradient."""
    return apply(choice_rules.minimum, a, b)


def where(mask: Any, a: Operand, b: Operand) -> Variable:
    """The elements of a where a mask is true, those of b elsewhere; the mask is copied."""
    return apply(choice_rules.where, a, b, mask=checked_mask("where", mask))


def checked_mask(operation: str, mask: Any) -> NDArray[np.bool_]:
    """A copy of an array of booleans, or an error."""
    array = np.array(mask) if isinstance(mask, (bool, np.bool_)) else mask
    describe_mask(array, operation, "mask")
    return np.array(array)


def cross_entropy(x: Variable, targets: Any, weight: Any = None, **options: Any) -> Variable:
    """Cross entropy of logits and targets, NumPy arrays that get no gradient; options as of `isograd.cross_entropy`."""
    if not isinstance(x, Variable):
        raise InvalidProblemError(f"cross_entropy: logits are {type(x).__name__}; only they may be a variable")
    given = Options(**options)
    return apply(loss_rules.cross_entropy, x, targets=targets, weight=weight, options=given)


def linear_cross_entropy(
    hidden: Operand,
    weight: Operand,
    targets: Any,
    bias: Operand | None = None,
    *,
    class_weight: Any = None,
    **options: Any,
) -> Variable:
    """Cross entropy of `hidden @ weight^T + bias`; options as of `isograd.linear_cross_entropy`."""
    operands = (hidden, weight) if bias is None else (hidden, weight, bias)
    given = LinearOptions(**options)
    return apply(loss_rules.linear_cross_entropy, *operands, targets=targets, class_weight=class_weight, options=given)


def sum(x: Variable, axis: rules.Axes = None, keepdims: bool = False) -> Variable:  # noqa: A001 - NumPy's name
    """The order-free sum over an axis, a tuple of axes, or all."""
    return apply(rules.sum, x, axis=axis, keepdims=keepdims)


def mean(x: Variable, axis: rules.Axes = None, keepdims: bool = False) -> Variable:
    """The mean over an axis, a tuple of axes, or all."""
    return apply(rules.mean, x, axis=axis, keepdims=keepdims)


def max(x: Variable, axis: rules.Axes = None, keepdims: bool = False) -> Variable:  # noqa: A001 - NumPy's name
    """The largest element over an axis, a tuple of axes, or all; n equal ones get 1 / n of the gradient each."""
    return apply(choice_rules.max, x, axis=axis, keepdims=keepdims)


def min(x: Variable, axis: rules.Axes = None, keepdims: bool = False) -> Variable:  # noqa: A001 - NumPy's name
    """The smallest element over an axis, a tuple of axes, or all; n equal ones get 1 / n of the gradient each."""
    return apply(choice_rules.min, x, axis=axis, keepdims=keepdims)


def reshape(x: Variable, shape: int | tuple[int, ...]) -> Variable:
    """The same elements in another shape; one size may be -1."""
    return apply(rules.reshape, x, shape=shape)


def transpose(x: Variable, axes: tuple[int, ...] | None = None) -> Variable:
    """Permute the axes; without `axes`, reverse them."""
    return apply(rules.transpose, x, axes=axes)


def getitem(x: Variable, index: Any) -> Variable:
    """A part of x by NumPy's indexing: integers, slices, an ellipsis, None, and arrays of integers or of booleans."""
    return apply(index_rules.getitem, x, index=index)


def concatenate(operands: Sequence[Operand], axis: int = 0) -> Variable:
    """Join variables, and arrays of their dtype, along an axis."""
    if isinstance(operands, Variable) or len(operands) == 0:
        raise InvalidProblemError("concatenate: expected a sequence of at least one variable")
    return apply(rules.concatenate, *operands, axis=axis)


# --- gather ----------------------------------------------------------------------------------------------------------
def take_along_axis(x: Variable, indices: Any, axis: int = -1) -> Variable:
    """Values along an axis at an array of indices; see `isograd.take_along_axis`."""
    return apply(gather_rules.take_along_axis, x, indices=copied(indices, "take_along_axis", "indices"), axis=axis)


def embedding(weight: Variable, indices: Any, padding_idx: int | None = None) -> Variable:
    """Rows of a table; see `isograd.embedding`."""
    rows = copied(indices, "embedding", "indices")
    return apply(gather_rules.embedding, weight, indices=rows, padding_idx=padding_idx)


def scatter_sum(x: Operand, indices: Any, values: Operand, axis: int = -1) -> Variable:
    """Values added onto x along an axis at an array of indices; see `isograd.scatter_sum`."""
    return apply(gather_rules.scatter_sum, x, values, indices=copied(indices, "scatter_sum", "indices"), axis=axis)


def segment_sum(values: Variable, segment_ids: Any, num_segments: int) -> Variable:
    """The sum of each segment's rows; see `isograd.segment_sum`."""
    ids = copied(segment_ids, "segment_sum", "segment_ids")
    return apply(gather_rules.segment_sum, values, segment_ids=ids, num_segments=num_segments)


# --- attention -------------------------------------------------------------------------------------------------------
def _constant(argument: str, value: Any) -> Any:
    """A copy of what gets no gradient, an array or a pair of them; None is nothing."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return tuple([_constant(argument, x) for x in value])
    return copied(value, "attention", argument)


def attention(
    q: Operand, k: Operand, v: Operand, options: AttentionOptions, given: Given, return_lse: bool = False
) -> Variable | tuple[Variable, Variable]:
    """Attention, and with return_lse the logarithm of its sums; `isograd.attention` takes options one by one."""
    every: dict[str, Any] = {**asdict(options), "layout": given.layout, "preference": given.preference}
    every |= {name: _constant(name, getattr(given, name)) for name in ("mask", "segment_ids", "cu_seqlens")}
    extra = {name: x for name, x in (("bias", given.bias), ("sinks", given.sinks)) if x is not None}
    operands = (q, k, v, *extra.values())
    values = [x.value if isinstance(x, Variable) else x for x in operands]
    optional: dict[str, Any] = {**dict(zip(extra, values[3:], strict=True)), **every}
    o, lse = attention_family.attention(values[0], values[1], values[2], return_lse=True, **optional)
    done = attention_rules.Computed(tuple(extra), o, lse, every)
    result = apply(attention_rules.attention, *operands, one_dtype=False, done=done)
    if not return_lse:
        return result
    return result, apply(attention_rules.attention_lse, *operands, one_dtype=False, done=done)
