"""What the norms of torch share: the sizes of rows, and derivatives beyond the first."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError
from isograd.torch.tensors import integer, require_dense, wide

Named = Mapping[str, Any]


def rows_of(
    name: str, x: Tensor, normalized_shape: Sequence[int], **along: Tensor | None
) -> tuple[Tensor, list[Tensor | None]]:
    """The last dimensions of x as one, and of tensors of their shape; InvalidProblemError for other sizes."""
    require_dense(name, x, "input")
    sizes = tuple([integer(name, "normalized_shape", size) for size in normalized_shape])
    if not sizes or tuple(x.shape[-len(sizes) :]) != sizes:
        raise InvalidProblemError(
            f"{name}: normalized_shape is {sizes}; input of shape {tuple(x.shape)} ends otherwise"
        )
    for key, tensor in along.items():
        if tensor is not None:
            require_dense(name, tensor, key)
            if tuple(tensor.shape) != sizes:
                raise InvalidProblemError(f"{name}: {key} has shape {tuple(tensor.shape)}; expected {sizes}")
    if len(sizes) == 1:
        return x, list(along.values())
    flat = [None if tensor is None else tensor.reshape(-1) for tensor in along.values()]
    return x.reshape(*x.shape[: -len(sizes)], math.prod(sizes)), flat


def of_sum(
    name: str,
    function: Callable[..., Any],
    x: Tensor,
    rows: Tensor,
    residual: Tensor,
    along: Sequence[Tensor | None],
    settings: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum, by the function for rows."""
    require_dense(name, residual, "residual")
    if residual.shape != x.shape:
        raise InvalidProblemError(
            f"{name}: residual has shape {tuple(residual.shape)} and input {tuple(x.shape)}; expected the same"
        )
    y, summed = function((rows, residual.reshape(rows.shape), *along), settings)[:2]
    return y.view(x.shape), summed.view(x.shape)


class Rows:
    """Normalized rows v, the Jacobian of v, and the curvature; all in the type that is computed in.

    v is x r or, where a mean was saved, (x - mean) r; r and the mean count as the functions of x that they are.
    """

    def __init__(self, given: Named, dim: int) -> None:
        x, weight = given["x"], given["weight"]
        self._dim, self._like = dim, x
        place = dim if dim >= 0 else dim + x.dim()
        self.r: Tensor
        self.v: Tensor
        self.r, (rows,) = given["rstd"].unsqueeze(place), wide(x)
        self._centered = "mean" in given
        self.v = (rows - given["mean"].unsqueeze(place) if self._centered else rows) * self.r
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

    def _projected(self, t: Tensor) -> Tensor:
        """Without its mean where the norm takes that away."""
        return t - self.mean(t) if self._centered else t

    def jacobian(self, t: Tensor) -> Tensor:
        """Dv / dx, which is symmetric, times t."""
        return self.r * (self._projected(t) - self.v * self.mean(self.v * t))

    def curvature(self, a: Tensor, b: Tensor) -> Tensor:
        """d(jacobian(a)) / dx times b; it is symmetric in the two."""
        a, b = self._projected(a), self._projected(b)
        alpha, beta = self.mean(a * self.v), self.mean(b * self.v)
        return -self.r.square() * (self.v * (self.mean(a * b) - 3 * alpha * beta) + beta * a + alpha * b)

    def over_rows(self, t: Tensor) -> Tensor:
        """The sum over the rows, one for each place of the axis."""
        others = [d for d in range(t.dim()) if d != self._dim % t.dim()]
        return t.sum(others) if others else t

    def stored(self, t: Tensor) -> Tensor:
        """In the dtype of the operands."""
        return t.to(self._like.dtype)


def tangent(saved: Named, settings: Any, tangents: Named) -> Tensor:
    """The tangent of the result."""
    rows = Rows(saved, settings[0])
    t = torch.zeros_like(rows.v)
    if tangents["x"] is not None:
        t = rows.weighted(rows.jacobian(wide(tangents["x"])[0]))
    if tangents["weight"] is not None:
        t = t + rows.v * rows.across(tangents["weight"])
    if tangents.get("bias") is not None:
        t = t + rows.across(tangents["bias"])
    return rows.stored(t)


def second(saved: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradients of the gradient."""
    rows, (dy,) = Rows(saved, settings[0]), wide(saved["dy"])
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
    if "dbias" in grads and settings[2] and grads["dbias"] is not None:
        by_dy = by_dy + rows.across(grads["dbias"])
    return found | {"dy": rows.stored(by_dy), "x": rows.stored(by_x)}


def second_tangent(saved: Named, settings: Any, tangents: Named) -> tuple[Tensor, ...]:
    """The tangents of the gradient: of dx, of dweight and, where there are means, of dbias."""
    rows, (dy,) = Rows(saved, settings[0]), wide(saved["dy"])
    zero = torch.zeros_like(rows.v)
    t_g, t_dx, t_dw, t_db = zero, zero, zero, zero
    if tangents["dy"] is not None:
        (t_db,) = wide(tangents["dy"])
        t_g, t_dw = rows.weighted(t_db), t_db * rows.v
    if tangents["weight"] is not None:
        t_g = t_g + dy * rows.across(tangents["weight"])
    if tangents["x"] is not None:
        (t,) = wide(tangents["x"])
        t_dx, t_dw = rows.curvature(rows.weighted(dy), t), t_dw + dy * rows.jacobian(t)
    sums = [
        rows.over_rows(t) if asked else t.new_empty(0) for t, asked in zip((t_dw, t_db), settings[1:], strict=False)
    ]
    return rows.stored(t_dx + rows.jacobian(t_g)), *map(rows.stored, sums)


# --- of sums with a residual, which are saved in the place of x ------------------------------------------------------
def added_tangent(saved: Named, settings: Any, tangents: Named) -> tuple[Tensor, Tensor]:
    """The tangents of the result and of the sum."""
    parts = [t for t in (tangents["x"], tangents["residual"]) if t is not None]
    summed = sum(parts[1:], parts[0]) if parts else None
    of = {**tangents, "x": summed}
    return tangent({**saved, "x": saved["summed"]}, settings, of), torch.zeros_like(
        saved["summed"]
    ) if summed is None else summed


def added_second(saved: Named, settings: Any, needs: Named, grads: Named) -> dict[str, Tensor]:
    """The gradients of the gradient."""
    found = second({**saved, "x": saved["summed"]}, settings, needs, grads)
    found["summed"] = found.pop("x")
    return found | ({"dsummed": grads["dx"]} if needs["dsummed"] else {})


def added_second_tangent(saved: Named, settings: Any, tangents: Named) -> tuple[Tensor, ...]:
    """The tangents of the gradient."""
    dx, *others = second_tangent({**saved, "x": saved["summed"]}, settings, {**tangents, "x": tangents["summed"]})
    return dx if tangents["dsummed"] is None else dx + tangents["dsummed"], *others
