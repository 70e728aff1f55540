"""How a kernel walks through strided arrays: dimensions merged where memory allows, then rows or lanes."""

from typing import NamedTuple

Shape = tuple[int, ...]


class Walk(NamedTuple):
    """A reduction problem as the CPU kernels see it; strides count elements.

    `shape` and `strides` (one tuple an operand) are the dimensions besides the reduced axis and the lanes; at least
    one, possibly of size 1. `lanes` is 0 where rows are taken one by one.
    """

    shape: Shape
    strides: tuple[Shape, ...]
    lanes: int
    length: int
    axis_strides: Shape


def merge_dimensions(shape: Shape, strides: tuple[Shape, ...]) -> tuple[Shape, tuple[Shape, ...]]:
    """The shape and each operand's strides with dimensions merged where memory allows; at least one dimension.

    Outermost first by the stride of the output, which is last.
    """
    order = sorted([d for d, n in enumerate(shape) if n != 1], key=lambda d: -abs(strides[-1][d]))
    merged: list[tuple[int, Shape]] = []
    for d in order:
        size, step = shape[d], tuple(s[d] for s in strides)
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], step, strict=True)):
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    merged = merged or [(1, (0,) * len(strides))]
    return tuple(size for size, _ in merged), tuple(tuple(step[i] for _, step in merged) for i in range(len(strides)))


def plan_walk(shape: Shape, strides: tuple[Shape, ...], axis: int) -> Walk:
    """Merge dimensions and choose between rows and lanes.

    Lanes are chosen when the reduced axis is not contiguous but another dimension is, in every operand: neighbouring
    rows then advance together and memory is read in order.
    """
    axis_strides = tuple(s[axis] for s in strides)
    others = [d for d in range(len(shape)) if d != axis and shape[d] != 1]
    others.sort(key=lambda d: -abs(strides[-1][d]))
    lanes = 0
    if shape[axis] > 1 and any(s != 1 for s in axis_strides):
        contiguous = [d for d in others if all(s[d] == 1 for s in strides)]
        if contiguous:
            others.remove(contiguous[0])
            lanes = shape[contiguous[0]]
    sizes, steps = merge_dimensions(
        tuple(shape[d] for d in others), tuple(tuple(s[d] for d in others) for s in strides)
    )
    return Walk(sizes, steps, lanes, shape[axis], axis_strides)
