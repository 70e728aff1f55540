"""Operators that compare distributions: kl_div and the distillation loss.

    kl_div(Tensor input, Tensor target, str reduction="mean", bool log_target=False, bool narrow=False) -> Tensor
    kl_div_backward(Tensor dloss, Tensor input, Tensor target, str reduction, bool log_target, str wrt) -> Tensor
    distillation_loss(Tensor student, Tensor teacher, float temperature=1.0, Tensor? indices=None,
                      str reduction="batchmean") -> Tensor
    distillation_loss_backward(Tensor dloss, Tensor student, Tensor teacher, float temperature, Tensor? indices,
                               str reduction) -> Tensor

Losses are in the work type; `narrow` rounds that of kl_div to the input's. First derivatives have the library's bits,
second ones are written with torch's own sums.
"""

from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError
from isograd.losses.divergence_plans import (
    DistillationLossBackwardPlan,
    DistillationLossPlan,
    KlDivBackwardPlan,
    KlDivPlan,
)
from isograd.losses.divergence_reference import divisor
from isograd.losses.promises import checked_reduction
from isograd.ops.softmax.torch import BACKWARD, FORWARD
from isograd.torch import define, members
from isograd.torch.tensors import (
    NAMES,
    Shape,
    empty,
    require_device,
    require_same_dtype,
    require_storage,
    run,
    usable,
    usable_index,
    wide,
    work_dtype,
)

Saved = tuple[Any, ...]


def _share(reduction: str, shape: Shape) -> float:
    """What every single loss counts in the reduced one."""
    return 1.0 if reduction == "none" else 1.0 / max(divisor(reduction, tuple(shape)), 1)


def _reduced(terms: Tensor, reduction: str) -> Tensor:
    return terms if reduction == "none" else terms.sum() * _share(reduction, terms.shape)


# --- kl_div ----------------------------------------------------------------------------------------------------------
def _require_pair(operation: str, input: Tensor, target: Tensor, reduction: str) -> None:  # noqa: A002
    checked_reduction(operation, reduction)
    require_device(operation, input=input, target=target)
    require_storage(operation, input, "input")
    require_same_dtype(operation, target, "target", input, "input")
    if input.shape != target.shape:
        raise InvalidProblemError(
            f"{operation}: input has shape {tuple(input.shape)} and target {tuple(target.shape)}; expected the same"
        )


def _kl_fake(
    input: Tensor,  # noqa: A002
    target: Tensor,
    reduction: str = "mean",
    log_target: bool = False,
    narrow: bool = False,
) -> Tensor:
    _require_pair("kl_div", input, target, reduction)
    shape = input.shape if reduction == "none" else ()
    return empty(shape, input, input.dtype if narrow else work_dtype(input.dtype))


def _kl(
    input: Tensor,  # noqa: A002
    target: Tensor,
    reduction: str = "mean",
    log_target: bool = False,
    narrow: bool = False,
) -> Tensor:
    loss = _kl_fake(input, target, reduction, log_target)
    x, t = (usable("kl_div", n, v).view(v.shape) for n, v in (("input", input), ("target", target)))
    run(KlDivPlan, x.device, (x.shape, NAMES[x.dtype], reduction, log_target), input=x, target=t, loss=loss)
    return loss.to(input.dtype) if narrow else loss


def _require_gradient(operation: str, dloss: Tensor, shape: Shape, dtype: torch.dtype) -> None:
    if tuple(dloss.shape) != tuple(shape) or dloss.dtype is not dtype:
        raise InvalidProblemError(
            f"{operation}: dloss has shape {tuple(dloss.shape)} and dtype {dloss.dtype}; expected {tuple(shape)} and "
            f"{dtype}"
        )


def _kl_backward_fake(
    dloss: Tensor,
    input: Tensor,  # noqa: A002
    target: Tensor,
    reduction: str,
    log_target: bool,
    wrt: str,
) -> Tensor:
    name = "kl_div_backward"
    _require_pair(name, input, target, reduction)
    require_device(name, dloss=dloss, input=input)
    _require_gradient(name, dloss, input.shape if reduction == "none" else (), work_dtype(input.dtype))
    return empty(input.shape, input)


def _kl_backward(
    dloss: Tensor,
    input: Tensor,  # noqa: A002
    target: Tensor,
    reduction: str,
    log_target: bool,
    wrt: str,
) -> Tensor:
    name = "kl_div_backward"
    dx = _kl_backward_fake(dloss, input, target, reduction, log_target, wrt)
    given = {"dloss": dloss, "input": input, "target": target}
    operands = {n: usable(name, n, v).view(v.shape) for n, v in given.items()}
    fields = (input.shape, NAMES[input.dtype], reduction, log_target, wrt)
    run(KlDivBackwardPlan, input.device, fields, **operands, dx=dx)
    return dx


def _save_kl(node: Any, inputs: Saved, loss: Tensor) -> Saved:
    x, t, node.reduction, node.log_target, _ = inputs
    node.dtype = loss.dtype
    return x, t


def _differentiate_kl(node: Any, saved: Saved, dloss: Tensor) -> tuple[Tensor | None, ...]:
    x, t = saved
    g = dloss.to(work_dtype(x.dtype))
    return tuple(
        KL_DIV_BACKWARD(g, x, t, node.reduction, node.log_target, wrt) if needed else None
        for wrt, needed in zip(("input", "target"), node.needs_input_grad, strict=False)
    )


class _Slopes:
    """The derivatives of `p (log p - x)`, 0 where p is 0: by the input -p, by the target `of_target`."""

    def __init__(self, x: Tensor, t: Tensor, log_target: bool) -> None:
        x, t = wide(x, t)
        self.log_target = log_target
        self.p = t.exp() if log_target else t
        self.positive = self.p != 0
        self.zero = torch.zeros_like(self.p)
        excess = (t if log_target else t.log()) - x
        self.of_target = self._where_positive((self.p if log_target else 1) * (excess + 1))
        self.second = self._where_positive(self.p * (excess + 2) if log_target else 1 / self.p)

    def _where_positive(self, value: Tensor) -> Tensor:
        return torch.where(self.positive, value, self.zero)

    @property
    def mixed(self) -> Tensor:
        """The second derivative by input and target."""
        return -self.p if self.log_target else -self.positive.to(self.p.dtype)


def _push_kl(node: Any, saved: Saved, t_x: Tensor | None, t_t: Tensor | None, *rest: None) -> Tensor:
    slopes = _Slopes(saved[0], saved[1], node.log_target)
    t = slopes.zero
    if t_x is not None:
        t = t - slopes.p * t_x
    if t_t is not None:
        t = t + slopes.of_target * t_t
    return _reduced(t, node.reduction).to(node.dtype)


def _save_kl_backward(node: Any, inputs: Saved, dx: Tensor) -> Saved:
    dloss, x, t, node.reduction, node.log_target, node.wrt = inputs
    return dloss, x, t


def _kl_hessian(node: Any, slopes: _Slopes, by: str) -> Tensor | None:
    """The derivative of the slope by `node.wrt` with respect to `by`, None where it is 0."""
    if node.wrt == by == "input":
        return None
    return slopes.second if node.wrt == by else slopes.mixed


def _differentiate_kl_backward(node: Any, saved: Saved, h: Tensor) -> tuple[Tensor | None, ...]:
    dloss, x, t = saved
    slopes = _Slopes(x, t, node.log_target)
    slope = -slopes.p if node.wrt == "input" else slopes.of_target
    (h,) = wide(h)
    gradients = [_reduced(h * slope, node.reduction) if node.needs_input_grad[0] else None]
    for by, needed in zip(("input", "target"), node.needs_input_grad[1:3], strict=True):
        hessian = _kl_hessian(node, slopes, by) if needed else None
        scaled = None if hessian is None else h * dloss * hessian * _share(node.reduction, x.shape)
        gradients.append(None if scaled is None else scaled.to(x.dtype))
    return tuple(gradients)


def _push_kl_backward(
    node: Any, saved: Saved, t_dloss: Tensor | None, t_x: Tensor | None, t_t: Tensor | None, *rest: None
) -> Tensor:
    dloss, x, t = saved
    options = (node.reduction, node.log_target, node.wrt)
    total = KL_DIV_BACKWARD(torch.zeros_like(dloss) if t_dloss is None else t_dloss, x, t, *options)
    slopes = _Slopes(x, t, node.log_target)
    for by, tangent in (("input", t_x), ("target", t_t)):
        if tangent is not None and (hessian := _kl_hessian(node, slopes, by)) is not None:
            total = total + (dloss * hessian * wide(tangent)[0] * _share(node.reduction, x.shape)).to(x.dtype)
    return total  # type: ignore[no-any-return]


def _batch_kl(
    op: define.Operator,
    size: int,
    in_dims: tuple[int | None, ...],
    input: Tensor,  # noqa: A002
    target: Tensor,
    reduction: str = "mean",
    log_target: bool = False,
    narrow: bool = False,
) -> tuple[Tensor, int]:
    x, t = (define.batched(v, d, size) for v, d in zip((input, target), in_dims, strict=False))
    losses = op(x, t, "none", log_target, narrow and reduction == "none")
    loss = members.reduced(losses, reduction, lambda: divisor(reduction, tuple(x.shape[1:])))
    return (loss.to(input.dtype) if narrow else loss), 0


def _batch_kl_backward(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Tensor, int]:
    g, x, t = (define.batched(v, d, size) for v, d in zip(args[:3], in_dims[:3], strict=True))
    reduction, *options = args[3:]
    g = members.spread(g, reduction, x.shape, lambda: divisor(reduction, tuple(x.shape[1:])))
    return op(g, x, t, "none", *options), 0


def _kl_autocast(
    input: Tensor,  # noqa: A002
    target: Tensor,
    reduction: str = "mean",
    log_target: bool = False,
    narrow: bool = False,
) -> Tensor:
    """As torch's kl_div under autocast: narrow inputs give float32."""
    input, target = wide(input, target)  # noqa: A001
    return KL_DIV(input, target, reduction, log_target)  # type: ignore[no-any-return]


KL_DIV: define.Operator = define.operator(
    'kl_div(Tensor input, Tensor target, str reduction="mean", bool log_target=False, bool narrow=False) -> Tensor',
    run=_kl,
    fake=_kl_fake,
    gradient=define.Gradient(_save_kl, _differentiate_kl, _push_kl),
    batch=_batch_kl,
    autocast={"CUDA": _kl_autocast, "CPU": _kl_autocast},
)
KL_DIV_BACKWARD: define.Operator = define.operator(
    "kl_div_backward(Tensor dloss, Tensor input, Tensor target, str reduction, bool log_target, str wrt) -> Tensor",
    run=_kl_backward,
    fake=_kl_backward_fake,
    gradient=define.Gradient(_save_kl_backward, _differentiate_kl_backward, _push_kl_backward),
    batch=_batch_kl_backward,
)


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
    g = dloss if reduction == "none" else (dloss * _share(reduction, shape)).expand(tuple(shape))
    return g.unsqueeze(-1)


def _push_distillation(node: Any, saved: Saved, t: Tensor, *rest: None) -> Tensor:
    student, teacher, indices = saved
    both = _Distributions(student, teacher, indices, node.temperature)
    return _reduced((wide(t)[0] * (both.q - both.p)).sum(-1) * node.temperature, node.reduction)


def _differentiate_distillation_backward(node: Any, saved: Saved, h: Tensor) -> tuple[Tensor | None, Tensor | None]:
    dloss, student, teacher, indices = saved
    both = _Distributions(student, teacher, indices, node.temperature)
    (h,) = wide(h)
    by_dloss = by_student = None
    if node.needs_input_grad[0]:
        by_dloss = _reduced((h * (both.q - both.p)).sum(-1) * node.temperature, node.reduction)
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
