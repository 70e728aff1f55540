"""The distillation loss on the CPU: from all of the teacher's logits, or from the classes that it names."""

from typing import Any

import numpy as np

from isograd.core import arrays
from isograd.core.kernel import launcher
from isograd.errors import IndexOutOfRangeError, InvalidProblemError
from isograd.numerics.losses import divisor
from isograd.numerics.storage import address, kernel_type
from isograd.ops.distillation_loss import numba_rows, numba_top
from isograd.ops.distillation_loss.reference import temperature_of
from isograd.reduction.numba_kernels import sum_rows
from isograd.rows.walk import element_strides, row_walk, work_zero
from isograd.runtime import parallel
from isograd.runtime.fenv import default_environment


def _check_indices(operation: str, indices: Any, classes: int) -> None:
    """Raise unless every index is one of the classes, and no row names a class twice."""
    if indices.size == 0:
        return
    k, strides = indices.shape[-1], element_strides(indices)
    count, outer = row_walk(indices.shape[:-1], (strides[:-1],))
    grain = parallel.grain(count, k)
    found = np.zeros(-(-count // grain), np.int64)
    tail = (*outer, classes, k, strides[-1], found, grain)
    parallel.for_ranges(numba_top.unfit_rows, count, grain, address(indices), *tail)
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


def _logits(problem: Any, student: Any, teacher: Any, indices: Any) -> list[Any]:
    """The arrays that both directions read; IndexOutOfRangeError before anything is written."""
    if indices is None:
        return [student, teacher]
    # A copy, which no other thread changes after the check, and of one type; there are few beside the logits.
    taken = indices.astype(np.int64)
    _check_indices(problem.operation, taken, problem.shape[-1])
    return [student, teacher, taken]


def _rows(problem: Any, name: str, operands: list[Any], scalars: tuple[Any, ...]) -> None:
    """Run a kernel over rows of operands, some of which have rows of one element."""
    if not arrays.size_of(problem.shape):
        return
    rank, n, top = len(problem.shape) - 1, problem.shape[-1], problem.classes is not None
    module: Any = numba_top if top else numba_rows
    function = getattr(module, f"distillation_{'top_' if top else ''}{name}")
    likes = [kernel_type(arrays.numpy_dtype(dtype)) for dtype in (problem.dtype, problem.teacher_dtype)]
    strides = [element_strides(a) for a in operands]
    count, outer = row_walk(problem.shape[:-1], tuple(s[:rank] for s in strides))
    sizes = (n, problem.classes) if top else (n,)
    parallel.for_ranges(
        function, count, parallel.grain(count, 2 * n), *likes, work_zero(problem.dtype), *map(address, operands),
        *outer, *sizes, *(s[rank] for s in strides if len(s) > rank), *scalars,
    )  # fmt: skip


def _share(problem: Any, zero: Any) -> Any:
    """What the sum of the losses is divided by."""
    with default_environment():
        return type(zero)(1 if problem.reduction == "none" else divisor(problem.reduction, problem.shape[:-1]))


@launcher("distillation_loss")
def distillation_loss(problem: Any, student: Any, teacher: Any, loss: Any, indices: Any = None) -> None:
    """Compute the loss."""
    logits, zero, factors = _logits(problem, student, teacher, indices), work_zero(problem.dtype), _factors(problem)
    losses = loss if problem.reduction == "none" else np.zeros(problem.shape[:-1], zero.dtype)
    if not problem.shape[-1]:
        losses[...] = 0
    _rows(problem, "rows", [*logits, losses], (factors.inverse, factors.square))
    if problem.reduction != "none":
        share = _share(problem, zero)
        parallel.for_ranges(sum_rows, 1, 1, zero, address(losses), address(loss), losses.size, share)


@launcher("distillation_loss_backward")
def distillation_loss_backward(
    problem: Any, dloss: Any, student: Any, teacher: Any, dstudent: Any, indices: Any = None
) -> None:
    """Compute dstudent; it may be the student's logits."""
    logits, factors = _logits(problem, student, teacher, indices), _factors(problem)
    scalars = (factors.inverse, factors.itself, _share(problem, work_zero(problem.dtype)))
    _rows(problem, "gradient", [np.broadcast_to(dloss, problem.shape[:-1]), *logits, dstudent], scalars)


def _factors(problem: Any) -> Any:
    """What the temperature becomes."""
    with default_environment():
        return temperature_of(problem.temperature, arrays.numpy_dtype(problem.dtype))
