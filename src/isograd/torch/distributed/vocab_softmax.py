"""softmax and log_softmax of rows whose classes are spread over ranks, with the bits of whole rows."""

import math
from typing import Any

import torch
from torch import Tensor

from isograd.errors import IsogradError
from isograd.torch.distributed.vocab_kernels import of
from isograd.torch.distributed.vocab_layout import PRODUCTS, VALUES
from isograd.torch.distributed.vocab_parts import Part, agreed, checked_part, given_group
from isograd.torch.indexing import enter


class _Softmax(torch.autograd.Function):
    """Both functions, of rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Part, logarithm: bool) -> Tensor:
        kernels = of(x)
        keys = part.largest(kernels.maxima(x))
        words = part.added(kernels.exponentials(x, keys, part.classes))
        y: Tensor = kernels.outputs(x, kernels.statistics(x, keys, words, part.classes), logarithm)
        ctx.save_for_backward(y)
        ctx.part, ctx.logarithm = part, logarithm
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (y,) = ctx.saved_tensors
        sums = ctx.part.total(VALUES if ctx.logarithm else PRODUCTS, dy, y, y)
        return of(y).gradients(dy, y, sums, ctx.logarithm), None, None


def _apply(name: str, x: Tensor, group: Any, logarithm: bool) -> Tensor:
    enter(name)
    group, failed, what = given_group(name, group), None, None
    try:
        x = checked_part(name, "x", x)
        what = (tuple(x.shape[:-1]), str(x.dtype), x.requires_grad and torch.is_grad_enabled())
    except IsogradError as error:
        failed = error
    part = agreed(name, group, x, failed, {"shapes but for the last axis, dtypes or requires_grad": what})
    if part.classes == 0:
        return x.clone()
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return _Softmax.apply(rows, part, logarithm).view(x.shape)  # type: ignore[no-any-return,no-untyped-call]


def vocab_parallel_softmax(x: Tensor, group: Any = None) -> Tensor:
    """The softmax along a last axis that is spread over the ranks of a group: this rank's part of the result.

    x: [..., classes of this rank]; float16, bfloat16, float32 or float64, any strides. The parts follow each other in
    the order of the ranks; they may have different sizes, and a rank none. group: by default all ranks, or none where
    `torch.distributed` is not initialized. A call is a collective of the group, and so is its backward pass.

    The bits of result and gradient are those of `igt.softmax` of whole rows, for any number of ranks and any parts:
    ranks exchange maxima and the exact integers of sums. Differentiable once.

    Raises, on all ranks: InvalidProblemError if they differ in the other axes, in dtype or in whether a gradient is
    needed; otherwise as `igt.softmax`, with InvalidProblemError on ranks whose own argument is right.
    UnsupportedError for a device without kernels; CPUs and CUDA devices have them.
    """
    return _apply("vocab_parallel_softmax", x, group, False)


def vocab_parallel_log_softmax(x: Tensor, group: Any = None) -> Tensor:
    """The log_softmax along a last axis that is spread over ranks; arguments and errors as `vocab_parallel_softmax`."""
    return _apply("vocab_parallel_log_softmax", x, group, True)
