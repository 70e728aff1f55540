"""The operations of the tape as functions: at least one operand is a Variable, the result is one.

The other operand of a binary operation may be a NumPy array of the same dtype or a Python number. Shapes broadcast as
in NumPy. All raise InvalidProblemError for operands or shapes that do not match.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from isograd.arrays import to_numpy
from isograd.errors import InvalidProblemError
from isograd.tape import distribution_rules, gather_rules, rules
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


def neg(x: Variable) -> Variable:
    """The operand with its sign changed."""
    return apply(rules.neg, x)


def matmul(a: Operand, b: Operand) -> Variable:
    """The matrix product with the shape rules of `numpy.matmul`, order-free (`isograd.numerics.matmul`)."""
    return apply(rules.matmul, a, b)


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


def silu(x: Variable) -> Variable:
    """The product x * sigmoid(x)."""
    return apply(rules.silu, x)


def softmax(x: Variable, axis: int = -1) -> Variable:
    """Softmax over an axis."""
    return apply(rules.softmax, x, axis=axis)


def log_softmax(x: Variable, axis: int = -1) -> Variable:
    """The logarithm of softmax over an axis."""
    return apply(rules.log_softmax, x, axis=axis)


def kl_div(x: Operand, target: Operand, reduction: str = "mean", log_target: bool = False) -> Variable:
    """The divergence of a target distribution from log-probabilities; both get gradients."""
    return apply(distribution_rules.kl_div, x, target, reduction=reduction, log_target=log_target)


def distillation_loss(
    student: Variable, teacher: Any, temperature: float = 1.0, indices: Any = None, reduction: str = "batchmean"
) -> Variable:
    """The divergence of a teacher, an array or a variable that gets no gradient, from a student."""
    # Copies, as constants are elsewhere: the caller may overwrite the originals before the gradient is computed.
    teacher = teacher.value if isinstance(teacher, Variable) else teacher
    options = {"teacher": _indices("distillation_loss", teacher, "teacher"), "temperature": temperature}
    indices = None if indices is None else _indices("distillation_loss", indices)
    return apply(distribution_rules.distillation_loss, student, **options, indices=indices, reduction=reduction)


def gumbel_softmax(
    x: Variable, tau: float = 1.0, hard: bool = False, axis: int = -1, seed: int = 0, offset: int = 0
) -> Variable:
    """A sample of the Gumbel-softmax distribution over an axis."""
    return apply(distribution_rules.gumbel_softmax, x, tau=tau, hard=hard, axis=axis, seed=seed, offset=offset)


def sparsemax(x: Variable, axis: int = -1) -> Variable:
    """The point of the probability simplex nearest to each row of an axis."""
    return apply(distribution_rules.sparsemax, x, axis=axis)


def sum(x: Variable, axis: rules.Axes = None, keepdims: bool = False) -> Variable:  # noqa: A001 - NumPy's name
    """The order-free sum over an axis, a tuple of axes, or all."""
    return apply(rules.sum, x, axis=axis, keepdims=keepdims)


def mean(x: Variable, axis: rules.Axes = None, keepdims: bool = False) -> Variable:
    """The mean over an axis, a tuple of axes, or all."""
    return apply(rules.mean, x, axis=axis, keepdims=keepdims)


def reshape(x: Variable, shape: int | tuple[int, ...]) -> Variable:
    """The same elements in another shape; one size may be -1."""
    return apply(rules.reshape, x, shape=shape)


def transpose(x: Variable, axes: tuple[int, ...] | None = None) -> Variable:
    """Permute the axes; without `axes`, reverse them."""
    return apply(rules.transpose, x, axes=axes)


def getitem(x: Variable, index: Any) -> Variable:
    """A part of x by basic indexing: integers, slices with any step, an ellipsis, None."""
    return apply(rules.getitem, x, index=index)


def concatenate(operands: Sequence[Operand], axis: int = 0) -> Variable:
    """Join variables, and arrays of their dtype, along an axis."""
    if isinstance(operands, Variable) or len(operands) == 0:
        raise InvalidProblemError("concatenate: expected a sequence of at least one variable")
    return apply(rules.concatenate, *operands, axis=axis)


def _indices(operation: str, indices: Any, argument: str = "indices") -> Any:
    # A copy: the caller may overwrite the original before the gradients are computed.
    return np.array(to_numpy(indices, operation, argument)[0])


def take_along_axis(x: Variable, indices: Any, axis: int = -1) -> Variable:
    """Values along an axis at an array of indices; see `isograd.take_along_axis`."""
    return apply(gather_rules.take_along_axis, x, indices=_indices("take_along_axis", indices), axis=axis)


def embedding(weight: Variable, indices: Any, padding_idx: int | None = None) -> Variable:
    """Rows of a table; see `isograd.embedding`."""
    return apply(gather_rules.embedding, weight, indices=_indices("embedding", indices), padding_idx=padding_idx)


def scatter_sum(x: Operand, indices: Any, values: Operand, axis: int = -1) -> Variable:
    """Values added onto x along an axis at an array of indices; see `isograd.scatter_sum`."""
    return apply(gather_rules.scatter_sum, x, values, indices=_indices("scatter_sum", indices), axis=axis)


def segment_sum(values: Variable, segment_ids: Any, num_segments: int) -> Variable:
    """The sum of each segment's rows; see `isograd.segment_sum`."""
    ids = _indices("segment_sum", segment_ids, "segment_ids")
    return apply(gather_rules.segment_sum, values, segment_ids=ids, num_segments=num_segments)
