"""The softmax family on Apple GPUs, one threadgroup a row."""

from collections.abc import Iterator
from typing import Any

from isograd.core import arrays
from isograd.core.kernel import launcher
from isograd.devices import metal
from isograd.runtime.layout import merge_dimensions


@launcher("softmax")
@launcher("softmax_backward")
@launcher("log_softmax")
@launcher("log_softmax_backward")
def rows(problem: Any, **given: Any) -> Iterator[metal.Launch]:
    """One launch, unless there is nothing to compute."""
    operands = [given[o.name] for o in problem.operands()]
    if arrays.size_of(problem.shape) == 0:
        return
    axis, columns = problem.axis, problem.shape[problem.axis]
    strides = [tuple(tensor.stride()) for tensor in operands]
    outer = [d for d in range(len(problem.shape)) if d != axis]
    shape, steps = merge_dimensions(
        tuple([problem.shape[d] for d in outer]), tuple([tuple([s[d] for d in outer]) for s in strides])
    )
    count = arrays.size_of(shape)
    layout = [count, columns, len(shape), *shape]
    for stride, step in zip(strides, steps, strict=True):
        layout += [stride[axis], *step]
    groups, size = min(count, metal.MOST_GROUPS), metal.threads_for(columns)
    yield metal.Launch(f"{problem.operation}_{problem.dtype}", (*operands, layout), groups, size)
