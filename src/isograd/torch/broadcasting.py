"""Broadcast operands whose gradient is an order-free sum."""

import math
from collections.abc import Sequence

from torch import Tensor

from isograd.torch.ops_matmul import ADD_TO_ROWS


def add(full: Tensor, small: Tensor) -> Tensor:
    """`full + small` of one dtype, small broadcast to full's shape; its gradient is a sum by rule 4."""
    own = (1,) * (full.dim() - small.dim()) + tuple(small.shape)
    folded = [d for d, size in enumerate(own) if size != full.shape[d]]
    if not folded or not small.requires_grad:
        return full + small
    kept = [d for d in range(full.dim()) if d not in folded]
    order = (*folded, *kept)
    moved = full.permute(order)
    sizes = [math.prod([full.shape[d] for d in axes]) for axes in (folded, kept)]  # torch.compile knows no generators
    rows = moved.reshape(sizes)
    total: Tensor = ADD_TO_ROWS(rows, small.reshape(-1))
    return total.reshape(moved.shape).permute(sorted(range(full.dim()), key=order.__getitem__))


def broadcast_shape(first: Sequence[int], second: Sequence[int]) -> tuple[int, ...] | None:
    """The shape that two shapes broadcast to, or None."""
    rank = max(len(first), len(second))
    pairs = list(zip(*[(1,) * (rank - len(shape)) + tuple(shape) for shape in (first, second)], strict=True))
    if any(a != b and a != 1 and b != 1 for a, b in pairs):
        return None
    return tuple([b if a == 1 else a for a, b in pairs])


def expanded(small: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`small.expand(shape)`, whose gradient is a sum by rule 4."""
    if tuple(small.shape) == tuple(shape) or not small.requires_grad:
        return small.expand(shape)
    return add(small.new_full((), -0.0).expand(shape), small)  # -0, to which every number adds as it is
