"""Descriptors and plans of the gather family, and the registration of its CPU kernels."""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from isograd.core.checks import DTYPES, INDEX_DTYPES, checked_axis, checked_dtype, checked_shape
from isograd.core.descriptor import Descriptor, Kernel, KernelSku, Operand, PrecisionGuarantee
from isograd.core.plan import Plan
from isograd.core.registry import register_kernel
from isograd.errors import InvalidProblemError
from isograd.gather import bounds, cpu


def _checked_lines(operation: str, shape: tuple[int, ...], indices_shape: tuple[int, ...], axis: int) -> None:
    """Raise unless two shapes agree but along an axis."""
    others = tuple([n for d, n in enumerate(shape) if d != axis])
    given = tuple([n for d, n in enumerate(indices_shape) if d != axis])
    if len(indices_shape) != len(shape) or others != given:
        raise InvalidProblemError(
            f"{operation}: indices_shape is {indices_shape}; expected {shape} with any size at axis {axis}"
        )


@dataclass(frozen=True, slots=True)
class _LinesDescriptor(Descriptor):
    """A problem along an axis of x, with one index for every element."""

    shape: tuple[int, ...]
    indices_shape: tuple[int, ...]
    dtype: str
    index_dtype: str = "int64"
    axis: int = -1

    def validated(self) -> Self:
        """Return the descriptor with plain ints and a non-negative axis, or raise what is wrong with it."""
        return type(self)(*self._checked())

    def _checked(self) -> tuple[tuple[int, ...], tuple[int, ...], str, str, int]:
        name = self.operation
        dtype = checked_dtype(name, self.dtype)
        index_dtype = checked_dtype(name, self.index_dtype, INDEX_DTYPES, "index_dtype")
        shape = checked_shape(name, "shape", self.shape)
        indices_shape = checked_shape(name, "indices_shape", self.indices_shape)
        axis = checked_axis(name, self.axis, shape)
        _checked_lines(name, shape, indices_shape, axis)
        return shape, indices_shape, dtype, index_dtype, axis

    def _indices(self) -> Operand:
        return Operand("indices", self.indices_shape, self.index_dtype)


@dataclass(frozen=True, slots=True)
class TakeAlongAxisDescriptor(_LinesDescriptor):
    """v = the values of x along an axis, one for every index.

    shape: of x, rank 1 to 8. indices_shape: of indices and v; equal to shape but for any size along the axis. dtype:
    "float16", "bfloat16", "float32" or "float64". index_dtype: "int32", "int64" or "uint32". axis: -rank to rank - 1.
    """

    @property
    def operation(self) -> str:
        """`take_along_axis`."""
        return "take_along_axis"

    def operands(self) -> tuple[Operand, ...]:
        """X and indices, then v."""
        return (
            Operand("x", self.shape, self.dtype),
            self._indices(),
            Operand("v", self.indices_shape, self.dtype, True),
        )


@dataclass(frozen=True, slots=True)
class TakeAlongAxisBackwardDescriptor(_LinesDescriptor):
    """dx from indices and dv, a scatter sum into zeros; fields as in TakeAlongAxisDescriptor.

    unique_indices: promises that no line along the axis holds an index twice. Then more indices than the axis has
    elements are an InvalidProblemError; where the promise is broken, one of the sources is taken.
    """

    unique_indices: bool = False

    @property
    def operation(self) -> str:
        """`take_along_axis_backward`."""
        return "take_along_axis_backward"

    def operands(self) -> tuple[Operand, ...]:
        """Indices and dv, then dx."""
        return (
            self._indices(),
            Operand("dv", self.indices_shape, self.dtype),
            Operand("dx", self.shape, self.dtype, True),
        )

    def validated(self) -> Self:
        """Return the descriptor with plain ints and a non-negative axis, or raise what is wrong with it."""
        checked = self._checked()
        shape, indices_shape, _, _, axis = checked
        if not isinstance(self.unique_indices, bool):
            given = self.unique_indices
            raise InvalidProblemError(f"{self.operation}: unique_indices is {given!r}; accepted: True, False")
        if self.unique_indices and indices_shape[axis] > shape[axis]:
            raise InvalidProblemError(
                f"{self.operation}: unique_indices is True for {indices_shape[axis]} indices along an axis of size "
                f"{shape[axis]}; so many cannot be distinct"
            )
        return type(self)(*checked, self.unique_indices)


@dataclass(frozen=True, slots=True)
class ScatterSumDescriptor(_LinesDescriptor):
    """out = x with values added along an axis; fields as in TakeAlongAxisDescriptor. out may be x."""

    @property
    def operation(self) -> str:
        """`scatter_sum`."""
        return "scatter_sum"

    def operands(self) -> tuple[Operand, ...]:
        """Indices, values and x, then out."""
        return (
            self._indices(),
            Operand("values", self.indices_shape, self.dtype),
            Operand("x", self.shape, self.dtype),
            Operand("out", self.shape, self.dtype, True, ("x",)),
        )


@dataclass(frozen=True, slots=True)
class _RowsDescriptor(Descriptor):
    """A problem over the rows of an array [num, *rest], with one index for every row."""

    shape: tuple[int, ...]
    indices_shape: tuple[int, ...]
    dtype: str
    index_dtype: str = "int64"
    negative: bool = True

    def _checked(self) -> tuple[tuple[int, ...], tuple[int, ...], str, str, bool]:
        name = self.operation
        dtype = checked_dtype(name, self.dtype)
        index_dtype = checked_dtype(name, self.index_dtype, INDEX_DTYPES, "index_dtype")
        shape = checked_shape(name, "shape", self.shape)
        indices_shape = checked_shape(name, "indices_shape", self.indices_shape, 0)
        checked_shape(name, "indices_shape + shape[1:]", (*indices_shape, *shape[1:]), 0)
        if not isinstance(self.negative, bool):
            raise InvalidProblemError(f"{name}: negative is {self.negative!r}; accepted: True, False")
        return shape, indices_shape, dtype, index_dtype, self.negative

    def _operands(self) -> tuple[Operand, Operand]:
        """The indices, and an operand with a row for each."""
        rows = (*self.indices_shape, *self.shape[1:])
        return Operand("indices", self.indices_shape, self.index_dtype), Operand("values", rows, self.dtype)


@dataclass(frozen=True, slots=True)
class IndexSelectDescriptor(_RowsDescriptor):
    """y = the rows of weight at indices: an embedding.

    shape: of weight, [num, *rest]. indices_shape: any, rank 0 to 8; y has the shape [*indices_shape, *rest] of rank 0
    to 8. dtype, index_dtype: as in TakeAlongAxisDescriptor. negative: whether negative indices count from the end; if
    not they are out of range.
    """

    @property
    def operation(self) -> str:
        """`index_select`."""
        return "index_select"

    def operands(self) -> tuple[Operand, ...]:
        """Weight and indices, then y."""
        indices, rows = self._operands()
        return Operand("weight", self.shape, self.dtype), indices, rows._replace(name="y", output=True)

    def validated(self) -> Self:
        """Return the descriptor with plain ints, or raise what is wrong with it."""
        return type(self)(*self._checked())


@dataclass(frozen=True, slots=True)
class IndexSumDescriptor(_RowsDescriptor):
    """out = zeros or x, [num, *rest], with rows of values [*indices_shape, *rest] added; out may be x.

    Fields as in IndexSelectDescriptor. accumulate: whether there is an x. skipped: an index, compared as it stands and
    perhaps out of range, whose sources are left out.
    """

    accumulate: bool = False
    skipped: int | None = None

    @property
    def operation(self) -> str:
        """`index_sum`."""
        return "index_sum"

    def operands(self) -> tuple[Operand, ...]:
        """Indices, values and perhaps x, then out."""
        base = (Operand("x", self.shape, self.dtype),) if self.accumulate else ()
        out = Operand("out", self.shape, self.dtype, True, ("x",) if self.accumulate else ())
        return (*self._operands(), *base, out)

    def validated(self) -> Self:
        """Return the descriptor with plain ints, or raise what is wrong with it."""
        checked = self._checked()
        if not isinstance(self.accumulate, bool):
            raise InvalidProblemError(f"{self.operation}: accumulate is {self.accumulate!r}; accepted: True, False")
        return type(self)(*checked, self.accumulate, self._checked_skipped())

    def _checked_skipped(self) -> int | None:
        try:
            skipped = None if self.skipped is None else operator.index(self.skipped)
        except TypeError:
            skipped = 1 << 63
        if skipped is not None and not -(1 << 63) <= skipped < 1 << 63:
            raise InvalidProblemError(
                f"{self.operation}: skipped is {self.skipped!r}; accepted: None or an integer of 64 bits"
            )
        return skipped


class TakeAlongAxisPlan(Plan):
    """A kernel for take_along_axis: `plan.run(x=x, indices=indices, v=v)`."""

    descriptor_type = TakeAlongAxisDescriptor
    __slots__ = ()


class TakeAlongAxisBackwardPlan(Plan):
    """A kernel for its gradient: `plan.run(indices=indices, dv=dv, dx=dx)`."""

    descriptor_type = TakeAlongAxisBackwardDescriptor
    __slots__ = ()


class ScatterSumPlan(Plan):
    """A kernel for scatter_sum: `plan.run(indices=indices, values=values, x=x, out=out)`; out may be x."""

    descriptor_type = ScatterSumDescriptor
    __slots__ = ()


class IndexSelectPlan(Plan):
    """A kernel for index_select: `plan.run(weight=weight, indices=indices, y=y)`."""

    descriptor_type = IndexSelectDescriptor
    __slots__ = ()


class IndexSumPlan(Plan):
    """A kernel for index_sum: `plan.run(indices=indices, values=values, out=out)`, and `x=x` if it accumulates."""

    descriptor_type = IndexSumDescriptor
    __slots__ = ()


COPIES = ("take_along_axis", "index_select")
SUMS = ("take_along_axis_backward", "scatter_sum", "index_sum")
OPERATIONS = (*COPIES, *SUMS)


def family_guarantee(descriptor: _LinesDescriptor | _RowsDescriptor) -> PrecisionGuarantee:
    """What every kernel of the family promises: it returns the bits of the reference."""
    return PrecisionGuarantee(
        math_precision="float64" if descriptor.dtype == "float64" else "float32",
        accumulator="none" if descriptor.operation in COPIES else "exact integers in fixed point",
        deterministic=True,
        bit_stable_on_same_hardware=True,
        batch_invariant=True,
        order_invariant=True,
        bit_stable_across_hardware=True,
        error_bound=bounds.error_bound(descriptor.operation, descriptor.dtype),
    )


def family_sku(descriptor: _LinesDescriptor | _RowsDescriptor, backend: str, arch: str) -> KernelSku:
    """The identity of a kernel of the family."""
    return KernelSku(
        category="gather",
        op=descriptor.operation,
        dtype=descriptor.dtype,
        aux_dtype=descriptor.index_dtype,
        layout="strided",
        epilogue="none",
        arch=arch,
        backend=backend,
        precision_guarantee=family_guarantee(descriptor),
    )


class NumbaGather(Kernel):
    """The family on the CPU, compiled by Numba."""

    name = "numba"
    backend = "numba"

    def sku(self, descriptor: _LinesDescriptor | _RowsDescriptor) -> KernelSku:
        """The kernel's identity."""
        return family_sku(descriptor, self.backend, "cpu")

    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads; needs no workspace. IndexOutOfRangeError comes before any result."""
        name, a = descriptor.operation, arguments
        if name == "take_along_axis":
            cpu.take_along_axis(name, a["x"], a["indices"], a["v"], descriptor.axis)
        elif name == "take_along_axis_backward":
            cpu.scatter(name, a["indices"], a["dv"], None, a["dx"], descriptor.axis, descriptor.unique_indices)
        elif name == "scatter_sum":
            cpu.scatter(name, a["indices"], a["values"], a["x"], a["out"], descriptor.axis)
        elif name == "index_select":
            cpu.index_select(name, a["weight"], a["indices"], a["y"], descriptor.negative)
        else:
            cpu.index_sum(
                name, a["indices"], a["values"], a.get("x"), a["out"], descriptor.negative, descriptor.skipped
            )


for _operation in OPERATIONS:
    for _dtype in DTYPES:
        register_kernel(_operation, "cpu", _dtype, NumbaGather())
