"""The operators `isograd::softmax`, `log_softmax`, `softmax_backward` and `log_softmax_backward`.

    softmax(Tensor input, int dim, ScalarType? dtype=None) -> Tensor
    softmax_backward(Tensor dy, Tensor y, int dim) -> Tensor

and the same for log_softmax. They have implementations for every device that a kernel is registered for, for `meta`
and fake tensors, gradients (the backwards are differentiable themselves), batching rules and autocast. `dtype`
converts the input first, as in torch. The forward operators save their result and nothing else.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from isograd import arrays, registry
from isograd.errors import DeviceMismatchError, InvalidProblemError, UnsupportedError
from isograd.plan import Plan
from isograd.softmax.plans import (
    KINDS,
    SoftmaxBackwardDescriptor,
    SoftmaxBackwardPlan,
    SoftmaxDescriptor,
    SoftmaxPlan,
)

# A fragment, so that other families can add operators to the namespace.
_library: Any = torch.library.Library("isograd", "FRAGMENT")  # type: ignore[no-untyped-call]
for _kind in KINDS:
    _tags = (torch.Tag.pt2_compliant_tag,)
    _library.define(f"{_kind}(Tensor input, int dim, ScalarType? dtype=None) -> Tensor", tags=_tags)
    _library.define(f"{_kind}_backward(Tensor dy, Tensor y, int dim) -> Tensor", tags=_tags)

FORWARD: dict[str, Callable[..., Tensor]] = {kind: getattr(torch.ops.isograd, kind).default for kind in KINDS}
BACKWARD: dict[str, Callable[..., Tensor]] = {
    kind: getattr(torch.ops.isograd, f"{kind}_backward").default for kind in KINDS
}
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# --- checks ----------------------------------------------------------------------------------------------------------
def normalized_dim(operation: str, dim: int, shape: torch.Size, name: str = "dim") -> int:
    """A dimension counted from the front; as in torch, a tensor without dimensions takes 0 and -1."""
    rank = max(len(shape), 1)
    if not -rank <= dim < rank:
        raise InvalidProblemError(f"{operation}: {name} is {dim}; shape {tuple(shape)} accepts {-rank} to {rank - 1}")
    return dim % rank


def require_same(operation: str, dy: Tensor, y: Tensor) -> None:
    """Raise if a gradient and a result differ in device, dtype or shape."""
    if dy.device != y.device:
        raise DeviceMismatchError(f"{operation}: dy is on {dy.device} and y on {y.device}; expected one device")
    if dy.dtype is not y.dtype:
        raise InvalidProblemError(f"{operation}: dy has dtype {dy.dtype} and y {y.dtype}; expected the same")
    if dy.shape != y.shape:
        raise InvalidProblemError(
            f"{operation}: dy has shape {tuple(dy.shape)} and y {tuple(y.shape)}; expected the same"
        )


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


def _usable(operation: str, name: str, tensor: Tensor) -> Tensor:
    """A tensor that kernels take: dense, of a storage type, aligned to its elements, with a dimension."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_nested:
        arrays.tensor_dtype(tensor, operation, name)
    if tensor.data_ptr() % tensor.element_size():  # of a buffer that another library filled
        tensor = tensor.clone()
    return tensor if tensor.dim() else tensor.reshape(1)


def _launch(plan: Plan, **operands: Tensor) -> None:
    # The operands are of the plan's making: nothing is left to check.
    if plan.device == "cpu":
        views = {name: arrays.numpy_view(tensor) for name, tensor in operands.items()}
        plan.kernel.launch(plan.descriptor, views, None, None)
    else:
        plan.kernel.launch(plan.descriptor, operands, None, None)


def _forward(kind: str, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
    if dtype is not None:
        input = input.to(dtype)  # noqa: A001
    x = _usable(kind, "input", input)
    plan = forward_plan(kind, x.shape, x.dtype, dim, x.device.type, registry.generation())
    y = torch.empty_like(x)
    _launch(plan, x=x, y=y)
    return y if input.dim() else y.reshape(())


def _backward(kind: str, dy: Tensor, y: Tensor, dim: int) -> Tensor:
    operation = f"{kind}_backward"
    require_same(operation, dy, y)
    gradient, result = _usable(operation, "dy", dy), _usable(operation, "y", y)
    plan = backward_plan(kind, result.shape, result.dtype, dim, result.device.type, registry.generation())
    dx = torch.empty_like(result)
    _launch(plan, dy=gradient, y=result, dx=dx)
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
def _below_autograd(op: Any, keyset: Any, *args: Any) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        result: Tensor = op.redispatch(keyset & torch._C._after_autograd_keyset, *args)
        return result


@contextmanager
def _differentiable() -> Iterator[None]:
    """Undo what torch does to a node's own code: cut it off from differentiation, which other levels still need."""
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
        yield


def _primals(*tensors: Tensor) -> list[Tensor]:
    return [forward_ad.unpack_dual(t).primal for t in tensors]  # type: ignore[no-untyped-call]


def _inside_node(op: Any, keyset: Any, *args: Any) -> Tensor:
    if not torch._C._are_functorch_transforms_active():
        return _below_autograd(op, keyset, *args)
    with _differentiable():
        return _below_autograd(op, keyset, *args)


# Operators are differentiated by their kernels at the Autograd key. `torch.library.register_autograd` would be shorter,
# but refuses torch.func's transforms. A single-level function is a node for the one level that the kernel serves.
class _Forward(_SingleLevelFunction):
    """The node of softmax and log_softmax in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, kind: str, keyset: Any, input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:  # noqa: A002
        y = _inside_node(FORWARD[kind], keyset, input, dim, dtype)
        ctx.save_for_backward(y)
        ctx.save_for_forward(y)
        ctx.kind, ctx.dim, ctx.dtype = kind, dim, input.dtype
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, None, Tensor, None, None]:
        (y,) = ctx.saved_tensors
        dx = BACKWARD[ctx.kind](dy, y, ctx.dim)
        return None, None, dx if dx.dtype is ctx.dtype else dx.to(ctx.dtype), None, None

    @staticmethod
    def jvp(ctx: Any, kind: None, keyset: None, tangent: Tensor, *rest: None) -> Tensor:
        (y,) = _primals(*ctx.saved_tensors)
        with _differentiable():
            return _forward_tangent(ctx.kind, tangent.to(y.dtype), y, ctx.dim)


class _Backward(_SingleLevelFunction):
    """The node of the gradients, which have gradients themselves."""

    @staticmethod
    def forward(ctx: Any, kind: str, keyset: Any, dy: Tensor, y: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(dy, y)
        ctx.save_for_forward(dy, y)
        ctx.kind, ctx.dim = kind, dim
        return _inside_node(BACKWARD[kind], keyset, dy, y, dim)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, Tensor | None, Tensor | None, None]:
        dy, y = ctx.saved_tensors
        grad_dy, grad_y = _SECOND[ctx.kind](g, dy, y, ctx.dim, *ctx.needs_input_grad[2:4])
        return None, None, grad_dy, grad_y, None

    @staticmethod
    def jvp(ctx: Any, kind: None, keyset: None, t_dy: Tensor | None, t_y: Tensor | None, dim: None) -> Tensor:
        dy, y = _primals(*ctx.saved_tensors)
        with _differentiable():
            return _backward_tangent(ctx.kind, t_dy, t_y, dy, y, ctx.dim)


def _apply(node: Any, *args: Any) -> Tensor:
    result: Tensor
    if not torch._C._are_functorch_transforms_active():
        result = node.apply(*args)
        return result
    with enable_single_level_autograd_function():
        result = node.apply(*args)
        return result


def _differentiated(*tensors: Tensor) -> bool:
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return True
    return forward_ad._current_level >= 0


def _forward_autograd(
    kind: str,
    keyset: Any,
    input: Tensor,  # noqa: A002
    dim: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if _differentiated(input):
        return _apply(_Forward, kind, keyset, input, dim, dtype)
    return _below_autograd(FORWARD[kind], keyset, input, dim, dtype)


def _backward_autograd(kind: str, keyset: Any, dy: Tensor, y: Tensor, dim: int) -> Tensor:
    if _differentiated(dy, y):
        return _apply(_Backward, kind, keyset, dy, y, dim)
    return _below_autograd(BACKWARD[kind], keyset, dy, y, dim)


Gradients = tuple[Tensor | None, Tensor | None]


def _wide(*tensors: Tensor) -> list[Tensor]:
    return [t if t.dtype is torch.float64 else t.float() for t in tensors]


def _second_softmax(g: Tensor, dy: Tensor, y: Tensor, dim: int, needs_dy: bool, needs_y: bool) -> Gradients:
    grad_dy = BACKWARD["softmax"](g, y, dim) if needs_dy else None
    if not needs_y:
        return grad_dy, None
    g_wide, dy_wide, y_wide = _wide(g, dy, y)
    s = (y_wide * dy_wide).sum(dim, keepdim=True)
    grad_y = g_wide * (dy_wide - s) - dy_wide * (g_wide * y_wide).sum(dim, keepdim=True)
    return grad_dy, grad_y.to(y.dtype)


def _second_log_softmax(g: Tensor, dy: Tensor, y: Tensor, dim: int, needs_dy: bool, needs_y: bool) -> Gradients:
    g_wide, dy_wide, y_wide = _wide(g, dy, y)
    weighted = g_wide * y_wide.exp()
    grad_dy = (g_wide - weighted.sum(dim, keepdim=True)).to(dy.dtype) if needs_dy else None
    grad_y = (-weighted * dy_wide.sum(dim, keepdim=True)).to(y.dtype) if needs_y else None
    return grad_dy, grad_y


_SECOND: dict[str, Callable[..., Gradients]] = {"softmax": _second_softmax, "log_softmax": _second_log_softmax}


def _forward_tangent(kind: str, t: Tensor, y: Tensor, dim: int) -> Tensor:
    """The directional derivative of the forward operation."""
    if kind == "softmax":  # whose Jacobian is symmetric
        return BACKWARD["softmax"](t, y, dim)
    t_wide, y_wide = _wide(t, y)
    return (t_wide - (y_wide.exp() * t_wide).sum(dim, keepdim=True)).to(y.dtype)


def _backward_tangent(kind: str, t_dy: Tensor | None, t_y: Tensor | None, dy: Tensor, y: Tensor, dim: int) -> Tensor:
    """The directional derivative of the gradient, which is linear in dy."""
    t = torch.zeros_like(dy) if t_dy is None else BACKWARD[kind](t_dy, y, dim)
    if t_y is None:
        return t
    dy_wide, y_wide, t_wide = _wide(dy, y, t_y)
    if kind == "softmax":
        s = (y_wide * dy_wide).sum(dim, keepdim=True)
        extra = t_wide * (dy_wide - s) - y_wide * (t_wide * dy_wide).sum(dim, keepdim=True)
    else:
        extra = -y_wide.exp() * t_wide * dy_wide.sum(dim, keepdim=True)
    return t + extra.to(y.dtype)


# --- vmap ------------------------------------------------------------------------------------------------------------
def _batched(tensor: Tensor, batch_dim: int | None, size: int) -> Tensor:
    """The batch in front; where there is none, every member reads the same memory."""
    return tensor.expand(size, *tensor.shape) if batch_dim is None else tensor.movedim(batch_dim, 0)


def _batch(
    operation: str, op: Callable[..., Tensor], count: int, info: Any, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Tensor, int]:
    """Run an operator whose first `count` arguments are tensors, the next one `dim`, over a batch."""
    tensors = [_batched(t, d, info.batch_size) for t, d in zip(args[:count], in_dims[:count], strict=True)]
    shape = tensors[0].shape[1:]
    dim = normalized_dim(operation, args[count], shape) + 1
    if not shape:
        tensors = [t.unsqueeze(1) for t in tensors]
    result = op(*tensors, dim, *args[count + 1 :])
    return (result if shape else result.squeeze(1)), 0


# --- autocast --------------------------------------------------------------------------------------------------------
_AUTOCAST_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def _autocast_cuda(kind: str, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:  # noqa: A002
    """As torch's softmax on CUDA: narrow inputs give float32 unless the caller asks for a dtype.

    On the CPU autocast leaves softmax alone.
    """
    if dtype is None and input.is_floating_point() and input.dtype is not torch.float64:
        dtype = torch.float32
    with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CUDA):
        return FORWARD[kind](input, dim, dtype)


def _register(kind: str) -> None:
    forward, backward = f"isograd::{kind}", f"isograd::{kind}_backward"
    # One implementation for all devices: the registry knows which have a kernel, and says so where none does.
    _library.impl(kind, functools.partial(_forward, kind), "CompositeExplicitAutograd")
    _library.impl(f"{kind}_backward", functools.partial(_backward, kind), "CompositeExplicitAutograd")
    _library.impl(kind, functools.partial(_autocast_cuda, kind), "AutocastCUDA")
    torch.library.register_fake(forward, functools.partial(_forward_fake, kind), lib=_library)
    torch.library.register_fake(backward, functools.partial(_backward_fake, kind), lib=_library)
    _library.impl(kind, functools.partial(_forward_autograd, kind), "Autograd", with_keyset=True)
    _library.impl(f"{kind}_backward", functools.partial(_backward_autograd, kind), "Autograd", with_keyset=True)
    torch.library.register_vmap(forward, functools.partial(_batch, kind, FORWARD[kind], 1), lib=_library)
    torch.library.register_vmap(
        backward, functools.partial(_batch, f"{kind}_backward", BACKWARD[kind], 2), lib=_library
    )


for _kind in KINDS:
    _register(_kind)
