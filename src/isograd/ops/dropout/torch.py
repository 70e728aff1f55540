"""dropout in torch's spelling, and its batches."""

from typing import Any

from torch import Tensor

from isograd.ops.dropout.operation import DROPOUT
from isograd.torch import bind, define


def _batch(op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Tensor, int]:
    """The mask belongs to the place in a member, or in a member's member."""
    (x,), (*settings, batched) = _operator.split(args)
    x = define.batched(x, in_dims[0], size)
    whole = x.flatten(0, 1) if batched else x.unsqueeze(1) if x.dim() == 1 else x
    return op(whole, *settings, True).view(x.shape), 0


_operator = bind.operator(DROPOUT, batch=_batch)
_dropout = bind.function(_operator)


def dropout(
    input: Tensor,  # noqa: A002
    p: float = 0.5,
    training: bool = True,
    *,
    seed: int,
    offset: int = 0,
) -> Tensor:
    """`torch.nn.functional.dropout` with a mask that `seed` and `offset` name, the same on every device.

    input: rank 0 to 8; float16, bfloat16, float32 or float64. p: from 0 to 1. training: whether anything is dropped;
    input is returned where it is not. seed, offset: from 0 to 2^64 - 1; element i, in C order, goes by number
    `offset + i`, so that a part of a batch has the mask that it has in the whole one if offset is the number of
    elements before it. torch's own draws from torch's generator, and elsewhere on another device or for another split.

    The mask is not kept: the gradient makes it again. Under vmap every member has the mask that it would have alone.

    Raises InvalidProblemError for a wrong p, seed or offset, UnsupportedError for another dtype.
    """
    if not training:
        return input
    y: Tensor = _dropout((input,), (p, seed, offset, False))
    return y
