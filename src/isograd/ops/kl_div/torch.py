"""kl_div in torch's spelling, and its derivatives beyond the first."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from isograd.ops.kl_div.operation import KL_DIV, KL_DIV_BACKWARD
from isograd.torch import bind
from isograd.torch.members import share, summed
from isograd.torch.tensors import or_zeros, refuse, wide
from isograd.typing import BatchReduction

Named = Mapping[str, Any]


class _Slopes:
    """The derivatives of `p (log p - x)`, 0 where p is 0: by the input -p, by the target `of_target`."""

    def __init__(self, given: Named, log_target: bool) -> None:
        x, t = wide(given["input"], given["target"])
        self.log_target = log_target
        self.p = t.exp() if log_target else t
        self.positive = self.p != 0
        self.zero = torch.zeros_like(self.p)
        excess = (t if log_target else t.log()) - x
        self.of_target = self._where_positive((self.p if log_target else 1) * (excess + 1))
        self.second = self._where_positive(self.p * (excess + 2) if log_target else 1 / self.p)

    def _where_positive(self, value: Tensor) -> Tensor:
        return torch.where(self.positive, value, self.zero)

    def hessian(self, wrt: str, by: str) -> Tensor | None:
        """The derivative of the slope by `wrt` with respect to `by`, None where it is 0."""
        if wrt == by:
            return None if by == "input" else self.second
        return -self.p if self.log_target else -self.positive.to(self.p.dtype)


def _tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    reduction, log_target, *_ = settings
    slopes = _Slopes(saved, log_target)
    t = slopes.zero
    if tangents["input"] is not None:
        t = t - slopes.p * tangents["input"]
    if tangents["target"] is not None:
        t = t + slopes.of_target * tangents["target"]
    return summed(t, reduction)


def _second(saved: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradients of the gradient."""
    (reduction, log_target, wrt), x = settings, saved["input"]
    slopes, (h,) = _Slopes(saved, log_target), wide(grads["dx"])
    found = {}
    if needs["dloss"]:
        found["dloss"] = summed(h * (-slopes.p if wrt == "input" else slopes.of_target), reduction)
    for by in ("input", "target"):
        if needs[by] and (hessian := slopes.hessian(wrt, by)) is not None:
            found[by] = (h * saved["dloss"] * hessian * share(reduction, x.shape)).to(x.dtype)
    return found


def _second_tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    (reduction, log_target, wrt), x, dloss = settings, saved["input"], saved["dloss"]
    t_dloss = or_zeros(tangents["dloss"], dloss)
    total: Tensor = _backward.call(t_dloss, x, saved["target"], *settings)
    slopes = _Slopes(saved, log_target)
    for by in ("input", "target"):
        if tangents[by] is not None and (hessian := slopes.hessian(wrt, by)) is not None:
            total = total + (dloss * hessian * wide(tangents[by])[0] * share(reduction, x.shape)).to(x.dtype)
    return total


_backward = bind.operator(KL_DIV_BACKWARD, derivative=_second, tangent=_second_tangent)
_kl_div = bind.function(bind.operator(KL_DIV, tangent=_tangent, autocast=("CUDA", "CPU")))


def kl_div(
    input: Tensor,  # noqa: A002
    target: Tensor,
    size_average: None = None,
    reduce: None = None,
    reduction: BatchReduction = "mean",
    log_target: bool = False,
) -> Tensor:
    """`torch.nn.functional.kl_div`: `p (log p - x)` for every element, reduced.

    input: log-probabilities x. target: probabilities p, or with log_target their logarithms; one shape and dtype.
    reduction: "mean" over all elements, "batchmean" over the first dimension, "sum" or "none".

    Where p is 0 the term is 0 and so is its gradient, also for an input of -inf (torch: NaN). The loss has input's
    dtype as in torch (`isograd.kl_div` returns float32 for 16 bits); under autocast narrow inputs give float32. The
    gradients of both have the bits of `isograd.kl_div_backward`. Differentiable twice.

    Raises InvalidProblemError for shapes or dtypes that differ, UnsupportedError for other dtypes and for torch's
    deprecated `size_average` and `reduce`.
    """
    refuse("kl_div", None, size_average=size_average, reduce=reduce)
    narrow = ("narrow",) if input.dtype in (torch.float16, torch.bfloat16) else ()
    loss: Tensor = _kl_div((input, target), (reduction, bool(log_target)), narrow)
    return loss
