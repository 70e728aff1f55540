"""rmsnorm in torch's spelling, and its derivatives beyond the first."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError
from isograd.ops.rmsnorm.operation import RMSNORM, RMSNORM_BACKWARD
from isograd.torch import bind
from isograd.torch.tensors import integer, require_dense, wide, work_dtype

Named = Mapping[str, Any]


class _Rows:
    """Normalized rows v = x r, the Jacobian of v, and the curvature; all in the type that is computed in."""

    def __init__(self, given: Named, dim: int) -> None:
        x, weight = given["x"], given["weight"]
        self._dim, self._like = dim, x
        self.r: Tensor
        self.v: Tensor
        self.r = given["rstd"].unsqueeze(dim if dim >= 0 else dim + x.dim())
        self.v = wide(x)[0] * self.r
        self.weight = None if weight is None else self.across(weight)

    def across(self, weight: Tensor) -> Tensor:
        """One for each place of the axis, seen by every row."""
        shape = [1] * self._like.dim()
        shape[self._dim] = -1
        (widened,) = wide(weight)
        return widened.view(shape)

    def weighted(self, t: Tensor) -> Tensor:
        """Times the weight."""
        return t if self.weight is None else t * self.weight

    def mean(self, t: Tensor) -> Tensor:
        """Over each row."""
        return t.mean(self._dim, keepdim=True)

    def jacobian(self, t: Tensor) -> Tensor:
        """Dv / dx, which is symmetric, times t."""
        return self.r * (t - self.v * self.mean(self.v * t))

    def curvature(self, a: Tensor, b: Tensor) -> Tensor:
        """d(jacobian(a)) / dx times b; it is symmetric in the two."""
        alpha, beta = self.mean(a * self.v), self.mean(b * self.v)
        return -self.r.square() * (self.v * (self.mean(a * b) - 3 * alpha * beta) + beta * a + alpha * b)

    def over_rows(self, t: Tensor) -> Tensor:
        """The sum over the rows, one for each place of the axis."""
        others = [d for d in range(t.dim()) if d != self._dim % t.dim()]
        return t.sum(others) if others else t

    def stored(self, t: Tensor) -> Tensor:
        """In the dtype of the operands."""
        return t.to(self._like.dtype)


def _tangent(saved: Named, settings: Any, tangents: Named) -> tuple[Tensor, None]:
    rows = _Rows(saved, settings[0])
    t = torch.zeros_like(rows.v)
    if tangents["x"] is not None:
        t = rows.weighted(rows.jacobian(wide(tangents["x"])[0]))
    if tangents["weight"] is not None:
        t = t + rows.v * rows.across(tangents["weight"])
    return rows.stored(t), None


def _second(saved: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradients of the gradient; rstd counts as the function of x that it is."""
    rows, (dy,) = _Rows(saved, settings[0]), wide(saved["dy"])
    by_dy, by_x = torch.zeros_like(rows.v), torch.zeros_like(rows.v)
    found = {}
    if grads["dx"] is not None:
        (h,) = wide(grads["dx"])
        through = rows.jacobian(h)
        by_dy, by_x = rows.weighted(through), rows.curvature(rows.weighted(dy), h)
        if rows.weight is not None and needs["weight"]:
            found["weight"] = rows.stored(rows.over_rows(dy * through))
    if settings[1] and grads["dweight"] is not None:
        k = rows.across(grads["dweight"])
        by_dy, by_x = by_dy + rows.v * k, by_x + rows.jacobian(dy * k)
    return found | {"dy": rows.stored(by_dy), "x": rows.stored(by_x)}


def _second_tangent(saved: Named, settings: Any, tangents: Named) -> tuple[Tensor, Tensor]:
    rows, (dy,) = _Rows(saved, settings[0]), wide(saved["dy"])
    t_g, t_dx, t_dw = torch.zeros_like(rows.v), torch.zeros_like(rows.v), torch.zeros_like(rows.v)
    if tangents["dy"] is not None:
        (t,) = wide(tangents["dy"])
        t_g, t_dw = rows.weighted(t), t * rows.v
    if tangents["weight"] is not None:
        t_g = t_g + dy * rows.across(tangents["weight"])
    if tangents["x"] is not None:
        (t,) = wide(tangents["x"])
        t_dx, t_dw = rows.curvature(rows.weighted(dy), t), t_dw + dy * rows.jacobian(t)
    of_weight = rows.over_rows(t_dw) if settings[1] else t_dw.new_empty(0)
    return rows.stored(t_dx + rows.jacobian(t_g)), rows.stored(of_weight)


bind.operator(RMSNORM_BACKWARD, derivative=_second, tangent=_second_tangent)
_rmsnorm = bind.function(bind.operator(RMSNORM, tangent=_tangent, autocast=("CUDA",)), "rms_norm")


def rms_norm(
    input: Tensor,  # noqa: A002
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """`torch.nn.functional.rms_norm`: `input / sqrt(mean(input^2) + eps) * weight` over the last dimensions.

    input: float16, bfloat16, float32 or float64. normalized_shape: the sizes of those dimensions. weight: of that
    shape and input's dtype. eps: 2^-23 (2^-52 for float64) where it is None, as in torch.

    Bits and bounds as for `isograd.rmsnorm`, those of the weight's gradient for any number and order of rows.
    Differentiable twice. Under CUDA autocast narrow operands give float32, as with torch's own
    from 2.13 on.

    Raises InvalidProblemError for sizes that are not input's last ones and a weight that does not fit, UnsupportedError
    for another dtype.
    """
    require_dense("rms_norm", input, "input")
    sizes = tuple([integer("rms_norm", "normalized_shape", size) for size in normalized_shape])
    if not sizes or tuple(input.shape[-len(sizes) :]) != sizes:
        raise InvalidProblemError(
            f"rms_norm: normalized_shape is {sizes}; input of shape {tuple(input.shape)} ends otherwise"
        )
    if weight is not None:
        require_dense("rms_norm", weight, "weight")
        if tuple(weight.shape) != sizes:
            raise InvalidProblemError(f"rms_norm: weight has shape {tuple(weight.shape)}; expected {sizes}")
    if eps is None:
        eps = torch.finfo(work_dtype(input.dtype)).eps
    rows, along = input, weight
    if len(sizes) > 1:
        rows = input.reshape(*input.shape[: -len(sizes)], math.prod(sizes))
        along = None if weight is None else weight.reshape(-1)
    y: Tensor = _rmsnorm((rows, along), (-1, eps))[0]
    return y if rows is input else y.view(input.shape)
