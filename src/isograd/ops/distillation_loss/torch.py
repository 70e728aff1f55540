"""distillation_loss in torch's spelling, and its derivatives beyond the first."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isograd.ops.distillation_loss.operation import DISTILLATION_LOSS, DISTILLATION_LOSS_BACKWARD
from isograd.ops.softmax.torch import BACKWARD, FORWARD
from isograd.torch import bind
from isograd.torch.members import share, summed
from isograd.torch.tensors import or_zeros, wide
from isograd.typing import BatchReduction

Named = Mapping[str, Any]


class _Distributions:
    """The student's q and, where the teacher names classes, its r over the others, with the teacher's rest."""

    def __init__(self, given: Named, temperature: float) -> None:
        x, t = wide(given["student"], given["teacher"])
        indices = given["indices"]
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


def _rows(dloss: Tensor, reduction: str, student: Tensor) -> Tensor:
    """The gradient of every row's loss, as a column."""
    shape = student.shape[:-1]
    g = dloss if reduction == "none" else (dloss * share(reduction, shape)).expand(tuple(shape))
    return g.unsqueeze(-1)


def _tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    temperature, reduction, *_ = settings
    both = _Distributions(saved, temperature)
    return summed((wide(tangents["student"])[0] * (both.q - both.p)).sum(-1) * temperature, reduction)


def _second(saved: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradients of the gradient."""
    (temperature, reduction), student = settings, saved["student"]
    both, (h,) = _Distributions(saved, temperature), wide(grads["dstudent"])
    found = {}
    if needs["dloss"]:
        found["dloss"] = summed((h * (both.q - both.p)).sum(-1) * temperature, reduction)
    if needs["student"]:
        found["student"] = (_rows(saved["dloss"], reduction, student) * both.curvature(h)).to(student.dtype)
    return found


def _second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    (temperature, reduction), (dloss, student, *rest) = settings, saved.values()
    t_dloss = or_zeros(tangents["dloss"], dloss)
    t: Tensor = _backward.call(t_dloss, student, *rest, *settings)
    if tangents["student"] is None:
        return t
    curved = _Distributions(saved, temperature).curvature(wide(tangents["student"])[0])
    return t + (_rows(dloss, reduction, student) * curved).to(student.dtype)


_backward = bind.operator(DISTILLATION_LOSS_BACKWARD, derivative=_second, tangent=_second_tangent)
_distillation_loss = bind.function(bind.operator(DISTILLATION_LOSS, tangent=_tangent))


def distillation_loss(
    student: Tensor,
    teacher: Tensor,
    temperature: float = 1.0,
    indices: Tensor | None = None,
    reduction: BatchReduction = "batchmean",
) -> Tensor:
    """`T^2 Σ_j p_j (log p_j - log q_j)`; arguments, bits and errors as `isograd.distillation_loss`.

    The loss is in the work type (float32 for 16 bits). Differentiable twice with respect to the student; a teacher that
    requires a gradient is an UnsupportedError.
    """
    loss: Tensor = _distillation_loss((student, teacher, indices), (temperature, reduction))
    return loss
