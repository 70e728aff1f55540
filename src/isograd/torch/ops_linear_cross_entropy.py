"""The operator of cross entropy after a linear layer, and its gradient.

    linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias=None, Tensor? class_weight=None,
                         SymInt ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, str reduction="mean",
                         float? count=None, SymInt? chunk=None, str? preference=None, bool gradient=False,
                         Tensor? divisor=None) -> (Tensor, Tensor, Tensor, Tensor)
    linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor targets, Tensor? bias,
                                  Tensor? class_weight, SymInt ignore_index, float label_smoothing, float z_loss,
                                  str reduction, float? count, SymInt? chunk, str? preference, Tensor? divisor=None)
        -> (Tensor, Tensor, Tensor)

`divisor` is a count that lies in a tensor. The loss is in the work type. With `gradient` the gradients of hidden,
weight and bias for a loss gradient of 1 follow it: computing them with the loss saves a product. Not in float16, whose
exponents end where the gradients of a mean begin: there they are computed when the loss gradient, which is large then,
has arrived. There are no second derivatives.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.losses import linear_cross_entropy as linear
from isograd.losses.reductions import checked_reduction
from isograd.torch import define
from isograd.torch.ops_scaled import SCALED
from isograd.torch.tensors import (
    empty,
    require_count,
    require_device,
    require_same_dtype,
    require_storage,
    usable,
    usable_index,
    work_dtype,
)

Saved = tuple[Any, ...]


def _linear_problem(
    operation: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    options: tuple[Any, ...],
) -> linear.LinearProblem:
    given = {"hidden": hidden, "weight": weight, "bias": bias, "class_weight": class_weight}
    operands = {n: None if t is None else usable(operation, n, t).view(t.shape) for n, t in given.items()}
    operands["targets"] = usable_index(operation, "targets", targets).view(targets.shape)
    return linear.problem(operation, **operands, options=linear.LinearOptions(*options))


def _require_linear(
    operation: str,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    reduction: str,
    divisor: Tensor | None,
) -> None:
    checked_reduction(operation, reduction)
    require_device(operation, hidden=hidden, weight=weight, targets=targets, bias=bias, class_weight=class_weight)
    require_count(operation, divisor, hidden.device)
    require_storage(operation, hidden, "hidden")
    require_same_dtype(operation, weight, "weight", hidden, "hidden")
    if bias is not None:
        require_same_dtype(operation, bias, "bias", hidden, "hidden")
    if hidden.dim() == 0 or weight.dim() != 2 or weight.shape[1] != hidden.shape[-1]:
        raise InvalidProblemError(
            f"{operation}: weight has shape {tuple(weight.shape)} and hidden {tuple(hidden.shape)}; expected "
            "(classes, features) and (..., features)"
        )
    if tuple(targets.shape) != tuple(hidden.shape[:-1]):
        raise InvalidProblemError(
            f"{operation}: targets have shape {tuple(targets.shape)}; expected {tuple(hidden.shape[:-1])}"
        )
    for name, vector in (("bias", bias), ("class_weight", class_weight)):
        if vector is not None and tuple(vector.shape) != (weight.shape[0],):
            raise InvalidProblemError(
                f"{operation}: {name} has shape {tuple(vector.shape)}; expected one for each of {weight.shape[0]} "
                "classes"
            )


def _gradients_like(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    shape = (0,) if bias is None else bias.shape
    return empty(hidden.shape, hidden), empty(weight.shape, hidden), empty(shape, hidden)


def _keeps(gradient: bool, hidden: Tensor) -> bool:
    """Whether gradients are computed with the loss."""
    return gradient and hidden.dtype is not torch.float16


def _linear_fake(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    count: float | None = None,
    chunk: int | None = None,
    preference: str | None = None,
    gradient: bool = False,
    divisor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _require_linear("linear_cross_entropy", hidden, weight, targets, bias, class_weight, reduction, divisor)
    loss = empty(targets.shape if reduction == "none" else (), hidden, work_dtype(hidden.dtype))
    none = (empty((0,), hidden), empty((0,), hidden), empty((0,), hidden))
    return loss, *(_gradients_like(hidden, weight, bias) if _keeps(gradient, hidden) else none)


def _linear(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    count: float | None = None,
    chunk: int | None = None,
    preference: str | None = None,
    gradient: bool = False,
    divisor: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    name = "linear_cross_entropy"
    _require_linear(name, hidden, weight, targets, bias, class_weight, reduction, divisor)
    options = (
        ignore_index,
        label_smoothing,
        z_loss,
        reduction,
        count if divisor is None else divisor,
        chunk,
        preference,
    )
    given = _linear_problem(name, hidden, weight, targets, bias, class_weight, options)
    if not _keeps(gradient, hidden):
        loss = linear.reduced(given, linear.forward(given))
        return loss, empty((0,), hidden), empty((0,), hidden), empty((0,), hidden)
    losses, *gradients = linear.gradient(given, linear.row_gradients(given, None))
    return linear.reduced(given, losses), *_shaped(hidden, gradients)


def _shaped(hidden: Tensor, gradients: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    dhidden, dweight, *dbias = gradients
    return dhidden.view(hidden.shape), dweight, dbias[0] if dbias else empty((0,), hidden)


def _linear_backward_fake(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    divisor = options[7] if len(options) > 7 else None
    _require_linear("linear_cross_entropy_backward", hidden, weight, targets, bias, class_weight, options[3], divisor)
    return _gradients_like(hidden, weight, bias)


def _linear_backward(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    name = "linear_cross_entropy_backward"
    divisor = options[7] if len(options) > 7 else None
    _require_linear(name, hidden, weight, targets, bias, class_weight, options[3], divisor)
    count = options[4] if divisor is None else divisor
    given = _linear_problem(name, hidden, weight, targets, bias, class_weight, (*options[:4], count, *options[5:7]))
    dlosses = linear.row_gradients(given, usable(name, "dloss", dloss).view(dloss.shape))
    _, *gradients = linear.gradient(given, dlosses)
    return _shaped(hidden, gradients)


def _save_linear(node: Any, inputs: Saved, output: Saved) -> Saved:
    *tensors, gradient, divisor = inputs
    node.options = tensors[5:]
    node.gradient = _keeps(gradient, inputs[0])
    if node.gradient:
        return tuple(output[1:])
    node.mark_non_differentiable(*output[1:])
    return (*tensors[:5], divisor)


def _refuse_second(*args: Any) -> Any:
    raise UnsupportedError(
        "linear_cross_entropy: it has neither second derivatives nor forward mode; use cross_entropy of torch's linear"
    )


def _differentiate_linear(
    node: Any, saved: Saved, dloss: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    if any(g is not None for g in others):  # a gradient was differentiated again
        _refuse_second()
    if dloss is None:
        return (None,)
    if node.gradient:
        wanted = [node.needs_input_grad[i] for i in (0, 1, 3)]
        dhidden, dweight, dbias = (SCALED(g, dloss) if w else None for g, w in zip(saved, wanted, strict=True))
        return dhidden, dweight, None, dbias
    *operands, divisor = saved
    dhidden, dweight, dbias = LINEAR_CROSS_ENTROPY_BACKWARD(dloss, *operands, *node.options, divisor)
    return dhidden, dweight, None, dbias if node.needs_input_grad[3] else None


def _autocast(device: str) -> Callable[..., Any]:
    """As torch's linear and cross_entropy under autocast: a product in autocast's type, its loss in float32."""

    def rule(
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        bias: Tensor | None = None,
        class_weight: Tensor | None = None,
        *options: Any,
    ) -> Any:
        dtype = torch.get_autocast_dtype(device)

        def cast(tensor: Tensor) -> Tensor:
            return tensor if tensor.dtype is torch.float64 else tensor.to(dtype)

        hidden, weight, bias = cast(hidden), cast(weight), None if bias is None else cast(bias)
        if class_weight is not None and class_weight.dtype is not torch.float64:
            class_weight = class_weight.float()
        return LINEAR_CROSS_ENTROPY(hidden, weight, targets, bias, class_weight, *options)

    return rule


LINEAR_CROSS_ENTROPY: define.Operator = define.operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias=None, Tensor? class_weight=None, "
    'SymInt ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, str reduction="mean", float? count=None, '
    "SymInt? chunk=None, str? preference=None, bool gradient=False, Tensor? divisor=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    run=_linear,
    fake=_linear_fake,
    gradient=define.Gradient(_save_linear, _differentiate_linear, _refuse_second),
    batch=define.one_by_one,
    autocast={"CUDA": _autocast("cuda"), "CPU": _autocast("cpu")},
)
LINEAR_CROSS_ENTROPY_BACKWARD: define.Operator = define.operator(
    "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, "
    "Tensor? class_weight, SymInt ignore_index, float label_smoothing, float z_loss, str reduction, float? count, "
    "SymInt? chunk, str? preference, Tensor? divisor=None) -> (Tensor, Tensor, Tensor)",
    run=_linear_backward,
    fake=_linear_backward_fake,
    gradient=define.Gradient(lambda node, inputs, output: (), _refuse_second, _refuse_second),
    batch=define.one_by_one,
)
