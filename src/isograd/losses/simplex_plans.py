"""Descriptors, plans and CPU kernels of gumbel_softmax."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from isograd import parallel
from isograd.errors import InvalidProblemError
from isograd.fenv import default_environment
from isograd.losses import simplex_bounds as bounds
from isograd.losses.promises import (
    NumbaKernel,
    checked_flag,
    checked_integer,
    checked_scale,
)
from isograd.numerics.reference import work_dtype
from isograd.numerics.storage import address, kernel_type
from isograd.plan import DTYPES, Descriptor, Operand, Plan, checked_axis, checked_dtype, checked_shape
from isograd.registry import register_kernel
from isograd.rows.walk import element_strides, row_walk, work_zero

_LONGEST = (1 << 31) - 1


# --- descriptors and plans -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _SimplexDescriptor(Descriptor):
    """Inputs and a result of one shape and dtype, in rows along an axis.

    shape: rank 1 to 8. dtype: "float16", "bfloat16", "float32" or "float64". axis: -rank to rank - 1.
    """

    shape: tuple[int, ...]
    dtype: str
    axis: int = -1

    inputs: ClassVar[tuple[str, ...]]
    output: ClassVar[str]

    def operands(self) -> tuple[Operand, ...]:
        """The inputs and the output, which may be any of them."""
        inputs = [Operand(name, self.shape, self.dtype) for name in self.inputs]
        return (*inputs, Operand(self.output, self.shape, self.dtype, True, self.inputs))

    def _plain(self) -> tuple[tuple[int, ...], str, int]:
        name = self.operation
        dtype, shape = checked_dtype(name, self.dtype), checked_shape(name, "shape", self.shape)
        return shape, dtype, checked_axis(name, self.axis, shape)


def _c_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of the elements' numbers, which count in C order."""
    steps = [1]
    for size in reversed(shape[1:]):
        steps.append(steps[-1] * size)
    return tuple(reversed(steps))


@dataclass(frozen=True, slots=True)
class GumbelSoftmaxDescriptor(_SimplexDescriptor):
    """y = softmax((logits + noise) / tau) along an axis.

    shape: of logits and y, rank 1 to 8. dtype: "float16", "bfloat16", "float32" or "float64". axis: -rank to rank - 1.
    tau: positive. hard: whether y is the one-hot of the first largest instead. seed, offset: element i in C order takes
    number offset + i of the noise of seed; both from 0 to 2^64 - 1. batched: whether i starts again at every place in
    the first dimension.
    """

    tau: float = 1.0
    hard: bool = False
    seed: int = 0
    offset: int = 0
    batched: bool = False

    inputs: ClassVar[tuple[str, ...]] = ("logits",)
    output: ClassVar[str] = "y"

    @property
    def operation(self) -> str:
        """`gumbel_softmax`."""
        return "gumbel_softmax"

    def validated(self) -> Self:
        """Return the descriptor with plain fields and a non-negative axis, or raise what is wrong with it."""
        name, (shape, dtype, axis) = self.operation, self._plain()
        tau, hard = checked_scale(name, "tau", self.tau, dtype), checked_flag(name, "hard", self.hard)
        seed, offset = (checked_integer(name, key, getattr(self, key), 64) for key in ("seed", "offset"))
        if checked_flag(name, "batched", self.batched) and axis == 0:
            raise InvalidProblemError(f"{name}: axis is 0; expected another than that of the batch")
        return type(self)(shape, dtype, axis, tau, hard, seed, offset, self.batched)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The strides of the elements' numbers."""
        strides = _c_strides(self.shape)
        return (0, *strides[1:]) if self.batched else strides


@dataclass(frozen=True, slots=True)
class GumbelSoftmaxBackwardDescriptor(_SimplexDescriptor):
    """dx from dy and y, the soft result of gumbel_softmax; fields as in GumbelSoftmaxDescriptor."""

    tau: float = 1.0

    inputs: ClassVar[tuple[str, ...]] = ("dy", "y")
    output: ClassVar[str] = "dx"

    @property
    def operation(self) -> str:
        """`gumbel_softmax_backward`."""
        return "gumbel_softmax_backward"

    def validated(self) -> Self:
        """Return the descriptor with plain fields and a non-negative axis, or raise what is wrong with it."""
        shape, dtype, axis = self._plain()
        return type(self)(shape, dtype, axis, checked_scale(self.operation, "tau", self.tau, dtype))


class GumbelSoftmaxPlan(Plan):
    """A kernel for gumbel_softmax: `plan.run(logits=logits, y=y)`; y may be logits."""

    descriptor_type = GumbelSoftmaxDescriptor
    __slots__ = ()


class GumbelSoftmaxBackwardPlan(Plan):
    """A kernel for its gradient: `plan.run(dy=dy, y=y, dx=dx)`; dx may be dy or y."""

    descriptor_type = GumbelSoftmaxBackwardDescriptor
    __slots__ = ()


# --- kernels ---------------------------------------------------------------------------------------------------------
class NumbaRows(NumbaKernel):
    """Rows of one axis on the CPU."""

    def __init__(self, ordered: bool = False) -> None:
        super().__init__("losses", bounds.error_bound, ordered)

    def reject(self, descriptor: Any) -> str | None:
        """Rows are counted in 31 bits."""
        longest = descriptor.shape[descriptor.axis]
        return f"a row has {longest} elements; at most {_LONGEST}" if longest > _LONGEST else None

    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads."""
        operands = [arguments[name] for name in (*descriptor.inputs, descriptor.output)]
        if operands[-1].size == 0:
            return
        with default_environment():
            from isograd.losses import numba_gumbel
        axis, n = descriptor.axis, descriptor.shape[descriptor.axis]
        leading = descriptor.shape[:axis] + descriptor.shape[axis + 1 :]
        strides = [element_strides(a) for a in operands]
        like, zero = kernel_type(operands[-1].dtype), work_zero(descriptor.dtype)
        before: tuple[Any, ...] = (like,)
        of = work_dtype(operands[-1].dtype)
        with default_environment():
            scalars: tuple[Any, ...] = (of(1) / of(descriptor.tau),)
        if descriptor.operation == "gumbel_softmax":
            # The numbers of the elements walk along as an operand that has strides and no memory; the output is last
            # in the walk, so they come between.
            strides.insert(1, descriptor.numbers)
            before = (like, zero)
            scalars = (*scalars, descriptor.hard, np.uint64(descriptor.seed), np.uint64(descriptor.offset))
        function = getattr(numba_gumbel, f"{descriptor.operation}_rows")
        count, outer = row_walk(leading, tuple(s[:axis] + s[axis + 1 :] for s in strides))
        parallel.for_ranges(
            function, count, parallel.grain(count, 4 * n), *before, *map(address, operands), *outer, n,
            *(s[axis] for s in strides), *scalars,
        )  # fmt: skip


for _dtype in DTYPES:
    register_kernel("gumbel_softmax", "cpu", _dtype, NumbaRows(ordered=True))
    register_kernel("gumbel_softmax_backward", "cpu", _dtype, NumbaRows())
