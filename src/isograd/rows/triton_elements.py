# mypy: ignore-errors
# ruff: noqa: N803
"""How Triton kernels on single elements are launched: a tile of them, in any layout."""

from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl

from isograd.devices.triton_launcher import Launcher, Specification, kept, merged
from isograd.numerics import triton_ops as ops
from isograd.numerics.triton_memory import element_offset

Strides = tuple[int, ...]
TILE = 1024  # elements


@triton.jit
def load(base, index, shape, strides, mask):
    """Elements in the type that they are computed in, 0 outside of the mask."""
    return ops.widen(tl.load(base + element_offset(index, shape, strides), mask=mask, other=0.0), False)


@triton.jit
def store(base, index, shape, strides, mask, value, NATIVE: tl.constexpr = False):
    """Elements, rounded to the type that they are stored in; NATIVE: in the instructions of compute capability 9.0."""
    value = ops.narrow(value, base.dtype.element_ty, NATIVE)
    tl.store(base + element_offset(index, shape, strides), value, mask=mask)


def layout(shape: Sequence[int], strides: Sequence[Strides]) -> tuple[Any, ...]:
    """(shape, strides of every tensor) of merged dimensions, at least one."""
    sizes, steps = merged(shape, strides)
    if not sizes:
        sizes, steps = [1], [tuple(0 for _ in strides)]
    return (tuple(sizes), *(tuple(step[t] for step in steps) for t in range(len(strides))))


@kept
def prepared(
    kernel: Any, n: int, before: tuple[int, ...], shape: Strides, strides: Any, flags: Any, _: Any
) -> Launcher:
    """A kernel for n elements: behind pointers it takes n, `before`, the layout, `flags` and the size of a tile."""
    tail = (n, *before, *layout(shape, strides), *flags, TILE)
    return Launcher(kernel, Specification(tail, -(-n // TILE)))
