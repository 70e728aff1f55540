"""cross_entropy and its gradient on arrays of every kind."""

from typing import Any, NamedTuple

import numpy as np

from isograd import arrays, encoder, functional
from isograd.errors import InvalidProblemError
from isograd.losses.cross_entropy_plans import (
    CrossEntropyBackwardDescriptor,
    CrossEntropyBackwardPlan,
    CrossEntropyDescriptor,
    CrossEntropyGradientDescriptor,
    CrossEntropyGradientPlan,
    CrossEntropyPlan,
)
from isograd.losses.cross_entropy_reference import STATE
from isograd.losses.reductions import REDUCTIONS, divided, reduce_losses, target_total
from isograd.plan import INDEX_DTYPES


class Options(NamedTuple):
    """What the functions have in common besides arrays."""

    axis: int | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    reduction: str
    count: Any


class Problem(NamedTuple):
    """The arrays of a call, NumPy's or tensors, with the fields of its descriptors."""

    logits: Any
    targets: Any
    weight: Any
    fields: tuple[Any, ...]
    row_shape: tuple[int, ...]
    work: str
    device: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The inputs that all plans take."""
        given = {"logits": self.logits, "targets": self.targets}
        return given if self.weight is None else given | {"weight": self.weight}


def _axis(operation: str, axis: Any, rank: int) -> int:
    if axis is None:
        return 1 if rank > 1 else 0
    number = functional.integer(operation, "axis", axis)
    if not -rank <= number < rank:
        raise InvalidProblemError(f"{operation}: axis is {number}; logits of rank {rank} accept {-rank} to {rank - 1}")
    return number % rank


def _is_index(operation: str, targets: Any) -> bool:
    if arrays.is_tensor(targets):
        return not targets.is_floating_point()
    return bool(targets.dtype.kind in "iub" and targets.dtype != arrays.numpy_dtype("bfloat16"))


def problem(operation: str, logits: Any, targets: Any, weight: Any, options: Options) -> Problem:
    """Check what plans do not see: the reduction, and arrays of more than one kind."""
    if options.reduction not in REDUCTIONS:
        raise InvalidProblemError(
            f'{operation}: reduction is {options.reduction!r}; accepted: {", ".join(map(repr, REDUCTIONS))}'
        )
    device, dtype = arrays.describe(logits, operation, "logits")
    work = "float64" if dtype == "float64" else "float32"
    shape = tuple(logits.shape)
    axis = _axis(operation, options.axis, len(shape)) if shape else 0
    _, target_dtype = arrays.describe(targets, operation, "targets", _is_index(operation, targets))
    if weight is not None:
        _, weight_dtype = arrays.describe(weight, operation, "weight")
        if weight_dtype not in (dtype, work):
            raise InvalidProblemError(f"{operation}: weight has dtype {weight_dtype}; accepted: {work}, {dtype}")
        weight = functional.converted(weight, work)
    fields = (
        shape, dtype, target_dtype, axis, weight is not None, options.ignore_index, options.label_smoothing,
        options.z_loss,
    )  # fmt: skip
    row_shape = shape[:axis] + shape[axis + 1 :]
    return Problem(logits, targets, weight, fields, row_shape, work, device)


def upstream(operation: str, given: Problem, dlosses: Any, options: Options) -> Any:
    """The gradient of every row's loss: `dlosses`, for a mean over its divisor, in the rows' shape."""
    if isinstance(dlosses, (int, float)) and not isinstance(dlosses, bool):
        dlosses = functional.full((), dlosses, given.work, given.logits)
    else:
        _, dtype = arrays.describe(dlosses, operation, "dloss")
        if dtype != given.work:
            raise InvalidProblemError(f"{operation}: dloss has dtype {dtype}; expected {given.work}")
    shape = tuple(dlosses.shape)
    if shape not in ((), given.row_shape) or (options.reduction != "none" and shape != ()):
        expected = "()" if options.reduction != "none" else f"() or {given.row_shape}"
        raise InvalidProblemError(f"{operation}: dloss has shape {shape}; expected {expected}")
    if options.reduction == "mean":
        dlosses = divided(dlosses, _divisor(operation, given, options))
    return functional.expanded(dlosses, given.row_shape)


def _divisor(operation: str, given: Problem, options: Options) -> Any:
    if options.count is not None:
        return functional.full((), _count(operation, options.count), given.work, given.logits)
    by_index = given.fields[2] in INDEX_DTYPES
    rows = arrays.size_of(given.row_shape)
    if not by_index:
        return functional.full((), rows, given.work, given.logits)
    return target_total(given.targets, given.weight, given.fields[0][given.fields[3]], options.ignore_index, given.work)


def _count(operation: str, count: Any) -> float:
    if isinstance(count, bool) or not isinstance(count, (int, float, np.integer, np.floating)):
        raise InvalidProblemError(f"{operation}: count is {count!r}; expected a number")
    return float(count)


def forward(operation: str, given: Problem) -> tuple[Any, Any]:
    """(losses, state) of the rows."""
    losses = functional.empty(given.row_shape, given.work, given.logits)
    state = functional.empty((STATE, *given.row_shape), given.work, given.logits)
    plan = functional.plan(CrossEntropyPlan, CrossEntropyDescriptor(*given.fields), given.device)
    return functional.run(plan, **given.arguments, losses=losses, state=state)  # type: ignore[no-any-return]


def backward(given: Problem, dlosses: Any, state: Any, out: Any = None) -> Any:
    """The gradient of the logits from the gradients of the rows' losses."""
    dlogits = functional.empty(given.fields[0], given.fields[1], given.logits) if out is None else out
    plan = functional.plan(CrossEntropyBackwardPlan, CrossEntropyBackwardDescriptor(*given.fields), given.device)
    return functional.run(plan, **given.arguments, dlosses=dlosses, state=state, dlogits=dlogits)


def fused(given: Problem, dlosses: Any, out: Any = None) -> tuple[Any, Any]:
    """(losses, gradient of the logits) in one pass."""
    losses = functional.empty(given.row_shape, given.work, given.logits)
    dlogits = functional.empty(given.fields[0], given.fields[1], given.logits) if out is None else out
    plan = functional.plan(CrossEntropyGradientPlan, CrossEntropyGradientDescriptor(*given.fields), given.device)
    return functional.run(plan, **given.arguments, dlosses=dlosses, losses=losses, dlogits=dlogits)  # type: ignore[no-any-return]


def reduced(operation: str, given: Problem, losses: Any, options: Options) -> Any:
    """The losses after the reduction."""
    if options.reduction == "none":
        return losses
    encoder.refuse(operation, f'reduction is "{options.reduction}"')
    total = reduce_losses(losses)
    return total if options.reduction == "sum" else divided(total, _divisor(operation, given, options))
