"""cross_entropy and its gradient on arrays of every kind, piece by piece; `api.py` has what a user calls."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from isograd.core import arrays, functional
from isograd.core.checks import INDEX_DTYPES, checked_axis, checked_shape, real_number
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.losses import reductions
from isograd.losses.cross_entropy_plans import (
    CrossEntropyBackwardDescriptor,
    CrossEntropyBackwardPlan,
    CrossEntropyDescriptor,
    CrossEntropyGradientDescriptor,
    CrossEntropyGradientPlan,
    CrossEntropyPlan,
)
from isograd.losses.cross_entropy_reference import STATE


class Options(NamedTuple):
    """The arguments besides arrays, as the user gave them."""

    axis: Any = None
    ignore_index: Any = -100
    label_smoothing: Any = 0.0
    z_loss: Any = 0.0
    reduction: Any = "mean"
    count: Any = None


class Problem(NamedTuple):
    """A call whose arguments were looked at: arrays, fields of the descriptors, and the reduction."""

    operation: str
    logits: Any
    targets: Any
    weight: Any
    fields: tuple[Any, ...]
    row_shape: tuple[int, ...]
    work: str
    device: str
    reduction: str
    divisor: Callable[[], Any]  # what a mean divides by, found once

    @property
    def inputs(self) -> dict[str, Any]:
        """What all plans take."""
        given = {"logits": self.logits, "targets": self.targets}
        return given if self.weight is None else given | {"weight": self.weight}


def _is_index(array: Any) -> bool:
    return not array.is_floating_point() if arrays.is_tensor(array) else array.dtype.kind in "biu"


def _checked_targets(operation: str, targets: Any, shape: tuple[int, ...], dtype: str, axis: int) -> str:
    """The dtype of targets that are class indices or probabilities, as their dtype says, of the shape of that kind."""
    by_index = _is_index(targets)
    _, target_dtype = arrays.describe(targets, operation, "targets", by_index)
    row_shape, given = shape[:axis] + shape[axis + 1 :], tuple(targets.shape)
    fits = given == (row_shape if by_index else shape)
    if not fits or (not by_index and target_dtype != dtype):
        kind = UnsupportedError if fits else InvalidProblemError
        raise kind(
            f"{operation}: targets has dtype {target_dtype} and shape {given}; accepted: class indices "
            f"({', '.join(INDEX_DTYPES)}) of shape {row_shape}, or probabilities ({dtype}) of shape {shape}"
        )
    return target_dtype


def problem(operation: str, logits: Any, targets: Any, weight: Any, options: Options) -> Problem:
    """Check what plans do not see and describe the rest to them; the arrays are NumPy's or tensors."""
    reduction = reductions.checked_reduction(operation, options.reduction)
    device, dtype = arrays.describe(logits, operation, "logits")
    work = "float64" if dtype == "float64" else "float32"
    shape = checked_shape(operation, "logits", logits.shape)
    axis = (1 if len(shape) > 1 else 0) if options.axis is None else checked_axis(operation, options.axis, shape)
    target_dtype = _checked_targets(operation, targets, shape, dtype, axis)
    if weight is not None:
        weight = reductions.checked_weight(operation, "weight", weight, shape[axis], dtype, work)
    ignored = functional.integer(operation, "ignore_index", options.ignore_index)
    smoothing = real_number(operation, "label_smoothing", options.label_smoothing)
    z_loss = real_number(operation, "z_loss", options.z_loss)
    count = reductions.checked_count(operation, options.count, logits)
    fields = (shape, dtype, target_dtype, axis, weight is not None, ignored, smoothing, z_loss)
    row_shape = shape[:axis] + shape[axis + 1 :]
    if count is None and target_dtype not in INDEX_DTYPES:
        count = arrays.size_of(row_shape)

    @functools.cache
    def divisor() -> Any:
        if count is not None:
            return reductions.scalar(count, work, logits)
        return reductions.target_total(operation, targets, weight, shape[axis], ignored, work)

    return Problem(operation, logits, targets, weight, fields, row_shape, work, device, reduction, divisor)


def row_gradients(given: Problem, dloss: Any) -> Any:
    """The gradient of every row's loss from that of the reduced loss, in the rows' shape."""
    about = (given.work, given.logits, given.row_shape, given.reduction)
    return reductions.row_gradients(given.operation, dloss, *about, given.divisor)


def forward(given: Problem) -> tuple[Any, Any]:
    """(losses, state) of the rows."""
    plan = functional.plan(CrossEntropyPlan, CrossEntropyDescriptor(*given.fields), given.device)
    losses = functional.empty(given.row_shape, given.work, given.logits)
    state = functional.empty((STATE, *given.row_shape), given.work, given.logits)
    result: tuple[Any, Any] = functional.run(plan, **given.inputs, losses=losses, state=state)
    return result


def backward(given: Problem, dlosses: Any, state: Any, out: Any = None) -> Any:
    """The gradient of the logits from those of the rows' losses."""
    plan = functional.plan(CrossEntropyBackwardPlan, CrossEntropyBackwardDescriptor(*given.fields), given.device)
    dlogits = functional.empty(given.fields[0], given.fields[1], given.logits) if out is None else out
    return functional.run(plan, **given.inputs, dlosses=dlosses, state=state, dlogits=dlogits)


def fused(given: Problem, dlosses: Any, out: Any = None) -> tuple[Any, Any]:
    """(losses, gradient of the logits) at once."""
    plan = functional.plan(CrossEntropyGradientPlan, CrossEntropyGradientDescriptor(*given.fields), given.device)
    losses = functional.empty(given.row_shape, given.work, given.logits)
    dlogits = functional.empty(given.fields[0], given.fields[1], given.logits) if out is None else out
    result: tuple[Any, Any] = functional.run(plan, **given.inputs, dlosses=dlosses, losses=losses, dlogits=dlogits)
    return result


def reduced(given: Problem, losses: Any) -> Any:
    """The losses after the reduction, of the logits' kind."""
    about = (given.work, given.logits, given.reduction)
    return reductions.reduced(given.operation, losses, *about, given.divisor)
