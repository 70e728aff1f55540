"""Descriptors, plans and kernels of the softmax family."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np

from isograd import arrays, parallel
from isograd.errors import InvalidProblemError
from isograd.fenv import default_environment
from isograd.layout import plan_walk
from isograd.numerics.storage import address, kernel_type
from isograd.plan import (
    DTYPES,
    Descriptor,
    Kernel,
    KernelSku,
    Operand,
    Plan,
    PrecisionGuarantee,
    checked_axis,
    checked_dtype,
    checked_shape,
)
from isograd.registry import register_kernel
from isograd.softmax import bounds

KINDS = ("softmax", "log_softmax")


@dataclass(frozen=True, slots=True)
class _AxisDescriptor(Descriptor):
    """A problem over one axis of arrays that share a shape and a dtype."""

    kind: str
    shape: tuple[int, ...]
    dtype: str
    axis: int = -1

    inputs: ClassVar[tuple[str, ...]]
    output: ClassVar[str]

    def operands(self) -> tuple[Operand, ...]:
        """The inputs and the output, which may be any of them."""
        inputs = [Operand(name, self.shape, self.dtype) for name in self.inputs]
        return (*inputs, Operand(self.output, self.shape, self.dtype, True, self.inputs))

    def validated(self) -> Self:
        """Return the descriptor with plain ints and a non-negative axis, or raise what is wrong with it."""
        if self.kind not in KINDS:
            raise InvalidProblemError(f"{type(self).__name__}: kind is {self.kind!r}; accepted: {list(KINDS)}")
        name = self.operation
        dtype = checked_dtype(name, self.dtype)
        shape = checked_shape(name, "shape", self.shape)
        return type(self)(self.kind, shape, dtype, checked_axis(name, self.axis, shape))


@dataclass(frozen=True, slots=True)
class SoftmaxDescriptor(_AxisDescriptor):
    """y = softmax(x) or log_softmax(x) along an axis.

    kind: "softmax" or "log_softmax". shape: of x and y, rank 1 to 8. dtype: "float16", "bfloat16", "float32" or
    "float64". axis: the reduced axis, -rank to rank - 1.
    """

    inputs: ClassVar[tuple[str, ...]] = ("x",)
    output: ClassVar[str] = "y"

    @property
    def operation(self) -> str:
        """`softmax` or `log_softmax`."""
        return self.kind


@dataclass(frozen=True, slots=True)
class SoftmaxBackwardDescriptor(_AxisDescriptor):
    """dx from dy and y, the result of the forward operation; fields as in SoftmaxDescriptor."""

    inputs: ClassVar[tuple[str, ...]] = ("dy", "y")
    output: ClassVar[str] = "dx"

    @property
    def operation(self) -> str:
        """`softmax_backward` or `log_softmax_backward`."""
        return f"{self.kind}_backward"


class SoftmaxPlan(Plan):
    """A kernel for softmax or log_softmax: `plan.run(x=x, y=y)`; y may be x."""

    descriptor_type = SoftmaxDescriptor
    __slots__ = ()


class SoftmaxBackwardPlan(Plan):
    """A kernel for a backward operation: `plan.run(dy=dy, y=y, dx=dx)`; dx may be dy or y."""

    descriptor_type = SoftmaxBackwardDescriptor
    __slots__ = ()


def family_guarantee(descriptor: _AxisDescriptor) -> PrecisionGuarantee:
    """What every kernel of the family promises: it returns the bits of the reference."""
    wide = descriptor.dtype == "float64"
    return PrecisionGuarantee(
        math_precision="float64" if wide else "float32",
        accumulator="exact integers in fixed point",
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        order_invariant=True,
        bit_stable_across_hardware=True,
        error_bound=bounds.error_bound(descriptor.operation, descriptor.dtype),
    )


def family_sku(descriptor: _AxisDescriptor, backend: str, arch: str) -> KernelSku:
    """The identity of a kernel of the family."""
    wide = descriptor.dtype == "float64"
    return KernelSku(
        category="softmax",
        op=descriptor.operation,
        dtype=descriptor.dtype,
        aux_dtype="float64" if wide else "float32",
        layout="strided",
        epilogue="none",
        arch=arch,
        backend=backend,
        precision_guarantee=family_guarantee(descriptor),
    )


@functools.lru_cache(maxsize=4096)
def _arguments(
    operation: str, dtype: Any, shape: tuple[int, ...], strides: tuple[tuple[int, ...], ...], axis: int
) -> tuple[Any, int, int, tuple[Any, ...], tuple[Any, ...]]:
    """The compiled function, its range, the elements a step, and the arguments before and after the addresses."""
    with default_environment():  # constants are rounded when a module is loaded
        from isograd.numerics.numba_memory import LANES
        from isograd.softmax import numba_kernels, numba_lanes

    like = kernel_type(dtype)
    walk = plan_walk(shape, strides, axis)
    rows = arrays.size_of(walk.shape)
    outer = (np.array(walk.shape, np.int64), *(np.array(s, np.int64) for s in walk.strides))
    if walk.lanes:
        function = getattr(numba_lanes, f"{operation}_lanes")
        tiles = -(-walk.lanes // LANES)
        work = walk.length * min(walk.lanes, LANES)
        after: tuple[Any, ...] = (*outer, walk.lanes, walk.length, *walk.axis_strides)
        return function, rows * tiles, work, (like,), after
    function = getattr(numba_kernels, f"{operation}_rows")
    return function, rows, walk.length, (like,), (*outer, walk.length, *walk.axis_strides)


class NumbaSoftmax(Kernel):
    """The family on the CPU, compiled by Numba."""

    name = "numba"
    backend = "numba"

    def sku(self, descriptor: _AxisDescriptor) -> KernelSku:
        """The kernel's identity."""
        return family_sku(descriptor, self.backend, "cpu")

    def launch(self, descriptor: _AxisDescriptor, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads; needs no workspace."""
        operands = [arguments[name] for name in descriptor.inputs]
        operands.append(arguments[descriptor.output])
        if operands[-1].size == 0:
            return
        itemsize = operands[-1].itemsize
        strides = tuple([tuple([s // itemsize for s in a.strides]) for a in operands])
        function, count, work, before, after = _arguments(
            descriptor.operation, operands[-1].dtype, descriptor.shape, strides, descriptor.axis
        )
        addresses = [address(a) for a in operands]
        parallel.for_ranges(function, count, parallel.grain(count, work), *before, *addresses, *after)


for _operation in (*KINDS, *(f"{kind}_backward" for kind in KINDS)):
    for _dtype in DTYPES:
        register_kernel(_operation, "cpu", _dtype, NumbaSoftmax())
