"""The operators of the distillation loss.

    distillation_loss(Tensor student, Tensor teacher, float temperature=1.0, Tensor? indices=None,
                      str reduction="batchmean") -> Tensor
    distillation_loss_backward(Tensor dloss, Tensor student, Tensor teacher, float temperature, Tensor? indices,
                               str reduction) -> Tensor

Losses are in the work type. First derivatives have the library's bits, second ones are written with torch's own sums.
"""

from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError
from isograd.losses.divergence_plans import (
    DistillationLossBackwardPlan,
    DistillationLossPlan,
)
from isograd.losses.promises import checked_reduction
from isograd.numerics.losses import divisor
from isograd.ops.softmax.torch import BACKWARD, FORWARD
from isograd.torch import define, members
from isograd.torch.tensors import (
    NAMES,
    Shape,
    empty,
    require_device,
    require_storage,
    run,
    usable,
    usable_index,
    wide,
    work_dtype,
)

Saved = tuple[Any, ...]


# --- distillation ----------------------------------------------------------------------------------------------------
def _require_teacher(operation: str, student: Tensor, teacher: Tensor, indices: Tensor | None, reduction: str) -> None:
    checked_reduction(operation, reduction)
    require_device(operation, student=student, teacher=teacher, indices=indices)
    require_storage(operation, student, "student")
    require_storage(operation, teacher, "teacher")
    expected = student.shape if indices is None else indices.shape
    if student.dim() == 0 or teacher.shape != expected or teacher.shape[:-1] != student.shape[:-1]:
        raise InvalidProblemError(
            f"{operation}: student has shape {tuple(student.shape)} and teacher {tuple(teacher.shape)}"
            + ("; expected the same" if indices is None else f" for indices of shape {tuple(indices.shape)}")
        )


def _require_gradient(operation: str, dloss: Tensor, shape: Shape, dtype: torch.dtype) -> None:
    if tuple(dloss.shape) != tuple(shape) or dloss.dtype is not dtype:
        raise InvalidProblemError(
            f"{operation}: dloss has shape {tuple(dloss.shape)} and dtype {dloss.dtype}; expected {tuple(shape)} and "
            f"{dtype}"
        )


def _distillation_fake(
    student: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    indices: Tensor | None = None,
    reduction: str = "batchmean",
) -> Tensor:
    _require_teacher("distillation_loss", student, teacher, indices, reduction)
    return empty(student.shape[:-1] if reduction == "none" else (), student, work_dtype(student.dtype))


def _distillation_problem(
    operation: str, student: Tensor, teacher: Tensor, temperature: float, indices: Tensor | None, reduction: str
) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """The fields of the descriptor, and the operands that both directions share."""
    operands = {"student": usable(operation, "student", student), "teacher": usable(operation, "teacher", teacher)}
    classes, index_dtype = None, "int64"
    if indices is not None:
        operands["indices"] = usable_index(operation, "indices", indices)
        classes, index_dtype = indices.shape[-1], NAMES[indices.dtype]
    dtypes = NAMES[student.dtype], NAMES[teacher.dtype]
    return (student.shape, *dtypes, temperature, classes, index_dtype, reduction), operands


def _distillation(
    student: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    indices: Tensor | None = None,
    reduction: str = "batchmean",
) -> Tensor:
    name = "distillation_loss"
    loss = _distillation_fake(student, teacher, temperature, indices, reduction)
    fields, operands = _distillation_problem(name, student, teacher, temperature, indices, reduction)
    run(DistillationLossPlan, loss.device, fields, **operands, loss=loss)
    return loss


def _distillation_backward_fake(
    dloss: Tensor, student: Tensor, teacher: Tensor, temperature: float, indices: Tensor | None, reduction: str
) -> Tensor:
    name = "distillation_loss_backward"
    _require_teacher(name, student, teacher, indices, reduction)
    require_device(name, dloss=dloss, student=student)
    _require_gradient(name, dloss, student.shape[:-1] if reduction == "none" else (), work_dtype(student.dtype))
    return empty(student.shape, student)


def _distillation_backward(
    dloss: Tensor, student: Tensor, teacher: Tensor, temperature: float, indices: Tensor | None, reduction: str
) -> Tensor:
    name = "distillation_loss_backward"
    dstudent = _distillation_backward_fake(dloss, student, teacher, temperature, indices, reduction)
    fields, operands = _distillation_problem(name, student, teacher, temperature, indices, reduction)
    g = usable(name, "dloss", dloss).view(dloss.shape)
    run(DistillationLossBackwardPlan, g.device, fields, dloss=g, **operands, dstudent=dstudent)
    return dstudent


def _save_distillation(node: Any, inputs: Saved, loss: Tensor) -> Saved:
    student, teacher, node.temperature, indices, node.reduction = inputs
    return student, teacher, indices


def _differentiate_distillation(node: Any, saved: Saved, dloss: Tensor) -> tuple[Tensor]:
    student, teacher, indices = saved
    return (DISTILLATION_LOSS_BACKWARD(dloss, student, teacher, node.temperature, indices, node.reduction),)


def _save_distillation_backward(node: Any, inputs: Saved, dstudent: Tensor) -> Saved:
    dloss, student, teacher, node.temperature, indices, node.reduction = inputs
    return dloss, student, teacher, indices


class _Distributions:
    """The student's q and, where the teacher names classes, its r over the others, with the teacher's rest."""

    def __init__(self, student: Tensor, teacher: Tensor, indices: Tensor | None, temperature: float) -> None:
        x, t = wide(student, teacher)
        x = x / temperature
        self.q = FORWARD["softmax"](x, -1)
        self.r: Tensor | None = None
        if indices is None:
            self.p = FORWARD["softmax"](t / temperature, -1)
            return
        named = torch.zeros_like(x).scatter(-1, indices.long(), t.exp())
        others = torch.ones_like(x).scatter(-1, indices.long(), torch.zeros_like(t))
        # Exponentials of the others alone: a row that names every class has none.
        scaled = torch.where(others > 0, x, torch.full_like(x, -torch.inf))
        self.r = FORWARD["softmax"](scaled, -1).nan_to_num(0.0)
        self.rest = 1 - t.exp().sum(-1, keepdim=True)
        self.p = named + self.rest * self.r

    def curvature(self, h: Tensor) -> Tensor:
        """The Jacobian of q - p times h; it is symmetric."""
        by = BACKWARD["softmax"](h, self.q, -1)
        return by if self.r is None else by - self.rest * BACKWARD["softmax"](h, self.r, -1)


def _rows(dloss: Tensor, reduction: str, shape: Shape) -> Tensor:
    """The gradient of every row's loss, as a column."""
    g = dloss if reduction == "none" else (dloss * members.share(reduction, shape)).expand(tuple(shape))
    return g.unsqueeze(-1)


def _push_distillation(node: Any, saved: Saved, t: Tensor, *rest: None) -> Tensor:
    student, teacher, indices = saved
    both = _Distributions(student, teacher, indices, node.temperature)
    return members.summed((wide(t)[0] * (both.q - both.p)).sum(-1) * node.temperature, node.reduction)


def _differentiate_distillation_backward(node: Any, saved: Saved, h: Tensor) -> tuple[Tensor | None, Tensor | None]:
    dloss, student, teacher, indices = saved
    both = _Distributions(student, teacher, indices, node.temperature)
    (h,) = wide(h)
    by_dloss = by_student = None
    if node.needs_input_grad[0]:
        by_dloss = members.summed((h * (both.q - both.p)).sum(-1) * node.temperature, node.reduction)
    if node.needs_input_grad[1]:
        by_student = (_rows(dloss, node.reduction, student.shape[:-1]) * both.curvature(h)).to(student.dtype)
    return by_dloss, by_student


def _push_distillation_backward(
    node: Any, saved: Saved, t_dloss: Tensor | None, t_student: Tensor | None, *rest: None
) -> Tensor:
    dloss, student, teacher, indices = saved
    t = DISTILLATION_LOSS_BACKWARD(
        torch.zeros_like(dloss) if t_dloss is None else t_dloss,
        student,
        teacher,
        node.temperature,
        indices,
        node.reduction,
    )
    if t_student is None:
        return t  # type: ignore[no-any-return]
    both = _Distributions(student, teacher, indices, node.temperature)
    extra = _rows(dloss, node.reduction, student.shape[:-1]) * both.curvature(wide(t_student)[0])
    return t + extra.to(student.dtype)  # type: ignore[no-any-return]


def _batch_distillation(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    student: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    indices: Tensor | None = None,
    reduction: str = "batchmean",
) -> tuple[Tensor, int]:
    x, t = (define.batched(v, d, size) for v, d in zip((student, teacher), in_dims, strict=False))
    named = None if indices is None else define.batched(indices, in_dims[3], size)
    losses = op(x, t, temperature, named, "none")
    return members.reduced(losses, reduction, lambda: divisor(reduction, tuple(losses.shape[1:]))), 0


def _batch_distillation_backward(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Tensor, int]:
    dloss, student, teacher, temperature, indices, reduction = args
    g, x, t = (define.batched(v, d, size) for v, d in zip((dloss, student, teacher), in_dims, strict=False))
    named = None if indices is None else define.batched(indices, in_dims[4], size)
    g = members.spread(g, reduction, x.shape[:-1], lambda: divisor(reduction, tuple(x.shape[1:-1])))
    return op(g, x, t, temperature, named, "none"), 0


DISTILLATION_LOSS: define.Operator = define.operator(
    "distillation_loss(Tensor student, Tensor teacher, float temperature=1.0, Tensor? indices=None, "
    'str reduction="batchmean") -> Tensor',
    run=_distillation,
    fake=_distillation_fake,
    gradient=define.Gradient(_save_distillation, _differentiate_distillation, _push_distillation),
    batch=_batch_distillation,
)
DISTILLATION_LOSS_BACKWARD: define.Operator = define.operator(
    "distillation_loss_backward(Tensor dloss, Tensor student, Tensor teacher, float temperature, Tensor? indices, "
    "str reduction) -> Tensor",
    run=_distillation_backward,
    fake=_distillation_backward_fake,
    gradient=define.Gradient(
        _save_distillation_backward, _differentiate_distillation_backward, _push_distillation_backward
    ),
    batch=_batch_distillation_backward,
)
