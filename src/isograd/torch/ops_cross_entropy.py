"""The operator of cross entropy and its gradient.

    cross_entropy(Tensor logits, Tensor targets, Tensor? weight=None, int dim=1, SymInt ignore_index=-100,
                  float label_smoothing=0.0, float z_loss=0.0, str reduction="mean", float? count=None,
                  bool narrow=False, Tensor? divisor=None) -> (Tensor, Tensor)
    cross_entropy_backward(Tensor dloss, Tensor logits, Tensor targets, Tensor? weight, Tensor state, int dim,
                           SymInt ignore_index, float label_smoothing, float z_loss, str reduction, float? count,
                           Tensor? divisor=None) -> Tensor

Losses are in the work type; `narrow` rounds that of cross_entropy to the logits'. `divisor` is a count that lies in a
tensor. The second result is what the gradient needs to know of every row. First derivatives for the logits have the
library's bits; those for probabilities as targets and second ones are written with torch's own sums.
"""

from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError
from isograd.losses import cross_entropy as steps
from isograd.losses.cross_entropy_reference import STATE
from isograd.losses.reductions import checked_reduction
from isograd.ops.softmax.torch import FORWARD
from isograd.torch import define, members
from isograd.torch.tensors import (
    INDEX_DTYPES,
    empty,
    normalized_dim,
    or_zeros,
    require_count,
    require_device,
    require_same_dtype,
    require_storage,
    usable,
    usable_index,
    wide,
    work_dtype,
)

Saved = tuple[Any, ...]


# --- cross_entropy ---------------------------------------------------------------------------------------------------
def _row_shape(
    operation: str, logits: Tensor, targets: Tensor, weight: Tensor | None, dim: int, reduction: str
) -> tuple[int, ...]:
    """The shape of the losses of the rows; raises for what does not fit."""
    checked_reduction(operation, reduction)
    require_device(operation, logits=logits, targets=targets, weight=weight)
    require_storage(operation, logits, "logits")
    if logits.dim() == 0:
        raise InvalidProblemError(f"{operation}: logits have shape (); expected at least one dimension")
    dim = normalized_dim(operation, dim, logits.shape)
    rows = (*logits.shape[:dim], *logits.shape[dim + 1 :])
    expected = rows
    if targets.dtype not in INDEX_DTYPES:
        require_same_dtype(operation, targets, "targets", logits, "logits")
        expected = tuple(logits.shape)
    if tuple(targets.shape) != expected:
        raise InvalidProblemError(
            f"{operation}: targets have shape {tuple(targets.shape)} and dtype {targets.dtype}; expected {expected} "
            f"for logits of shape {tuple(logits.shape)}"
        )
    if weight is not None and tuple(weight.shape) != (logits.shape[dim],):
        raise InvalidProblemError(
            f"{operation}: weight has shape {tuple(weight.shape)}; expected one for each of {logits.shape[dim]} classes"
        )
    return rows


def _problem(
    operation: str, logits: Tensor, targets: Tensor, weight: Tensor | None, dim: int, options: tuple[Any, ...]
) -> steps.Problem:
    logits = usable(operation, "logits", logits)
    check = usable_index if targets.dtype in INDEX_DTYPES else usable
    targets = check(operation, "targets", targets).view(targets.shape)
    weight = None if weight is None else usable(operation, "weight", weight)
    ignore_index, label_smoothing, z_loss, reduction, count = options
    given = steps.Options(dim, ignore_index, label_smoothing, z_loss, reduction, count)
    return steps.problem(operation, logits, targets, weight, given)


def _forward_fake(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    dim: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    count: float | None = None,
    narrow: bool = False,
    divisor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    rows = _row_shape("cross_entropy", logits, targets, weight, dim, reduction)
    require_count("cross_entropy", divisor, logits.device)
    work = work_dtype(logits.dtype)
    loss = empty(rows if reduction == "none" else (), logits, logits.dtype if narrow else work)
    return loss, empty((STATE, *rows), logits, work)


def _forward(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    dim: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    count: float | None = None,
    narrow: bool = False,
    divisor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    name = "cross_entropy"
    _row_shape(name, logits, targets, weight, dim, reduction)
    require_count(name, divisor, logits.device)
    options = (ignore_index, label_smoothing, z_loss, reduction, count if divisor is None else divisor)
    given = _problem(name, logits, targets, weight, dim, options)
    losses, state = steps.forward(given)
    loss: Tensor = steps.reduced(given, losses)
    return (loss.to(logits.dtype) if narrow else loss), state


def _backward_fake(
    dloss: Tensor, logits: Tensor, targets: Tensor, weight: Tensor | None, state: Tensor, dim: int, *options: Any
) -> Tensor:
    name = "cross_entropy_backward"
    rows = _row_shape(name, logits, targets, weight, dim, options[3])
    require_device(name, dloss=dloss, logits=logits, state=state)
    expected = rows if options[3] == "none" else ()
    if tuple(dloss.shape) != expected or dloss.dtype is not work_dtype(logits.dtype):
        raise InvalidProblemError(
            f"{name}: dloss has shape {tuple(dloss.shape)} and dtype {dloss.dtype}; expected {expected} and "
            f"{work_dtype(logits.dtype)}"
        )
    return empty(logits.shape, logits)


def _backward(
    dloss: Tensor, logits: Tensor, targets: Tensor, weight: Tensor | None, state: Tensor, dim: int, *options: Any
) -> Tensor:
    name = "cross_entropy_backward"
    dlogits = _backward_fake(dloss, logits, targets, weight, state, dim, *options)
    count = options[4] if len(options) < 6 or options[5] is None else options[5]
    given = _problem(name, logits, targets, weight, dim, (*options[:4], count))
    dlosses = steps.row_gradients(given, usable(name, "dloss", dloss).view(dloss.shape))
    steps.backward(given, dlosses, usable(name, "state", state), dlogits)
    return dlogits


def _save_forward(node: Any, inputs: Saved, output: tuple[Tensor, Tensor]) -> Saved:
    logits, targets, weight, node.dim, *node.options, _, divisor = inputs
    node.dtype = output[0].dtype
    node.mark_non_differentiable(output[1])
    return logits, targets, weight, output[1], divisor


def _differentiate_forward(node: Any, saved: Saved, dloss: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    if dloss is None:
        return (None,)
    logits, targets, weight, state, divisor = saved
    g = dloss.to(work_dtype(logits.dtype))
    by_logits = by_targets = None
    if node.needs_input_grad[0]:
        by_logits = CROSS_ENTROPY_BACKWARD(g, logits, targets, weight, state, node.dim, *node.options, divisor)
    if node.needs_input_grad[1]:
        rows = _Rows(node, logits, targets, weight, divisor)
        by_targets = rows.back(rows.gradients(g) * rows.factor * -rows.log_p, targets.dtype)
    return by_logits, by_targets


class _Rows:
    """The rows of a problem for derivatives that no kernel has, classes last and in the work type.

    p: softmax; q: the target distribution, a: the factor of p in the gradient `g (a p - q)`. Both are 0 where the
    target is ignored.
    """

    def __init__(
        self, node: Any, logits: Tensor, targets: Tensor, weight: Tensor | None, divisor: Tensor | None
    ) -> None:
        self.ignore_index, smoothing, self.z_loss, self.reduction, self.count = node.options
        self.given = divisor
        self.dim = node.dim % logits.dim()
        (x,) = wide(logits)
        self.x = x = x.movedim(self.dim, -1)
        self.p, self.log_p = FORWARD["softmax"](x, -1), FORWARD["log_softmax"](x, -1)
        self.weight = None if weight is None else weight.to(x.dtype)
        w = torch.ones((), dtype=x.dtype, device=x.device) if self.weight is None else self.weight
        keep, spread = 1.0 - smoothing, smoothing / x.shape[-1]
        self.factor = w * keep  # of a probability among the targets
        self.targets, self.kept = targets, None
        if targets.dtype not in INDEX_DTYPES:
            self.q = (wide(targets)[0].movedim(self.dim, -1) * keep + spread) * w
        else:
            self.kept = (targets != self.ignore_index).unsqueeze(-1)
            index = torch.where(self.kept, targets.long().unsqueeze(-1), 0)
            own = torch.zeros_like(x).scatter(-1, index, keep)
            self.q = torch.where(self.kept, (own + spread) * w, torch.zeros_like(x))
        self.lse = x.logsumexp(-1, keepdim=True)
        self.a = self.q.sum(-1, keepdim=True) + self._kept(2 * self.z_loss * self.lse)

    def _kept(self, value: Tensor) -> Tensor:
        return value if self.kept is None else torch.where(self.kept, value, torch.zeros_like(value))

    def divisor(self) -> Tensor | float:
        """What a mean divides by."""
        if self.given is not None:
            return self.given.to(self.x.dtype)
        if self.count is not None:
            return float(self.count)
        if self.kept is None:
            return max(self.lse.numel(), 1)
        if self.weight is None:
            kept: Tensor = self.kept.sum().to(self.x.dtype)
            return kept
        index = torch.where(self.kept, self.targets.long().unsqueeze(-1), 0)
        total: Tensor = self._kept(self.weight.expand_as(self.x).gather(-1, index)).sum()
        return total

    def gradients(self, dloss: Tensor) -> Tensor:
        """The gradients of the losses of the rows, as a column."""
        if self.reduction == "none":
            return dloss.unsqueeze(-1)
        return dloss / self.divisor() if self.reduction == "mean" else dloss

    def reduced(self, losses: Tensor) -> Tensor:
        """A column of the rows' shape after the reduction."""
        if self.reduction == "none":
            return losses.squeeze(-1)
        total = losses.sum()
        return total / self.divisor() if self.reduction == "mean" else total

    def slope(self, t: Tensor) -> Tensor:
        """The derivatives of the losses of the rows along t, as a column."""
        slope: Tensor = self.a * (self.p * t).sum(-1, keepdim=True) - (self.q * t).sum(-1, keepdim=True)
        return slope

    def curvature(self, t: Tensor) -> Tensor:
        """The Hessians of the losses of the rows times t."""
        along = (self.p * t).sum(-1, keepdim=True)
        product: Tensor = self.p * (self.a * (t - along) + self._kept(2 * self.z_loss * along))
        return product

    def back(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows with the class dimension where it was."""
        return rows.movedim(-1, self.dim).to(dtype)

    def forth(self, tensor: Tensor) -> Tensor:
        """A tensor of the logits' shape as rows."""
        return wide(tensor)[0].movedim(self.dim, -1)


def _push_forward(
    node: Any, saved: Saved, t_logits: Tensor | None, t_targets: Tensor | None, *rest: None
) -> tuple[Tensor, None]:
    logits, targets, weight, _, divisor = saved
    rows = _Rows(node, logits, targets, weight, divisor)
    t = torch.zeros_like(rows.lse)
    if t_logits is not None:
        t = t + rows.slope(rows.forth(t_logits))
    if t_targets is not None:
        t = t - (rows.factor * rows.log_p * rows.forth(t_targets)).sum(-1, keepdim=True)
    return rows.reduced(t).to(node.dtype), None


def _save_backward(node: Any, inputs: Saved, dlogits: Tensor) -> Saved:
    *saved, node.dim, node.options, divisor = *inputs[:6], inputs[6:-1], inputs[-1]
    return (*saved, divisor)


def _differentiate_backward(node: Any, saved: Saved, h: Tensor) -> tuple[Tensor | None, ...]:
    dloss, logits, targets, weight, _, divisor = saved
    rows = _Rows(node, logits, targets, weight, divisor)
    t = rows.forth(h)
    by_dloss = by_logits = by_targets = None
    if node.needs_input_grad[0]:
        by_dloss = rows.reduced(rows.slope(t))
    if node.needs_input_grad[1]:
        by_logits = rows.back(rows.gradients(dloss) * rows.curvature(t), logits.dtype)
    if node.needs_input_grad[2]:
        along = (rows.p * t).sum(-1, keepdim=True)
        by_targets = rows.back(rows.gradients(dloss) * rows.factor * (along - t), targets.dtype)
    return by_dloss, by_logits, by_targets


def _push_backward(
    node: Any,
    saved: Saved,
    t_dloss: Tensor | None,
    t_logits: Tensor | None,
    t_targets: Tensor | None,
    *rest: Tensor | None,
) -> Tensor:
    dloss, logits, targets, weight, state, divisor = saved
    t_dloss = or_zeros(t_dloss, dloss)
    total = CROSS_ENTROPY_BACKWARD(t_dloss, logits, targets, weight, state, node.dim, *node.options, divisor)
    if t_logits is None and t_targets is None:
        return total  # type: ignore[no-any-return]
    rows = _Rows(node, logits, targets, weight, divisor)
    if t_logits is not None:
        total = total + rows.back(rows.gradients(dloss) * rows.curvature(rows.forth(t_logits)), logits.dtype)
    if t_targets is not None:
        t = rows.factor * rows.forth(t_targets)
        slope = rows.p * t.sum(-1, keepdim=True) - t
        total = total + rows.back(rows.gradients(dloss) * slope, logits.dtype)
    return total  # type: ignore[no-any-return]


# --- vmap ------------------------------------------------------------------------------------------------------------
class _Members:
    """The problems of a batch as one problem, batch first, whose losses are not reduced."""

    def __init__(self, size: int, in_dims: tuple[int | None, ...], logits: Tensor, targets: Tensor, *rest: Any) -> None:
        self.weight, dim, *options = rest
        self.ignore_index, smoothing, z_loss, self.reduction, self.count, self.given = options
        self.logits, self.targets = (
            define.batched(t, d, size) for t, d in zip((logits, targets), in_dims, strict=False)
        )
        self.dim = dim % (self.logits.dim() - 1) + 1
        self.rows = self.logits.select(self.dim, 0)
        self.options = (self.ignore_index, smoothing, z_loss, "none", None)

    def divisor(self) -> members.Divisor:
        """What the mean of every member divides by."""
        if self.given is not None:
            return self.given  # type: ignore[no-any-return]
        if self.count is not None:
            return self.count  # type: ignore[no-any-return]
        if self.targets.dtype not in INDEX_DTYPES:
            return max(self.rows[0].numel(), 1)
        return members.target_totals(self.targets, self.ignore_index, self.weight, work_dtype(self.logits.dtype))


def _alone(size: int, in_dims: tuple[int | None, ...], weight: int, logits: Tensor) -> bool:
    """Whether members are computed one by one: with weights of their own, of which a kernel takes one for all rows."""
    return in_dims[weight] is not None or size == 0 or logits.numel() == 0


def _batch_forward(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
    defaults: tuple[Any, ...] = op.defaults  # type: ignore[attr-defined]
    logits, targets, weight, dim, *options = args = *args, *defaults[len(args) :]
    in_dims = *in_dims, *[None] * (len(args) - len(in_dims))
    narrow = options.pop(5)
    if _alone(size, in_dims, 2, logits):
        return define.one_by_one(op, size, in_dims, *args)
    whole = _Members(size, in_dims, logits, targets, weight, dim, *options)
    losses, state = op(whole.logits, whole.targets, weight, whole.dim, *whole.options, False)
    losses = members.reduced(losses, whole.reduction, whole.divisor)
    return (losses.to(logits.dtype) if narrow else losses, state), (0, 1)


def _batch_backward(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    args = *args, *[None] * (12 - len(args))
    in_dims = *in_dims, *[None] * (12 - len(in_dims))
    dloss, logits, targets, weight, state, *options = args
    if _alone(size, in_dims, 3, logits):
        return define.one_by_one(op, size, in_dims, *args)
    whole = _Members(size, in_dims[1:3], logits, targets, weight, *options)
    g = members.spread(define.batched(dloss, in_dims[0], size), whole.reduction, whole.rows.shape, whole.divisor)
    states = define.batched(state, in_dims[4], size).movedim(0, 1)
    return op(g, whole.logits, whole.targets, weight, states, whole.dim, *whole.options), 0


def _autocast(logits: Tensor, targets: Tensor, weight: Tensor | None = None, *options: Any) -> tuple[Tensor, Tensor]:
    """As torch's cross_entropy under autocast: narrow logits give float32."""
    (logits,) = wide(logits)
    targets = targets.to(logits.dtype) if targets.is_floating_point() else targets
    weight = None if weight is None else weight.to(logits.dtype)
    if len(options) > 6:
        options = (*options[:6], False, *options[7:])
    return CROSS_ENTROPY(logits, targets, weight, *options)  # type: ignore[no-any-return]


CROSS_ENTROPY: define.Operator = define.operator(
    "cross_entropy(Tensor logits, Tensor targets, Tensor? weight=None, int dim=1, SymInt ignore_index=-100, "
    'float label_smoothing=0.0, float z_loss=0.0, str reduction="mean", float? count=None, bool narrow=False, '
    "Tensor? divisor=None) -> (Tensor, Tensor)",
    run=_forward,
    fake=_forward_fake,
    gradient=define.Gradient(_save_forward, _differentiate_forward, _push_forward),
    batch=_batch_forward,
    autocast={"CUDA": _autocast, "CPU": _autocast},
)
CROSS_ENTROPY_BACKWARD: define.Operator = define.operator(
    "cross_entropy_backward(Tensor dloss, Tensor logits, Tensor targets, Tensor? weight, Tensor state, int dim, "
    "SymInt ignore_index, float label_smoothing, float z_loss, str reduction, float? count, "
    "Tensor? divisor=None) -> Tensor",
    run=_backward,
    fake=_backward_fake,
    gradient=define.Gradient(_save_backward, _differentiate_backward, _push_backward),
    batch=_batch_backward,
)
