"""Linear layers whose weight is spread over ranks, with the bits of `igt.linear` of the whole."""

from typing import Any

import torch
from torch import Tensor

from isograd.errors import InvalidProblemError, IsogradError, UnsupportedError
from isograd.numerics.matmul import MAX_TERMS
from isograd.torch import tensors
from isograd.torch.distributed import parallel_products as parts
from isograd.torch.distributed.vocab_parts import Part, agreed, checked_part, given_group
from isograd.torch.indexing import enter
from isograd.torch.ops_matmul import ADD_TO_ROWS

_COLUMN, _ROW = "column_parallel_linear", "row_parallel_linear"


class _Columns(torch.autograd.Function):
    """The product of whole rows x with this rank's outputs of a weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: Part) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.part = part
        return parts.product(x, weight.t(), parts.whole_balance(part, weight.t()))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), part = ctx.saved_tensors, ctx.part
        g = tensors.usable(_COLUMN, "the gradient", g)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = parts.summed_product(part, g, weight, parts.spread_balance(part, weight))
        if ctx.needs_input_grad[1]:
            balance = parts.tokens_balance(x.t(), parts.row_keys(part, g))
            dweight = parts.product(x.t(), g, balance).t()
        return dx, dweight, None


class _Rows(torch.autograd.Function):
    """The product of this rank's features x with those of a weight, summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, part: Part) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.part = part
        return parts.summed_product(part, x, weight.t(), parts.spread_balance(part, weight.t()))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight), part = ctx.saved_tensors, ctx.part
        g = tensors.usable(_ROW, "the gradient", g)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = parts.product(g, weight, parts.whole_balance(part, weight))
        if ctx.needs_input_grad[1]:
            balance = parts.tokens_balance(parts.row_keys(part, x), g)
            dweight = parts.product(x.t(), g, balance).t()
        return dx, dweight, None


def _checked(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in the dtype of autocast, where that is on."""
    given = {"input": x, "weight": weight} | ({} if bias is None else {"bias": bias})
    found = {argument: checked_part(name, argument, tensor) for argument, tensor in given.items()}
    device = given["input"].device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        found = {key: t if t.dtype is torch.float64 else t.to(dtype) for key, t in found.items()}
    tensors.require_device(name, **given)
    x, weight, bias = found["input"], found["weight"], found.get("bias")
    if x.dtype is torch.float64:
        raise UnsupportedError(f"{name}: input has dtype float64; accepted: float16, bfloat16, float32")
    for argument in ("weight", "bias"):
        if argument in found:
            tensors.require_same_dtype(name, found[argument], argument, x, "input")
    if not given["input"].dim() or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise InvalidProblemError(
            f"{name}: input has shape {tuple(x.shape)} and weight {tuple(weight.shape)}; expected [..., features] and "
            "[outputs, features]"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InvalidProblemError(f"{name}: bias has shape {tuple(bias.shape)}; expected {tuple(weight.shape[:1])}")
    return x, weight, bias


def _apply(function: Any, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, group: Any) -> Tensor:
    enter(name)
    group, failed, what, spread, grads = given_group(name, group), None, None, None, None
    try:
        x, weight, bias = _checked(name, x, weight, bias)
        features, whole = (weight.shape[1], None) if name == _COLUMN else (None, weight.shape[0])
        what = (tuple(x.shape[:-1]), features, whole, str(x.dtype), bias is None)
        grads = (x.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else None
        spread = weight.t() if name == _COLUMN else weight
    except IsogradError as error:
        failed = error
    said = {"shapes, dtypes or a bias": what, "requires_grad of input and weight": grads}
    part = agreed(name, group, spread, failed, said)
    if max(part.classes, x.shape[-1], x.shape[:-1].numel()) > MAX_TERMS:
        raise UnsupportedError(f"{name}: an axis has more than {MAX_TERMS} elements; accepted: up to that")
    found: Tensor = function.apply(parts.as_rows(x), weight, part)
    if bias is not None:
        found = ADD_TO_ROWS(found, bias)
    return found.view(*x.shape[:-1], weight.shape[0])


def column_parallel_linear(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """A linear layer whose outputs are spread over the ranks of a group: those of this rank.

    input: [..., features], the same on all ranks. weight: [outputs of this rank, features], bias: [outputs of this
    rank]; float16, bfloat16 or float32, one dtype. The parts follow each other in the order of the ranks; they may have
    different sizes, and a rank none. group: by default all ranks, or none where `torch.distributed` is not initialized.
    A call is a collective of the group, and so is its backward pass. The result: [..., outputs of this rank].

    The bits of the result and of all gradients are those of `igt.linear` of the whole weight with precision="int16",
    for any number of ranks and any parts. Forward ranks exchange the greatest exponents of the weight's features,
    8 bytes each; backward the gradient of input is a sum over ranks, of exact integers of 8 bytes an element, and whole
    on every rank. Differentiable once.

    Raises, on all ranks: InvalidProblemError if they differ in shapes, dtypes, having a bias or requires_grad; else as
    `igt.linear`, with InvalidProblemError on ranks whose own arguments are right. UnsupportedError for float64 and a
    device without kernels; CPUs and CUDA devices have them. A GPU is waited for, here and where sums are added over
    ranks.
    """
    return _apply(_Columns, _COLUMN, input, weight, bias, group)


def row_parallel_linear(
    input: Tensor,  # noqa: A002
    weight: Tensor,
    bias: Tensor | None = None,
    group: Any = None,
) -> Tensor:
    """A linear layer whose features are spread over the ranks of a group; every rank has the whole result.

    input: [..., features of this rank]. weight: [outputs, features of this rank]. bias: [outputs], the same on all
    ranks, as is the gradient that comes back for the result. Dtypes, parts and group as for `column_parallel_linear`,
    of which it takes the results.

    The bits of the result and of all gradients are those of `igt.linear` of the whole with precision="int16": ranks
    exchange exponents and add exact integers, 8 bytes an element of the result, which is rounded once; backward they
    exchange exponents only. Differentiable once. Raises as `column_parallel_linear`.
    """
    return _apply(_Rows, _ROW, input, weight, bias, group)
