"""Descriptors, plans and CPU kernels of distillation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from isograd import arrays, parallel
from isograd.errors import IndexOutOfRangeError, InvalidProblemError
from isograd.fenv import default_environment
from isograd.losses import divergence_bounds as bounds
from isograd.losses.divergence_reference import temperature_of
from isograd.losses.promises import (
    NumbaKernel,
    checked_reduction,
    checked_scale,
)
from isograd.numerics.losses import divisor
from isograd.numerics.storage import address, compute_dtype, kernel_type
from isograd.plan import DTYPES, INDEX_DTYPES, Descriptor, Operand, Plan, checked_dtype, checked_shape
from isograd.registry import register_kernel
from isograd.rows.walk import element_strides, row_walk, work_zero


# --- descriptors and plans -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DistillationLossDescriptor(Descriptor):
    """The divergence of a teacher from a student, rows of logits along the last axis.

    shape: of the student's logits, rank 1 to 8. dtype: theirs. teacher_dtype: the teacher's, with the same work type;
    the student's if left out. temperature: what logits are divided by. classes: how many of its classes the teacher
    names, None for the logits of all. index_dtype: of their indices. reduction: of the losses of the rows, as in
    KlDivDescriptor, "mean" over all rows.
    """

    shape: tuple[int, ...]
    dtype: str
    teacher_dtype: str | None = None
    temperature: float = 1.0
    classes: int | None = None
    index_dtype: str = "int64"
    reduction: str = "batchmean"

    @property
    def operation(self) -> str:
        """`distillation_loss`."""
        return "distillation_loss"

    @property
    def loss_shape(self) -> tuple[int, ...]:
        """The shape of the loss."""
        return self.shape[:-1] if self.reduction == "none" else ()

    def _inputs(self) -> tuple[Operand, ...]:
        assert self.teacher_dtype is not None
        student = Operand("student", self.shape, self.dtype)
        if self.classes is None:
            return student, Operand("teacher", self.shape, self.teacher_dtype)
        named = (*self.shape[:-1], self.classes)
        return student, Operand("teacher", named, self.teacher_dtype), Operand("indices", named, self.index_dtype)

    def operands(self) -> tuple[Operand, ...]:
        """student, teacher and perhaps indices, then the loss."""
        return (*self._inputs(), Operand("loss", self.loss_shape, compute_dtype(self.dtype), True))

    def validated(self) -> Self:
        """Return the descriptor with plain fields, or raise what is wrong with it."""
        name = self.operation
        shape, dtype = checked_shape(name, "shape", self.shape), checked_dtype(name, self.dtype)
        given = dtype if self.teacher_dtype is None else self.teacher_dtype
        teacher = checked_dtype(name, given, argument="teacher_dtype")
        if compute_dtype(teacher) != compute_dtype(dtype):
            raise InvalidProblemError(
                f"{name}: teacher has dtype {teacher} for a student in {dtype}; float64 goes with float64 only"
            )
        classes, index = self.classes, checked_dtype(name, self.index_dtype, INDEX_DTYPES, "index_dtype")
        if classes is not None and not 1 <= classes <= shape[-1]:
            raise InvalidProblemError(f"{name}: classes is {classes}; accepted for shape {shape}: 1 to {shape[-1]}")
        temperature = checked_scale(name, "temperature", self.temperature, dtype)
        reduction = checked_reduction(name, self.reduction)
        return type(self)(shape, dtype, teacher, temperature, classes, index, reduction)


@dataclass(frozen=True, slots=True)
class DistillationLossBackwardDescriptor(DistillationLossDescriptor):
    """The gradient of the distillation loss for the student's logits; fields as in DistillationLossDescriptor."""

    @property
    def operation(self) -> str:
        """`distillation_loss_backward`."""
        return "distillation_loss_backward"

    def operands(self) -> tuple[Operand, ...]:
        """The gradient of the loss and the inputs, then the gradient, which may take the place of the student."""
        dloss = Operand("dloss", self.loss_shape, compute_dtype(self.dtype))
        return (dloss, *self._inputs(), Operand("dstudent", self.shape, self.dtype, True, ("student",)))


class DistillationLossPlan(Plan):
    """A kernel for the distillation loss: `plan.run(student=x, teacher=t, loss=loss)`, perhaps `indices`."""

    descriptor_type = DistillationLossDescriptor
    __slots__ = ()


class DistillationLossBackwardPlan(Plan):
    """A kernel for its gradient: `plan.run(dloss=dloss, student=x, teacher=t, dstudent=dx)`, `indices` as above."""

    descriptor_type = DistillationLossBackwardDescriptor
    __slots__ = ()


# --- kernels ---------------------------------------------------------------------------------------------------------
def _check_indices(operation: str, indices: Any, classes: int) -> None:
    """Raise unless every index is one of the classes, and no row names a class twice."""
    if indices.size == 0:
        return
    with default_environment():
        from isograd.losses.numba_distillation_top import unfit_rows
    k, strides = indices.shape[-1], element_strides(indices)
    count, outer = row_walk(indices.shape[:-1], (strides[:-1],))
    grain = parallel.grain(count, k)
    found = np.zeros(-(-count // grain), np.int64)
    tail = (*outer, classes, k, strides[-1], found, grain)
    parallel.for_ranges(unfit_rows, count, grain, address(indices), *tail)
    if found.any():
        _refuse_indices(operation, indices, classes)


def _refuse_indices(operation: str, indices: Any, classes: int) -> None:
    outside = (indices < 0) | (indices >= classes)
    if outside.any():
        position = tuple(int(i) for i in np.argwhere(outside)[0])
        raise IndexOutOfRangeError(
            f"{operation}: indices{list(position)} is {indices[position]}; accepted for {classes} classes: 0 to "
            f"{classes - 1}"
        )
    ordered = np.sort(indices, axis=-1)
    *row, place = (int(i) for i in np.argwhere(ordered[..., 1:] == ordered[..., :-1])[0])
    raise InvalidProblemError(
        f"{operation}: indices{row} names class {ordered[(*row, place)]} twice; expected distinct ones in a row"
    )


class NumbaDistillation(NumbaKernel):
    """The distillation loss and its gradient on the CPU."""

    def __init__(self) -> None:
        super().__init__("losses", bounds.error_bound)

    def launch(self, descriptor: Any, arguments: Mapping[str, Any], workspace: Any, stream: Any) -> None:
        """Compute on the library's threads; IndexOutOfRangeError before anything is written."""
        logits = [arguments[name] for name in ("student", "teacher")]
        if descriptor.classes is not None:
            # A copy, which no other thread changes after the check, and of one type; there are few beside the logits.
            logits.append(arguments["indices"].astype(np.int64))
            _check_indices(descriptor.operation, logits[2], descriptor.shape[-1])
        leading, zero = descriptor.shape[:-1], work_zero(descriptor.dtype)
        with default_environment():
            factors = temperature_of(descriptor.temperature, logits[0].dtype)
            share = type(zero)(1 if descriptor.reduction == "none" else divisor(descriptor.reduction, leading))
        if descriptor.operation == "distillation_loss_backward":
            dloss = np.broadcast_to(arguments["dloss"], leading)
            scalars = (factors.inverse, factors.itself, share)
            self._rows(descriptor, "gradient", [dloss, *logits, arguments["dstudent"]], scalars)
            return
        loss = arguments["loss"]
        losses = loss if descriptor.reduction == "none" else np.zeros(leading, zero.dtype)
        if not descriptor.shape[-1]:
            losses[...] = 0
        self._rows(descriptor, "rows", [*logits, losses], (factors.inverse, factors.square))
        if descriptor.reduction != "none":
            with default_environment():
                from isograd.reduction.numba_kernels import sum_rows
            parallel.for_ranges(sum_rows, 1, 1, zero, address(losses), address(loss), losses.size, share)

    def _rows(self, descriptor: Any, name: str, operands: list[Any], scalars: tuple[Any, ...]) -> None:
        """Run a kernel over rows of operands, some of which have rows of one element."""
        if not arrays.size_of(descriptor.shape):
            return
        with default_environment():
            from isograd.losses import numba_distillation, numba_distillation_top
        rank, n, top = len(descriptor.shape) - 1, descriptor.shape[-1], descriptor.classes is not None
        module: Any = numba_distillation_top if top else numba_distillation
        function = getattr(module, f"distillation_{'top_' if top else ''}{name}")
        likes = [_zero_of(descriptor, name) for name in ("dtype", "teacher_dtype")]
        strides = [element_strides(a) for a in operands]
        count, outer = row_walk(descriptor.shape[:-1], tuple(s[:rank] for s in strides))
        sizes = (n, descriptor.classes) if top else (n,)
        parallel.for_ranges(
            function, count, parallel.grain(count, 2 * n), *likes, work_zero(descriptor.dtype),
            *map(address, operands), *outer, *sizes, *(s[rank] for s in strides if len(s) > rank), *scalars,
        )  # fmt: skip


def _zero_of(descriptor: Any, field: str) -> Any:
    return kernel_type(arrays.numpy_dtype(getattr(descriptor, field)))


for _dtype in DTYPES:
    for _operation in ("distillation_loss", "distillation_loss_backward"):
        register_kernel(_operation, "cpu", _dtype, NumbaDistillation())
