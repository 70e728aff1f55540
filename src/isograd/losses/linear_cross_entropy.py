"""linear_cross_entropy on arrays of every kind."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from isograd.core import arrays, functional
from isograd.core.checks import checked_preference, checked_shape, real_number
from isograd.errors import InvalidProblemError
from isograd.losses import reductions
from isograd.losses.linear_plans import (
    LinearCrossEntropyDescriptor,
    LinearCrossEntropyGradientDescriptor,
    LinearCrossEntropyGradientPlan,
    LinearCrossEntropyPlan,
)


class LinearOptions(NamedTuple):
    """The arguments besides arrays, as the user gave them."""

    ignore_index: Any = -100
    label_smoothing: Any = 0.0
    z_loss: Any = 0.0
    reduction: Any = "mean"
    count: Any = None
    chunk: Any = None
    preference: Any = None


class LinearProblem(NamedTuple):
    """A call whose arguments were looked at."""

    operation: str
    inputs: dict[str, Any]
    fields: tuple[Any, ...]
    row_shape: tuple[int, ...]
    work: str
    device: str
    reduction: str
    divisor: Callable[[], Any]  # what a mean divides by, found once
    preference: str | None

    @property
    def hidden(self) -> Any:
        """What results are made like."""
        return self.inputs["hidden"]


def problem(
    operation: str,
    hidden: Any,
    weight: Any,
    targets: Any,
    bias: Any,
    class_weight: Any,
    options: LinearOptions,
) -> LinearProblem:
    """Check what plans do not see and describe the rest to them; the arrays are NumPy's or tensors."""
    reduction = reductions.checked_reduction(operation, options.reduction)
    device, dtype = arrays.describe(hidden, operation, "hidden")
    work = "float64" if dtype == "float64" else "float32"
    shape = checked_shape(operation, "hidden", hidden.shape)
    classes, features = checked_shape(operation, "weight", weight.shape)[0], shape[-1]
    if len(weight.shape) != 2 or weight.shape[1] != features:
        raise InvalidProblemError(
            f"{operation}: weight has shape {tuple(weight.shape)}; expected (classes, {features}) for hidden {shape}"
        )
    _, target_dtype = arrays.describe(targets, operation, "targets", True)
    if tuple(targets.shape) != shape[:-1]:
        raise InvalidProblemError(
            f"{operation}: targets have shape {tuple(targets.shape)}; expected {shape[:-1]} for hidden {shape}"
        )
    rows = arrays.size_of(shape[:-1])
    inputs = {
        "hidden": functional.reshaped(operation, "hidden", hidden, (rows, features)),
        "weight": weight,
        "targets": functional.reshaped(operation, "targets", targets, (rows,)),
    }
    if bias is not None:
        inputs["bias"] = bias
    if class_weight is not None and classes:  # a weight without rows is refused by the plan
        given = (class_weight, classes, dtype, work)
        inputs["class_weight"] = reductions.checked_weight(operation, "class_weight", *given)
    fields = (
        *(rows, features, classes, dtype, target_dtype, bias is not None, class_weight is not None),
        functional.integer(operation, "ignore_index", options.ignore_index),
        real_number(operation, "label_smoothing", options.label_smoothing),
        real_number(operation, "z_loss", options.z_loss),
        0 if options.chunk is None else _chunk(operation, options.chunk),
    )
    count = reductions.checked_count(operation, options.count, hidden)
    preference = checked_preference(operation, options.preference)

    @functools.cache
    def divisor() -> Any:
        if count is not None:
            return reductions.scalar(count, work, hidden)
        given = (inputs["targets"], inputs.get("class_weight"), classes, fields[7], work)
        return reductions.target_total(operation, *given)

    return LinearProblem(operation, inputs, fields, shape[:-1], work, device, reduction, divisor, preference)


def _chunk(operation: str, chunk: Any) -> int:
    rows = functional.integer(operation, "chunk", chunk)
    if rows < 1:
        raise InvalidProblemError(f"{operation}: chunk is {rows}; expected a positive number of rows")
    return rows


def row_gradients(given: LinearProblem, dloss: Any) -> Any:
    """The gradient of every row's loss from that of the reduced loss, flat."""
    about = (given.work, given.hidden, given.row_shape, given.reduction)
    dlosses = reductions.row_gradients(given.operation, dloss, *about, given.divisor)
    return functional.reshaped(given.operation, "dloss", dlosses, (given.fields[0],))


def forward(given: LinearProblem) -> Any:
    """The losses of the rows, flat."""
    descriptor = LinearCrossEntropyDescriptor(*given.fields)
    plan = functional.plan(LinearCrossEntropyPlan, descriptor, given.device, given.preference)
    return functional.run(plan, **given.inputs, losses=functional.empty((given.fields[0],), given.work, given.hidden))


def gradient(given: LinearProblem, dlosses: Any) -> tuple[Any, ...]:
    """(losses, flat; dhidden, flat; dweight; dbias if there is a bias)."""
    rows, features, classes, dtype, *_ = given.fields
    descriptor = LinearCrossEntropyGradientDescriptor(*given.fields)
    plan = functional.plan(LinearCrossEntropyGradientPlan, descriptor, given.device, given.preference)
    outputs = {
        "losses": functional.empty((rows,), given.work, given.hidden),
        "dhidden": functional.empty((rows, features), dtype, given.hidden),
        "dweight": functional.empty((classes, features), dtype, given.hidden),
    }
    if "bias" in given.inputs:
        outputs["dbias"] = functional.empty((classes,), dtype, given.hidden)
    result: tuple[Any, ...] = functional.run(plan, dlosses=dlosses, **given.inputs, **outputs)
    return result


def reduced(given: LinearProblem, losses: Any) -> Any:
    """The losses after the reduction, of hidden's kind."""
    if given.reduction == "none":
        return functional.reshaped(given.operation, "losses", losses, given.row_shape)
    about = (given.work, given.hidden, given.reduction)
    return reductions.reduced(given.operation, losses, *about, given.divisor)
