"""The operators `isograd::softmax`, `log_softmax`, `softmax_backward` and `log_softmax_backward`.

    softmax(Tensor input, int dim, ScalarType? dtype=None) -> Tensor
    softmax_backward(Tensor dy, Tensor y, int dim) -> Tensor

and the same for log_softmax. They have implementations for every device that a kernel is registered for, for `meta`
and fake tensors, gradients (the backwards are differentiable themselves), batching rules and autocast. `dtype`
converts the input first, as in torch. The forward operators save their result and nothing else.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from isograd import registry
from isograd.errors import UnsupportedError
from isograd.memory import with_huge_pages
from isograd.softmax.plans import (
    KINDS,
    SoftmaxBackwardDescriptor,
    SoftmaxBackwardPlan,
    SoftmaxDescriptor,
    SoftmaxPlan,
)
from isograd.torch import define
from isograd.torch.tensors import DTYPES, launch, normalized_dim, require_same, usable, wide


# --- implementations -------------------------------------------------------------------------------------------------
@functools.lru_cache(maxsize=4096)
def forward_plan(
    kind: str, shape: torch.Size, dtype: torch.dtype, dim: int, device: str, generation: int
) -> SoftmaxPlan:
    """The plan for tensors of a shape with at least one dimension; `generation` is the registry's."""
    name = str(dtype).removeprefix("torch.")
    return SoftmaxPlan.select(SoftmaxDescriptor(kind, shape, name, normalized_dim(kind, dim, shape)), device)


@functools.lru_cache(maxsize=4096)
def backward_plan(
    kind: str, shape: torch.Size, dtype: torch.dtype, dim: int, device: str, generation: int
) -> SoftmaxBackwardPlan:
    """The same for a gradient."""
    name = str(dtype).removeprefix("torch.")
    dim = normalized_dim(f"{kind}_backward", dim, shape)
    return SoftmaxBackwardPlan.select(SoftmaxBackwardDescriptor(kind, shape, name, dim), device)


def _forward(kind: str, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
    if dtype is not None:
        input = input.to(dtype)  # noqa: A001
    x = usable(kind, "input", input)
    plan = forward_plan(kind, x.shape, x.dtype, dim, x.device.type, registry.generation())
    y: Tensor = with_huge_pages(torch.empty_like(x))
    launch(plan, x=x, y=y)
    return y if input.dim() else y.reshape(())


def _backward(kind: str, dy: Tensor, y: Tensor, dim: int) -> Tensor:
    operation = f"{kind}_backward"
    require_same(operation, dy, y)
    gradient, result = usable(operation, "dy", dy), usable(operation, "y", y)
    plan = backward_plan(kind, result.shape, result.dtype, dim, result.device.type, registry.generation())
    dx: Tensor = with_huge_pages(torch.empty_like(result))
    launch(plan, dy=gradient, y=result, dx=dx)
    return dx if y.dim() else dx.reshape(())


def _forward_fake(kind: str, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
    normalized_dim(kind, dim, input.shape)
    if (dtype or input.dtype) not in DTYPES:
        raise UnsupportedError(f"{kind}: input has dtype {dtype or input.dtype}; accepted: {DTYPES}")
    return torch.empty_like(input, dtype=dtype)


def _backward_fake(kind: str, dy: Tensor, y: Tensor, dim: int) -> Tensor:
    normalized_dim(f"{kind}_backward", dim, y.shape)
    require_same(f"{kind}_backward", dy, y)
    if y.dtype not in DTYPES:
        raise UnsupportedError(f"{kind}_backward: y has dtype {y.dtype}; accepted: {DTYPES}")
    return torch.empty_like(y)


# --- gradients -------------------------------------------------------------------------------------------------------
Gradients = tuple[Tensor | None, Tensor | None]


def _save_forward(node: Any, inputs: tuple[Any, ...], y: Tensor) -> tuple[Tensor]:
    node.dim, node.dtype = inputs[1], inputs[0].dtype
    return (y,)


def _differentiate_forward(kind: str, node: Any, saved: tuple[Tensor], dy: Tensor) -> tuple[Tensor]:
    dx = BACKWARD[kind](dy, *saved, node.dim)
    return (dx if dx.dtype is node.dtype else dx.to(node.dtype),)


def _push_forward(kind: str, node: Any, saved: tuple[Tensor], t: Tensor, *rest: None) -> Tensor:
    """The directional derivative of the forward operation."""
    (y,) = saved
    t = t.to(y.dtype)
    if kind == "softmax":  # whose Jacobian is symmetric
        return BACKWARD["softmax"](t, y, node.dim)
    t_wide, y_wide = wide(t, y)
    return (t_wide - (y_wide.exp() * t_wide).sum(node.dim, keepdim=True)).to(y.dtype)


def _save_backward(node: Any, inputs: tuple[Any, ...], dx: Tensor) -> tuple[Tensor, Tensor]:
    dy, y, node.dim = inputs
    return dy, y


def _differentiate_backward(kind: str, node: Any, saved: tuple[Tensor, Tensor], g: Tensor) -> Gradients:
    return _SECOND[kind](g, *saved, node.dim, *node.needs_input_grad[:2])


def _push_backward(
    kind: str, node: Any, saved: tuple[Tensor, Tensor], t_dy: Tensor | None, t_y: Tensor | None, dim: None
) -> Tensor:
    """The directional derivative of the gradient, which is linear in dy."""
    dy, y = saved
    t = torch.zeros_like(dy) if t_dy is None else BACKWARD[kind](t_dy, y, node.dim)
    if t_y is None:
        return t
    dy_wide, y_wide, t_wide = wide(dy, y, t_y)
    if kind == "softmax":
        s = (y_wide * dy_wide).sum(node.dim, keepdim=True)
        extra = t_wide * (dy_wide - s) - y_wide * (t_wide * dy_wide).sum(node.dim, keepdim=True)
    else:
        extra = -y_wide.exp() * t_wide * dy_wide.sum(node.dim, keepdim=True)
    return t + extra.to(y.dtype)


def _second_softmax(g: Tensor, dy: Tensor, y: Tensor, dim: int, needs_dy: bool, needs_y: bool) -> Gradients:
    grad_dy = BACKWARD["softmax"](g, y, dim) if needs_dy else None
    if not needs_y:
        return grad_dy, None
    g_wide, dy_wide, y_wide = wide(g, dy, y)
    s = (y_wide * dy_wide).sum(dim, keepdim=True)
    grad_y = g_wide * (dy_wide - s) - dy_wide * (g_wide * y_wide).sum(dim, keepdim=True)
    return grad_dy, grad_y.to(y.dtype)


def _second_log_softmax(g: Tensor, dy: Tensor, y: Tensor, dim: int, needs_dy: bool, needs_y: bool) -> Gradients:
    g_wide, dy_wide, y_wide = wide(g, dy, y)
    weighted = g_wide * y_wide.exp()
    grad_dy = (g_wide - weighted.sum(dim, keepdim=True)).to(dy.dtype) if needs_dy else None
    grad_y = (-weighted * dy_wide.sum(dim, keepdim=True)).to(y.dtype) if needs_y else None
    return grad_dy, grad_y


_SECOND: dict[str, Callable[..., Gradients]] = {"softmax": _second_softmax, "log_softmax": _second_log_softmax}


# --- vmap ------------------------------------------------------------------------------------------------------------
def _batch(
    count: int, op: Callable[..., Tensor], size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Tensor, int]:
    """Run an operator whose first `count` arguments are tensors, the next one `dim`, over a batch."""
    tensors = [define.batched(t, d, size) for t, d in zip(args[:count], in_dims[:count], strict=True)]
    shape = tensors[0].shape[1:]
    dim = normalized_dim(op.__name__, args[count], shape) + 1
    if not shape:
        tensors = [t.unsqueeze(1) for t in tensors]
    result = op(*tensors, dim, *args[count + 1 :])
    return (result if shape else result.squeeze(1)), 0


# --- autocast --------------------------------------------------------------------------------------------------------
def _autocast_cuda(kind: str, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
    """As torch's softmax on CUDA: narrow inputs give float32 unless the caller asks for a dtype.

    On the CPU autocast leaves softmax alone.
    """
    if dtype is None and input.is_floating_point() and input.dtype is not torch.float64:
        dtype = torch.float32
    return FORWARD[kind](input, dim, dtype)


def _define(kind: str) -> tuple[define.Operator, define.Operator]:
    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(function, kind)

    forward = define.operator(
        f"{kind}(Tensor input, int dim, ScalarType? dtype=None) -> Tensor",
        run=of(_forward),
        fake=of(_forward_fake),
        gradient=define.Gradient(_save_forward, of(_differentiate_forward), of(_push_forward)),
        batch=functools.partial(_batch, 1),
        autocast={"CUDA": of(_autocast_cuda)},
    )
    backward = define.operator(
        f"{kind}_backward(Tensor dy, Tensor y, int dim) -> Tensor",
        run=of(_backward),
        fake=of(_backward_fake),
        gradient=define.Gradient(_save_backward, of(_differentiate_backward), of(_push_backward)),
        batch=functools.partial(_batch, 2),
    )
    return forward, backward


_defined = {kind: _define(kind) for kind in KINDS}
FORWARD: dict[str, Callable[..., Tensor]] = {kind: forward for kind, (forward, _) in _defined.items()}
BACKWARD: dict[str, Callable[..., Tensor]] = {kind: backward for kind, (_, backward) in _defined.items()}
