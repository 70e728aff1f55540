"""The operators of products with a number and of quotients: what no other kernel of the library includes.

    scaled(Tensor input, Tensor factor) -> Tensor
    divided(Tensor input, Tensor divisor) -> Tensor

`factor` has one number, or one for each place in input's first dimension; it is rounded to the work type first, each
product to the work type, then to input's dtype. `divided` takes a work type and a divisor for every element, a constant
of any real dtype, which is rounded to the work type first. On the CPU torch's own results are computed in the caller's
rounding mode, and in that in force when torch's threads started. Differentiable any number of times.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from isograd.core import arrays
from isograd.elementwise import api as elementwise
from isograd.errors import InvalidProblemError
from isograd.losses import reductions
from isograd.torch import define
from isograd.torch.tensors import (
    NAMES,
    empty,
    require_device,
    require_storage,
    usable,
    wide,
    work_dtype,
)

Saved = tuple[Any, ...]


def _scaled_fake(input: Tensor, factor: Tensor) -> Tensor:  # noqa: A002
    require_device("scaled", input=input, factor=factor)
    require_storage("scaled", input, "input")
    if tuple(factor.shape) not in ((), tuple(input.shape[:1])) or not factor.is_floating_point():
        raise InvalidProblemError(
            f"scaled: factor has shape {tuple(factor.shape)} and dtype {factor.dtype}; expected one number, or one for "
            f"each place in the first dimension of {tuple(input.shape)}"
        )
    return empty(input.shape, input)


def _scaled(input: Tensor, factor: Tensor) -> Tensor:  # noqa: A002
    out = _scaled_fake(input, factor)
    x = usable("scaled", "input", input).reshape(input.shape)
    if x.is_cpu:
        elementwise.scale(arrays.numpy_view(x), arrays.numpy_view(factor), arrays.numpy_view(out))
        return out
    number = _along(factor.to(work_dtype(x.dtype)), x)
    if x.dtype is number.dtype:
        return torch.mul(x, number, out=out)
    return out.copy_(x.float().mul_(number))


def _along(factor: Tensor, x: Tensor) -> Tensor:
    """Factors with the dimensions of what they multiply."""
    return factor.reshape(*factor.shape, *(1,) * (x.dim() - 1)) if factor.dim() else factor


def _save(node: Any, inputs: Saved, out: Tensor) -> Saved:
    x, factor = inputs
    by_factor = node.needs_input_grad[1] or forward_ad._current_level >= 0
    return (x if by_factor else None), factor


def _differentiate(node: Any, saved: Saved, g: Tensor) -> tuple[Tensor | None, ...]:
    x, factor = saved
    by_input = SCALED(g, factor) if node.needs_input_grad[0] else None
    if not node.needs_input_grad[1]:
        return by_input, None
    a, b = wide(g, x)
    product, behind = a * b, list(range(factor.dim(), a.dim()))
    return by_input, (product.sum(behind) if behind else product).to(factor.dtype)


def _push(node: Any, saved: Saved, t_input: Tensor | None, t_factor: Tensor | None) -> Tensor:
    x, factor = saved
    t = torch.zeros_like(x) if t_input is None else SCALED(t_input, factor)
    return t if t_factor is None else t + SCALED(x, t_factor)


def _batch(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, Any]:
    x = define.batched(args[0], in_dims[0], size)
    if in_dims[1] is None and not args[1].dim():
        return op(x, args[1]), 0
    factor = define.batched(args[1], in_dims[1], size)
    if factor.dim() == 1:
        return op(x, factor), 0
    return op(x.flatten(0, 1), factor.flatten()).unflatten(0, x.shape[:2]), 0


SCALED: define.Operator = define.operator(
    "scaled(Tensor input, Tensor factor) -> Tensor",
    run=_scaled,
    fake=_scaled_fake,
    gradient=define.Gradient(_save, _differentiate, _push),
    batch=_batch,
)


# --- quotients -------------------------------------------------------------------------------------------------------
def _divided_fake(input: Tensor, divisor: Tensor) -> Tensor:  # noqa: A002
    require_device("divided", input=input, divisor=divisor)
    if input.dtype not in (torch.float32, torch.float64) or input.shape != divisor.shape:
        raise InvalidProblemError(
            f"divided: input has shape {tuple(input.shape)} and dtype {input.dtype}, divisor {tuple(divisor.shape)}; "
            "expected one shape, and torch.float32 or torch.float64"
        )
    return empty(input.shape, input)


def _divided(input: Tensor, divisor: Tensor) -> Tensor:  # noqa: A002
    out = _divided_fake(input, divisor)
    quotient = reductions.divided(input, reductions.rounded(divisor, NAMES[input.dtype]))
    if input.is_cpu:
        arrays.numpy_view(out)[...] = quotient
        return out
    return out.copy_(quotient)


def _save_divided(node: Any, inputs: Saved, out: Tensor) -> Saved:
    return (inputs[1],)


def _batch_divided(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, Any]:
    return op(*[define.batched(t, d, size) for t, d in zip(args, in_dims, strict=True)]), 0


DIVIDED: define.Operator = define.operator(
    "divided(Tensor input, Tensor divisor) -> Tensor",
    run=_divided,
    fake=_divided_fake,
    gradient=define.Gradient(
        _save_divided,
        lambda node, saved, g: (DIVIDED(g, saved[0]),),
        lambda node, saved, t, *rest: DIVIDED(t, saved[0]),
    ),
    batch=_batch_divided,
)
