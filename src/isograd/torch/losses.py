"""Losses, and distributions on the simplex, in torch's spelling where torch has them."""

from typing import Any

import torch
from torch import Tensor

from isograd.core.checks import checked_preference, real_number
from isograd.errors import InvalidProblemError, UnsupportedError
from isograd.losses.reductions import checked_reduction, counted
from isograd.torch.indexing import enter
from isograd.torch.ops_cross_entropy import CROSS_ENTROPY
from isograd.torch.ops_linear_cross_entropy import LINEAR_CROSS_ENTROPY
from isograd.torch.tensors import checked_index, integer, refuse, require_count, require_dense, require_tensor
from isograd.typing import Reduction


def _is_narrow(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.float16, torch.bfloat16)


def _constant(operation: str, weight: Tensor | None, name: str) -> Tensor | None:
    """Weights of classes, which get no gradient."""
    if weight is None:
        return None
    require_dense(operation, weight, name)
    if weight.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(f"{operation}: {name} requires a gradient and gets none, as in torch; detach() it")
    return weight


def _count(operation: str, count: Any, operand: Tensor) -> tuple[float | None, Tensor | None]:
    """What a mean divides by: the number, or the tensor that it is in and stays in."""
    if count is None or not isinstance(count, Tensor):
        return None if count is None else counted(operation, count), None
    require_count(operation, count, operand.device)
    return None, count


def cross_entropy(
    input: Tensor,  # noqa: A002
    target: Tensor,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: Reduction = "mean",
    label_smoothing: float = 0.0,
    *,
    z_loss: float = 0.0,
    count: float | Tensor | None = None,
) -> Tensor:
    """`torch.nn.functional.cross_entropy`, with a z-loss on request.

    input: logits, classes along dimension 1 (0 if there is one dimension); float16, bfloat16, float32 or float64.
    target: class indices (int32, int64, uint32 or uint8), or probabilities of input's shape and dtype, which may
    require gradients too. weight: of the classes; gets no gradient. reduction: "mean", "sum" or "none". z_loss: the
    factor of the squared logsumexp that is added to every loss. count: what a mean divides by instead of the weights
    of the targets, so that parts of a batch have the gradients of the whole; a number, or a tensor of one without
    dimensions on input's device or the CPU, which is not waited for (`num_items_in_batch` of transformers' Trainer).

    The loss has input's dtype as in torch (`isograd.cross_entropy` returns float32 for 16 bits); under autocast narrow
    inputs give float32. The gradient of the logits has the bits of `isograd.cross_entropy_backward`. Differentiable
    twice.

    Raises IndexOutOfRangeError on the CPU for a target that is no class; on a GPU its loss is NaN and
    `isograd.check()` raises. InvalidProblemError for shapes, dtypes or options that do not fit, UnsupportedError for
    other dtypes and for torch's deprecated `size_average` and `reduce`.
    """
    name = "cross_entropy"
    enter(name)
    require_dense(name, input, "input")
    require_tensor(name, target, "target")
    refuse(name, None, size_average=size_average, reduce=reduce)
    if not target.is_floating_point():
        target = checked_index(name, target, "target")
    elif ignore_index >= 0:
        raise InvalidProblemError(f"{name}: ignore_index is {ignore_index} for probabilities, which name no class")
    else:
        require_dense(name, target, "target")
    plain_count, divisor = _count(name, count, input)
    options: tuple[Any, ...] = (
        integer(name, "ignore_index", ignore_index),
        real_number(name, "label_smoothing", label_smoothing),
        real_number(name, "z_loss", z_loss),
        reduction,
        plain_count,
    )
    checked_reduction(name, reduction)
    weight = _constant(name, weight, "weight")
    dim = 1 if input.dim() > 1 else 0
    result = CROSS_ENTROPY(input, target, weight, dim, *options, _is_narrow(input), divisor)
    return result[0]  # type: ignore[no-any-return]


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: Reduction = "mean",
    count: float | Tensor | None = None,
    chunk: int | None = None,
    preference: str | None = None,
) -> Tensor:
    """Cross entropy of `hidden @ weight.T + bias`, of whose logits no more than a chunk is ever held.

    hidden: [..., features]; weight: [classes, features]; targets: class indices, [...]; bias: [classes]. class_weight
    and the other options are those of `cross_entropy`; chunk: rows at a time; preference: the name of a kernel,
    "order_free" for products in no order, whose bits are the same for any chunk and on the CPU and, in 16 bits, on
    GPUs. The loss is in the work type (float32 for 16 bits).

    Where a gradient is needed and the losses are reduced, it is computed along with the loss, for a loss gradient of 1,
    kept in the operands' dtype, and multiplied by the one that arrives. In float16, where such gradients would leave
    the exponents before a scaled loss brings them back, only the operands are kept: the backward pass computes the
    logits again, a fourth product, from the gradient that arrives. hidden, weight and bias have gradients; there are no
    second derivatives. Under vmap members that share weight and bias, and need no gradient of them, are one call. Under
    autocast the product has autocast's dtype and the loss float32, as with torch's linear and cross_entropy. Bits and
    errors as for `isograd.linear_cross_entropy`.
    """
    name = "linear_cross_entropy"
    enter(name)
    for argument, tensor in (("hidden", hidden), ("weight", weight), *((("bias", bias),) if bias is not None else ())):
        require_dense(name, tensor, argument)
    targets = checked_index(name, targets, "targets")
    checked_reduction(name, reduction)
    class_weight = _constant(name, class_weight, "class_weight")
    plain_count, divisor = _count(name, count, hidden)
    matrix = any(t is not None and t.requires_grad for t in (weight, bias))
    return LINEAR_CROSS_ENTROPY(  # type: ignore[no-any-return]
        hidden,
        weight,
        targets,
        bias,
        class_weight,
        integer(name, "ignore_index", ignore_index),
        real_number(name, "label_smoothing", label_smoothing),
        real_number(name, "z_loss", z_loss),
        reduction,
        plain_count,
        None if chunk is None else integer(name, "chunk", chunk),
        checked_preference(name, preference),
        torch.is_grad_enabled() and (matrix or hidden.requires_grad) and reduction != "none",
        divisor,
        matrix,
    )[0]
