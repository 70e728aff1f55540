"""What batching rules and second derivatives share.

Members as rows of one problem, reduced as each is alone, and indices that count on.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from isograd.numerics.losses import divisor as count_of
from isograd.torch.ops_gather import GATHER_BACKWARD
from isograd.torch.ops_scaled import DIVIDED
from isograd.torch.tensors import Shape

Divisor = Tensor | float


def lines(values: Tensor) -> Tensor:
    """Every member's values as a line."""
    return values.flatten(1) if values.dim() > 1 else values.unsqueeze(1)


def totals(values: Tensor) -> Tensor:
    """The order-free sum of every member's values."""
    values = lines(values)
    index = torch.zeros(values.shape, dtype=torch.int64, device=values.device)
    return GATHER_BACKWARD(values, 1, index, [values.shape[0], 1]).squeeze(1)  # type: ignore[no-any-return]


def _quotients(values: Tensor, divisor: Divisor) -> Tensor:
    """One value of every member, divided by a number or by one of every member."""
    if not isinstance(divisor, Tensor):
        divisor = torch.full((), divisor, dtype=torch.float64, device=values.device)
    return DIVIDED(values, divisor.to(values.device).expand(values.shape))  # type: ignore[no-any-return]


def reduced(losses: Tensor, reduction: str, divisor: Callable[[], Divisor]) -> Tensor:
    """Losses after the reduction of every member; `divisor` returns what a mean divides by."""
    if reduction == "none":
        return losses
    return totals(losses) if reduction == "sum" else _quotients(totals(losses), divisor())


def share(reduction: str, shape: Shape) -> float:
    """What every single loss counts in the reduced one, in torch's own sums."""
    return 1.0 if reduction == "none" else 1.0 / max(count_of(reduction, tuple(shape)), 1)


def summed(terms: Tensor, reduction: str) -> Tensor:
    """Terms after a reduction, by torch's own sum."""
    return terms if reduction == "none" else terms.sum() * share(reduction, terms.shape)


def spread(dloss: Tensor, reduction: str, shape: Shape, divisor: Callable[[], Divisor]) -> Tensor:
    """The gradients of single losses of a shape from those of the members' losses."""
    if reduction == "none":
        return dloss
    g = dloss if reduction == "sum" else _quotients(dloss, divisor())
    return g.reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)


def target_totals(targets: Tensor, ignore_index: int, weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The targets of every member that are not ignored or, given weights of classes, the sum of theirs in a dtype."""
    targets = lines(targets).long()
    kept = targets != ignore_index
    if weight is None:
        return kept.sum(1)
    weights = weight.to(dtype)[torch.where(kept, targets, 0)]
    return totals(torch.where(kept, weights, torch.zeros_like(weights)))


def placed(index: Tensor, bound: int) -> Tensor:
    """Indices below a bound of every member as those of all members, whose places follow each other.

    What is no place of its member is none of the whole, and is told as that.
    """
    index = index.long()
    first = torch.arange(index.shape[0], device=index.device).view(-1, *(1,) * (index.dim() - 1)) * bound
    return torch.where((index >= 0) & (index < bound), index + first, -1)


def parted(tensor: Tensor, size: int, length: int, dim: int = 0) -> Tensor:
    """A dimension in which members of a length follow each other as two, the members' in front of all."""
    parts: Tensor = tensor.unflatten(dim, (size, length))  # type: ignore[no-untyped-call]
    return parts.movedim(dim, 0)
