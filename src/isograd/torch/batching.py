"""Batching rules from declarations: a batch is a dimension of rows like the others, or one of losses."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from isograd.core.operands import AlongAxis, Chosen, Like, Loss
from isograd.numerics.losses import divisor
from isograd.torch import define, members

if TYPE_CHECKING:
    from isograd.torch.bind import Bound

Values = tuple[Any, ...]
OF_ELEMENTS = (Like, Chosen)  # without dimensions where the problem has none


def of_rows(
    bound: Bound, op: define.Operator, size: int, in_dims: tuple[int | None, ...], *args: Any
) -> tuple[Any, Any]:
    """Over a batch, which is a dimension of rows like the others unless it has a weight for every member."""
    inputs, settings = bound.split(args)
    dims = [d if isinstance(d, int) else None for d in (*in_dims, *[None] * len(inputs))][: len(inputs)]
    if bound.reduction(settings) != "none":
        return _reduced(bound, op, size, inputs, dims, settings)
    shared = all(d is None or not isinstance(a, AlongAxis) for (_, a), d in zip(bound.kinds, dims, strict=True))
    if not (shared and bound.has_parts(settings)):
        return define.one_by_one(op, size, in_dims, *args)
    moved = [
        t if t is None or isinstance(a, AlongAxis) else define.batched(t, d, size)
        for (_, a), t, d in zip(bound.kinds, inputs, dims, strict=True)
    ]
    assert bound.problem is not None
    shape = moved[bound.problem].shape[1:]
    if len(shape) < bound.op.least_rank:
        moved = [t.unsqueeze(1) if isinstance(a, Like) else t for (_, a), t in zip(bound.kinds, moved, strict=True)]
    axis = bound.along(settings, shape)
    found = op(*moved, *bound.moved(settings, axis + 1))
    outputs = []
    for (_, a, asked), t in zip(bound.asked(settings), found if isinstance(found, tuple) else (found,), strict=True):
        member = t if len(shape) >= bound.op.least_rank or not isinstance(a, OF_ELEMENTS) else t.squeeze(1)
        outputs.append(member if asked else t.new_empty((size, 0)))
    return bound.results(outputs), (0,) * len(outputs) if len(outputs) > 1 else 0


def _reduced(
    bound: Bound, op: define.Operator, size: int, inputs: Values, dims: list[int | None], settings: Values
) -> tuple[Tensor, int]:
    """Over a batch of losses: all as they are, then reduced for every member as it is alone."""
    reduction, narrow = bound.reduction(settings), bound.narrow(settings)
    moved: list[Any] = [t if t is None else define.batched(t, d, size) for t, d in zip(inputs, dims, strict=True)]
    assert bound.problem is not None
    shape = tuple(moved[bound.problem].shape)
    for i, (_, a) in enumerate(bound.kinds):
        if isinstance(a, Loss):
            losses = a.shape(shape, -1)
            moved[i] = members.spread(moved[i], reduction, losses, partial(divisor, reduction, losses[1:]))
    assert bound.reduction_place is not None
    settings = (*settings[: bound.reduction_place], "none", *settings[bound.reduction_place + 1 :])
    found = op(*moved, *(settings[:-1] if bound.has_loss else settings))
    if not isinstance(next(iter(bound.op.outputs.values())), Loss):
        return found, 0
    loss = members.reduced(found, reduction, partial(divisor, reduction, tuple(found.shape[1:])))
    return (loss.to(moved[bound.problem].dtype) if narrow else loss), 0
