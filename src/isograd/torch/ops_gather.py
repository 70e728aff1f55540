"""Operators with one index for every element: values by index, and sums over repeated indices.

    gather(Tensor input, int dim, Tensor index) -> Tensor
    gather_backward(Tensor grad, int dim, Tensor index, SymInt[] size, bool unique=False) -> Tensor
    scatter_add(Tensor input, int dim, Tensor index, Tensor src) -> Tensor

All are linear in their floating-point inputs: the derivative of each is another one of them. The gradients have the
order-free sums of `isograd.take_along_axis_backward`. Negative indices count from the end.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from isograd.core.faults import named
from isograd.errors import InvalidProblemError
from isograd.gather.plans import ScatterSumPlan, TakeAlongAxisBackwardPlan, TakeAlongAxisPlan
from isograd.torch import define
from isograd.torch.tensors import (
    NAMES,
    Shape,
    empty,
    holds,
    like,
    normalized_dim,
    require_device,
    require_same_dtype,
    require_storage,
    run,
    usable,
    usable_index,
    zeros_or,
)


# --- checks that real and fake tensors share -------------------------------------------------------------------------
def _require_covered(operation: str, index: Tensor, large: Shape, other: str, skipped: int | None) -> None:
    if holds(index.numel() == 0):  # torch takes an empty index of any rank
        return
    small = index.shape
    if len(small) != len(large) and not len(small) + len(large) == 1:  # a scalar goes with one dimension
        raise InvalidProblemError(
            f"{operation}: index has shape {tuple(small)} and {other} {tuple(large)}; expected the same rank"
        )
    for d, (a, b) in enumerate(zip(small, large, strict=False)):
        if d != skipped and holds(a > b):
            raise InvalidProblemError(
                f"{operation}: index has shape {tuple(small)} and {other} {tuple(large)}; expected no more than {b} "
                f"along dimension {d}"
            )


def _region(tensor: Tensor, shape: Shape, dim: int | None = None) -> Tensor:
    """The part at the start of every dimension but one that an index of a shape reaches."""
    for d, (size, length) in enumerate(zip(shape, tensor.shape, strict=True)):
        if d != dim and size != length:
            tensor = tensor.narrow(d, 0, size)
    return tensor


def _lines(x: Tensor, index: Tensor, dim: int) -> tuple[Shape, Shape, str, str, int]:
    """The fields of a descriptor along an axis."""
    return x.shape, index.shape, NAMES[x.dtype], NAMES[index.dtype], dim


# What the arguments of plans are called here.
_NAMES = {"indices": "index", "indices_shape": "index", "shape": "input", "axis": "dim"}


# --- one index for every element -------------------------------------------------------------------------------------
def _gather_fake(input: Tensor, dim: int, index: Tensor) -> Tensor:  # noqa: A002
    require_device("gather", input=input, index=index)
    require_storage("gather", input, "input")
    dim = normalized_dim("gather", dim, input.shape)
    _require_covered("gather", index, input.shape, "input", dim)
    return empty(index.shape, input)


def _gather(input: Tensor, dim: int, index: Tensor) -> Tensor:  # noqa: A002
    v = _gather_fake(input, dim, index)
    x, indices = usable("gather", "input", input), usable_index("gather", "index", index)
    if v.numel() == 0:
        return v
    dim = normalized_dim("gather", dim, x.shape)
    x = _region(x, indices.shape, dim)
    with named("gather", at=None, **_NAMES):
        run(TakeAlongAxisPlan, x.device, _lines(x, indices, dim), x=x, indices=indices, v=v if v.dim() else v.view(1))
    return v


def _gather_backward_fake(grad: Tensor, dim: int, index: Tensor, size: Shape, unique: bool = False) -> Tensor:
    name = "gather_backward"
    require_device(name, grad=grad, index=index)
    require_storage(name, grad, "grad")
    if grad.shape != index.shape:
        raise InvalidProblemError(
            f"{name}: grad has shape {tuple(grad.shape)} and index {tuple(index.shape)}; expected the same"
        )
    dim = normalized_dim(name, dim, torch.Size(size))
    _require_covered(name, index, size, "size", dim)
    return empty(size, grad)


def _gather_backward(grad: Tensor, dim: int, index: Tensor, size: Shape, unique: bool = False) -> Tensor:
    name = "gather_backward"
    dx = _gather_backward_fake(grad, dim, index, size, unique)
    dv, indices = usable(name, "grad", grad), usable_index(name, "index", index)
    if dx.numel() == 0 or indices.numel() == 0:
        return dx.zero_()
    whole = dx if dx.dim() else dx.view(1)
    dim = normalized_dim(name, dim, whole.shape)
    part = _region(whole, indices.shape, dim)
    if part.shape != whole.shape:
        whole.zero_()
    fields = (*_lines(part, indices, dim), unique)
    with named(name, at=None, **_NAMES):
        run(TakeAlongAxisBackwardPlan, dx.device, fields, indices=indices, dv=dv, dx=part)
    return dx


def _scatter_add_fake(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:  # noqa: A002
    require_device("scatter_add", input=input, index=index, src=src)
    require_storage("scatter_add", input, "input")
    require_same_dtype("scatter_add", src, "src", input, "input")
    dim = normalized_dim("scatter_add", dim, input.shape)
    _require_covered("scatter_add", index, input.shape, "input", dim)
    _require_covered("scatter_add", index, src.shape, "src", None)
    return empty(input.shape, input)


def _scatter_add(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:  # noqa: A002
    out = _scatter_add_fake(input, dim, index, src)
    x, indices, values = (
        usable("scatter_add", "input", input),
        usable_index("scatter_add", "index", index),
        usable("scatter_add", "src", src),
    )
    if out.numel() == 0 or indices.numel() == 0:
        return out.copy_(input)
    dim = normalized_dim("scatter_add", dim, x.shape)
    values = _region(values, indices.shape)
    part, out_part = _region(x, indices.shape, dim), _region(out if out.dim() else out.view(1), indices.shape, dim)
    if part.shape != x.shape:
        out.copy_(input)
    fields = _lines(part, indices, dim)
    with named("scatter_add", at=None, **_NAMES):
        run(ScatterSumPlan, x.device, fields, indices=indices, values=values, x=part, out=out_part)
    return out


def _batch_lines(
    result: int, op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Tensor, int]:
    """Both over a batch, which is a dimension like the others to them.

    result: the argument whose shape the result has.
    """
    tensors = {i: define.batched(args[i], in_dims[i], size) for i in range(len(args)) if i != 1}
    dim = normalized_dim(op.__name__, args[1], tensors[0].shape[1:]) + 1
    scalar = tensors[result].dim() == 1
    first, *others = [t.unsqueeze(1) if t.dim() == 1 else t for t in tensors.values()]
    out = op(first, dim, *others)
    return (out.squeeze(1) if scalar else out), 0


def _batch_gather_backward(
    op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Tensor, int]:
    grad, index = (define.batched(args[i], in_dims[i], size) for i in (0, 2))
    dim, shape = args[1], args[3]
    dim = normalized_dim("gather_backward", dim, torch.Size(shape)) + 1
    if grad.dim() == 1:
        grad, index = grad.unsqueeze(1), index.unsqueeze(1)
    result = op(grad, dim, index, [size, *(shape or [1])], *args[4:])
    return (result if shape else result.squeeze(1)), 0


def _save_gather(node: Any, inputs: tuple[Any, ...], v: Tensor) -> tuple[Tensor]:
    input, node.dim, index = inputs  # noqa: A001
    node.size = input.shape
    return (index,)


def _save_gather_backward(node: Any, inputs: tuple[Any, ...], dx: Tensor) -> tuple[Tensor]:
    _, node.dim, index, node.size, node.unique = inputs
    return (index,)


def _save_scatter_add(node: Any, inputs: tuple[Any, ...], out: Tensor) -> tuple[Tensor]:
    _, node.dim, index, src = inputs
    node.size, node.likes = src.shape, (like(out), like(src))
    return (index,)


def _differentiate_scatter_add(node: Any, saved: tuple[Tensor], g: Tensor) -> tuple[Tensor | None, ...]:
    (index,) = saved
    if not node.needs_input_grad[3]:
        return (g,)
    if holds(index.numel() == 0):
        return g, None, None, g.new_zeros(node.size)
    d_src = GATHER(g, node.dim, index)
    if d_src.shape != node.size:  # what index does not reach was not read
        missing = [(0, size - length) for size, length in zip(node.size, d_src.shape, strict=True)]
        d_src = torch.nn.functional.pad(d_src, [n for pair in reversed(missing) for n in pair])
    return g, None, None, d_src


GATHER: define.Operator = define.operator(
    "gather(Tensor input, int dim, Tensor index) -> Tensor",
    run=_gather,
    fake=_gather_fake,
    gradient=define.Gradient(
        _save_gather,
        lambda node, saved, dv: (GATHER_BACKWARD(dv, node.dim, saved[0], node.size),),
        lambda node, saved, t, *rest: GATHER(t, node.dim, saved[0]),
    ),
    batch=functools.partial(_batch_lines, 2),
)
GATHER_BACKWARD: define.Operator = define.operator(
    "gather_backward(Tensor grad, int dim, Tensor index, SymInt[] size, bool unique=False) -> Tensor",
    run=_gather_backward,
    fake=_gather_backward_fake,
    gradient=define.Gradient(
        _save_gather_backward,
        lambda node, saved, g: (GATHER(g, node.dim, saved[0]),),
        lambda node, saved, t, *rest: GATHER_BACKWARD(t, node.dim, saved[0], node.size, node.unique),
    ),
    batch=_batch_gather_backward,
)


def _promoted(input: Tensor, dim: int, index: Tensor, src: Tensor) -> Tensor:  # noqa: A002
    """As torch's scatter_add under autocast on CUDA: both in the wider type."""
    dtype = torch.promote_types(input.dtype, src.dtype)
    return SCATTER_ADD(input.to(dtype), dim, index, src.to(dtype))  # type: ignore[no-any-return]


SCATTER_ADD: define.Operator = define.operator(
    "scatter_add(Tensor input, int dim, Tensor index, Tensor src) -> Tensor",
    run=_scatter_add,
    fake=_scatter_add_fake,
    gradient=define.Gradient(
        _save_scatter_add,
        _differentiate_scatter_add,
        lambda node, saved, t_input, _, __, t_src: SCATTER_ADD(
            zeros_or(t_input, node.likes[0]), node.dim, saved[0], zeros_or(t_src, node.likes[1])
        ),
    ),
    batch=functools.partial(_batch_lines, 0),
    autocast={"CUDA": _promoted},
)
