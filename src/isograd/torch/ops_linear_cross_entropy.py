"""The operator of cross entropy after a linear layer, and its gradient.

    linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias=None, Tensor? class_weight=None,
                         SymInt ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, str reduction="mean",
                         float? count=None, SymInt? chunk=None, str? preference=None, bool gradient=False,
                         Tensor? divisor=None, bool matrix=True) -> (Tensor, Tensor, Tensor, Tensor)
    linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor targets, Tensor? bias,
                                  Tensor? class_weight, SymInt ignore_index, float label_smoothing, float z_loss,
                                  str reduction, float? count, SymInt? chunk, str? preference, Tensor? divisor=None,
                                  bool matrix=True) -> (Tensor, Tensor, Tensor)

`divisor` is a count that lies in a tensor. The loss is in the work type. With `gradient` the gradients of hidden,
weight and bias for a loss gradient of 1 follow it: computing them with the loss saves a product. Not in float16, whose
exponents end where the gradients of a mean begin: there they are computed when the loss gradient, which is large then,
has arrived. Without `matrix` those of weight and bias are empty. There are no second derivatives.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.losses import linear_cross_entropy as linear
from isograd.losses.linear_plans import ONE_PIECE
from isograd.losses.reductions import checked_reduction
from isograd.torch import define, members
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


def _gradients_like(hidden: Tensor, weight: Tensor, bias: Tensor | None, matrix: bool) -> tuple[Tensor, Tensor, Tensor]:
    none = (0,)
    shapes = (weight.shape if matrix else none, none if bias is None or not matrix else bias.shape)
    return empty(hidden.shape, hidden), empty(shapes[0], hidden), empty(shapes[1], hidden)


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
    matrix: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _require_linear("linear_cross_entropy", hidden, weight, targets, bias, class_weight, reduction, divisor)
    loss = empty(targets.shape if reduction == "none" else (), hidden, work_dtype(hidden.dtype))
    none = (empty((0,), hidden), empty((0,), hidden), empty((0,), hidden))
    return loss, *(_gradients_like(hidden, weight, bias, matrix) if _keeps(gradient, hidden) else none)


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
    matrix: bool = True,
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
    return linear.reduced(given, losses), *_shaped(hidden, gradients, matrix)


def _shaped(hidden: Tensor, gradients: list[Tensor], matrix: bool) -> tuple[Tensor, Tensor, Tensor]:
    dhidden, dweight, *dbias = gradients
    none = empty((0,), hidden)
    return dhidden.view(hidden.shape), dweight if matrix else none, dbias[0] if dbias and matrix else none


def _linear_backward_fake(
    dloss: Tensor,
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    *_, reduction, _, _, _, divisor, matrix = _completed(options)
    name = "linear_cross_entropy_backward"
    _require_linear(name, hidden, weight, targets, bias, class_weight, reduction, divisor)
    return _gradients_like(hidden, weight, bias, matrix)


def _completed(options: tuple[Any, ...]) -> tuple[Any, ...]:
    """The options of the gradient with the defaults that a call leaves out."""
    return (*options, *(None, True)[len(options) - 7 :])


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
    *plain, count, chunk, preference, divisor, matrix = _completed(options)
    _require_linear(name, hidden, weight, targets, bias, class_weight, plain[3], divisor)
    values = (*plain, count if divisor is None else divisor, chunk, preference)
    given = _linear_problem(name, hidden, weight, targets, bias, class_weight, values)
    dlosses = linear.row_gradients(given, usable(name, "dloss", dloss).view(dloss.shape))
    _, *gradients = linear.gradient(given, dlosses)
    return _shaped(hidden, gradients, matrix)


def _save_linear(node: Any, inputs: Saved, output: Saved) -> Saved:
    *tensors, gradient, divisor, matrix = inputs
    node.options = tensors[5:]
    needs_matrix = node.needs_input_grad[1] or node.needs_input_grad[3]
    node.gradient = _keeps(gradient, inputs[0]) and (matrix or not needs_matrix)
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
    by_weight, by_bias = node.needs_input_grad[1], node.needs_input_grad[3]
    options = (*node.options, divisor, by_weight or by_bias)
    dhidden, dweight, dbias = LINEAR_CROSS_ENTROPY_BACKWARD(dloss, *operands, *options)
    return dhidden, dweight if by_weight else None, None, dbias if by_bias else None


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


class _Members:
    """The problems of a batch as rows of one problem, whose losses are not reduced."""

    def __init__(
        self, size: int, in_dims: tuple[int | None, ...], operands: tuple[Any, ...], options: list[Any]
    ) -> None:
        hidden, self.weight, targets, *self.vectors = operands
        self.ignore_index, *self.numbers, self.reduction, self.count, self.chunk, self.preference = options
        self.hidden, self.targets = define.batched(hidden, in_dims[0], size), define.batched(targets, in_dims[2], size)
        # A product's bits may depend on its rows: of every member those that it has alone, if these are one piece.
        self.rows = math.prod(self.targets.shape[1:])
        one_piece = self.rows * self.weight.shape[0] <= ONE_PIECE
        shared = all(d is None for d in (in_dims[1], *in_dims[3:5]))
        filled = size > 0 and self.rows > 0
        self.fold = shared and filled and (one_piece if self.chunk is None else self.rows % self.chunk == 0)

    def divisor(self, given: Tensor | None) -> members.Divisor:
        """What the mean of every member divides by."""
        if given is not None or self.count is not None:
            return self.count if given is None else given
        work = work_dtype(self.hidden.dtype)
        return members.target_totals(self.targets, self.ignore_index, self.vectors[1], work)

    def arguments(self) -> tuple[Any, ...]:
        """The operands and the options of the one problem."""
        chunk = self.rows if self.chunk is None else self.chunk
        options = (self.ignore_index, *self.numbers, "none", None, chunk, self.preference)
        return (self.hidden, self.weight, self.targets, *self.vectors, *options)


def _batch_linear(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    defaults: tuple[Any, ...] = op.defaults  # type: ignore[attr-defined]
    args = (*args, *defaults[len(args) :])
    in_dims = (*in_dims, *[None] * (len(args) - len(in_dims)))
    *options, gradient, divisor, matrix = args[5:]
    whole = _Members(size, in_dims, args[:5], options)
    keeps = _keeps(gradient, whole.hidden)
    if not whole.fold or (keeps and matrix):
        return define.one_by_one(op, size, in_dims, *args)
    losses, none, *_ = op(*whole.arguments())
    loss = members.reduced(losses, whole.reduction, lambda: whole.divisor(divisor))
    if not keeps:
        return (loss, none, none, none), (0, None, None, None)
    ones = torch.ones_like(loss)
    g = members.spread(ones, whole.reduction, losses.shape, lambda: whole.divisor(divisor))
    dhidden, *nothing = LINEAR_CROSS_ENTROPY_BACKWARD(g, *whole.arguments(), None, False)
    return (loss, dhidden, *nothing), (0, 0, None, None)


def _batch_linear_backward(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    args = (*args[:6], *_completed(args[6:]))
    in_dims = (*in_dims, *[None] * (len(args) - len(in_dims)))
    *options, divisor, matrix = args[6:]
    whole = _Members(size, in_dims[1:], args[1:6], options)
    if not whole.fold or matrix:
        return define.one_by_one(op, size, in_dims, *args)
    dloss = define.batched(args[0], in_dims[0], size)
    g = members.spread(dloss, whole.reduction, whole.targets.shape, lambda: whole.divisor(divisor))
    return op(g, *whole.arguments(), None, False), (0, None, None)


LINEAR_CROSS_ENTROPY: define.Operator = define.operator(
    "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor targets, Tensor? bias=None, Tensor? class_weight=None, "
    'SymInt ignore_index=-100, float label_smoothing=0.0, float z_loss=0.0, str reduction="mean", float? count=None, '
    "SymInt? chunk=None, str? preference=None, bool gradient=False, Tensor? divisor=None, bool matrix=True) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    run=_linear,
    fake=_linear_fake,
    gradient=define.Gradient(_save_linear, _differentiate_linear, _refuse_second),
    batch=_batch_linear,
    autocast={"CUDA": _autocast("cuda"), "CPU": _autocast("cpu")},
)
LINEAR_CROSS_ENTROPY_BACKWARD: define.Operator = define.operator(
    "linear_cross_entropy_backward(Tensor dloss, Tensor hidden, Tensor weight, Tensor targets, Tensor? bias, "
    "Tensor? class_weight, SymInt ignore_index, float label_smoothing, float z_loss, str reduction, float? count, "
    "SymInt? chunk, str? preference, Tensor? divisor=None, bool matrix=True) -> (Tensor, Tensor, Tensor)",
    run=_linear_backward,
    fake=_linear_backward_fake,
    gradient=define.Gradient(lambda node, inputs, output: (), _refuse_second, _refuse_second),
    batch=_batch_linear_backward,
)
